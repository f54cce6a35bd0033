"""The request socket: a ZeroMQ ROUTER on a Unix socket, with the kernel's word on who speaks.

libzmq asks the kernel for the credentials of each connection (SO_PEERCRED) and hands them to
us as "Peer-Address" of every message: `localhost:UID:GID:PID`, as they were at connect.

What a hostile or broken client can do is bounded: one frame by MAXMSGSIZE (it is
disconnected), unread requests of one connection by RCVHWM (then its writes block, not ours),
unread replies by SNDHWM and by their bytes (further ones are dropped), a handshake by
HANDSHAKE_IVL; ROUTER takes messages from all connections in turn.  A user's connections are
counted, because each takes a descriptor of ours: beyond the bound they are hung up on.  Not
bounded: the number of frames in one unfinished message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import zmq

from rlq.errors import UnavailableError
from rlqd.bounds import Connections, Unread

log = logging.getLogger(__name__)

#: More frames than any message of ours has; what has more is dropped.
FRAMES_MAX = 8
#: A client may have this many requests under way and loses no reply.  ZeroMQ learns of what
#: was taken from a queue only each time half of it was, hence the doubled mark.
REPLIES_UNREAD_MIN = 512
UNREAD_BYTES_MAX = 64 * 1024 * 1024
#: A user with too many connections is told of in the log at most this often.
LOG_INTERVAL_S = 60.0
#: struct ucred: pid, uid, gid.
_UCRED = struct.Struct("iII")
_PEER_ADDRESS = re.compile(r"[^:]*:(\d+):(\d+):(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who sent a message, by the kernel.  `pid` is 0 for a process of another pid namespace."""

    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True)
class Received:
    #: None: only with `takes_unvouched`: the daemon's own user, by the socket's mode.
    peer: Peer | None
    #: The way back, for `Server.send`.
    route: bytes
    frames: list[bytes]


