"""Who asks, and what the machine's user database says of them: who is an administrator.

A message's word counts for nothing here: the uid comes from the kernel, the groups from
getgrouplist(3), which asks whatever nsswitch.conf names (files, LDAP, NIS).
"""

from __future__ import annotations

import grp
import os
import pwd
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: A directory service may take a while over each look, and a membership that was taken away
#: must not count for long.
REMEMBERED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who asks: by the kernel's word, or by the key that was enrolled for them."""

    uid: int
    gid: int
    pid: int
    #: From another machine: never an administrator.
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """A user as the database has it."""

    name: str
    gids: frozenset[int]


def account_of(uid: int) -> Account | None:
    """None: there is no such user, or nobody can be asked."""
    try:
        user = pwd.getpwuid(uid)
        return Account(user.pw_name, frozenset(os.getgrouplist(user.pw_name, user.pw_gid)))
    except (KeyError, OSError):
        return None


def user_name(uid: int) -> str:
    """Its number where nobody knows its name (now)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)


def uid_of(user: str) -> int | None:
    """None: there is no such user, or nobody can be asked."""
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError, OSError):
        return None


def gid_of(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError, OSError):
        return None


@dataclass(slots=True)
class Accounts:
    """Remembers what it looked up for `REMEMBERED_S`."""

    #: The group whose members are administrators (daemon.admin_group); "": nobody's.
    admin_group: str = ""
    look_up: Callable[[int], Account | None] = account_of
    look_up_group: Callable[[str], int | None] = gid_of
    clock: Callable[[], float] = time.monotonic
    _accounts: dict[int, tuple[float, Account | None]] = field(
        default_factory=dict[int, tuple[float, Account | None]]
    )
    _groups: dict[str, tuple[float, int | None]] = field(
        default_factory=dict[str, tuple[float, int | None]]
    )

    def is_operator(self, peer: Peer) -> bool:
        """Whether this peer may act on everybody's jobs, and on the daemon itself: root, the
        daemon's own user, and the members of `admin_group`, on this machine."""
        if peer.remote:
            return False
        if peer.uid in (0, os.geteuid()):
            return True
        return self.admin_group != "" and self.is_member(peer.uid, self.admin_group)

    def may_act_for(self, peer: Peer, owner: int) -> bool:
        """Whether this peer may act on what is `owner`'s."""
        return peer.uid == owner or self.is_operator(peer)

    def is_member(self, uid: int, group: str) -> bool:
        gid, account = self.gid(group), self.account(uid)
        return gid is not None and account is not None and gid in account.gids

    def account(self, uid: int) -> Account | None:
        known = self._accounts.get(uid)
        if known is None or self.clock() - known[0] >= REMEMBERED_S:
            known = self._accounts[uid] = (self.clock(), self.look_up(uid))
        return known[1]

    def gid(self, group: str) -> int | None:
        """None: there is no such group, or nobody can be asked."""
        known = self._groups.get(group)
        if known is None or self.clock() - known[0] >= REMEMBERED_S:
            known = self._groups[group] = (self.clock(), self.look_up_group(group))
        return known[1]

    def forget(self) -> None:
        """Look everything up anew."""
        self._accounts.clear()
        self._groups.clear()
