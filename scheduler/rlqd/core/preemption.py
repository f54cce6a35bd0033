"""Which running jobs are stopped for one of a higher priority.  Pure.

Opt-in on both sides: the configuration allows it, and the user of the running job has said that it
goes on where it was when it is run again.  Then:

* only for the first job that waits for room, and only for a higher explicit priority: never for an
  order that changes by itself, such as age;
* only if it starts then: with room, and by the throughput guard's word too.  A victim whose end
  leads to nothing is none;
* as few as possible, then the youngest, which lose the least; before them those that rlqd has
  paused (core/backoff.py), as nothing new starts beside one; never one that a user has paused;
* while jobs that were asked to stop are still there, they count as gone: nobody is stopped for
  what is on its way;
* a job that was started again is left alone for `preempt_exempt_ms`: it gets somewhere before it
  is its turn again.

What is stopped comes back to the queue at its place, and its GPU is offered once it was read after
the end, as after any end (core/room.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlqd.core.calendar import Outlook
from rlqd.core.model import GpuId
from rlqd.core.room import Holding


def victims(priority: int, ahead: Outlook, fits: Callable[[], bool]) -> tuple[Holding, ...] | None:
    """Whom to stop for a job of this priority; none if it needs only to wait for those who leave
    already; None if it cannot be helped.

    Args:
        ahead: what there will be; used up.
        fits: whether the job would start, as `ahead` is now.
    """
    for holding in [h for h in ahead.holders if h.is_leaving]:
        ahead.release(holding)
    if fits():
        return ()
    those = [h for h in ahead.holders if h.yields_above is not None and h.yields_above < priority]
    if not those:
        return None
    for holding in those:
        ahead.release(holding)
    is_enough = fits()
    for holding in those:
        ahead.take(holding)
    if not is_enough:
        return None
    return min((_clear(_order(those, gpu), ahead, fits) for gpu in _devices(those)), key=len)


def _devices(those: Sequence[Holding]) -> list[GpuId | None]:
    """Where to begin: anywhere, and on each GPU that one of them has."""
    return [None, *dict.fromkeys(gpu for h in those for gpu in h.placement.gpus)]


def _order(those: Sequence[Holding], gpu: GpuId | None) -> list[Holding]:
    """Those on the device first; the youngest first."""
    return sorted(
        those,
        key=lambda h: (gpu is not None and gpu not in h.placement.gpus, -h.since, -h.job_id),
    )


def _clear(
    order: Sequence[Holding], ahead: Outlook, fits: Callable[[], bool]
) -> tuple[Holding, ...]:
    """Of `order`, which is enough as a whole, as many as it takes, less those whose end turns out
    not to be needed; `ahead` is as before afterwards."""
    gone: list[Holding] = []
    for holding in order:
        ahead.release(holding)
        gone.append(holding)
        if fits():
            break
    for holding in sorted(gone, key=lambda h: (h.since, h.job_id)):
        ahead.take(holding)
        if fits():
            gone.remove(holding)
        else:
            ahead.release(holding)
    for holding in gone:
        ahead.take(holding)
    return tuple(gone)
