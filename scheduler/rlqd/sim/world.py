"""A make-believe machine under the real core: virtual time, true and false readings, faults.

The world plays everything that is not the core: users, processes that grow, monitors that read
them once a second, outsiders, and a shell that commits rows, carries out effects and sometimes
dies between the two.  `run` ends with calm, in which everything that can finish has to.

Every fourth seed is calm throughout and busy: big jobs among a stream of small ones, where the
contract demands the starvation bound.  In every other one of those the jobs are one user's, in
the rest several users compete, and the contract demands that they do so fairly.  In every fourth
other one jobs train and report, more of them on one GPU are slower than two, and rlqd may pause
the youngest.  In another fourth something is booked (sim/bookings.py).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

from rlqd.core import invariants
from rlqd.core.fairness import Accounted
from rlqd.core.guard import Guard
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    Account,
    Action,
    AdmissionSet,
    After,
    CancelRequested,
    Core,
    Event,
    Exit,
    Finished,
    Freeze,
    GpuFacts,
    GpuId,
    GpuShare,
    GuardPolicy,
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
    Limit,
    MachineFacts,
    MachineSampled,
    PauseRequested,
    Pending,
    Persist,
    Placement,
    Policy,
    PrioritySet,
    ProcessEvent,
    ProcessExited,
    ProcessLost,
    ProcessStarted,
    ReleaseRequested,
    RequeueRequested,
    ResumeRequested,
    SampleNow,
    Submitted,
    Suspended,
    Terminate,
    UserEvent,
)
from rlqd.sim import bookings
from rlqd.sim.contract import Contract, ContractViolation
from rlqd.sim.faults import Faults

JOBS = 10
FAULTY_MS = 60_000
CALM_MS = 900_000
SAMPLE_MS = 1_000
HOST_OVERHEAD_MIB = 2_000
GPU_OVERHEAD_MIB = 300
#: How many times longer than they run on jobs say that they do; 0: always the same.
LIES = (1.0, 0.3, 4.0, None, 0.0)
NEVER_DONE_MS = 20_000


@dataclass(slots=True, kw_only=True)
class Process:
    """A supervisor and the job under it, as they truly are."""

    pid: int
    job_id: JobId
    attempt: int
    placement: Placement
    born_at: int
    mem_mib: int  # at its largest
    gpu_mem_mib: int
    sm_pct: int
    millicores: int
    grows_ms: int
    ignores_sigterm: bool
    #: Work left in ms; None: it hangs.
    left_ms: int | None
    alive: bool = True
    frozen: bool = False
    #: What its exit record says; None: it left none.
    record: Exit | None = None
    #: Raised whenever an exit that was planned no longer holds.
    plan: int = 0
    since: int = 0

    def share(self, now: int) -> float:
        """Of its largest size: a job starts small and fills its replay buffer."""
        return min(1.0, 0.2 + 0.8 * max(0, now - self.born_at) / self.grows_ms)


@dataclass(frozen=True, slots=True)
class Reported:
    """A report on its way from a supervisor to the daemon of one life."""

    life: int
    event: ProcessEvent


@dataclass(frozen=True, slots=True)
class Due:
    """A process reaches the end of its work, or of its patience, unless plans changed."""

    process: Process
    plan: int
    exit: Exit


@dataclass(frozen=True, slots=True)
class Sample:
    """The monitor looks; `regular`: and looks again a second later."""

    regular: bool


@dataclass(frozen=True, slots=True)
class Request:
    event: UserEvent


Happening = Reported | Due | Sample | Request


@dataclass(slots=True, kw_only=True)
class Gpu:
    id: GpuId
    index: int
    total_mib: int
    cores_near: frozenset[int]
    outside_mib: int = 0
    outside_sm_pct: int = 0
    #: Lost until then; and whether it then even vanishes from the list.
    lost_until: int = 0
    vanishes: bool = False


@dataclass(slots=True)
class World:
    seed: int
    jobs: int = JOBS
    #: Keep a readable trace.  Costs more than the run itself.
    tracing: bool = False
    #: Check the invariants after every n-th step.
    check_every: int = 1
    trace: list[str] = field(default_factory=list[str])
    rows: dict[JobId, Job] = field(default_factory=dict[JobId, Job])  # the database
    uses: tuple[Accounted, ...] = ()  # likewise
    uses_at: Instant = field(default=Instant(0))
    steps: int = 0
    crashes: int = 0
    now: int = 0

    rng: random.Random = field(init=False)
    rng_after: random.Random = field(init=False)
    rng_shutdown: random.Random = field(init=False)
    is_calm: bool = field(init=False)
    #: Jobs report their steps/s, and the guard backs off.
    trains: bool = field(init=False)
    #: Of the jobs of such a calm seed some have a higher priority, and others yield to them.
    preempts: bool = field(init=False)
    guard: Guard = field(init=False)
    faults: Faults = field(init=False)
    policy: Policy = field(init=False)
    limits: dict[int, tuple[Limit, ...]] = field(init=False)
    core: Scheduler = field(init=False)
    contract: Contract = field(init=False)
    cores: tuple[Core, ...] = field(init=False)
    gpus: list[Gpu] = field(init=False)
    mem_mib_total: int = field(init=False)
    outside_mib: int = 0
    outside_millicores: int = 0
    processes: dict[int, Process] = field(default_factory=dict[int, Process])
    nvml_fails_until: int = 0
    nvml_hangs_until: int = 0
    monitor_hangs_until: int = 0
    gpus_taken_at: int = 0
    gpus_seen: tuple[GpuFacts, ...] = ()
    draining: bool = False
    is_over: bool = False  # the faulty part
    #: None: nothing is ever booked.
    calendar: bookings.Bookings | None = None
    _life: int = 0  # reports under way when the daemon died are lost
    _heap: list[tuple[int, int, Happening]] = field(
        default_factory=list[tuple[int, int, Happening]]
    )
    _order: count[int] = field(default_factory=count)
    _pids: count[int] = field(default_factory=lambda: count(1000))
    _requests: count[int] = field(default_factory=count)
    _ids: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.rng_after = random.Random(f"after {self.seed}")
        self.rng_shutdown = random.Random(f"shutdown of {self.seed}")
        self.is_calm = self.seed % 4 == 0
        self.trains = self.seed % 4 == 3
        self.preempts = self.seed % 8 == 0
        self.faults = Faults.draw(rng)
        if self.is_calm:
            # Only what a job may do by itself.
            self.faults = Faults(ignores_sigterm=rng.choice([0.0, 0.5]))
            self.jobs *= 2
        self.policy = Policy(
            cores_reserve=rng.choice([0, 0, 1]),
            jobs_per_gpu_max=rng.choice([0, 0, 0, 2]),
            reserve_after_ms=rng.choice([0, 5_000, 15_000]),
            settle_ms=rng.choice([4_000, 6_000]),
            stale_ms=5_000,
            launch_timeout_ms=6_000,
            launch_retry_delay_ms=1_000,
            launch_retries=rng.choice([0, 1, 3]),
            queued_max=1_000,
        )
        self.guard = Guard(GuardPolicy())
        if self.trains:
            self.policy = replace(self.policy, jobs_per_gpu_max=0)
            self.faults = replace(self.faults, user_per_s=rng.choice([0.0, 0.2, 0.5]))
            self.guard.policy = GuardPolicy(
                observe_ms=3_000,
                first_report_ms=4_000,
                patience_ms=8_000,
                pause_youngest=True,
                pause_turn_ms=rng.choice([3_000, 8_000]),
            )
        if self.preempts:
            # What is declared is what is counted, so that who was stopped is enough for good.
            self.policy = replace(
                self.policy,
                preemption=True,
                preempt_exempt_ms=rng.choice([0, 5_000, 20_000]),
                margin_pct=0,
            )
        self._build_machine()
        self.limits = self._draw_limits()
        self.core = Scheduler(policy=self.policy, guard=self.guard, limits=self.limits)
        turn_ms = self.guard.policy.pause_turn_ms if self.trains else None
        self.contract = Contract(
            self.policy, calm=self.is_calm, turn_ms=turn_ms, limits=self.limits
        )
        if self.seed % 4 == 1:
            self.calendar = bookings.Bookings.draw(
                self.seed, [gpu.id for gpu in self.gpus], len(self.cores)
            )

    def _build_machine(self) -> None:
        rng = self.rng
        physical = rng.choice([4, 8])
        smt = rng.choice([1, 2])
        nodes = rng.choice([1, 2])
        self.cores = tuple(
            Core(number=s * physical + p, physical=p, numa_node=p * nodes // physical)
            for s in range(smt)
            for p in range(physical)
        )
        self.mem_mib_total = rng.choice([32_000, 64_000])
        count_ = rng.choice([1, 2] if self.is_calm else [0, 1, 1, 2, 4])
        self.gpus = [
            Gpu(
                id=GpuId(f"GPU-{index}"),
                index=index,
                total_mib=rng.choice([16_000, 24_000, 40_000]),
                cores_near=frozenset(
                    c.number for c in self.cores if nodes == 1 or c.numa_node == index % 2
                ),
            )
            for index in range(count_)
        ]

    def _draw_limits(self) -> dict[int, tuple[Limit, ...]]:
        """Users 1 and 2 are a group, in every third world."""
        if self.seed % 3:
            return {}
        rng = random.Random(f"limits of {self.seed}")

        def limit(whose: str, more: int) -> Limit:
            return Limit(
                whose=whose,
                max_jobs=rng.choice([None, 1 + more, 2 + more]),
                max_submit_jobs=rng.choice([None, None, 4 + more]),
                gpus=rng.choice([None, 1 + more, 2 + more]),
                # What every core must count at the least is known, and not what it counts: no
                # measure for who is held up by whom.
                gpu_mem_mib=None if self.is_calm else rng.choice([None, 16_000 * (1 + more)]),
                cores=rng.choice([None, 4 + more]),
            )

        group = limit("group 12", 1)
        return {1: (limit("user 1", 0), group), 2: (group,), 3: (limit("user 3", 0),)}

    # ---- running -------------------------------------------------------------------

    def run(self) -> None:
        """Raises:
        AssertionError: an invariant or the contract does not hold; the seed replays it.
        """
        try:
            self._run()
        except AssertionError as error:
            error.add_note(f"replay with: python -m rlqd.sim {self.seed} --jobs {self.jobs} -v")
            raise

    def _run(self) -> None:
        self._schedule_users()
        self._push(self.rng.choice([0, 2_500]), Sample(regular=True))
        self._drain(until=FAULTY_MS)
        self._calm_down()
        self._drain(until=self.now + CALM_MS)
        stuck = list(self.core.jobs.values())
        if stuck:
            raise ContractViolation(f"no progress: {stuck[:3]}")
        self.contract.finish()

    def _drain(self, until: int) -> None:
        while not (self.is_over and not self.core.jobs and not self._is_busy()):
            wakeup = self.core.next_wakeup()
            top = self._heap[0][0] if self._heap else None
            at = min((t for t in (wakeup, top) if t is not None), default=None)
            if at is None or at > until:
                return
            self.now = max(self.now, at)
            events: list[Event] = []
            while self._heap and self._heap[0][0] <= self.now:
                events += self._happen(heapq.heappop(self._heap)[2])
                if self.rng.random() < 0.5:  # how much one step takes in is up to the shell
                    break
            if events or (wakeup is not None and wakeup <= self.now):
                self._step(events)

    def _is_busy(self) -> bool:
        return any(isinstance(h, Reported | Request) for _, _, h in self._heap)

    def _step(self, events: list[Event]) -> None:
        self.steps += 1
        now = Instant(self.now)
        if self.calendar is not None and (news := self.calendar.news(now)) is not None:
            events = [news, *events]
        actions = self.core.step(now, events)
        if self.tracing:
            self._log(events, actions)
        if self.steps % self.check_every == 0:
            invariants.check(self.core)
        crash = self.rng.random() < self.faults.crash
        if crash and self.rng.random() < 0.3:
            self._crash([], note="before the commit")  # nobody was told anything
            return
        self.contract.observe(now, events, actions)
        for action in actions:
            if isinstance(action, Persist):
                self.rows[action.job.id] = action.job
            elif isinstance(action, Account):
                self.uses, self.uses_at = action.users, now
        if crash:
            done = actions[: self.rng.randrange(len(actions) + 1)]
            self._crash(done, note=f"after {len(done)} of {len(actions)} effects")
            return
        live = {i for i, job in self.rows.items() if not isinstance(job.state, Finished)}
        demand_same = live == self.core.jobs.keys()
        assert demand_same, f"the database lags the core: {live ^ self.core.jobs.keys()}"
        for action in actions:
            self._do(action)

    def _happen(self, what: Happening) -> list[Event]:
        now = Instant(self.now)
        match what:
            case Reported(life=life, event=event):
                return [replace(event, now=now)] if life == self._life else []
            case Due(process=process, plan=plan, exit=exit_):
                if process.alive and process.plan == plan:
                    self._die(process, exit_)
                return []
            case Request(event=event):
                return self._arrive(event)
            case Sample(regular=regular):
                return self._sample(regular=regular)

    def _arrive(self, event: UserEvent) -> list[Event]:
        now = Instant(self.now)
        if isinstance(event, Submitted):
            # Ids are given on arrival, ascending.
            jobs = tuple((JobId(next(self._ids)), spec) for _, spec in event.jobs)
            held = event.held and not self.is_over
            after = None if event.after is None else self._after(event.after)
            return [replace(event, now=now, jobs=jobs, held=held, after=after)]
        row = self.rows.get(event.job_id)
        if row is None or self.is_over:  # when it is over, users only help
            return []
        if isinstance(event, RequeueRequested):
            finished = row if isinstance(row.state, Finished) else None
            return [replace(event, now=now, finished=finished)]
        return [replace(event, now=now)]

    def _after(self, asked: After) -> After | None:
        """Jobs there are, but for those that have ended, as the shell leaves them out."""
        number = min(len(self.rows), self.rng_after.randint(1, 3))
        chosen = self.rng_after.sample(sorted(self.rows), number)
        live = [i for i in chosen if not isinstance(self.rows[i].state, Finished)]
        return replace(asked, job_ids=tuple(live)) if live else None

    # ---- what the shell does -------------------------------------------------------

    def _do(self, action: Action) -> None:
        match action:
            case Launch(job_id=job_id, attempt=attempt, placement=placement, spec=spec):
                self._launch(job_id, attempt, placement, spec)
            case Terminate(job_id=job_id, attempt=attempt):
                process = self._process_of(job_id, attempt)
                if process is not None and not self._hit(self.faults.signal_lost):
                    self._sigterm(process)
            case Kill(job_id=job_id, attempt=attempt):
                process = self._process_of(job_id, attempt)
                if process and process.alive and not self._hit(self.faults.signal_lost):
                    self._plan(process, self._ms(1, 50), Exit(signal=9))
            case Freeze(job_id=job_id, attempt=attempt, on=on):
                process = self._process_of(job_id, attempt)
                assert process is not None, f"a process that was told of is not there: {action}"
                self._freeze(process, on=on)
            case SampleNow():
                self._push(self.now + 20, Sample(regular=False))
            case _:
                pass

    def _process_of(self, job_id: JobId, attempt: int) -> Process | None:
        """None: its launch has failed, and that is still to be told."""
        found = (p for p in self.processes.values() if (p.job_id, p.attempt) == (job_id, attempt))
        return next(found, None)

    def _launch(self, job_id: JobId, attempt: int, placement: Placement, spec: JobSpec) -> None:
        delay = self._ms(4_000, 12_000) if self._hit(self.faults.late_report) else self._ms(1, 90)
        if self._hit(self.faults.launch_fails):
            passing = self.rng.random() < 0.7
            reason = "no more processes" if passing else "no such file"
            self._report(delay, LaunchFailed(Instant(0), job_id, attempt, reason, passing))
            return
        for other in self.processes.values():
            twice = other.alive and other.job_id == job_id
            assert not twice, f"job {job_id} runs twice: {other}"
            shared = other.alive and set(other.placement.cores) & set(placement.cores)
            assert not shared, f"cores {shared} of {other.job_id} are given to {job_id} too"
        charge = placement.charge
        off = self.rng.choice([40, 80, 100] if self.is_calm else [40, 80, 100, 130])
        process = Process(
            pid=next(self._pids),
            job_id=job_id,
            attempt=attempt,
            placement=placement,
            born_at=self.now,
            since=self.now,
            mem_mib=charge.mem_mib * off // 100,
            gpu_mem_mib=charge.gpu_mem_mib * off // 100,
            sm_pct=min(100, charge.sm_pct * off // 100),
            millicores=charge.cores * 900,
            grows_ms=self.rng.choice([1, 3_000, 20_000]),
            ignores_sigterm=self._hit(self.faults.ignores_sigterm),
            left_ms=None if self._hit(self.faults.hangs) else self._work_ms(),
        )
        self.processes[process.pid] = process
        self._report(delay, ProcessStarted(Instant(0), job_id, attempt, process.pid))
        if process.left_ms is not None:
            self._plan(process, process.left_ms, self._own_end())

    def _work_ms(self) -> int:
        return self._ms(20_000, 90_000) if self.trains else self._ms(200, 25_000)

    def _sigterm(self, process: Process) -> None:
        if process.alive:
            if process.frozen:
                self._freeze(process, on=False)
            if not process.ignores_sigterm:
                code = self.rng.choice([0, 143])  # with a checkpoint, or without
                self._plan(process, self._ms(1, 900), Exit(code=code))

    def _freeze(self, process: Process, *, on: bool) -> None:
        if not process.alive or process.frozen == on:
            return
        process.frozen = on
        if on:
            if process.left_ms is not None:
                process.left_ms = max(1, process.left_ms - (self.now - process.since))
            process.plan += 1
            return
        process.since = self.now
        if process.left_ms is not None:
            self._plan(process, process.left_ms, self._own_end())

    def _plan(self, process: Process, delay: int, exit_: Exit) -> None:
        process.plan += 1
        self._push(self.now + delay, Due(process, process.plan, exit_))

    def _own_end(self) -> Exit:
        return Exit(code=1 if self._hit(self.faults.exit_fails) else 0)

    def _die(self, process: Process, exit_: Exit) -> None:
        process.alive = False
        process.record = exit_
        delay = self._ms(3_000, 15_000) if self._hit(self.faults.late_report) else self._ms(0, 40)
        self._report(delay, ProcessExited(Instant(0), process.job_id, process.attempt, exit_))

    def _report(self, delay: int, event: ProcessEvent) -> None:
        self._push(self.now + delay, Reported(self._life, event))
        if self._hit(self.faults.repeated_report):
            self._push(self.now + delay + self._ms(0, 15_000), Reported(self._life, event))

    # ---- the daemon and the machine go down and come back --------------------------

    def _crash(self, done: list[Action], *, note: str) -> None:
        for action in done:
            self._do(action)
        self.crashes += 1
        self._log_note(f"-- the daemon dies {note}")
        self._come_back(down_ms=self.rng.choice([1, 500, 8_000, 40_000]))

    def _reboot(self) -> None:
        self._log_note("-- the machine reboots")
        is_orderly = self.rng_shutdown.random() < 0.5
        for process in self.processes.values():
            if is_orderly and process.alive and not process.ignores_sigterm:
                code = self.rng_shutdown.choice([0, 1, 143, None])
                signal = 15 if code is None else None
                process.record = Exit(code=code, signal=signal, stopped_by_others=True)
            process.alive = False
        self._come_back(down_ms=self._ms(1_000, 60_000))

    def _come_back(self, down_ms: int) -> None:
        """The rows are all that is left.  What ran meanwhile went on running."""
        self._life += 1
        back_at = self.now + down_ms
        while self._heap and self._heap[0][0] <= back_at:
            at, _, what = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            if isinstance(what, Sample):
                if what.regular:
                    self._push(back_at + 1, what)
            elif isinstance(what, Due):
                self._happen(what)  # requests and reports found nobody
        self.now = back_at
        rows = [j for _, j in sorted(self.rows.items()) if not isinstance(j.state, Finished)]
        self.core = Scheduler.restore(rows, self.policy, Instant(self.now))
        # What was learned is in the database; what was being measured is not.
        learned = self.guard.known(Instant(self.now))
        self.guard = self.core.guard = Guard(self.guard.policy)
        self.guard.load(learned, Instant(self.now))
        self.core.limits = self.limits
        self.core.fairness.load(self.uses, self.uses_at)
        self.contract.restarted()
        if self.calendar is not None:
            self.calendar.is_told = False
        at_once = self.rng.random() < 0.5
        for job in rows:
            if not isinstance(job.state, Pending):
                delay = 0 if at_once else self._ms(0, 3_000)
                self._push(self.now + delay, Reported(self._life, self._what_became_of(job)))
        if self.draining:
            self.draining = False

    def _what_became_of(self, job: Job) -> ProcessEvent:
        zero = Instant(0)
        for process in self.processes.values():
            if (process.job_id, process.attempt) == (job.id, job.attempt):
                if process.alive:
                    return ProcessStarted(zero, job.id, job.attempt, process.pid)
                if process.record is not None:
                    return ProcessExited(zero, job.id, job.attempt, process.record)
                return ProcessLost(zero, job.id, job.attempt, "it left no exit record")
        return LaunchVoided(zero, job.id, job.attempt)

    # ---- readings ------------------------------------------------------------------

    def _sample(self, *, regular: bool) -> list[Event]:
        if regular:
            self._push(self.now + SAMPLE_MS, Sample(regular=True))
            life = self._life
            trouble = [] if self.is_over else self._trouble()
            if life != self._life:  # rebooted
                return trouble
        else:
            trouble = []
        if self.now < self.monitor_hangs_until:
            return trouble
        self._run_out_of_memory()
        return [*trouble, MachineSampled(Instant(self.now), self._look())]

    def _look(self) -> MachineFacts:
        now = Instant(self.now)
        alive = [p for p in self.processes.values() if p.alive]
        used = sum(self._mem(p) for p in alive)
        problem = ""
        if self.now < self.nvml_fails_until:
            if self.gpus:
                problem = "driver and library versions differ"
            self.gpus_seen = ()
            self.gpus_taken_at = self.now
        elif self.now >= self.nvml_hangs_until:  # else what was read last
            looks = (self._look_at(gpu, alive) for gpu in self.gpus)
            self.gpus_seen = tuple(look for look in looks if look is not None)
            self.gpus_taken_at = self.now
        return MachineFacts(
            taken_at=now,
            gpus_taken_at=Instant(self.gpus_taken_at),
            cores=self.cores,
            busy_permille=tuple(
                (c.number, 900 if c.number * 1000 < self.outside_millicores else 0)
                for c in self.cores
            ),
            millicores_outside=self.outside_millicores,
            mem_mib_total=self.mem_mib_total,
            mem_mib_available=max(
                0, self.mem_mib_total - HOST_OVERHEAD_MIB - self.outside_mib - used
            ),
            gpus=self.gpus_seen,
            gpus_problem=problem,
            jobs=tuple((p.job_id, self._look_into(p, alive)) for p in alive),
        )

    def _look_at(self, gpu: Gpu, alive: list[Process]) -> GpuFacts | None:
        if self.now < gpu.lost_until:
            if gpu.vanishes:
                return None
            return GpuFacts(
                id=gpu.id,
                index=gpu.index,
                mem_mib_total=None,
                mem_mib_free=None,
                sm_pct=None,
                problem="fell off the bus",
            )
        here = [p for p in alive if gpu.id in p.placement.gpus]
        used = sum(self._gpu_mem(p) for p in here) + gpu.outside_mib + GPU_OVERHEAD_MIB
        sm_pct = sum(self._sm(p) for p in here) + gpu.outside_sm_pct
        return GpuFacts(
            id=gpu.id,
            index=gpu.index,
            mem_mib_total=gpu.total_mib,
            mem_mib_free=max(0, gpu.total_mib - used),
            sm_pct=min(100, sm_pct),
            cores_near=gpu.cores_near,
        )

    def _look_into(self, process: Process, alive: list[Process]) -> JobFacts:
        hidden = self._hit(self.faults.unreadable_share)
        share = GpuShare(
            mem_mib=None if hidden else self._gpu_mem(process),
            sm_pct=None if hidden else self._sm(process),
        )
        return JobFacts(
            cpu_millicores=process.millicores,
            mem_mib=self._mem(process),
            gpus=tuple((gpu, share) for gpu in process.placement.gpus),
            steps_milli_per_s=self._rate(process, alive) if self.trains else None,
            reports=self.trains,
            left_ms=self._told_left(process) if self.is_calm else None,
        )

    def _told_left(self, process: Process) -> int | None:
        """What it says of itself: true, too little, too much, or nothing, by its pid."""
        lie = LIES[process.pid % len(LIES)]
        if lie is None or process.left_ms is None:
            return None
        left_ms = max(0, process.left_ms - (self.now - process.since))
        return round(lie * left_ms) + (NEVER_DONE_MS if lie == 0 else 0)

    def _rate(self, process: Process, alive: list[Process]) -> int | None:
        """Steps per 1000 s."""
        if process.frozen:
            return None
        beside = sum(p.placement.gpus == process.placement.gpus and not p.frozen for p in alive)
        return round(50_000 * (1.7 if beside == 2 else 1.0) / beside)

    def _mem(self, process: Process) -> int:
        return int(process.mem_mib * process.share(self.now))

    def _gpu_mem(self, process: Process) -> int:
        return int(process.gpu_mem_mib * process.share(self.now))

    def _sm(self, process: Process) -> int:
        return 0 if process.frozen else process.sm_pct

    def _run_out_of_memory(self) -> None:
        """Jobs that take more than they said, or outsiders: the youngest one pays."""
        alive = [p for p in self.processes.values() if p.alive]
        room = self.mem_mib_total - HOST_OVERHEAD_MIB - self.outside_mib
        if alive and sum(self._mem(p) for p in alive) > room:
            self._die(alive[-1], Exit(signal=9, oom="host"))
        for gpu in self.gpus:
            here = [p for p in alive if p.alive and gpu.id in p.placement.gpus]
            free = gpu.total_mib - gpu.outside_mib - GPU_OVERHEAD_MIB
            if here and sum(self._gpu_mem(p) for p in here) > free:
                self._die(here[-1], Exit(code=1, oom="gpu"))

    # ---- trouble -------------------------------------------------------------------

    def _trouble(self) -> list[Event]:
        """One second's worth."""
        faults, rng = self.faults, self.rng
        events: list[Event] = []
        if self.calendar is not None:
            self.calendar.change()
        if faults.outsiders_pct and rng.random() < 0.2:
            pct = rng.randint(0, faults.outsiders_pct)
            self.outside_mib = self.mem_mib_total * pct // 200
            self.outside_millicores = len(self.cores) * 10 * rng.randint(0, faults.outsiders_pct)
            for gpu in self.gpus:
                gpu.outside_mib = gpu.total_mib * rng.randint(0, faults.outsiders_pct) // 100
                gpu.outside_sm_pct = rng.randint(0, faults.outsiders_pct)
        if self.gpus and self._hit(faults.gpu_lost_per_s):
            gpu = rng.choice(self.gpus)
            gpu.lost_until = self.now + self._ms(1_000, 20_000)
            gpu.vanishes = rng.random() < 0.5
        if self._hit(faults.nvml_fails_per_s):
            self.nvml_fails_until = self.now + self._ms(1_000, 15_000)
        if self._hit(faults.nvml_hangs_per_s):
            self.nvml_hangs_until = self.now + self._ms(3_000, 20_000)
        if self._hit(faults.monitor_hangs_per_s):
            self.monitor_hangs_until = self.now + self._ms(1_000, 15_000)
        if self._hit(faults.clock_jumps_per_s):
            gap = rng.choice([10_000, 3_600_000])
            self._log_note(f"-- the clock jumps by {gap} ms")
            self._heap = [(at + gap, n, what) for at, n, what in self._heap]
            self.now += gap
            for process in self.processes.values():
                process.born_at += gap
                process.since += gap
        victims = [p for p in self.processes.values() if p.alive]
        if victims and self._hit(faults.supervisor_killed_per_s):
            victim = rng.choice(victims)
            victim.alive = False
            lost = ProcessLost(Instant(0), victim.job_id, victim.attempt, "its supervisor died")
            self._report(self._ms(0, 900), lost)
        if self._hit(faults.drain_per_s):
            self.draining = not self.draining
            reason = "draining" if self.draining else ""
            events.append(AdmissionSet(Instant(self.now), reason))
        if self._hit(faults.user_per_s):
            self._push(self.now, Request(self._whim()))
        if self._hit(faults.reboot_per_s):
            self._reboot()
            return []
        return events

    def _whim(self) -> UserEvent:
        rng, zero = self.rng, Instant(0)
        request = next(self._requests)
        job_id = JobId(rng.randint(1, self.jobs + 1))
        if self.trains and (paused := self._backed_off()):
            job_id = rng.choice(paused)
            if rng.random() < 0.5:
                return PauseRequested(zero, request, job_id)
            return ResumeRequested(zero, request, job_id)
        match rng.randrange(8):
            case 0:
                return CancelRequested(zero, request, job_id)
            case 1:
                return CancelRequested(zero, request, job_id, at_once=True)
            case 2:
                return HoldRequested(zero, request, job_id)
            case 3:
                return ReleaseRequested(zero, request, job_id)
            case 4:
                return PauseRequested(zero, request, job_id)
            case 5:
                return ResumeRequested(zero, request, job_id)
            case 6:
                return PrioritySet(zero, request, job_id, rng.choice([-5, 0, 5, 10]))
            case _:
                return RequeueRequested(zero, request, job_id)

    def _backed_off(self) -> list[JobId]:
        return [
            i
            for i, job in sorted(self.rows.items())
            if isinstance(job.state, Suspended) and job.state.backed_off is not None
        ]

    def _calm_down(self) -> None:
        """Faults off, outsiders gone, users helpful: from here all that can finish must."""
        self._log_note("-- calm")
        self.is_over = True
        self.faults = Faults()
        self.outside_mib = self.outside_millicores = 0
        self.nvml_fails_until = self.nvml_hangs_until = self.monitor_hangs_until = 0
        for gpu in self.gpus:
            gpu.outside_mib = gpu.outside_sm_pct = gpu.lost_until = 0
        now = Instant(self.now)
        events: list[Event] = [AdmissionSet(now, "")]
        hanging = {p.job_id for p in self.processes.values() if p.alive and p.left_ms is None}
        for job_id, job in sorted(self.core.jobs.items()):
            request = next(self._requests)
            if job_id in hanging or self._is_too_big(job.spec):
                events.append(CancelRequested(now, request, job_id))
            elif isinstance(job.state, Suspended):
                events.append(ResumeRequested(now, request, job_id))
            elif isinstance(job.state, Pending) and job.state.held:
                events.append(ReleaseRequested(now, request, job_id))
        self._step(events)

    # ---- users ---------------------------------------------------------------------

    def _schedule_users(self) -> None:
        left = self.jobs
        while left > 0:
            size = min(left, self.rng.choice([1, 1, 1, 3]))  # an array of equal jobs
            left -= size
            spec = (
                self._small_or_big()
                if self.is_calm
                else self._training()
                if self.trains
                else self._spec()
            )
            at = self._ms(0, FAULTY_MS // 2)
            jobs = tuple((JobId(0), spec) for _ in range(size))
            held = not self.is_calm and self.rng.random() < 0.1
            after = None
            if not self.is_calm and self.rng_after.random() < 0.15:
                after = After(job_ids=(), any_end=self.rng_after.random() < 0.5)
            event = Submitted(Instant(0), next(self._requests), jobs, held, after)
            self._push(at, Request(event))

    def _small_or_big(self) -> JobSpec:
        rng = self.rng
        is_big = rng.random() < 0.25
        smallest = min(g.total_mib for g in self.gpus)
        is_shared = self.seed % 8 != 0
        return JobSpec(
            user=rng.randint(1, 3) if is_shared else 1,
            gpus=rng.randint(1, len(self.gpus)) if is_big else 1,
            gpu_mem_mib=smallest - 1_500 if is_big else rng.choice([2_000, 4_000]),
            sm_pct=20,
            cores=1,
            mem_mib=1_000,
            exclusive=is_big and rng.random() < 0.3,
            # Few kinds, so that one user's jobs are like another's.
            time_limit_ms=30_000 if is_shared else rng.choice([10_000, 30_000, 30_000, None]),
            grace_ms=0 if is_shared else rng.choice([0, 10_000]),
            priority=rng.choice([0, 0, 1, 5]) if self.preempts else 0,
            preemptible=self.preempts and rng.random() < 0.7,
        )

    def _training(self) -> JobSpec:
        """All is declared, so that the contract knows what it is counted for."""
        rng = self.rng
        return JobSpec(
            user=rng.randint(1, 3),
            priority=rng.choice([0, 0, 0, 5]),
            gpus=min(1, len(self.gpus)),
            gpu_mem_mib=1_000,
            sm_pct=1,
            cores=1,
            mem_mib=rng.choice([1_000, 2_000]),
            exclusive=rng.random() < 0.05,
            time_limit_ms=rng.choice([None, None, 30_000, 60_000]),
            grace_ms=rng.choice([0, 1_000]),
            requeue=rng.random() < 0.4,
            signature="sac",
            interactive=rng.random() < 0.2,
        )

    def _spec(self) -> JobSpec:
        rng = self.rng
        return JobSpec(
            user=rng.randint(1, 3),
            priority=rng.choice([0, 0, 0, 5]),
            gpus=rng.choice([None, None, 0, 1, 1, 2]),
            gpu_mem_mib=rng.choice([None, 1_000, 8_000, 15_000, 39_000]),
            sm_pct=rng.choice([None, 10, 50, 100]),
            cores=rng.choice([None, 1, 2, 4, 16]),
            mem_mib=rng.choice([None, 1_000, 8_000, 28_000]),
            exclusive=rng.random() < 0.1,
            time_limit_ms=rng.choice([None, 5_000, 20_000, 60_000]),
            grace_ms=rng.choice([0, 1_000, 10_000]),
            requeue=rng.random() < 0.4,
        )

    def _is_too_big(self, spec: JobSpec) -> bool:
        """More than this machine could ever give (accepted before it had been read)."""
        gpus = int(bool(self.gpus)) if spec.gpus is None else spec.gpus
        for limit in self.limits.get(spec.user, ()):
            mem_mib = gpus * (spec.gpu_mem_mib or self.policy.gpu_mem_mib_default)
            if (
                (limit.gpus is not None and gpus > limit.gpus)
                or (limit.gpu_mem_mib is not None and mem_mib > limit.gpu_mem_mib)
                or (
                    limit.cores is not None
                    and (spec.cores or self.policy.cores_default) > limit.cores
                )
            ):
                return True
        if gpus:
            mem_mib = spec.gpu_mem_mib or self.policy.gpu_mem_mib_default
            mem_mib += self.policy.gpu_mem_mib_reserve + GPU_OVERHEAD_MIB
            if sum(mem_mib <= g.total_mib for g in self.gpus) < gpus:
                return True
        mem_mib = (spec.mem_mib or self.policy.mem_mib_default) + self.policy.mem_mib_reserve
        cores = len(self.cores) - self.policy.cores_reserve
        return (
            mem_mib > self.mem_mib_total - HOST_OVERHEAD_MIB
            or (spec.cores or self.policy.cores_default) > cores
        )

    # ---- helpers -------------------------------------------------------------------

    def _hit(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def _ms(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def _push(self, at: int, what: Happening) -> None:
        heapq.heappush(self._heap, (at, next(self._order), what))

    def _log_note(self, note: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.now:>9} {note}")

    def _log(self, events: Iterable[Event], actions: Iterable[Action]) -> None:
        told = [str(e) for e in events if not isinstance(e, MachineSampled)]
        done = [str(a) for a in actions]
        if any(isinstance(e, MachineSampled) for e in events):
            told.insert(0, "MachineSampled(...)")
        if told or done:
            self.trace.append(f"{self.now:>9} " + "; ".join(told))
            self.trace += [f"          -> {line}" for line in done]
