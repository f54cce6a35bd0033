"""Fair share: who has had how much of the machine, and who is therefore next.

Slurm's multifactor priority with its classic fair-share factor, for users without a tree of
accounts (https://slurm.schedmd.com/priority_multifactor.html, .../classic_fair_share.html):

    explicit priority                 decides first, always
    age_weight   * min(1, waited / age_max)
    + share_weight * 2 ** -(use / shares)       both normalised over the users there are

What a job takes of the machine is the LARGEST of its shares of the GPUs, the cores and the host
memory, as with Slurm's PriorityFlags=MAX_TRES (and "dominant resource fairness", Ghodsi 2011):
who holds all cores leaves nothing for a GPU job either.  Of one GPU it is the larger of its share
of the memory and its share of the SM: that is what others can no longer have, whichever of the
two it was that the job wanted.  A job takes what it is CHARGED for (core/charge.py), so what was
declared and left unused counts.  This rate, integrated over time, is the use; it halves every
`half_life`.

Accounting alone would act only after hours.  So what a user holds at this moment, and is given in
this pass, counts as if it had run for HELD_COUNTS_AS_MS already (LSF's RUN_JOB_FACTOR is the
same thought): on an empty history B's first job goes before A's second.

Floats add up use and never decide: a score is a whole number, as in Slurm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlqd.core.model import (
    Charge,
    GpuId,
    Instant,
    JobId,
    MachineFacts,
    SharePolicy,
)
from rlqd.core.room import Holding

#: What is held counts as if it had been held for so long.
HELD_COUNTS_AS_MS = 3_600_000
#: Use is told to the shell this often while it grows; and whenever a job leaves.
TELL_EVERY_MS = 60_000
#: Who has used less of the machine than this (in ms of all of it) has used nothing.
NEGLIGIBLE_MS = 100.0


@dataclass(frozen=True, slots=True)
class Rate:
    """What something takes while it runs."""

    #: Its share of the machine: the largest of its shares of GPUs, cores and memory.
    machine: float
    #: GPUs, by the larger of the memory's and the SM's share of each.
    gpus: float
    cores: int


@dataclass(frozen=True, slots=True)
class Use:
    """Decayed use of one user: ms of the whole machine, of one GPU, of one core."""

    machine_ms: float = 0.0
    gpu_ms: float = 0.0
    core_ms: float = 0.0

    def plus(self, rate: Rate, ms: int) -> Use:
        return Use(
            self.machine_ms + rate.machine * ms,
            self.gpu_ms + rate.gpus * ms,
            self.core_ms + rate.cores * ms,
        )

    def times(self, factor: float) -> Use:
        return Use(self.machine_ms * factor, self.gpu_ms * factor, self.core_ms * factor)


@dataclass(frozen=True, slots=True)
class Accounted:
    """A user's use as the database keeps it."""

    user: int
    use: Use


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a job's share is a share of.  A GPU whose memory cannot be read has None."""

    cores: int
    mem_mib: int
    gpus: Mapping[GpuId, int | None]

    @classmethod
    def of(cls, facts: MachineFacts) -> Capacity:
        gpus = {gpu.id: gpu.mem_mib_total for gpu in facts.gpus}
        return cls(len(facts.cores), facts.mem_mib_total, gpus)

    def rate(self, charge: Charge, gpus: Iterable[GpuId | None], *, exclusive: bool) -> Rate:
        """`gpus`: those it is on; None for one that is not chosen yet."""
        on = [1.0 if exclusive else self._share_of(gpu, charge) for gpu in gpus]
        machine = max(
            sum(on) / max(1, len(self.gpus)),
            charge.cores / max(1, self.cores),
            charge.mem_mib / max(1, self.mem_mib),
            # Without a GPU, `exclusive` asks for the machine.
            1.0 if exclusive and not on else 0.0,
        )
        return Rate(min(1.0, machine), sum(on), charge.cores)

    def _share_of(self, gpu: GpuId | None, charge: Charge) -> float:
        total = (
            self.gpus.get(gpu)
            if gpu is not None
            else max((mib for mib in self.gpus.values() if mib is not None), default=None)
        )
        mem = charge.gpu_mem_mib / total if total else 0.0
        return min(1.0, max(mem, charge.sm_pct / 100))

    def rate_of(self, holding: Holding) -> Rate:
        return self.rate(holding.charge, holding.placement.gpus, exclusive=holding.exclusive)


