"""Hypothesis plays a hostile shell: any fact, in any order, at any time.

RLQ_HYPOTHESIS=thorough searches at random and for longer; by default the search is the same
each time, so that a failure is the change's doing.
"""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.core.machines import A, B, cores, gpu

from rlqd.core import invariants
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    AdmissionSet,
    Booking,
    CalendarSet,
    CancelRequested,
    Event,
    Exit,
    Finished,
    GpuFacts,
    GpuShare,
    HoldRequested,
    Instant,
    Job,
    JobFacts,
    JobId,
    JobSpec,
    Kill,
    Launch,
    LaunchFailed,
    LaunchVoided,
    MachineFacts,
    MachineSampled,
    PauseRequested,
    Pending,
    Persist,
    Policy,
    PrioritySet,
    ProcessEvent,
    ProcessExited,
    ProcessLost,
    ProcessStarted,
    Quiet,
    ReleaseRequested,
    RequeueRequested,
    ResumeRequested,
    Submitted,
    Suspended,
    Tick,
    UserEvent,
)
from rlqd.sim.contract import Contract

POLICY = Policy(
    reserve_after_ms=5_000,
    settle_ms=3_000,
    stale_ms=10_000,
    launch_timeout_ms=6_000,
    launch_retries=1,
    launch_retry_delay_ms=1_000,
    preemption=True,
    preempt_exempt_ms=5_000,
)
SPECS = st.builds(
    JobSpec,
    user=st.just(1000),
    priority=st.sampled_from([0, 0, 1]),
    gpus=st.sampled_from([None, 0, 1, 2]),
    gpu_mem_mib=st.sampled_from([None, 1_000, 12_000, 23_000]),
    sm_pct=st.sampled_from([None, 10, 100]),
    cores=st.sampled_from([None, 1, 3, 8]),
    mem_mib=st.sampled_from([None, 1, 30_000]),
    exclusive=st.sampled_from([False, False, False, True]),
    time_limit_ms=st.sampled_from([None, 5_000, 60_000]),
    grace_ms=st.sampled_from([0, 1_000]),
    requeue=st.booleans(),
    preemptible=st.booleans(),
)
DELAYS = st.sampled_from([0, 0, 1, 999, 5_000, 30_000])
GPUS = st.lists(
    st.builds(
        lambda free, sm, problem: gpu(A, free=free, sm=sm, problem=problem),
        free=st.sampled_from([None, 0, 13_000, 24_000, 24_000]),
        sm=st.sampled_from([None, 0, 0, 60]),
        problem=st.sampled_from(["", "", "", "fell off the bus"]),
    ),
    max_size=2,
)
AHEAD = st.sampled_from([-5_000, 0, 1_000, 20_000])
LENGTHS = st.sampled_from([1, 10_000, 60_000])
BOOKINGS = st.builds(
    lambda starts, length, user, **what: Booking(
        id=1,
        starts_at=Instant(starts),
        ends_at=Instant(starts + length),
        users=frozenset(user),
        **what,
    ),
    starts=AHEAD,
    length=LENGTHS,
    user=st.sampled_from([(), (1000,), (1001,)]),
    gpus=st.sampled_from([frozenset(), frozenset({A}), frozenset({A, B})]),
    cores=st.sampled_from([0, 3, 8]),
    mem_mib=st.sampled_from([0, 30_000]),
    whole=st.sampled_from([False, False, True]),
)
QUIET = st.builds(
    lambda starts, length, **share: Quiet(
        starts_at=Instant(starts), ends_at=Instant(starts + length), **share
    ),
    starts=AHEAD,
    length=LENGTHS,
    gpus=st.sampled_from([None, 0, 1]),
    cores=st.sampled_from([None, 1, 4]),
    sm_pct=st.sampled_from([None, 15]),
)
REQUESTS = st.sampled_from(
    [
        CancelRequested,
        HoldRequested,
        ReleaseRequested,
        PrioritySet,
        PauseRequested,
        ResumeRequested,
        RequeueRequested,
    ]
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = Scheduler(policy=POLICY)
        self.contract = Contract(POLICY)
        self.now = 0
        self.requests = 0
        self.rows: dict[JobId, Job] = {}
        self.launched: dict[tuple[JobId, int], int] = {}  # begun and not told as over: the pid
        self.told: set[tuple[JobId, int]] = set()  # as started
        self.over: list[ProcessEvent] = []
        self.last_facts: MachineFacts | None = None
        self.calendar = CalendarSet(Instant(0))

    def feed(self, delay: int, *events: Event) -> None:
        self.now += delay
        now = Instant(self.now)
        timed = [replace(event, now=now) for event in events]
        actions = self.core.step(now, timed)
        self.contract.observe(now, timed, actions)
        for action in actions:
            match action:
                case Persist(job=job):
                    self.rows[job.id] = job
                case Launch(job_id=job_id, attempt=attempt):
                    self.launched[job_id, attempt] = 1000 + len(self.contract.begun)
                case Kill(job_id=job_id, attempt=attempt):
                    assert (job_id, attempt) in self.launched
                case _:
                    pass

    # ---- the machine ---------------------------------------------------------------

    def reading(self, gpus: list[GpuFacts], used_pct: int | None, problem: str = "") -> Event:
        now = Instant(self.now)
        found = tuple(
            replace(g, id=id_, index=n)
            for n, (id_, g) in enumerate(zip((A, B), gpus, strict=False))
        )
        jobs: list[tuple[JobId, JobFacts]] = []
        for holding in self.core.holdings():
            if used_pct is not None:
                charge = holding.placement.charge
                share = GpuShare(
                    mem_mib=charge.gpu_mem_mib * used_pct // 100, sm_pct=used_pct // 4
                )
                on = tuple((g, share) for g in holding.placement.gpus)
                facts = JobFacts(
                    cpu_millicores=None,
                    mem_mib=charge.mem_mib * used_pct // 100,
                    gpus=on,
                    left_ms=used_pct * 200,  # what it says
                )
                jobs.append((holding.job_id, facts))
        facts_ = MachineFacts(
            taken_at=now,
            gpus_taken_at=now,
            cores=cores(4, smt=2),
            mem_mib_total=64_000,
            mem_mib_available=50_000,
            gpus=found,
            gpus_problem=problem,
            jobs=tuple(jobs),
        )
        self.last_facts = facts_
        return MachineSampled(now, facts_)

    @rule(
        gpus=GPUS,
        used_pct=st.sampled_from([None, 0, 50, 100, 150]),
        problem=st.sampled_from(["", "", "", "driver mismatch"]),
        delay=DELAYS,
    )
    def machine_read(
        self, gpus: list[GpuFacts], used_pct: int | None, problem: str, delay: int
    ) -> None:
        self.now += delay
        self.feed(0, self.reading(gpus, used_pct, problem))

    @rule(times=st.integers(1, 8))
    def machine_read_all_well(self, times: int) -> None:
        for _ in range(times):
            self.now += 1_000
            self.feed(0, self.reading([gpu(A), gpu(B)], 50))

    @rule(delay=DELAYS)
    def old_reading_again(self, delay: int) -> None:
        if self.last_facts is not None:
            self.feed(delay, MachineSampled(Instant(0), self.last_facts))

    @rule(reason=st.sampled_from(["", "draining"]))
    def admission(self, reason: str) -> None:
        self.feed(0, AdmissionSet(Instant(0), reason))

    @rule(bookings=st.lists(BOOKINGS, max_size=2), quiet=st.lists(QUIET, max_size=1), delay=DELAYS)
    def booked(self, bookings: list[Booking], quiet: list[Quiet], delay: int) -> None:
        """Anything, at any time; told anew, as when the wall clock was set."""
        at = self.now + delay
        self.calendar = CalendarSet(
            Instant(0),
            tuple(
                replace(
                    b,
                    starts_at=Instant(at + b.starts_at),
                    ends_at=Instant(at + b.ends_at),
                )
                for b in bookings
            ),
            tuple(
                replace(
                    q,
                    starts_at=Instant(at + q.starts_at),
                    ends_at=Instant(at + (q.ends_at or 0)),
                )
                for q in quiet
            ),
        )
        self.feed(delay, self.calendar)

    # ---- users ---------------------------------------------------------------------

    @rule(spec=SPECS, copies=st.integers(1, 3), held=st.booleans(), delay=DELAYS)
    def submit(self, spec: JobSpec, copies: int, held: bool, delay: int) -> None:
        self.requests += 1
        first = self.requests * 10
        jobs = tuple((JobId(first + n), spec) for n in range(copies))
        self.feed(delay, Submitted(Instant(0), self.requests, jobs, held))

    @rule(kinds=st.lists(REQUESTS, min_size=1, max_size=3), data=st.data(), delay=DELAYS)
    def request(self, kinds: list[type[UserEvent]], data: st.DataObject, delay: int) -> None:
        """Several at once, of one job: they are all answered."""
        if not self.rows:
            return
        job_id = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[job_id]
        events: list[Event] = []
        for kind in kinds:
            self.requests += 1
            if kind is RequeueRequested:
                finished = row if isinstance(row.state, Finished) else None
                events.append(RequeueRequested(Instant(0), self.requests, job_id, finished))
            elif kind is CancelRequested:
                at_once = data.draw(st.booleans())
                events.append(CancelRequested(Instant(0), self.requests, job_id, at_once))
            elif kind is PrioritySet:
                priority = data.draw(st.integers(-2, 2))
                events.append(PrioritySet(Instant(0), self.requests, job_id, priority))
            else:
                assert kind is not Submitted
                events.append(kind(Instant(0), self.requests, job_id))  # type: ignore[arg-type,call-arg]
        self.feed(delay, *events)

    # ---- processes -----------------------------------------------------------------

    @rule(
        data=st.data(),
        kind=st.sampled_from(["started", "started", "exited", "lost", "failed", "voided"]),
        delay=DELAYS,
    )
    def report(self, data: st.DataObject, kind: str, delay: int) -> None:
        if not self.launched:
            return
        job_id, attempt = one = data.draw(st.sampled_from(sorted(self.launched)))
        zero = Instant(0)
        event: ProcessEvent
        if kind == "started":
            self.told.add(one)
            self.feed(delay, ProcessStarted(zero, job_id, attempt, self.launched[one]))
            return
        if kind == "exited":
            code = data.draw(st.sampled_from([0, 1]))
            oom = data.draw(st.sampled_from([None, None, "gpu", "host"]))
            by_others = data.draw(st.booleans())
            exit_ = Exit(code=code, oom=oom, stopped_by_others=by_others)
            event = ProcessExited(zero, job_id, attempt, exit_)
        elif kind == "lost" or one in self.told:
            event = ProcessLost(zero, job_id, attempt, "gone")
        elif kind == "failed":
            passing = data.draw(st.booleans())
            event = LaunchFailed(zero, job_id, attempt, "no", passing)
        else:
            event = LaunchVoided(zero, job_id, attempt)
        del self.launched[one]
        self.over.append(event)
        self.feed(delay, event)

    @rule(data=st.data(), delay=DELAYS)
    def report_again(self, data: st.DataObject, delay: int) -> None:
        """The end of an old attempt, told twice or late."""
        if self.over:
            event = data.draw(st.sampled_from(self.over))
            if (event.job_id, event.attempt) not in self.launched:
                self.feed(delay, event)

    # ---- time, and the daemon ------------------------------------------------------

    @rule(delay=DELAYS)
    def tick(self, delay: int) -> None:
        self.feed(delay, Tick(Instant(0)))

    @rule()
    def tick_when_asked(self) -> None:
        if (at := self.core.next_wakeup()) is not None:
            self.feed(at - self.now)

    @rule(tell=st.booleans())
    def restart(self, tell: bool) -> None:
        rows = [job for job in self.rows.values() if not isinstance(job.state, Finished)]
        self.core = Scheduler.restore(rows, POLICY, Instant(self.now))
        self.contract.restarted()
        found: list[Event] = [
            ProcessStarted(Instant(0), *one, pid)
            for one, pid in self.launched.items()
            if tell or one in self.told
        ]
        self.told |= {one for one in self.launched if tell}
        self.feed(0, self.calendar, *found)

    # ---- what must hold ------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        invariants.check(self.core)
        live = {i for i, job in self.rows.items() if not isinstance(job.state, Finished)}
        assert live == self.core.jobs.keys()

    def teardown(self) -> None:
        """Liveness: from any state, a helpful shell on a free machine gets every job done."""
        self.feed(60_000, AdmissionSet(Instant(0), ""))
        for _ in range(40 + 8 * len(self.core.jobs)):
            if not self.core.jobs:
                break
            events: list[Event] = []
            for one in list(self.launched):
                del self.launched[one]
                events.append(ProcessExited(Instant(0), *one, Exit(code=0)))
            for job in self.core.jobs.values():
                self.requests += 1
                match job.state:
                    case Pending(held=True):
                        events.append(ReleaseRequested(Instant(0), self.requests, job.id))
                    case Suspended():
                        events.append(ResumeRequested(Instant(0), self.requests, job.id))
                    case _:
                        pass
            self.now += 1_000
            self.feed(0, *events, self.reading([gpu(A), gpu(B)], None))
            # What was accepted while the machine could not be read, and cannot be met.
            for job in list(self.core.jobs.values()):
                if isinstance(job.state, Pending) and (job.spec.gpu_mem_mib or 0) > 23_000:
                    self.requests += 1
                    self.feed(0, CancelRequested(Instant(0), self.requests, job.id))
        assert not self.core.jobs, list(self.core.jobs.values())[:3]
        self.contract.finish()


PROFILE = os.environ.get("RLQ_HYPOTHESIS", "")
SchedulerMachine.TestCase.settings = (
    settings(max_examples=3_000, stateful_step_count=50, deadline=None)
    if PROFILE == "thorough"
    else settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
        # A planted bug has to be found, not to be explained.
        phases=[Phase.generate] if PROFILE == "hunt" else list(Phase),
    )
)
TestScheduler = SchedulerMachine.TestCase
