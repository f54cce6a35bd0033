"""How much room the machine has for one more job.

Room is what is free at this moment, less what running jobs are still expected to grow into:

    free memory - sum over our jobs of max(0, charge - what it uses now) - reserve

so that processes outside the queue are subtracted without being looked for: they are in "free".
A reading that is unknown, too old, or older than the last release of that GPU is no room at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rlqd.core.charge import Need
from rlqd.core.model import (
    BackedOff,
    Booking,
    Charge,
    Core,
    GpuFacts,
    GpuId,
    GpuShare,
    Instant,
    JobFacts,
    JobId,
    MachineFacts,
    Placement,
    Policy,
    Quiet,
)

JUST_LEFT = "a job has just left it; its memory is being read again"


@dataclass(frozen=True, slots=True)
class Prediction:
    """When a job is expected to end, by its progress: never before, and about then.  Not a
    bound: a job that says it has 10 s left may go on for hours, or fail now."""

    early: Instant
    late: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A job that holds resources, and what it is charged for now."""

    job_id: JobId
    user: int
    placement: Placement
    charge: Charge
    exclusive: bool
    signature: str
    #: When this attempt was admitted or began to run.
    since: Instant
    #: When it is known to end at the latest; None: nobody knows.
    ends_at: Instant | None
    #: It keeps what it holds, but does nothing.
    is_paused: bool = False
    #: rlqd paused it, and why.
    backed_off: BackedOff | None = None
    #: None: it tells no progress.
    prediction: Prediction | None = None
    #: It may be stopped for a job of a higher priority than this; None: for none.
    yields_above: int | None = None
    #: It has been asked to stop.
    is_leaving: bool = False

    @property
    def expected_end(self) -> Instant | None:
        """What people are told, and the order in which jobs are reckoned to leave."""
        return _sooner(self.ends_at, None if self.prediction is None else self.prediction.late)

    @property
    def is_end_sure(self) -> bool:
        return self.ends_at is not None and self.expected_end == self.ends_at

    @property
    def earliest_end(self) -> Instant | None:
        """What is to have ended before this one ends must have ended by then."""
        return _sooner(self.ends_at, None if self.prediction is None else self.prediction.early)


def _sooner(sure: Instant | None, predicted: Instant | None) -> Instant | None:
    known = [at for at in (sure, predicted) if at is not None]
    return min(known, default=None)


@dataclass(slots=True, kw_only=True)
class GpuRoom:
    """None: unknown, which admits nothing.  `why_unknown` says what is the matter."""

    facts: GpuFacts
    mem_mib: int | None
    sm_pct: int | None
    jobs: int = 0
    is_exclusive: bool = False
    why_unknown: str = ""
    #: It is unknown only because a job has just left it: (memory, SM share) if there are no
    #: outsiders.  Nothing is admitted on this guess; what is reserved stays reserved by it.
    guess: tuple[int, int] | None = None
    #: What keeps the job that looks off this device, or part of its SM share from it.
    kept: Booking | Quiet | None = None
    sm_kept: Quiet | None = None


