"""What is booked, in words that both sides say alike."""

from __future__ import annotations

import time

from rlq.protocol.messages import Booking, Quiet
from rlq.protocol.units import format_mib


def format_clock(at: float, now: float) -> str:
    """'14:03' today, else '28 Nov 14:03'."""
    then, today = time.localtime(at), time.localtime(now)
    same_day = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M" if same_day else "%d %b %H:%M", then)


def span(starts_at: float, ends_at: float | None, now: float) -> str:
    """ "until 16:10", "from 09:00 to 18:00"."""
    if ends_at is None:
        return "at all times"
    if starts_at <= now:
        return f"until {format_clock(ends_at, now)}"
    # The day is said once.
    return f"from {format_clock(starts_at, now)} to {format_clock(ends_at, starts_at)}"


def booked_words(booking: Booking, now: float) -> str:
    """ "claimed by alice until 16:10", "reserved for alice, bob (course) until 18:00"."""
    when = span(booking.starts_at, booking.ends_at, now)
    match booking.kind:
        case "claim":
            return f"claimed by {booking.by} {when}"
        case "maintenance":
            return f"under maintenance {when}"
        case _:
            return f"reserved for {', '.join(booking.users)} ({booking.name}) {when}"


def what_words(booking: Booking) -> str:
    """ "GPU 0, 4 cores, 16 GiB"."""
    if booking.kind == "maintenance":
        return "all of it"
    parts = [f"GPU {index}" if index >= 0 else "a lost GPU" for index in booking.gpu_indices]
    if booking.cores:
        parts.append(f"{booking.cores} core{'s' if booking.cores > 1 else ''}")
    if booking.mem_mib:
        parts.append(format_mib(booking.mem_mib))
    return ", ".join(parts)


def quiet_words(quiet: Quiet, now: float) -> str:
    """ "quiet hours until 18:00: the queue uses 1 GPU and 8 cores"."""
    parts = []
    if quiet.gpus is not None:
        parts.append(f"{quiet.gpus or 'no'} GPU{'' if quiet.gpus == 1 else 's'}")
    if quiet.cores is not None:
        parts.append(f"{quiet.cores or 'no'} core{'' if quiet.cores == 1 else 's'}")
    if quiet.sm_pct is not None:
        parts.append(f"{quiet.sm_pct}% of each GPU")
    when = span(quiet.starts_at, quiet.ends_at, now)
    return f"quiet hours {when}: the queue uses {' and '.join(parts) or 'everything'}"


def running_words(booking: Booking, now: float) -> str:
    """ "2 jobs still run on it (3, 5)"; "" when none does."""
    if not booking.jobs:
        return ""
    numbers = ", ".join(map(str, booking.jobs[:5])) + (", …" if len(booking.jobs) > 5 else "")
    jobs, run = (
        ("1 job", "runs") if len(booking.jobs) == 1 else (f"{len(booking.jobs)} jobs", "run")
    )
    if booking.starts_at <= now:
        return f"{jobs} still {run} on it ({numbers})"
    return f"{jobs} may still run on it then ({numbers})"
