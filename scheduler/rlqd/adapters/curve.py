"""The request socket for other machines: a ZeroMQ ROUTER on TCP, with CURVE (RFC 26).

Who speaks is told by the key of the connection: libzmq proves that the peer holds its secret
half, asks `knows` whether that key may come in (ZAP, RFC 27), and hands the key to us as
"User-Id" of every message.  Nothing in a message, nor in a handshake, can claim another.

A stranger is told nothing.  Whoever does not know our public key cannot take the first step of
the handshake and is disconnected; a key that `knows` does not know is answered by silence (ZAP
300), and the connection ends, with the handshake's time at the latest.

What strangers can do is bounded: a connection without a handshake ends after HANDSHAKE_MS, a
frame has at most `message_bytes_max` bytes, and with `connections_max` connections no further
one is accepted.  libzmq itself knows no such limit: its monitor tells of each connection, and
at the limit the kernel is told to drop what arrives at the listening socket (a socket filter),
so that further peers try again, second by second, as if their packets were lost.  libzmq may
be some hundred connections ahead by then; it waits where we do not read what its monitor says.
All of it happens in a ZeroMQ context and I/O thread of its own, so that the local socket does
not notice.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from rlq.errors import RlqError, UnavailableError, UsageError
from rlq.protocol import keys
from rlqd.bounds import Connections, Unread

log = logging.getLogger(__name__)

FRAMES_MAX = 8
HANDSHAKE_MS = 5_000
#: A peer whose machine went to sleep or away is given up after three of these.
HEARTBEAT_MS = 30_000
BACKLOG = 128
#: Twice the requests that a client may have under way: see adapters/zeromq.py.
REPLIES_MAX = 1024
UNREAD_BYTES_MAX = 64 * 1024 * 1024
#: Strangers are told of in the log at most this often.
LOG_INTERVAL_S = 60.0
#: linux/socket.h; not in Python's socket module.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_HANDSHAKES_PER_TURN = 50


@dataclass(frozen=True, slots=True)
class Received:
    #: The public key (32 bytes) whose holder sent it.
    key: bytes
    #: The way back, for `CurveServer.send`.
    route: bytes
    frames: list[bytes]


class CurveServer:
    """Listens on `host` (an address, "*" for all of IPv4) and `port` (0: any that is free).

    Poll `sources`, then call `tend` and `receive`.

    Raises:
        UnavailableError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        *,
        knows: Callable[[bytes], bool],
        connections_max: int = 128,
        message_bytes_max: int = 8 * 1024 * 1024,
    ) -> None:
        self.public = public_of(secret)
        self._knows = knows
        self._connections_max = connections_max
        #: Messages thrown away since the start.
        self.dropped = 0
        #: Keys turned away since the start.
        self.refused = 0
        self._told_at = -LOG_INTERVAL_S
        self._listener = _listen(host, port)
        address = self._listener.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        #: As clients reach it.
        self.endpoint = f"tcp://{shown}:{address[1]}"
        self._context = zmq.Context(io_threads=1)
        # Before anybody can connect: libzmq lets everybody in while nobody answers there.
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, secret),
            (zmq.ZAP_DOMAIN, b"rlq"),
            (zmq.MAXMSGSIZE, message_bytes_max),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.RCVHWM, 64),
            (zmq.SNDHWM, REPLIES_MAX),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS),
            (zmq.IPV6, int(self._listener.family == socket.AF_INET6)),
            (zmq.LINGER, 500),
        ):
            self.socket.setsockopt(option, value)
        self._connections = Connections(self._context, self.socket)
        self._unread = Unread(self.socket, UNREAD_BYTES_MAX)
        #: Whether further connections are let in.
        self.accepting = True
        # A copy: libzmq closes its own, and through ours the filter is set.
        self.socket.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        self.socket.bind(self.endpoint)

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], ...]:
        return (self.socket, self._zap, self._connections.source)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def tend(self) -> None:
        """Let in those who may, and keep the number of connections within its bound."""
        for _ in self._connections.news():
            pass
        self._answer_handshakes()
        n = len(self._connections)
        if self.accepting and n >= self._connections_max:
            self.accepting = False
            _set_filter(self._listener, drop=True)
            self._tell("%d remote connections are open, the most that may be: others wait", n)
        elif not self.accepting and n <= self._connections_max * 3 // 4:
            self.accepting = True
            _set_filter(self._listener, drop=False)

    def receive(self, limit: int = 200) -> list[Received]:
        """The messages that are there, at most `limit`, without waiting."""
        messages: list[Received] = []
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            key = _key_of(frames[1]) if 2 <= len(frames) <= 1 + FRAMES_MAX else None
            if key is None:
                self.dropped += 1
                continue
            messages.append(Received(key, frames[0].bytes, [f.bytes for f in frames[1:]]))
        return messages

    def send(self, route: bytes, frames: list[bytes], reader: int) -> bool:
        """Queue a reply without waiting.  False: the client is gone or does not read.

        `reader`: whose unread replies count together, on whatever connections.
        """
        is_sent = self._unread.send([route, *frames], reader)
        self.dropped += not is_sent
        return is_sent

    def close(self) -> None:
        """Send what is queued, for half a second at most."""
        _set_filter(self._listener, drop=True)
        self._connections.close()
        self._zap.close()
        self.socket.close()
        self._context.term()
        self._listener.close()

    def __enter__(self) -> CurveServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer_handshakes(self) -> None:
        for _ in range(_HANDSHAKES_PER_TURN):
            try:
                request = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # version, request id, domain, address, identity, mechanism, credentials
            version, request_id, _, address = (*request, b"", b"", b"", b"")[:4]
            key = request[6] if len(request) == 7 and request[5] == b"CURVE" else b""
            if len(key) == keys.KEY_BYTES and self._is_known(key):
                reply = (b"200", b"OK", keys.show_key(key).encode(), b"")
            else:
                # 400 would tell the peer; of 300 it learns nothing.
                reply = (b"300", b"", b"", b"")
                self.refused += 1
                self._tell(
                    "a key that is not enrolled was turned away, from %s",
                    address.decode(errors="backslashreplace"),
                )
            self._zap.send_multipart([version, request_id, *reply])

    def _tell(self, text: str, value: object) -> None:
        """Log it, unless the log was told of strangers a moment ago."""
        now = time.monotonic()
        if now - self._told_at >= LOG_INTERVAL_S:
            self._told_at = now
            log.warning(text, value)

    def _is_known(self, key: bytes) -> bool:
        try:
            return self._knows(key)
        except Exception:
            # The handler owes an answer to each handshake; without one none works any more.
            log.exception("cannot tell whether a key is enrolled")
            return False