@dataclass(slots=True, kw_only=True)
class Room:
    cores_free: set[int]
    #: How many of `cores_free` may be used: outsiders' load takes some, wherever it runs.
    cores_usable: int
    mem_mib: int
    mem_mib_total: int
    gpus: dict[GpuId, GpuRoom]
    cores: Mapping[int, Core]
    cores_busy: Mapping[int, int]
    jobs: int = 0
    is_exclusive: bool = False
    #: As one job sees the room (core/calendar.py): what keeps all of it, what makes it nobody's
    #: alone, and what takes most of its cores and memory.
    booked: Booking | None = None
    shared_with: Booking | None = None
    cores_kept: Booking | Quiet | None = None
    mem_kept: Booking | None = None

    def copy(self) -> Room:
        gpus = {i: replace(g) for i, g in self.gpus.items()}
        return replace(self, cores_free=set(self.cores_free), gpus=gpus)

    def guessed(self) -> Room:
        """A copy in which GPUs that are being read again have the room they are hoped to have."""
        future = self.copy()
        for gpu in future.gpus.values():
            if gpu.guess is not None:
                gpu.mem_mib, gpu.sm_pct = gpu.guess
        return future

    def only(self, gpus: Iterable[GpuId]) -> Room:
        """The same room with these GPUs alone.  Shares what it holds: to be read only."""
        return replace(self, gpus={g: self.gpus[g] for g in gpus})

    def take(self, placement: Placement, charge: Charge, *, exclusive: bool) -> None:
        self._shift(placement, charge, -1)
        self.is_exclusive = self.is_exclusive or (exclusive and not placement.gpus)
        for gpu in placement.gpus:
            if gpu in self.gpus:
                self.gpus[gpu].is_exclusive |= exclusive

    def give_back(self, placement: Placement, charge: Charge, *, exclusive: bool) -> None:
        self._shift(placement, charge, +1)
        self.is_exclusive = self.is_exclusive and not (exclusive and not placement.gpus)
        for gpu in placement.gpus:
            if gpu in self.gpus:
                self.gpus[gpu].is_exclusive &= not exclusive

    def _shift(self, placement: Placement, charge: Charge, sign: int) -> None:
        """`sign` -1: take away from the room; +1: give back to it."""
        known = {c for c in placement.cores if c in self.cores}
        self.cores_free = self.cores_free | known if sign > 0 else self.cores_free - known
        self.cores_usable += sign * len(known)
        self.mem_mib += sign * charge.mem_mib
        self.jobs -= sign
        for gpu in placement.gpus:
            if (room := self.gpus.get(gpu)) is None:
                continue
            room.jobs -= sign
            if room.mem_mib is not None:
                room.mem_mib += sign * charge.gpu_mem_mib
            if room.sm_pct is not None:
                room.sm_pct += sign * charge.sm_pct


def measure(
    now: Instant,
    facts: MachineFacts,
    holdings: Iterable[Holding],
    gpus_fresh_after: Mapping[GpuId, Instant],
    policy: Policy,
) -> Room:
    """The room there is beside the holdings.  Amounts may be negative: overcommitted."""
    holdings = list(holdings)
    uses = dict(facts.jobs)
    cores = {core.number: core for core in facts.cores}
    assigned = {c for h in holdings for c in h.placement.cores if c in cores}
    growth_mib = sum(
        max(0, h.charge.mem_mib - (uses[h.job_id].mem_mib if h.job_id in uses else 0))
        for h in holdings
    )
    room = Room(
        cores_free=set(cores) - assigned,
        cores_usable=_cores_usable(len(cores), len(assigned), facts.millicores_outside, policy),
        mem_mib=facts.mem_mib_available - policy.mem_mib_reserve - growth_mib,
        mem_mib_total=facts.mem_mib_total,
        gpus={g.id: GpuRoom(facts=g, mem_mib=None, sm_pct=None) for g in facts.gpus},
        cores=cores,
        cores_busy=dict(facts.busy_permille),
        jobs=len(holdings),
        is_exclusive=any(h.exclusive and not h.placement.gpus for h in holdings),
    )
    for gpu in room.gpus.values():
        here = [h for h in holdings if gpu.facts.id in h.placement.gpus]
        gpu.jobs = len(here)
        gpu.is_exclusive = any(h.exclusive for h in here)
        gpu.why_unknown = _why_unknown(now, facts, gpu.facts, gpus_fresh_after, policy)
        if not gpu.why_unknown:
            _measure_gpu(gpu, here, uses, policy)
        elif gpu.why_unknown == JUST_LEFT:
            assert gpu.facts.mem_mib_total is not None
            gpu.guess = (
                gpu.facts.mem_mib_total
                - policy.gpu_mem_mib_reserve
                - sum(h.charge.gpu_mem_mib for h in here),
                policy.sm_pct_limit - sum(h.charge.sm_pct for h in here),
            )
    return room


