"""Hours of the week, such as "Mon-Fri 09:00-18:00": parsed, shown, and laid out on the calendar.

Times are the machine's local time, whatever it is on that day: 09:00 stays 09:00 when summer
time begins.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY = "|".join(DAYS)
_HOURS = re.compile(
    rf"(?:({_DAY})(?:-({_DAY}))?\s+)?(\d\d?):(\d\d)-(\d\d?):(\d\d)", re.IGNORECASE | re.ASCII
)
_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Hours:
    """Minutes after midnight; `to` at or before `since`: on the next day."""

    text: str
    days: tuple[int, ...]  # Monday is 0
    since: int
    to: int

    @property
    def minutes(self) -> int:
        return (self.to - self.since - 1) % _MINUTES + 1


def parse_hours(text: str) -> Hours:
    """Hours of 'Mon-Fri 09:00-18:00', 'Sat 22:00-06:00', '00:00-24:00' (every day).

    Raises:
        ValueError: it is not hours.
    """
    match = _HOURS.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    first, last = (_day(match[1]), _day(match[2] or match[1])) if match[1] else (0, 6)
    days = tuple((first + n) % 7 for n in range((last - first) % 7 + 1))
    since, to = (int(h) * 60 + int(m) for h, m in ((match[3], match[4]), (match[5], match[6])))
    if not (since < _MINUTES and to <= _MINUTES and int(match[4]) < 60 and int(match[6]) < 60):
        raise ValueError(text)
    return Hours(text.strip(), days, since, to)


def _day(name: str) -> int:
    return DAYS.index(name.capitalize())


def is_always(hours: Sequence[Hours]) -> bool:
    """Whether together they are all of the week."""
    week = 7 * _MINUTES
    covered: set[int] = set()
    for one in hours:
        for day in one.days:
            start = day * _MINUTES + one.since
            covered.update(minute % week for minute in range(start, start + one.minutes))
    return len(covered) == week


def windows(hours: Sequence[Hours], now: float, days_ahead: int = 8) -> list[tuple[float, float]]:
    """From and to, in Unix seconds, of those that are not over yet; those that touch are one."""
    today = time.localtime(now)
    found: list[tuple[float, float]] = []
    # Yesterday's may still go on.
    for ahead in range(-1, days_ahead):
        day = today.tm_mday + ahead
        noon = time.localtime(_at(today, day, 12 * 60))
        for one in hours:
            if noon.tm_wday in one.days:
                starts = _at(today, day, one.since)
                ends = _at(today, day, one.since + one.minutes)
                found.append((starts, ends))
    joined: list[tuple[float, float]] = []
    for starts, ends in sorted(found):
        if joined and starts <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(ends, joined[-1][1]))
        else:
            joined.append((starts, ends))
    return [(starts, ends) for starts, ends in joined if ends > now]


def _at(today: time.struct_time, day: int, minutes: int) -> float:
    """That day of this month (0: the last of the month before), by the clock on the wall."""
    wall = (today.tm_year, today.tm_mon, day, minutes // 60, minutes % 60, 0, 0, 0, -1)
    return time.mktime(wall)
