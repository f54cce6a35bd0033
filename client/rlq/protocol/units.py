"""Quantities as people write them: sizes, durations, shares, ranges.

Sizes are binary (2G is 2 GiB, as in Slurm's --mem); a bare number of a size is MiB, a bare
number of a duration is minutes, as in Slurm.
"""

from __future__ import annotations

import re

from rlq.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MIB_PER = {"K": 1 / 1024, "M": 1, "": 1, "G": 1024, "T": 1024 * 1024}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{1,2})(?::(\d{1,2}))?")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)?", re.IGNORECASE)
_MS_PER = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    None: 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
#: Ids are SQLite rowids.
ID_MAX = 2**63 - 1


def parse_mib(text: str) -> int:
    """MiB of '512', '512M', '2G', '1.5GiB'.

    Raises:
        UsageError: not a size, or not at least 1 MiB.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write 512M, 2G or 1.5G")
    mib = round(float(match[1]) * _MIB_PER[match[2].upper()])
    if not 1 <= mib <= 2**40:
        raise UsageError(f"{text!r} is not a usable size", hint="the least is 1M")
    return mib


def parse_duration_ms(text: str) -> int:
    """Milliseconds of '90' (minutes), '45s', '2h', '1:30:00', '2-12:00:00', '1h30m'.

    Raises:
        UsageError: not a duration, or not above zero.
    """
    hint = "write 30 (minutes), 45s, 2h30m, 1:30:00 or 2-12:00:00 (days-hours:minutes:seconds)"
    stripped = text.strip()
    if clock := _CLOCK.fullmatch(stripped):
        days, first, second, third = (int(part or 0) for part in clock.groups())
        if clock[1] is not None or clock[4] is not None:  # [D-]H:M[:S]
            ms = ((days * 24 + first) * 60 + second) * 60_000 + third * 1000
        else:  # M:S, as in Slurm
            ms = first * 60_000 + second * 1000
    else:
        spans = list(_SPAN.finditer(stripped))
        if not spans or "".join(s[0] for s in spans) != stripped:
            raise UsageError(f"{text!r} is not a duration", hint=hint)
        if len(spans) > 1 and any(s[2] is None for s in spans):
            raise UsageError(f"{text!r} is not a duration", hint=hint)
        ms = round(sum(float(s[1]) * _MS_PER[s[2] and s[2].lower()] for s in spans))
    if not 1 <= ms <= 10 * 365 * 86_400_000:
        raise UsageError(f"{text!r} is not a usable duration", hint=hint)
    return ms


def parse_pct(text: str) -> int:
    """Per cent of '30%' or '30'.

    Raises:
        UsageError: not a whole number from 1 to 100.
    """
    number = text.strip().removesuffix("%")
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 100):
        raise UsageError(f"{text!r} is not a share", hint="write 1% to 100%")
    return int(number)


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Inclusive ranges of '3', '3-9', '1,4-6'.

    Raises:
        UsageError: not numbers and ranges.
    """
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,19})(?:-(\d{1,19}))?\s*", part, re.ASCII)
        if match is None:
            raise UsageError(f"{text!r} is not a number or a range", hint="write 3, 3-9 or 1,4-6")
        low = int(match[1])
        high = int(match[2]) if match[2] is not None else low
        if high < low:
            raise UsageError(f"the range {part.strip()} runs backwards", hint=f"{high}-{low}?")
        if high > ID_MAX:
            raise UsageError(f"{high} is too large a number")
        ranges.append((low, high))
    return tuple(ranges)


def format_mib(mib: int) -> str:
    """'512 MiB', '1.5 GiB'."""
    if abs(mib) < 1024:
        return f"{mib} MiB"
    return f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def format_duration(seconds: float) -> str:
    """'45s', '12m 3s', '3h 20m', '2d 4h': at most two units."""
    total = max(0, round(seconds))
    minutes, s = divmod(total, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h}h"
    if hours:
        return f"{h}h {m}m"
    if minutes:
        return f"{m}m {s}s"
    return f"{s}s"
