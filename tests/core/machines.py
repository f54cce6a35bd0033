"""A machine and a scheduler to speak about in tests: everything not said is quiet and roomy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rlqd.core import invariants
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    Accept,
    Action,
    After,
    CancelRequested,
    Core,
    Event,
    Exit,
    Finished,
    GpuFacts,
    GpuId,
    GpuShare,
    HoldRequested,
    Instant,
    Job,
    JobFacts,
    JobId,
    JobSpec,
    Launch,
    MachineFacts,
    MachineSampled,
    Outcome,
    PauseRequested,
    Persist,
    Placement,
    Policy,
    ProcessExited,
    ProcessLost,
    ProcessStarted,
    Refuse,
    ReleaseRequested,
    RequeueRequested,
    ResumeRequested,
    State,
    Submitted,
)

A, B = GpuId("GPU-a"), GpuId("GPU-b")
GPU_MIB = 24_000
#: No reserves, so that the numbers in a test add up.
EXACT = Policy(
    gpu_mem_mib_reserve=0,
    mem_mib_reserve=0,
    reserve_after_ms=10_000,
    settle_ms=5_000,
)


def cores(physical: int = 8, *, smt: int = 1, nodes: int = 1) -> tuple[Core, ...]:
    """As Linux numbers them: first one thread of every physical core, then the siblings."""
    return tuple(
        Core(number=s * physical + p, physical=p, numa_node=p * nodes // physical)
        for s in range(smt)
        for p in range(physical)
    )


def gpu(
    id_: GpuId = A,
    *,
    free: int | None = GPU_MIB,
    total: int | None = GPU_MIB,
    sm: int | None = 0,
    near: Iterable[int] = (),
    problem: str = "",
) -> GpuFacts:
    return GpuFacts(
        id=id_,
        index=0 if id_ == A else 1,
        mem_mib_total=total,
        mem_mib_free=free,
        sm_pct=sm,
        cores_near=frozenset(near),
        problem=problem,
    )


def used(mem: int = 0, *, gpus: Iterable[GpuId] = (), gpu_mem: int | None = 0) -> JobFacts:
    share = GpuShare(mem_mib=gpu_mem, sm_pct=0)
    return JobFacts(cpu_millicores=1000, mem_mib=mem, gpus=tuple((g, share) for g in gpus))


FACTS = MachineFacts(
    taken_at=Instant(0),
    gpus_taken_at=Instant(0),
    cores=cores(),
    mem_mib_total=64_000,
    mem_mib_available=64_000,
)


def spec(
    *,
    gpus: int | None = 0,
    cores: int | None = 1,
    mem: int | None = 1,
    gpu_mem: int | None = None,
    sm: int | None = 1,
    limit: int | None = None,
    grace: int = 1_000,
    priority: int = 0,
    exclusive: bool = False,
    requeue: bool = False,
    user: int = 1000,
) -> JobSpec:
    return JobSpec(
        user=user,
        priority=priority,
        gpus=gpus,
        gpu_mem_mib=gpu_mem,
        sm_pct=sm,
        cores=cores,
        mem_mib=mem,
        exclusive=exclusive,
        time_limit_ms=limit,
        grace_ms=grace,
        requeue=requeue,
    )


@dataclass
class Desk:
    """A scheduler and somebody who tells it things and remembers what it wants."""

    facts: MachineFacts = FACTS
    policy: Policy = EXACT
    now: int = 0
    said: list[Action] = field(default_factory=list[Action])  # by the last step
    launched: dict[int, Launch] = field(default_factory=dict[int, Launch])  # the latest
    rows: dict[int, Job] = field(default_factory=dict[int, Job])
    requests: int = 0

    def __post_init__(self) -> None:
        self.core = Scheduler(policy=self.policy)
        self.sample()

    def tell(self, *events: Event, after: int = 0) -> list[Action]:
        self.now += after
        now = Instant(self.now)
        self.said = self.core.step(now, [replace(e, now=now) for e in events])
        invariants.check(self.core)
        for action in self.said:
            match action:
                case Launch(job_id=job_id):
                    self.launched[job_id] = action
                case Persist(job=job):
                    self.rows[job.id] = job
                case _:
                    pass
        return self.said

    def reading(self, facts: MachineFacts | None = None) -> MachineSampled:
        now = Instant(self.now)
        self.facts = facts or self.facts
        return MachineSampled(now, replace(self.facts, taken_at=now, gpus_taken_at=now))

    def sample(self, facts: MachineFacts | None = None, *, after: int = 0) -> list[Action]:
        """A reading of everything, just taken."""
        self.now += after
        return self.tell(self.reading(facts))

    def submit(
        self,
        *specs: JobSpec,
        after: int = 0,
        held: bool = False,
        follow: Iterable[int] = (),
        any_end: bool = False,
    ) -> list[int]:
        submission = self.submission(*specs, held=held, follow=follow, any_end=any_end)
        self.tell(submission, after=after)
        return [job_id for job_id, _ in submission.jobs]

    def submission(
        self,
        *specs: JobSpec,
        held: bool = False,
        follow: Iterable[int] = (),
        any_end: bool = False,
    ) -> Submitted:
        """`follow`: jobs that have to end first."""
        first = max(self.rows, default=0) + 1
        jobs = tuple((JobId(first + n), one) for n, one in enumerate(specs))
        followed = tuple(JobId(i) for i in follow)
        order = After(job_ids=followed, any_end=any_end) if followed else None
        return Submitted(Instant(0), self._request(), jobs, held, order)

    def start(self, job_id: int, *, after: int = 0) -> list[Action]:
        """Its supervisor reports that it runs."""
        return self.tell(self.started(job_id), after=after)

    def started(self, job_id: int) -> ProcessStarted:
        attempt = self.launched[job_id].attempt
        return ProcessStarted(Instant(0), JobId(job_id), attempt, 1000 + job_id)

    def lost(self, job_id: int) -> ProcessLost:
        attempt = self.launched[job_id].attempt
        return ProcessLost(Instant(0), JobId(job_id), attempt, "the machine was rebooted")

    def exit(self, job_id: int, *, after: int = 0, code: int = 0) -> list[Action]:
        attempt = self.launched[job_id].attempt
        ended = ProcessExited(Instant(0), JobId(job_id), attempt, Exit(code=code))
        return self.tell(ended, after=after)

    def run(self, *specs: JobSpec) -> list[int]:
        """Submit jobs that must start at once, and have them running."""
        ids = self.submit(*specs)
        assert self.running() >= set(ids), "a test's premise: these start at once"
        self.tell(*(self.started(job_id) for job_id in ids))
        return ids

    # ---- requests ------------------------------------------------------------------

    def cancel(self, job_id: int, *, at_once: bool = False, after: int = 0) -> Accept | Refuse:
        event = CancelRequested(Instant(0), self._request(), JobId(job_id), at_once)
        return self._ask(event, after)

    def hold(self, job_id: int, *, after: int = 0) -> Accept | Refuse:
        return self._ask(HoldRequested(Instant(0), self._request(), JobId(job_id)), after)

    def release(self, job_id: int, *, after: int = 0) -> Accept | Refuse:
        return self._ask(ReleaseRequested(Instant(0), self._request(), JobId(job_id)), after)

    def pause(self, job_id: int, *, after: int = 0) -> Accept | Refuse:
        return self._ask(PauseRequested(Instant(0), self._request(), JobId(job_id)), after)

    def resume(self, job_id: int, *, after: int = 0) -> Accept | Refuse:
        return self._ask(ResumeRequested(Instant(0), self._request(), JobId(job_id)), after)

    def requeue(self, job_id: int, *, after: int = 0) -> Accept | Refuse:
        row = self.rows[job_id] if JobId(job_id) not in self.core.jobs else None
        event = RequeueRequested(Instant(0), self._request(), JobId(job_id), row)
        return self._ask(event, after)

    def _ask(self, event: Event, after: int) -> Accept | Refuse:
        answers = [a for a in self.tell(event, after=after) if isinstance(a, Accept | Refuse)]
        assert len(answers) == 1, answers
        return answers[0]

    def _request(self) -> int:
        self.requests += 1
        return self.requests

    # ---- what came of it -----------------------------------------------------------

    def state(self, job_id: int) -> State:
        return self.rows[job_id].state

    def exit_of(self, job_id: int) -> Exit:
        state = self.rows[job_id].state
        assert isinstance(state, Finished), state
        return state.exit

    def outcome(self, job_id: int) -> Outcome:
        state = self.rows[job_id].state
        assert isinstance(state, Finished), state
        return state.outcome

    def running(self) -> set[int]:
        """Jobs that hold resources."""
        return {h.job_id for h in self.core.holdings()}

    def place(self, job_id: int) -> Placement:
        return self.launched[job_id].placement

    def effects(self) -> list[str]:
        """The last step's signals and launches by name, in order."""
        quiet = {"Persist", "Accept", "Refuse", "SampleNow", "Account"}
        return [n for a in self.said if (n := type(a).__name__) not in quiet]
