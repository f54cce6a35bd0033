"""What people book of a make-believe machine, and how it changes: drawn from the world's seed.

From a stream of random numbers of its own, so that a world without bookings is as it was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlqd.core.model import Booking, CalendarSet, GpuId, Instant, Quiet

USERS = (1, 2, 3)
CHANGES_PER_S = 0.05


@dataclass(slots=True)
class Bookings:
    rng: random.Random
    bookings: list[Booking] = field(default_factory=list[Booking])
    quiet: list[Quiet] = field(default_factory=list[Quiet])
    is_told: bool = False

    @classmethod
    def draw(cls, seed: int, gpus: Sequence[GpuId], cores: int) -> Bookings:
        rng = random.Random(f"bookings {seed}")
        drawn = cls(rng)
        for number in range(rng.choice([1, 2, 3])):
            starts_at = rng.randint(-5_000, 50_000)
            whole = rng.random() < 0.12
            drawn.bookings.append(
                Booking(
                    id=number,
                    starts_at=Instant(starts_at),
                    ends_at=Instant(starts_at + rng.randint(2_000, 60_000)),
                    users=frozenset(rng.sample(USERS, 0 if whole else rng.choice([0, 1, 2]))),
                    gpus=frozenset(rng.sample(gpus, rng.choice([0, len(gpus) // 2, len(gpus)]))),
                    cores=rng.choice([0, cores // 2, cores - 3, cores - 2]),
                    mem_mib=rng.choice([0, 0, 8_000, 20_000]),
                    whole=whole,
                )
            )
        if rng.random() < 0.7:
            starts_at = rng.randint(0, 20_000)
            drawn.quiet.append(
                Quiet(
                    starts_at=Instant(starts_at),
                    ends_at=Instant(starts_at + rng.randint(10_000, 60_000)),
                    gpus=rng.choice([None, 0, 1]),
                    cores=rng.choice([None, 1, 2]),
                    sm_pct=rng.choice([None, 30]),
                )
            )
        return drawn

    def news(self, now: Instant) -> CalendarSet | None:
        """What the core has not been told, or None."""
        if self.is_told:
            return None
        self.is_told = True
        return CalendarSet(now, tuple(self.bookings), tuple(self.quiet))

    def change(self) -> None:
        """A second's worth: somebody cancels, or the wall clock jumps under all windows."""
        if self.rng.random() >= CHANGES_PER_S:
            return
        self.is_told = False
        if self.bookings and self.rng.random() < 0.3:
            self.bookings.remove(self.rng.choice(self.bookings))
            return
        by = self.rng.randint(-20_000, 20_000)
        self.bookings = [_moved(b, by) for b in self.bookings]
        self.quiet = [
            replace(
                q,
                starts_at=Instant(q.starts_at + by),
                ends_at=None if q.ends_at is None else Instant(q.ends_at + by),
            )
            for q in self.quiet
        ]


def _moved(booking: Booking, by: int) -> Booking:
    return replace(
        booking,
        starts_at=Instant(booking.starts_at + by),
        ends_at=Instant(booking.ends_at + by),
    )
