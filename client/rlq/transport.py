"""One DEALER socket to the daemon, and knowing at once when nobody is at the other end.

ZeroMQ connects for ever and in silence: to a socket file that a dead daemon left behind it
would wait until a timeout.  So a plain connect(2) asks the kernel first whether anybody
listens, and a monitor tells when the peer goes away while an answer is due.
"""

from __future__ import annotations

import math
import os
import socket as plain_socket
import struct
import time
from pathlib import Path

import zmq

from rlq import paths
from rlq.errors import NotPermittedError, UnreachableError, UsageError
from rlq.protocol import codec
from rlq.protocol.messages import Reply, Request

#: While an answer is due, ask the kernel this often whether anybody still listens.
PROBE_INTERVAL_MS = 1000
_MONITOR_EVENT = struct.Struct("=HI")


class ConnectionLostError(UnreachableError):
    """The daemon went away while an answer was due: nobody knows what it did before."""


def is_answering(path: Path) -> bool:
    """Whether a process listens on the Unix socket `path`.

    Raises:
        NotPermittedError: somebody may, but this user must not connect.
        UsageError: not a path a socket can have.
    """
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


class Connection:
    """Frames out, replies in.  Belongs to one thread of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, codec.BODY_BYTES_MAX)
        # A window of requests is ours to bound (`Client.requests`), not ZeroMQ's to block on.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._socket.connect(f"ipc://{path}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

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
            if not ready and not is_answering(self.path):
                raise self._lost()

    def _next(self) -> tuple[bytes, Reply] | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return codec.decode_reply(frames)

    def _has_lost_peer(self) -> bool:
        lost = False
        while True:
            try:
                event, _value = _MONITOR_EVENT.unpack_from(
                    self._monitor.recv_multipart(zmq.NOBLOCK)[0]
                )
            except zmq.Again:
                return lost
            lost = lost or event != zmq.EVENT_MONITOR_STOPPED

    def _lost(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"the daemon on {self.path} went away before it answered",
            hint="`rlq list` shows what it has done; `rlq doctor` looks for what is wrong",
        )
