"""Who may come in over the network, and as whom.

A public key is enrolled for a user by an administrator, on the machine itself.  Whom a key
stands for is looked up at every message, so that a key that was revoked is worth nothing from
the next message on, on connections that are open too; nor is it given replies that were due.

Over the network one may do what a user may, and never what an administrator may: no key can be
enrolled for root, and `Peer.remote` is refused wherever an administrator is asked for.
"""

from __future__ import annotations

import logging
import os
import pwd
import time
from dataclasses import dataclass, field

from rlq.errors import NotFoundError, RefusedError, UnavailableError, UsageError
from rlq.protocol import keys
from rlq.protocol import messages as wire
from rlqd.adapters.curve import CurveServer
from rlqd.adapters.sqlite import RemoteKey, Store
from rlqd.shell.accounts import Peer, user_name
from rlqd.shell.requests import act_of

log = logging.getLogger(__name__)

#: Keys that may be enrolled in all: a slip in a loop should not fill the database.
KEYS_MAX = 10_000


@dataclass(slots=True, kw_only=True)
class Keyring:
    store: Store
    _known: dict[bytes, RemoteKey] = field(default_factory=dict[bytes, RemoteKey])

    def __post_init__(self) -> None:
        self._known = {one.key: one for one in self.store.remote_keys()}

    def peer_of(self, key: bytes) -> Peer | None:
        """As whom the holder of `key` counts; None: as nobody."""
        one = self._known.get(key)
        return None if one is None else Peer(uid=one.uid, gid=-1, pid=0, remote=True)

    def knows(self, key: bytes) -> bool:
        """Asked at each handshake, and so also whether the account still is that user's."""
        one = self._known.get(key)
        if one is None:
            return False
        if user_name(one.uid) != one.user:
            log.warning("a key of %s: uid %d is no longer that user", one.user, one.uid)
            return False
        return True

    def enrol(self, request: wire.EnrolKey, peer: Peer) -> wire.Ok:
        """
        Raises:
            UsageError: not a key.
            NotFoundError: no such user.
            RefusedError: not for this user, or the key is another's.
        """
        key = keys.parse_key(request.key)
        try:
            account = pwd.getpwnam(request.user)
        except (KeyError, ValueError) as error:
            raise NotFoundError(
                f"there is no user {request.user!r} on this machine", hint="`getent passwd`"
            ) from error
        if account.pw_uid == 0:
            raise RefusedError(
                "no key can be enrolled for root",
                hint="administrators use ssh, or a key of their own account",
            )
        if os.geteuid() not in (0, account.pw_uid):
            raise RefusedError(
                f"this daemon runs jobs as {user_name(os.geteuid())} only",
                hint="a daemon for everybody is root's (README)",
            )
        if (other := self._known.get(key)) is not None:
            if other.uid == account.pw_uid:
                return wire.Ok(message=f"{other.user} has that key already")
            raise RefusedError(
                f"that key is {other.user}'s: nobody shares a key",
                hint=f"revoke it first: rlq key revoke {keys.show_key(key)}",
            )
        if len(self._known) >= KEYS_MAX:
            raise UnavailableError(
                f"{KEYS_MAX} keys are enrolled, and no more can be", hint="rlq key revoke"
            )
        made = RemoteKey(key, account.pw_uid, account.pw_name, time.time(), user_name(peer.uid))
        with self.store.transaction():
            self.store.put_remote_key(made)
            self.store.put_audit((act_of(peer, "enrol", f"a key of {made.user}"),))
        self._known[key] = made
        log.info("%s enrolled a key of %s", made.enrolled_by, made.user)
        return wire.Ok(message=f"enrolled a key of {made.user}")

    def revoke(self, request: wire.RevokeKey, peer: Peer) -> wire.Ok:
        """
        Raises:
            UsageError: not a key, or neither a key nor a user is named.
            NotFoundError: there is no such key.
        """
        if bool(request.key) == bool(request.user):
            raise UsageError("name a key, or a user for all of their keys")
        if request.key:
            found = [self._known.get(keys.parse_key(request.key))]
        else:
            found = [one for one in self._known.values() if one.user == request.user]
        gone = [one for one in found if one is not None]
        if not gone:
            whose = f"a key of {request.user}" if request.user else "that key"
            raise NotFoundError(f"{whose} is not enrolled", hint="`rlq key list` shows the keys")
        with self.store.transaction():
            for one in gone:
                self.store.drop_remote_key(one.key)
                self.store.put_audit((act_of(peer, "revoke", f"a key of {one.user}"),))
        for one in gone:
            del self._known[one.key]
            log.info("%s revoked a key of %s", user_name(peer.uid), one.user)
        what = "a key" if len(gone) == 1 else f"{len(gone)} keys"
        return wire.Ok(message=f"revoked {what} of {gone[0].user}")

    def list(self, server: CurveServer | None, uid: int | None) -> wire.Keys:
        """`uid`: only this user's; None: all."""
        return wire.Keys(
            server_key="" if server is None else keys.show_key(server.public),
            endpoint="" if server is None else server.endpoint,
            keys=tuple(
                wire.EnrolledKey(
                    key=keys.show_key(one.key),
                    user=one.user,
                    enrolled_at=one.enrolled_at,
                    enrolled_by=one.enrolled_by,
                )
                for one in sorted(self._known.values(), key=lambda k: (k.user, k.enrolled_at))
                if uid is None or one.uid == uid
            ),
        )
