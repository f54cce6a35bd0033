"""Noticing that somebody has set the machine's clock.

Decisions are made by the monotonic clock; only what people read has the wall clock's times, and
the age at which finished jobs are forgotten.  A clock that is years ahead for a minute, from a
dead battery or a typing error, must not cost the whole history.
"""

from __future__ import annotations

#: Time servers correct a running clock by less.
SET_S_MIN = 3600.0


class WallClock:
    """Fed with CLOCK_REALTIME and CLOCK_BOOTTIME, which no suspend sets apart; seconds."""

    def __init__(self, wall_s: float, boot_s: float) -> None:
        self._ahead_s = wall_s - boot_s

    def set_by_s(self, wall_s: float, boot_s: float) -> float:
        """By how much it was set since the last call; 0.0: not, or by little."""
        by_s = wall_s - boot_s - self._ahead_s
        if abs(by_s) < SET_S_MIN:
            return 0.0
        self._ahead_s += by_s
        return by_s
