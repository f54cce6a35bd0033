"""Which job of a device is paused where fewer were faster, and which goes on.  Opt-in.  Pure.

When k jobs were measured to give less together than fewer did, one of them is paused: the
youngest, so that those who were there first are disturbed by nobody who came later.  It keeps
what it holds, its memory and its cores; what the others gain is the device's time.  It goes on
as soon as another one leaves.

It does not wait for ever, nor longer than the others: after a turn it goes on, and the next
youngest is paused instead, and so on round.  Over a round every job gets the same share, and
since those that run give more than all of them together did, each is better off than if nobody
were paused.  Nobody is paused again before it has run for a turn.

Two numbers of jobs were compared; once those that are left have been measured, and are no faster
than all were, the pause was no use and ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlqd.core.model import BackedOff, Instant, JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A running job that may be paused."""

    job_id: JobId
    priority: int
    since: Instant
    #: When it last went on after a pause of this kind; None: it has had none.
    rested_at: Instant | None


def next_to_pause(candidates: Iterable[Candidate], now: Instant, turn_ms: int) -> Candidate | None:
    """Of the lowest priority: the youngest that has not been paused yet, then the one whose
    pause is longest ago.  None: it is too early for any of them."""
    known = list(candidates)
    lowest = min((c.priority for c in known), default=0)

    def rank(one: Candidate) -> tuple[bool, Instant, int, int]:
        rested_at = one.rested_at
        return (rested_at is not None, rested_at or Instant(0), -one.since, -one.job_id)

    for one in sorted((c for c in known if c.priority == lowest), key=rank):
        if one.rested_at is None or now - one.rested_at >= turn_ms:
            return one
    return None


def going_on(paused: Sequence[tuple[JobId, BackedOff]], running: int) -> list[JobId]:
    """Who goes on beside so many that run, the longest paused first."""
    # The smallest number that was too many counts for all of them.
    room = min((why.jobs for _, why in paused), default=0) - 1 - running
    waiting = sorted(paused, key=lambda one: (one[1].until, one[0]))
    return [job_id for job_id, _ in waiting[: max(0, room)]]
