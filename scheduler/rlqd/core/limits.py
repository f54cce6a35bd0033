"""Limits per user and group: what the jobs of some users may have together.  Pure.

Slurm's MaxJobs, MaxSubmitJobs and GrpTRES.  `max_submit_jobs` refuses a submission; the others
make a job wait, without holding up anybody else's and without a reservation: what it waits for is
its own user's jobs, and no room that others could be kept out of.

A job counts for what it is charged; a GPU that two jobs share counts for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlqd.core.charge import Need
from rlqd.core.model import Limit, Limits
from rlqd.core.room import Holding, count_of, mib_in_words

#: Of one job, or of several together: jobs, GPUs, MiB of GPU memory, cores.
Amounts = tuple[int, int, int, int]
RESOURCES = ("jobs", "gpu", "gpu memory", "cores")
UNITS = ("jobs", "GPUs", "MiB", "cores")
NOTHING: Amounts = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLimit:
    """One limit that one more job would break."""

    whose: str
    #: One of RESOURCES; "submitted": jobs that wait or run.
    resource: str
    unit: str
    used: int
    limit: int
    need: int


def amounts_of(need: Need) -> Amounts:
    charge = need.charge
    return (1, need.gpus, need.gpus * charge.gpu_mem_mib, charge.cores)


def amounts_held(holding: Holding) -> Amounts:
    gpus = len(holding.placement.gpus)
    return (1, gpus, gpus * holding.charge.gpu_mem_mib, len(holding.placement.cores))


def most_of(limit: Limit) -> tuple[int | None, int | None, int | None, int | None]:
    return (limit.max_jobs, limit.gpus, limit.gpu_mem_mib, limit.cores)


def exceeded(limit: Limit, used: Amounts, need: Amounts) -> list[AtLimit]:
    """Of what `need` would be too much, on top of `used`."""
    return [
        AtLimit(whose=limit.whose, resource=resource, unit=unit, used=had, limit=most, need=more)
        for resource, unit, most, had, more in zip(
            RESOURCES, UNITS, most_of(limit), used, need, strict=True
        )
        if most is not None and more and had + more > most
    ]


def never_within(limits: Limits, user: int, need: Need) -> list[AtLimit]:
    """The limits that a job breaks by itself."""
    amounts = amounts_of(need)
    return [at for limit in limits.get(user, ()) for at in exceeded(limit, NOTHING, amounts)]


def too_many_submitted(
    limits: Limits, submitted: Mapping[int, int], user: int, more: int
) -> AtLimit | None:
    """The limit that `more` jobs of a user break beside those that wait or run.

    Args:
        submitted: how many jobs of each user wait or run.
    """
    for limit in limits.get(user, ()):
        if limit.max_submit_jobs is None:
            continue
        # A group's limit is over all its members.
        used = sum(n for other, n in submitted.items() if limit in limits.get(other, ()))
        if used + more > limit.max_submit_jobs:
            return AtLimit(
                whose=limit.whose,
                resource="submitted",
                unit="jobs",
                used=used,
                limit=limit.max_submit_jobs,
                need=more,
            )
    return None


def in_words(at: AtLimit) -> str:
    """ "group students has 4 of at most 4 running jobs" """
    match at.resource:
        case "submitted":
            return (
                f"{at.whose} has {at.used} of at most {at.limit} jobs that wait or run, and"
                f" {at.need} more would be too many"
            )
        case "jobs" if at.limit == 0:
            return f"{at.whose} may run no jobs"
        case "jobs":
            return f"{at.whose} has {at.used} of at most {count_of(at.limit, 'running job')}"
        case "gpu":
            need, used, most = str(at.need), str(at.used), count_of(at.limit, "GPU")
        case "cores":
            need, used, most = str(at.need), str(at.used), count_of(at.limit, "core")
        case _:
            need, used = mib_in_words(at.need), mib_in_words(at.used)
            most = f"{mib_in_words(at.limit)} of GPU memory"
    if at.need > at.limit:
        return f"{at.whose} may have at most {most}, and this takes {need}"
    return f"{at.whose} has {used} of at most {most}, and this takes {need} more"


@dataclass(slots=True)
class Standing:
    """What everybody has, as a pass goes on: jobs that it starts count at once."""

    limits: Limits
    _used: dict[str, Amounts] = field(default_factory=dict[str, Amounts])

    @classmethod
    def of(cls, limits: Limits, held: Iterable[tuple[int, Holding]]) -> Standing:
        """`held`: each with its job's user."""
        standing = cls(limits)
        if limits:
            for user, holding in held:
                standing.add(user, amounts_held(holding))
        return standing

    def add(self, user: int, amounts: Amounts) -> None:
        for limit in self.limits.get(user, ()):
            jobs, gpus, mem, cores = self._used.get(limit.whose, NOTHING)
            self._used[limit.whose] = (
                jobs + amounts[0],
                gpus + amounts[1],
                mem + amounts[2],
                cores + amounts[3],
            )

    def with_(self, user: int, amounts: Amounts) -> Standing:
        """A copy in which this user has so much more."""
        more = Standing(self.limits, dict(self._used))
        more.add(user, amounts)
        return more

    def is_limited(self, user: int) -> bool:
        return bool(self.limits.get(user))

    def exceeded(self, user: int, need: Need) -> tuple[AtLimit, ...]:
        """The limits that keep one more such job of this user from starting."""
        mine = self.limits.get(user)
        if not mine:
            return ()
        amounts = amounts_of(need)
        return tuple(
            at
            for limit in mine
            for at in exceeded(limit, self._used.get(limit.whose, NOTHING), amounts)
        )