class Server:
    """Listens on `path`.  Poll `socket` with a zmq.Poller; its `fileno` alone is edge-triggered.

    `mode`: who may connect: 0o600 the daemon's own user, 0o666 everybody who can reach the
    folder.  The caller holds the state folder's lock: a socket left by a dead daemon is
    replaced, one that still answers is not.

    `takes_unvouched`: serve messages whose sender the kernel does not name: only for a libzmq
    that never does (`check_peer_address`), with mode 0o600.

    Poll `connections.source` as well, then call `tend`.

    Raises:
        UnavailableError: somebody answers there already, something else than a socket is in
            the way, or the folder cannot be written to.
    """

    def __init__(
        self,
        path: Path,
        *,
        mode: int = 0o600,
        message_bytes_max: int = 64 * 1024 * 1024,
        takes_unvouched: bool = False,
        connections_per_user_max: int = 1024,
        unread_bytes_max: int = UNREAD_BYTES_MAX,
    ) -> None:
        self.path = path
        self._takes_unvouched = takes_unvouched
        #: Messages thrown away since the start: too many frames, or nobody to send to.
        self.dropped = 0
        _clear_the_way(path)
        self._context = zmq.Context(io_threads=1)
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.MAXMSGSIZE, message_bytes_max),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.RCVHWM, 64),
            (zmq.SNDHWM, 2 * REPLIES_UNREAD_MIN),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.BACKLOG, 1024),
            # Long enough for the last reply, too short to hold up the exit.
            (zmq.LINGER, 500),
        ):
            self.socket.setsockopt(option, value)
        self.connections = Connections(self._context, self.socket)
        self._connections_per_user_max = connections_per_user_max
        #: The user at the other end of each connection, and how many each has.
        self._user_of: dict[int, int] = {}
        self._per_user: Counter[int] = Counter()
        self._told_at = -LOG_INTERVAL_S
        self._unread = Unread(self.socket, unread_bytes_max)
        self._mode = mode
        try:
            self._bind()
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise UnavailableError(
                f"cannot listen on {path}: {error.strerror}",
                hint="choose another path with --socket or RLQ_SOCKET",
            ) from error

    def _bind(self) -> None:
        # The socket's file has its mode from the moment it exists: chmod after bind would
        # leave a moment in which anybody can connect.
        before = os.umask(0o777 & ~self._mode)
        try:
            self.socket.bind(f"ipc://{self.path}")
            self._inode = self.path.stat().st_ino
        finally:
            os.umask(before)

    def receive(self, limit: int = 200) -> list[Received]:
        """The messages that are there, at most `limit`, without waiting."""
        messages: list[Received] = []
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if not 2 <= len(frames) <= 1 + FRAMES_MAX:
                self.dropped += 1
                continue
            peer = _peer(frames[1])
            if peer is None and not self._takes_unvouched:
                # A handshake of ZMTP 1 or 2 carries no metadata, so nobody vouches for the
                # sender; whoever wants to be taken for somebody else would speak it.
                self.dropped += 1
                continue
            messages.append(Received(peer, frames[0].bytes, [frame.bytes for frame in frames[1:]]))
        return messages

    def tend(self) -> None:
        """Count who has come and gone, and hang up on who has too many connections."""
        for descriptor, is_new in self.connections.news():
            if is_new:
                self._opened(descriptor)
            elif (uid := self._user_of.pop(descriptor, None)) is not None:
                self._per_user[uid] -= 1
                if self._per_user[uid] <= 0:
                    del self._per_user[uid]

    def _opened(self, descriptor: int) -> None:
        try:
            connection = socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return  # it is gone already
        with connection:
            try:
                # The number may be another connection's by now, but never of another kind.
                if connection.getsockname() != str(self.path):
                    return
                credentials = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size
                )
            except OSError:
                return
            _, uid, _ = _UCRED.unpack(credentials)
            self._user_of[descriptor] = uid
            self._per_user[uid] += 1
            if self._per_user[uid] <= self._connections_per_user_max:
                return
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        now = time.monotonic()
        if now - self._told_at >= LOG_INTERVAL_S:
            self._told_at = now
            log.warning(
                "uid %d has %d connections, the most one user may: more are hung up on",
                uid,
                self._connections_per_user_max,
            )

    def send(self, route: bytes, frames: list[bytes], reader: int = 0) -> bool:
        """Queue a reply without waiting.  False: the client is gone or does not read.

        `reader`: whose unread replies count together, on whatever connections: a uid.
        """
        is_sent = self._unread.send([route, *frames], reader)
        self.dropped += not is_sent
        return is_sent

    def listening(self) -> bool:
        """Whether clients still find us: a cleaner of /tmp may have removed the socket's file."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def listen_again(self) -> bool:
        """Put the socket's file back if it was removed, and a folder that is its user's alone;
        whether that was needed, and done.

        Connections stay: to unbind the listener of the old file would end them, so it is kept.
        """
        if os.path.lexists(self.path):
            return False
        with contextlib.suppress(zmq.ZMQError, OSError):
            if self._mode == 0o600 and not self.path.parent.exists():
                self.path.parent.mkdir(mode=0o700)
            self._bind()
            return True
        return False

    def close(self) -> None:
        """Send what is queued, for half a second at most, and remove the socket's file."""
        ours = self.listening()
        self.connections.close()
        self.socket.close()
        self._context.term()
        if ours:  # libzmq leaves it there
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_peer_address() -> bool:
    """Whether this libzmq tells who speaks: asked of a connection from ourselves to ourselves."""
    context = zmq.Context(io_threads=1)
    try:
        with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
            endpoint = f"ipc://@rlqd-probe-{secrets.token_hex(16)}"  # abstract: no file
            router.bind(endpoint)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(endpoint)
            dealer.send(b"?")
            if not router.poll(2000):
                return False
            frames = router.recv_multipart(copy=False)
            return _peer(frames[1]) == Peer(os.geteuid(), os.getegid(), os.getpid())
    except zmq.ZMQError:
        return False
    finally:
        context.destroy(linger=0)


def _peer(frame: zmq.Frame) -> Peer | None:
    try:
        address = frame.get("Peer-Address")
    except zmq.ZMQError:
        return None
    match = _PEER_ADDRESS.fullmatch(str(address))
    return Peer(int(match[1]), int(match[2]), int(match[3])) if match else None


def _clear_the_way(path: Path) -> None:
    """libzmq removes whatever is at the path before it binds; only a dead socket may be there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UnavailableError(f"cannot listen on {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise UnavailableError(
            f"cannot listen on {path}: there is something that is not a socket",
            hint="remove it, or choose another path with --socket or RLQ_SOCKET",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        except OSError as error:
            raise UnavailableError(f"cannot listen on {path}: {error}") from error
        else:
            raise UnavailableError(
                f"another daemon answers on {path}",
                hint="stop it, or choose another path with --socket or RLQ_SOCKET",
            )