def make_secret() -> bytes:
    return z85.decode(zmq.curve_keypair()[1])


def public_of(secret: bytes) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def load_secret(path: Path) -> bytes:
    """The daemon's own secret key, made at the first call; its file is mode 0600.

    Raises:
        UnavailableError: the file cannot be read, written or understood.
    """
    hint = f"if it is lost, remove {path}: a new one is made, which clients have to trust anew"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _write_secret(path)
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    with open(descriptor) as file:
        try:
            return keys.parse_secret(file.read(1000))
        except (RlqError, UnicodeDecodeError):
            raise UnavailableError(f"{path} holds no secret key", hint=hint) from None


def _write_secret(path: Path) -> bytes:
    secret = make_secret()
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(part, flags, 0o600), "w") as file:
            file.write(keys.show_secret(secret) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error.strerror}") from error
    return secret


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("0.0.0.0" if host == "*" else host, port))
        made.listen(BACKLOG)
        # Where the kernel does not know this, better now than in a flood.
        _set_filter(made, drop=True)
        _set_filter(made, drop=False)
    except OSError as error:
        made.close()
        raise UnavailableError(
            f"cannot listen on {host}, port {port}: {error.strerror}",
            hint="[remote] listen in the configuration names the address; `ss -ltn` shows"
            " who has a port",
        ) from error
    return made


def _set_filter(listener: socket.socket, *, drop: bool) -> None:
    """Whether the kernel drops every packet that asks for a new connection.  Those that are
    open are sockets of their own, and do not notice."""
    if not drop:
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    # struct sock_fprog with the one instruction of classic BPF: return 0, keep nothing.
    program = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
    fprog = struct.pack("@HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)


def _key_of(frame: zmq.Frame) -> bytes | None:
    try:
        return keys.parse_key(str(frame.get("User-Id")))
    except (zmq.ZMQError, UsageError):
        return None
