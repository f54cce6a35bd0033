"""A request to stop, as a flag: the training decides when it is safe to heed it."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopRequest:
    """Set by SIGTERM (the queue) and SIGINT (Ctrl-C).

    SIGTERM may come twice, to the process and to its group, and says the same again.  A second
    Ctrl-C is a person who does not want to wait: it ends the process at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """As a shell shows a process that the signal ended: 143 for SIGTERM, 130 for SIGINT."""
        assert self.signal is not None
        return 128 + self.signal

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT of this process, for good."""
        signal.signal(signal.SIGTERM, self._heard)
        signal.signal(signal.SIGINT, self._heard)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
