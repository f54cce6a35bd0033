"""Booked capacity and quiet hours: what of the room is not for everybody, and when.  Pure.

A booking binds a job of anybody else that could still run when it begins: one that is sure to
end before it does not meet it.  Sure means by its time limit; a prediction is not sure.  Booked
devices are then as good as not there.  Of booked cores and host memory so much is kept as those
they are booked for do not hold already.

Quiet hours bind whatever starts in them, and nothing that starts before.

Windows are on the core's clock: the shell makes them from times of day, and tells them again
when the two clocks part (NTP, suspend, somebody sets the clock).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlqd.core.charge import Need
from rlqd.core.model import Booking, GpuId, Instant, Policy, Quiet
from rlqd.core.room import Holding, Room

#: Room is kept for a job that waits for a booking to end only in the last hour before: a device
#: that nobody has booked must not stand idle for it all day.
KEPT_AHEAD_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Calendar:
    #: By start.
    bookings: tuple[Booking, ...] = ()
    quiet: tuple[Quiet, ...] = ()

    @classmethod
    def of(cls, bookings: Iterable[Booking], quiet: Iterable[Quiet]) -> Calendar:
        return cls(tuple(sorted(bookings, key=lambda b: (b.starts_at, b.id))), tuple(quiet))

    def __bool__(self) -> bool:
        return bool(self.bookings or self.quiet)

    @property
    def _windows(self) -> tuple[Booking | Quiet, ...]:
        return (*self.bookings, *self.quiet)

    def next_edge(self, now: Instant) -> Instant | None:
        """When something begins or ends next."""
        edges = [at for w in self._windows for at in (w.starts_at, w.ends_at)]
        return min((at for at in edges if at is not None and at > now), default=None)

    def ends(self, now: Instant) -> list[Instant]:
        """Ends near enough that room is kept for what waits for them; ascending."""
        ends = {w.ends_at for w in self._windows if w.ends_at is not None}
        return sorted(at for at in ends if now < at <= now + KEPT_AHEAD_MS)

    def binding(self, user: int, at: Instant, ends_at: Instant | None) -> tuple[Booking, ...]:
        """The bookings in the way of a job of this user that would run from `at` to `ends_at`
        (None: nobody knows)."""
        return tuple(
            b
            for b in self.bookings
            if at < b.ends_at
            and (ends_at is None or ends_at > b.starts_at)
            and user not in b.users
        )

    def quiet_at(self, at: Instant) -> Quiet | None:
        """The hours that hold then; of several the least of each."""
        there = [
            q for q in self.quiet if q.starts_at <= at and (q.ends_at is None or at < q.ends_at)
        ]
        return _least(there) if there else None

    def for_ever(self) -> Quiet | None:
        """What the queue may never use more than."""
        there = [q for q in self.quiet if q.ends_at is None]
        return _least(there) if there else None


def _least(quiet: Sequence[Quiet]) -> Quiet:
    def least(amounts: Iterable[int | None]) -> int | None:
        return min((n for n in amounts if n is not None), default=None)

    return replace(
        max(quiet, key=lambda q: (q.ends_at is None, q.ends_at or 0)),
        gpus=least(q.gpus for q in quiet),
        cores=least(q.cores for q in quiet),
        sm_pct=least(q.sm_pct for q in quiet),
    )


@dataclass(slots=True, kw_only=True)
class Outlook:
    """One room as jobs of different users see it."""

    calendar: Calendar
    room: Room
    #: Whoever holds what is not in the room.
    holders: list[Holding]
    at: Instant
    policy: Policy
    _seen: dict[tuple[Booking, ...], Room] = field(
        default_factory=dict[tuple[Booking, ...], Room], init=False
    )

    def of(self, user: int, ends_at: Instant | None) -> Room:
        """What a job may use of it that starts `at`.  Shares what the room holds: only to read."""
        if not self.calendar:
            return self.room
        binding = self.calendar.binding(user, self.at, ends_at)
        if binding not in self._seen:
            quiet = self.calendar.quiet_at(self.at)
            self._seen[binding] = self._without(binding, quiet)
        return self._seen[binding]

    def changed(self) -> None:
        """The room, its holders or the moment are others now."""
        self._seen.clear()

    def take(self, holding: Holding) -> None:
        self.room.take(holding.placement, holding.charge, exclusive=holding.exclusive)
        self.holders.append(holding)
        self.changed()

    def release(self, holding: Holding) -> None:
        self.room.give_back(holding.placement, holding.charge, exclusive=holding.exclusive)
        self.holders.remove(holding)
        self.changed()

    def _without(self, bookings: tuple[Booking, ...], quiet: Quiet | None) -> Room:
        seen = replace(self.room)
        kept: dict[GpuId, Booking | Quiet] = {}
        for booking in reversed(bookings):
            kept |= dict.fromkeys(booking.gpus, booking)
            seen.shared_with = booking
            if booking.whole:
                seen.booked = booking
        if quiet is not None and quiet.gpus is not None:
            by_index = sorted(seen.gpus, key=lambda id_: seen.gpus[id_].facts.index)
            kept |= dict.fromkeys(by_index[quiet.gpus :], quiet)
        if kept:
            seen.gpus = {
                id_: replace(gpu, kept=kept[id_]) if id_ in kept else gpu
                for id_, gpu in seen.gpus.items()
            }
        amounts = [b for b in bookings if b.cores or b.mem_mib]
        for moment in sorted({max(self.at, b.starts_at) for b in amounts}):
            self._keep_for(seen, moment, [b for b in amounts if b.starts_at <= moment < b.ends_at])
        if quiet is not None:
            self._keep_quiet(seen, quiet)
        return seen

    def _keep_for(self, seen: Room, moment: Instant, bookings: Sequence[Booking]) -> None:
        """Leave in `seen` no more cores and host memory than may be used at that moment."""

        def leaves(holder: Holding) -> bool:
            return moment > self.at and holder.ends_at is not None and holder.ends_at <= moment

        stay = [h for h in self.holders if not leaves(h)]
        gone = [h for h in self.holders if leaves(h)]
        if cores := _unfilled(bookings, stay, lambda b: b.cores, lambda h: len(h.placement.cores)):
            free = min(self.room.cores_usable, len(self.room.cores_free))
            left = free + sum(len(h.placement.cores) for h in gone) - cores
            if left < seen.cores_usable:
                seen.cores_usable = left
                seen.cores_kept = next(b for b in bookings if b.cores)
        if mem := _unfilled(bookings, stay, lambda b: b.mem_mib, lambda h: h.charge.mem_mib):
            left = self.room.mem_mib + sum(h.charge.mem_mib for h in gone) - mem
            if left < seen.mem_mib:
                seen.mem_mib = left
                seen.mem_kept = next(b for b in bookings if b.mem_mib)

    def _keep_quiet(self, seen: Room, quiet: Quiet) -> None:
        if quiet.cores is not None:
            left = quiet.cores - sum(len(h.placement.cores) for h in self.holders)
            if left < seen.cores_usable:
                seen.cores_usable, seen.cores_kept = left, quiet
        if quiet.sm_pct is not None and quiet.sm_pct < self.policy.sm_pct_limit:
            less = self.policy.sm_pct_limit - quiet.sm_pct
            seen.gpus = {
                id_: gpu
                if gpu.sm_pct is None
                else replace(gpu, sm_pct=gpu.sm_pct - less, sm_kept=quiet)
                for id_, gpu in seen.gpus.items()
            }


def _unfilled(
    bookings: Sequence[Booking],
    holders: Iterable[Holding],
    booked: Callable[[Booking], int],
    held: Callable[[Holding], int],
) -> int:
    """What is booked and not yet held by those it is booked for.  What somebody holds fills one
    booking only."""
    if not any(map(booked, bookings)):
        return 0
    pools: Counter[int] = Counter()
    for holder in holders:
        pools[holder.user] += held(holder)
    total = 0
    for booking in bookings:
        left = booked(booking)
        for user in sorted(booking.users):
            fills = min(left, pools[user])
            pools[user] -= fills
            left -= fills
        total += left
    return total


def never_fits(need: Need, quiet: Quiet) -> str | None:
    """Why quiet hours without an end keep such a job waiting for ever, or None."""
    if quiet.gpus is not None and need.gpus > quiet.gpus:
        return f"it asks for {need.gpus} GPUs, the queue may use {quiet.gpus} at any time"
    if quiet.cores is not None and need.charge.cores > quiet.cores:
        return (
            f"it asks for {need.charge.cores} cores, the queue may use {quiet.cores} at any time"
        )
    if quiet.sm_pct is not None and need.charge.sm_pct > quiet.sm_pct:
        return (
            f"it asks for {need.charge.sm_pct}% of a GPU, the queue may use {quiet.sm_pct}%"
            " at any time"
        )
    return None
