"""Moments as people write them: local times of day, dates."""

from __future__ import annotations

import re
import time

from rlq.errors import UsageError

_CLOCK = re.compile(r"(?:(today|tomorrow)\s+)?(\d\d?):(\d\d)", re.IGNORECASE | re.ASCII)
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d))?)?", re.ASCII)
_HINT = "write 2026-12-01T09:00, 09:00, 'tomorrow 09:00' or now: local time"


def parse_moment(text: str, now: float) -> float:
    """Unix seconds of 'now', '2026-12-01T09:00', '2026-12-01' (its midnight), 'tomorrow 9:00',
    and '9:00', which is the next time that it is nine, as in Slurm.

    Raises:
        UsageError: it is not a moment.
    """
    words = text.strip()
    if words.lower() == "now":
        return now
    if match := _CLOCK.fullmatch(words):
        hour, minute = int(match[2]), int(match[3])
        today = time.localtime(now)
        if hour < 24 and minute < 60:
            day = today.tm_mday + (1 if (match[1] or "").lower() == "tomorrow" else 0)
            at = _at(today.tm_year, today.tm_mon, day, hour, minute)
            if match[1] is None and at < now:
                at = _at(today.tm_year, today.tm_mon, day + 1, hour, minute)
            return at
    if match := _ISO.fullmatch(words):
        numbers = [int(part or 0) for part in match.groups()]
        at = _at(*numbers)
        # 30 February would be 2 March.
        if list(time.localtime(at)[:3]) == numbers[:3] and numbers[3] < 24 and numbers[4] < 60:
            return at
    raise UsageError(f"{text!r} is not a moment", hint=_HINT)


def _at(year: int, month: int, day: int, hour: int, minute: int, second: int = 0) -> float:
    try:
        return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
    except (OverflowError, ValueError):
        return 0.0