@dataclass(frozen=True, slots=True)
class _Debt:
    """Held for `ms`; at what rate can be told once the machine has been read."""

    holding: Holding
    ms: int


@dataclass(slots=True)
class Fairness:
    """The account book.  `at`: all of `uses` are decayed up to then."""

    policy: SharePolicy = field(default_factory=SharePolicy)
    uses: dict[int, Use] = field(default_factory=dict[int, Use])
    at: Instant = field(default=Instant(0))
    #: Each job that holds something is in `uses` up to then; one that is missing was running
    #: when the daemon started, and is up to `_loaded_at`.
    _until: dict[JobId, Instant] = field(default_factory=dict[JobId, Instant])
    _loaded_at: Instant | None = None
    _debts: list[_Debt] = field(default_factory=list[_Debt])
    _told_at: Instant = field(default=Instant(0))
    _is_told: bool = True
    _has_left: bool = False

    # ---- keeping the books ---------------------------------------------------------

    def load(self, rows: Iterable[Accounted], at: Instant | None) -> None:
        """What an earlier daemon wrote down, and when by this clock: it may be before 0.  None:
        there was nothing to write down."""
        self.uses = {row.user: row.use for row in rows}
        self._loaded_at = at
        self.at = self.at if at is None else at

    def carry_over(self, now: Instant) -> None:
        """The jobs are read from the database again: of those that seemed to have ended, all
        but what is still to come was counted."""
        self._loaded_at = now

    def began(self, job_id: JobId, now: Instant) -> None:
        """It is given what it is placed on."""
        self._until[job_id] = now

    def count(self, holding: Holding, begun: Instant | None, until: Instant) -> None:
        """Charge the user for what the job has held since it was last counted.

        `begun`: when it began to run, if that is known: a job that ran on while no daemon was
        there pays from then, or from the last word of the daemon before.
        """
        since = self._until.get(holding.job_id)
        if since is None:
            known = [at for at in (begun, self._loaded_at) if at is not None]
            since = max(known, default=until)
        if until > since:
            self._debts.append(_Debt(holding, until - since))
        self._until[holding.job_id] = max(until, since)

    def stop(self, job_id: JobId, now: Instant) -> None:
        """What it holds from its last count to `now` is free."""
        self._until[job_id] = now

    def lost(self, job_id: JobId, now: Instant) -> None:
        """If it was gone before this daemon came, nobody knows since when: nobody pays."""
        self._until.setdefault(job_id, now)

    def left(self, job_id: JobId) -> None:
        """It holds nothing any more."""
        del self._until[job_id]
        self._has_left = True

    def settle(self, now: Instant, facts: MachineFacts | None) -> None:
        """Enter what is owed, once it is known what it is a share of."""
        self._decay(now)
        if facts is None or not self._debts:
            return
        capacity = Capacity.of(facts)
        for debt in self._debts:
            user = debt.holding.user
            use = self.uses.get(user, Use())
            self.uses[user] = use.plus(capacity.rate_of(debt.holding), debt.ms)
        self._is_told = False
        self._debts.clear()

    def _decay(self, now: Instant) -> None:
        if now <= self.at:
            return
        factor = 2.0 ** (-(now - self.at) / self.policy.half_life_ms)
        self.uses = {
            user: use
            for user, before in self.uses.items()
            if (use := before.times(factor)).machine_ms >= NEGLIGIBLE_MS
        }
        self.at = now

    def take_changes(self, now: Instant) -> tuple[Accounted, ...]:
        """All users' use, if it is time to write it down; else ()."""
        is_due = self._has_left or now - self._told_at >= TELL_EVERY_MS
        if self._is_told or not is_due:
            return ()
        self._is_told, self._has_left, self._told_at = True, False, now
        return tuple(Accounted(user, use) for user, use in sorted(self.uses.items()))

    # ---- who is next ---------------------------------------------------------------

    def ranking(
        self,
        now: Instant,
        held: Iterable[tuple[int, Rate]],
        waiting: Iterable[int],
        since: Mapping[JobId, Instant],
    ) -> Ranking:
        """How users stand at this moment.

        Args:
            held: what each job that holds something takes, by user.
            waiting: the users who have jobs in the queue.
            since: since when a job waits.
        """
        counted = dict.fromkeys(waiting, 0.0)
        counted |= {user: use.machine_ms for user, use in self.uses.items()}
        for user, rate in held:
            counted[user] = counted.get(user, 0.0) + rate.machine * HELD_COUNTS_AS_MS
        return Ranking(self.policy, now, counted, since)


