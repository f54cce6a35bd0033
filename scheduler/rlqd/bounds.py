"""Two bounds that libzmq does not have: on connections, and on the bytes that wait for a reader.

Used by both request sockets (adapters/zeromq.py, adapters/curve.py).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from itertools import count

import zmq

_EVENT = struct.Struct("=HI")
_EVENTS_PER_TURN = 1000
_names = count()


class Connections:
    """The descriptors of a listening socket's connections, as libzmq's monitor tells.

    Poll `source`, then iterate `news`.  libzmq is at most some 1,000 events ahead of us: then it
    waits, and accepts no more.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listening: zmq.Socket[bytes]):
        self._listening = listening
        endpoint = f"inproc://connections-{next(_names)}"
        listening.monitor(endpoint, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.source = context.socket(zmq.PAIR)
        self.source.setsockopt(zmq.LINGER, 0)
        self.source.setsockopt(zmq.RCVHWM, 1)
        self.source.connect(endpoint)
        self.open: set[int] = set()

    def __len__(self) -> int:
        return len(self.open)

    def news(self) -> Iterator[tuple[int, bool]]:
        """(descriptor, whether it was opened: else it was closed), in order."""
        for _ in range(_EVENTS_PER_TURN):
            try:
                parts = self.source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, descriptor = _EVENT.unpack_from(parts[0])
            if event == zmq.EVENT_ACCEPTED:
                self.open.add(descriptor)
                yield descriptor, True
            elif event == zmq.EVENT_DISCONNECTED:
                self.open.discard(descriptor)
                yield descriptor, False

    def close(self) -> None:
        """Nothing may be arriving by the hundred: libzmq, waiting for us to read its news, would
        wait for ever."""
        for _ in self.news():
            pass
        with contextlib.suppress(zmq.ZMQError):
            self._listening.disable_monitor()
        self.source.close()


class Unread:
    """Sends, and knows how many bytes libzmq still holds for each reader.

    Of small replies only the number is bounded (SNDHWM): watching each would cost more than it
    weighs.
    """

    #: The smallest that is watched.
    SMALL_BYTES = 4096

    def __init__(self, sending: zmq.Socket[bytes], bytes_max: int) -> None:
        self._socket = sending
        self._bytes_max = bytes_max
        sending.copy_threshold = self.SMALL_BYTES
        #: By reader: what it has not been sent yet.
        self._waiting: dict[int, list[tuple[zmq.MessageTracker, int]]] = {}

    def send(self, frames: Sequence[bytes], reader: int) -> bool:
        """Without waiting.  `reader`: whose replies count together; one may always wait.

        False: the client is gone or does not read: too many bytes or messages wait for it.
        """
        try:
            self._send(frames, reader)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def _send(self, frames: Sequence[bytes], reader: int) -> None:
        size = len(frames[-1])
        if size < self.SMALL_BYTES:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            return
        waiting = [one for one in self._waiting.pop(reader, ()) if not one[0].done]
        if waiting:
            self._waiting[reader] = waiting
            if sum(n for _, n in waiting) + size > self._bytes_max:
                raise zmq.Again
        tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        if not tracker.done:
            self._waiting.setdefault(reader, []).append((tracker, size))