def _measure_gpu(
    gpu: GpuRoom, here: list[Holding], uses: Mapping[JobId, JobFacts], policy: Policy
) -> None:
    assert gpu.facts.mem_mib_free is not None
    assert gpu.facts.sm_pct is not None
    growth_mib = 0
    sm_pct_ours = 0
    for holding in here:
        share = _share(uses.get(holding.job_id), gpu.facts.id)
        growth_mib += max(0, holding.charge.gpu_mem_mib - (share.mem_mib or 0))
        if holding.job_id in uses:
            # A share that cannot be read is taken to be what it is charged for.  A job that
            # was not there when the reading was taken is no part of it: the rest is outsiders'.
            sm_pct_ours += holding.charge.sm_pct if share.sm_pct is None else share.sm_pct
    sm_pct_outside = max(0, gpu.facts.sm_pct - sm_pct_ours)
    sm_pct_charged = sum(h.charge.sm_pct for h in here)
    gpu.mem_mib = gpu.facts.mem_mib_free - policy.gpu_mem_mib_reserve - growth_mib
    gpu.sm_pct = policy.sm_pct_limit - sm_pct_outside - sm_pct_charged


def _share(facts: JobFacts | None, gpu: GpuId) -> GpuShare:
    nothing = GpuShare(mem_mib=None, sm_pct=None)
    return nothing if facts is None else dict(facts.gpus).get(gpu, nothing)


def _why_unknown(
    now: Instant,
    facts: MachineFacts,
    gpu: GpuFacts,
    fresh_after: Mapping[GpuId, Instant],
    policy: Policy,
) -> str:
    if gpu.problem:
        return gpu.problem
    if gpu.mem_mib_free is None or gpu.mem_mib_total is None:
        return "its memory cannot be read"
    if gpu.sm_pct is None:
        return "its utilisation cannot be read"
    if now - facts.gpus_taken_at > policy.stale_ms:
        return "its last reading is too old"
    if facts.gpus_taken_at < fresh_after.get(gpu.id, 0):
        return JUST_LEFT
    return ""


def _cores_usable(total: int, assigned: int, millicores_outside: int, policy: Policy) -> int:
    outside = (millicores_outside + 500) // 1000 if policy.outside_cpu_counts else 0
    # Outsiders slow the queue down but never stop it: a forgotten browser tab must not.
    usable = max(total - policy.cores_reserve - outside, min(policy.cores_minimum, total))
    return usable - assigned


def is_impossible(need: Need, facts: MachineFacts, policy: Policy) -> str | None:
    """Why an empty machine could not meet the need either, or None if it could."""
    cores = max(
        len(facts.cores) - policy.cores_reserve, min(policy.cores_minimum, len(facts.cores))
    )
    if need.charge.cores > cores:
        kept = f" ({policy.cores_reserve} kept free)" if policy.cores_reserve else ""
        return f"it asks for {need.charge.cores} cores, this machine has {len(facts.cores)}{kept}"
    if need.charge.mem_mib > facts.mem_mib_total - policy.mem_mib_reserve:
        asked, total = _sizes(need.charge.mem_mib, facts.mem_mib_total)
        return (
            f"it asks for {asked} of host memory, this machine has {total}"
            f" ({mib_in_words(policy.mem_mib_reserve)} kept free)"
        )
    if need.gpus == 0:
        return None
    if facts.gpus_problem and need.gpus > len(facts.gpus):
        return None  # they may be there, and cannot be read just now: it waits
    if need.gpus > len(facts.gpus):
        return f"it asks for {count_of(need.gpus, 'GPU')}, this machine has {len(facts.gpus)}"
    if need.charge.sm_pct > policy.sm_pct_limit:
        return f"it asks for {need.charge.sm_pct}% of a GPU, the limit is {policy.sm_pct_limit}%"
    totals = sorted(
        (g.mem_mib_total for g in facts.gpus if g.mem_mib_total is not None), reverse=True
    )
    if len(totals) == len(facts.gpus):
        most = totals[need.gpus - 1]
        if need.charge.gpu_mem_mib > most - policy.gpu_mem_mib_reserve:
            asked, total = _sizes(need.charge.gpu_mem_mib, most)
            return (
                f"it asks for {asked} on {count_of(need.gpus, 'GPU')}, the largest here has"
                f" {total} ({mib_in_words(policy.gpu_mem_mib_reserve)} kept free)"
            )
    return None


def mib_in_words(mib: int) -> str:
    """'512 MiB', '1.5 GiB'."""
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def _sizes(asked_mib: int, total_mib: int) -> tuple[str, str]:
    """Both as people read them, and never the same for two that differ."""
    asked, total = mib_in_words(asked_mib), mib_in_words(total_mib)
    return (asked, total) if asked != total else (f"{asked_mib} MiB", f"{total_mib} MiB")


def count_of(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