@dataclass(frozen=True, slots=True)
class Score:
    """How a job's rank among those of equal priority is made up."""

    age: int
    share: int

    @property
    def total(self) -> int:
        return self.age + self.share


class Ranking:
    """The users' standing within one pass: it changes with every job that is started in it."""

    __slots__ = (
        "_counted",
        "_points",
        "_policy",
        "_shares",
        "_shares_sum",
        "_since",
        "_sum",
        "now",
    )

    def __init__(
        self,
        policy: SharePolicy,
        now: Instant,
        counted: dict[int, float],
        since: Mapping[JobId, Instant],
    ) -> None:
        self.now = now
        self._policy = policy
        self._counted = counted
        self._since = since
        given = dict(policy.shares)
        self._shares = {user: given.get(user, policy.shares_default) for user in counted}
        self._shares_sum = sum(self._shares.values())
        self._sum = sum(counted.values())
        #: What does not depend on the job, until somebody is given something: (points, level).
        self._points: dict[int, tuple[int, int]] = {}

    def give(self, user: int, rate: Rate) -> None:
        """A job of this user starts."""
        amount = rate.machine * HELD_COUNTS_AS_MS
        self._counted[user] += amount
        self._sum += amount
        self._points.clear()

    def counted_ms(self, user: int) -> float:
        """Use and what is held, in ms of the whole machine."""
        return self._counted[user]

    def users(self) -> list[int]:
        return list(self._counted)

    def shares(self, user: int) -> int:
        return self._shares[user]

    def part(self, user: int) -> float:
        """Of the machine, by shares."""
        return self._shares[user] / self._shares_sum

    def level(self, user: int) -> float:
        """Counted use over shares, both normalised: 1.0 has had exactly a fair part."""
        if self._sum <= 0:
            return 0.0
        return self._counted[user] / self._sum * self._shares_sum / self._shares[user]

    def factor(self, user: int) -> float:
        """1.0: has had nothing; 0.5: a fair part; then towards 0."""
        return float(2.0 ** -self.level(user))

    def score(self, user: int, job_id: JobId) -> Score:
        return Score(age=self._age(job_id), share=self._points_of(user)[0])

    def key(self, user: int, job_id: JobId) -> tuple[int, int]:
        """Lower goes first.  Of two whose scores are alike, who has had less of a fair part:
        far beyond it all factors are near 0."""
        share, level = self._points_of(user)
        return (-self._age(job_id) - share, level)

    def _age(self, job_id: JobId) -> int:
        policy = self._policy
        if not policy.age_weight:
            return 0
        waited = min(max(0, self.now - self._since[job_id]), policy.age_max_ms)
        return policy.age_weight * waited // policy.age_max_ms

    def _points_of(self, user: int) -> tuple[int, int]:
        if (known := self._points.get(user)) is None:
            weight = self._policy.share_weight
            level = round(1000 * self.level(user)) if weight else 0
            known = self._points[user] = (round(weight * self.factor(user)), level)
        return known
