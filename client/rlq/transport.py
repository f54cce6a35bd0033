"""One DEALER socket to the daemon, and knowing at once when nobody is at the other end.

ZeroMQ connects for ever and in silence: to a socket file that a dead daemon left behind it
would wait until a timeout.  So a plain connect(2) asks the kernel first whether anybody
listens, and a monitor tells when the peer goes away while an answer is due.

To another machine (`Remote`) it speaks TCP with CURVE.  A server that does not know our key
says nothing at all, so the handshake has a time of its own.
"""

from __future__ import annotations

import math
import os
import socket as plain_socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import zmq

from rlq import paths
from rlq.errors import NotPermittedError, UnreachableError, UsageError
from rlq.protocol import codec
from rlq.protocol.messages import Reply, Request

if TYPE_CHECKING:  # most commands never need it
    from rlq.remote import Remote

Place: TypeAlias = "Path | Remote"

#: While an answer is due, ask the kernel this often whether anybody still listens.
PROBE_INTERVAL_MS = 1000
#: To reach another machine, and to shake hands with it; rlqd itself hangs up after five.
REMOTE_TIMEOUT_S = 8.0
#: A remote server that has not been heard of for three of these is gone.
HEARTBEAT_MS = 10_000
_MONITOR_EVENT = struct.Struct("=HI")


class ConnectionLostError(UnreachableError):
    """The daemon went away while an answer was due: nobody knows what it did before."""


def is_answering(path: Place) -> bool:
    """Whether a process listens there.

    Raises:
        NotPermittedError: somebody may, but this user must not connect.
        UsageError: not a path a socket can have.
    """
    if not isinstance(path, Path):
        try:
            _reach(path, REMOTE_TIMEOUT_S)
        except UnreachableError:
            return False
        return True
    paths.check_socket_path(path)
    with plain_socket.socket(plain_socket.AF_UNIX, plain_socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return True  # its backlog is full: busy, and very much there
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            return False
        except PermissionError as error:
            raise NotPermittedError(
                f"you may not connect to {path}",
                hint="ask its owner, or name another socket with --socket or RLQ_SOCKET",
            ) from error
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not the socket of a daemon: {error}") from error
    return True


def _reach(remote: Remote, timeout_s: float) -> str:
    """The address under which somebody listens there, for ZeroMQ.

    Raises:
        UnreachableError: nobody does, in words that name the likely causes.
    """
    try:
        with plain_socket.create_connection((remote.host, remote.port), timeout_s) as probe:
            address = probe.getpeername()[0]
    except plain_socket.gaierror as error:
        raise UnreachableError(
            f"there is no machine called {remote.host}",
            hint="is the name right, and are you on its network?",
        ) from error
    except OSError as error:
        why = error.strerror or "no answer in time"
        raise UnreachableError(
            f"cannot reach {remote.host}, port {remote.port}: {why}",
            hint="the likely causes: no rlqd runs there with [remote] listen in its"
            " configuration; a firewall is in between; the host or the port is another."
            f" `ssh {remote.host} rlq list` needs none of it",
        ) from error
    return (
        f"tcp://[{address}]:{remote.port}" if ":" in address else f"tcp://{address}:{remote.port}"
    )


class Connection:
    """Frames out, replies in.  Belongs to one thread of one process.

    Raises:
        UnreachableError: a remote daemon is not there, or does not let us in.
    """

    def __init__(self, place: Place, *, timeout_s: float = REMOTE_TIMEOUT_S) -> None:
        self.place = place
        patience_s = min(timeout_s, REMOTE_TIMEOUT_S)
        endpoint = f"ipc://{place}" if isinstance(place, Path) else _reach(place, patience_s)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, codec.BODY_BYTES_MAX)
        # A window of requests is ours to bound (`Client.requests`), not ZeroMQ's to block on.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if not isinstance(place, Path):
            events |= zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._socket.set(zmq.CURVE_SERVERKEY, place.server_key)
            self._socket.set(zmq.CURVE_PUBLICKEY, place.public)
            self._socket.set(zmq.CURVE_SECRETKEY, place.secret)
            self._socket.set(zmq.IPV6, 1)
            self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self._monitor = self._socket.get_monitor_socket(events)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        if not isinstance(place, Path) and not self._is_let_in(patience_s):
            self.close()
            raise UnreachableError(
                f"{place} does not let you in: it says nothing",
                hint="the likely causes: your key is not enrolled there, or no longer (`rlq key`"
                " prints what an administrator has to run); its own key is another than the one"
                f" you trust (`rlq key server` on {place.host} prints it); what listens on port"
                f" {place.port} is not rlqd",
            )

    def _is_let_in(self, patience_s: float) -> bool:
        if not self._monitor.poll(math.ceil(patience_s * 1000)):
            return False
        return bool(self._next_event() == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def send(self, request_id: bytes, message: Request) -> None:
        self._socket.send_multipart(codec.encode(request_id, message), copy=True)

    def receive(self, deadline: float) -> tuple[bytes, Reply] | None:
        """The next reply in its order of arrival; None: there is none by `deadline`
        (`time.monotonic()`).

        Raises:
            ConnectionLostError: the daemon is gone.
            ProtocolError: what arrived is not a reply.
        """
        while True:
            if (reply := self._next()) is not None:
                return reply
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0:
                return None
            ready = dict(self._poller.poll(math.ceil(min(left_ms, PROBE_INTERVAL_MS))))
            if self._socket in ready:
                continue
            if self._monitor in ready and self._has_lost_peer():
                # What it said before it went may have arrived together with the news.
                if (reply := self._next()) is not None:
                    return reply
                raise self._lost()
            # A remote peer's absence is told by its heartbeat.
            if not ready and isinstance(self.place, Path) and not is_answering(self.place):
                raise self._lost()

    def _next(self) -> tuple[bytes, Reply] | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return codec.decode_reply(frames)

    def _has_lost_peer(self) -> bool:
        lost = False
        while (event := self._next_event()) is not None:
            lost = lost or event not in (zmq.EVENT_MONITOR_STOPPED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return lost

    def _next_event(self) -> int | None:
        try:
            event, _value = _MONITOR_EVENT.unpack_from(
                self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            )
        except zmq.Again:
            return None
        return int(event)

    def _lost(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"the daemon on {self.place} went away before it answered",
            hint="`rlq list` shows what it has done; `rlq doctor` looks for what is wrong",
        )
