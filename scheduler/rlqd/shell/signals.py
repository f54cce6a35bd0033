"""Unix signals as bytes on a pipe, so that the event loop hears them like everything else."""

from __future__ import annotations

import os
import signal


class Signals:
    """SIGTERM and SIGINT: stop.  SIGHUP: read the configuration again.  One per process."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        return self._read_fd

    def take(self) -> set[int]:
        """The signals that arrived since the last call."""
        try:
            return set(os.read(self._read_fd, 4096))
        except BlockingIOError:
            return set()
