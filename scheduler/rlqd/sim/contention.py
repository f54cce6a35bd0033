"""A machine on which jobs disturb each other, for studies of the throughput guard.

A training job alternates between its own cores and a GPU that it shares: per step `cpu_ms` of the
one and `gpu_ms` of the other.  That is a closed queueing network with one customer per job, and
its rates follow from approximate mean value analysis (Bard 1979, Schweitzer 1979), which is exact
enough here and has no noise of its own: noise is added where it is measured.

* A time-sliced GPU serves one process at a time.  Whenever another one is there too, it is
  switched away from, `switches` times a step, at `switch_ms` each: total throughput FALLS when
  there are too many.
* Under MPS kernels overlap until the processes present ask for more than the whole chip.
* Cores are given out whole, so there is no contention for them; memory bandwidth is shared.

Between two changes (a start, an end, a job that begins to train, evaluates or changes phase)
rates are constant, so the machine advances from change to change, exactly.

`run_core` puts the real core above it: one reading a second, as the shell would compute them.
`run_rule` puts a rule of a few lines in its place.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlqd.core.guard import Guard, Learned
from rlqd.core.learned import LearnedPeak
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    Core,
    Event,
    Exit,
    GpuFacts,
    GpuId,
    GpuShare,
    Instant,
    JobFacts,
    JobId,
    JobSpec,
    Launch,
    Learn,
    MachineFacts,
    MachineSampled,
    Policy,
    ProcessExited,
    ProcessStarted,
    SampleNow,
    Submitted,
)

MIB = 2**20
#: The shell's window for the rate the guard sees, and how much of it must be covered.
RATE_WINDOW_S = 9
#: Under MPS each other process at the GPU costs so much even while the chip is not full
#: (caches, memory bandwidth, launches).
MPS_FRICTION = 0.08
#: Rounds of the fixed point; it converges geometrically.
ROUNDS = 60
#: A run that takes longer than this has a scheduler that stands still.
TOO_LONG_S = 60 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one kind of job costs.  Times are per training step."""

    signature: str
    cpu_ms: float
    #: 0: it runs on the CPU alone.
    gpu_ms: float
    #: Share of `cpu_ms` that several cores divide among them (Amdahl 1967).
    cpu_parallel: float = 0.0
    #: Share of the chip its kernels fill while they run; counts under MPS.
    sm_share: float = 0.2
    #: How often a step loses the GPU to another process that wants it.
    switches: float = 2.0
    #: NVML samples coarsely: gaps between small kernels count as busy, this many times over.
    spread: float = 2.5
    gpu_mem_mib: int = 1_500
    mem_mib: int = 1_800
    #: A replay buffer fills by so much a step, up to so much.
    mem_bytes_per_step: int = 0
    mem_mib_grows: int = 0
    gb_per_s: float = 1.0
    #: Imports: no step is made, nothing reported.
    startup_s: float = 12.0
    #: JIT compilation between the warm-up and the first gradient step.
    jit_s: float = 0.0
    #: Steps without gradient (learning_starts), much faster, without GPU.
    warmup_steps: int = 0
    warmup_ms: float = 1.0
    #: After so many steps it evaluates for so long; 0: never.
    eval_every: int = 0
    eval_s: float = 0.0
    #: From this share of its steps on, times change by these factors (CPU, GPU).
    phase_at: float = 1.0
    phase_cpu: float = 1.0
    phase_gpu: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job before it runs."""

    id: int
    program: Program
    steps: int
    spec: JobSpec
    arrives_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outsider:
    """A process that nobody queued: it takes its share of a GPU from then to then."""

    gpu: int
    program: Program
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    gpus: int = 1
    cores: int = 16
    gpu_mem_mib: int = 40_960
    mem_mib: int = 256 * 1024
    mps: bool = False
    switch_ms: float = 0.15
    #: Every further process makes a switch so much dearer (caches, translation tables).
    switch_growth: float = 0.06
    gb_per_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    seed: int
    hardware: Hardware
    tasks: tuple[Task, ...]
    outsiders: tuple[Outsider, ...] = ()
    #: Lognormal noise of a measured rate: from second to second, and from job to job.
    noise: float = 0.04
    job_noise: float = 0.02


# ---- rates -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """One process on a GPU at this moment."""

    cpu_ms: float
    gpu_ms: float
    sm_share: float
    switches: float


def rates_per_s(loads: Sequence[Load], hardware: Hardware) -> list[float]:
    """Steps per second of processes that share one GPU."""
    n = len(loads)
    queued = [0.5] * n  # the share of its time that a process is at the GPU
    rates = [0.0] * n
    switch_ms = hardware.switch_ms * (1 + hardware.switch_growth * max(0, n - 2))
    for _ in range(ROUNDS):
        total = sum(queued)
        demand = sum(q * load.sm_share for q, load in zip(queued, loads, strict=True))
        moved = 0.0
        for i, load in enumerate(loads):
            others = total - queued[i]
            if hardware.mps:
                crowd = load.sm_share + demand - queued[i] * load.sm_share
                response = load.gpu_ms * (max(1.0, crowd) + MPS_FRICTION * others)
            else:
                # It is switched away from as often as somebody else is there.
                serve = load.gpu_ms + load.switches * switch_ms * min(1.0, others)
                response = serve * (1 + others)
            step_ms = load.cpu_ms + response
            rates[i] = 1000.0 / step_ms
            after = response / step_ms
            moved = max(moved, abs(after - queued[i]))
            queued[i] = 0.5 * (queued[i] + after)
        if moved < 1e-9:
            break
    return rates


def load_of(program: Program, *, late: bool = False, slower: float = 1.0, cores: int = 1) -> Load:
    cpu = program.cpu_ms * (program.phase_cpu if late else 1.0) * slower
    cpu *= 1 - program.cpu_parallel * (1 - 1 / cores)
    gpu = program.gpu_ms * (program.phase_gpu if late else 1.0)
    return Load(cpu, gpu, program.sm_share, program.switches)


def alone_per_s(program: Program, *, late: bool = False) -> float:
    load = load_of(program, late=late)
    return 1000.0 / (load.cpu_ms + load.gpu_ms)


def alone_s(task: Task) -> float:
    """How long it takes on an empty machine."""
    p = task.program
    early = math.floor(task.steps * p.phase_at)
    evals = (task.steps - 1) // p.eval_every if p.eval_every else 0
    return (
        p.startup_s
        + p.warmup_steps * p.warmup_ms / 1000
        + early / alone_per_s(p)
        + (task.steps - early) / alone_per_s(p, late=True)
        + p.jit_s
        + evals * p.eval_s
    )


# ---- the machine -------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """A task that runs."""

    task: Task
    gpu: int | None
    started_s: float
    cores: int = 1
    #: "startup", "warmup", "jit", "train" or "eval"; what is left of it in seconds or steps.
    stage: str = "startup"
    left: float = 0.0
    steps_done: float = 0.0
    warmup_done: float = 0.0
    per_s: float = 1.0  # of `left`

    @property
    def trains(self) -> bool:
        return self.stage == "train"

    @property
    def is_late(self) -> bool:
        return self.steps_done >= math.floor(self.task.steps * self.task.program.phase_at) - 1e-6

    @property
    def mem_mib(self) -> int:
        p = self.task.program
        grown = int((self.warmup_done + self.steps_done) * p.mem_bytes_per_step / MIB)
        return p.mem_mib + min(p.mem_mib_grows, grown)

    @property
    def gpu_mem_mib(self) -> int:
        if self.gpu is None or self.stage == "startup":
            return 0
        return self.task.program.gpu_mem_mib


@dataclass(slots=True)
class Machine:
    hardware: Hardware
    outsiders: tuple[Outsider, ...] = ()
    now: float = 0.0
    runs: dict[int, Run] = field(default_factory=dict[int, Run])
    _stale: bool = True
    _known: dict[tuple[Load, ...], list[float]] = field(
        default_factory=dict[tuple[Load, ...], list[float]]
    )
    #: Per GPU: share of time busy, and as NVML reads it.
    busy: list[float] = field(default_factory=list[float])
    seen: list[float] = field(default_factory=list[float])

    def on(self, gpu: int | None) -> list[Run]:
        return [r for r in self.runs.values() if r.gpu == gpu]

    def cores_used(self) -> int:
        return sum(r.cores for r in self.runs.values())

    def mem_mib_used(self) -> int:
        return 4_096 + sum(r.mem_mib for r in self.runs.values())

    def gpu_mem_mib_used(self, gpu: int) -> int:
        return (
            sum(r.gpu_mem_mib for r in self.on(gpu))
            + sum(o.program.gpu_mem_mib for o in self.visitors(gpu))
            + 400
        )

    def visitors(self, gpu: int) -> list[Outsider]:
        return [o for o in self.outsiders if o.gpu == gpu and o.from_s <= self.now < o.to_s]

    def start(self, task: Task, gpu: int | None, cores: int = 0) -> Run:
        """`cores`: 0: as many as it declares, or one."""
        assert task.id not in self.runs
        cores = cores or task.spec.cores or 1
        run = Run(task, gpu, self.now, cores, left=task.program.startup_s)
        self.runs[task.id] = run
        self._stale = True
        return run

    def kill(self, id_: int) -> None:
        del self.runs[id_]
        self._stale = True

    def advance_to(self, until: float) -> list[Run]:
        """Let time pass; who has ended by then, in order.  They no longer run."""
        ended: list[Run] = []
        while self.now < until:
            if (run := self._advance(until)) is not None:
                ended.append(run)
        return ended

    def advance_to_end(self, until: float) -> Run | None:
        """Let time pass until a run ends, or until then."""
        while self.now < until:
            if (run := self._advance(until)) is not None:
                return run
        return None

    def _advance(self, until: float) -> Run | None:
        self._refresh()
        step = until - self.now
        first: Run | None = None
        for run in self.runs.values():
            if run.left < step * run.per_s:
                step, first = run.left / run.per_s, run
        for edge in (t for o in self.outsiders for t in (o.from_s, o.to_s)):
            if self.now < edge < self.now + step:
                step, first = edge - self.now, None
                self._stale = True
            elif edge == self.now + step:
                self._stale = True
        for run in self.runs.values():
            done = run.per_s * step
            run.left -= done
            if run.stage == "train":
                run.steps_done += done
            elif run.stage == "warmup":
                run.warmup_done += done
        self.now = until if first is None and step == until - self.now else self.now + step
        if first is None:
            return None
        first.left = 0.0
        self._stale = True
        if self._next_stage(first):
            return None
        del self.runs[first.task.id]
        return first

    def _next_stage(self, run: Run) -> bool:
        """False: it has ended."""
        p, steps = run.task.program, run.task.steps
        if run.stage == "startup" and p.warmup_steps:
            run.stage, run.left = "warmup", float(p.warmup_steps)
            return True
        if run.stage in ("startup", "warmup") and p.jit_s:
            run.stage, run.left = "jit", p.jit_s
            return True
        run.steps_done = round(run.steps_done)  # a chunk ends on a whole step
        if run.steps_done >= steps:
            return False
        if run.stage == "train" and p.eval_every and run.steps_done % p.eval_every == 0:
            run.stage, run.left = "eval", p.eval_s
            return True
        chunk = steps - run.steps_done
        phase = math.floor(steps * p.phase_at)
        if run.steps_done < phase:
            chunk = phase - run.steps_done
        if p.eval_every:
            chunk = min(chunk, p.eval_every - run.steps_done % p.eval_every)
        run.stage, run.left = "train", float(chunk)
        return True

    def _refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
        used = sum(r.task.program.gb_per_s for r in self.runs.values() if r.trains)
        slower = max(1.0, 1 + 0.5 * (used / self.hardware.gb_per_s - 1))
        self.busy, self.seen = [], []
        for run in self.runs.values():
            p = run.task.program
            if run.stage == "warmup":
                run.per_s = 1000.0 / p.warmup_ms
            elif not run.trains:
                run.per_s = 1.0
            elif run.gpu is None:
                run.per_s = (
                    1000.0 / load_of(p, late=run.is_late, slower=slower, cores=run.cores).cpu_ms
                )
        for gpu in range(self.hardware.gpus):
            here = [r for r in self.runs.values() if r.gpu == gpu and r.trains]
            guests = [o.program for o in self.visitors(gpu)]
            loads = [
                load_of(r.task.program, late=r.is_late, slower=slower, cores=r.cores) for r in here
            ]
            loads += [load_of(p, late=False) for p in guests]
            rates = self.rates(tuple(loads))
            for run, rate in zip(here, rates, strict=False):
                run.per_s = rate
            programs = [*(r.task.program for r in here), *guests]
            idle = idle_seen = 1.0
            for load, rate, p in zip(loads, rates, programs, strict=True):
                # Switching keeps it busy as well.
                switch_ms = load.switches * self.hardware.switch_ms * (len(loads) > 1)
                served_ms = load.gpu_ms + (0.0 if self.hardware.mps else switch_ms)
                share = min(1.0, served_ms * rate / 1000)
                idle *= 1 - share
                idle_seen *= 1 - min(1.0, share * p.spread)
            self.busy.append(1 - idle)
            self.seen.append(1 - idle_seen)

    def rates(self, loads: tuple[Load, ...]) -> list[float]:
        if (found := self._known.get(loads)) is None:
            found = self._known[loads] = rates_per_s(loads, self.hardware)
        return found

    def overflowing(self) -> Run | None:
        """Whom the OOM killer takes, or who finds no GPU memory: the youngest."""
        victims: list[Run] = []
        if self.mem_mib_used() > self.hardware.mem_mib:
            victims = list(self.runs.values())
        for gpu in range(self.hardware.gpus):
            if self.gpu_mem_mib_used(gpu) > self.hardware.gpu_mem_mib:
                victims += self.on(gpu)
        return max(victims, key=lambda r: (r.started_s, r.task.id), default=None)

    def fits_when_grown(self) -> bool:
        programs = [r.task.program for r in self.runs.values()]
        mem_mib = 4_096 + sum(p.mem_mib + p.mem_mib_grows for p in programs)
        on = [[r.task.program.gpu_mem_mib for r in self.on(g)] for g in range(self.hardware.gpus)]
        guests = sum(o.program.gpu_mem_mib for o in self.outsiders)
        most = max(sum(mib) for mib in on) + guests + 400
        return mem_mib <= self.hardware.mem_mib and most <= self.hardware.gpu_mem_mib

    def refresh(self) -> None:
        self._refresh()


# ---- results -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    task: Task
    started_s: float
    ended_s: float

    @property
    def turnaround_s(self) -> float:
        return self.ended_s - self.task.arrives_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a policy made of a workload."""

    done: tuple[Done, ...]
    #: Runs that were lost to a full memory, and had to start again.
    lost: int = 0
    #: (second, jobs per GPU) at every start.
    starts: tuple[tuple[float, int, int | None, int], ...] = ()

    @property
    def makespan_s(self) -> float:
        return max(d.ended_s for d in self.done) - min(d.task.arrives_s for d in self.done)

    @property
    def mean_s(self) -> float:
        return sum(d.turnaround_s for d in self.done) / len(self.done)

    @property
    def p95_s(self) -> float:
        times = sorted(d.turnaround_s for d in self.done)
        return times[math.ceil(0.95 * len(times)) - 1]

    @property
    def stp(self) -> float:
        """Mean system throughput: work by the time it takes alone, per time."""
        return sum(alone_s(d.task) for d in self.done) / self.makespan_s

    @property
    def antt(self) -> float:
        """Mean slowdown of a job while it runs, the wait not counted."""
        slow = [(d.ended_s - d.started_s) / alone_s(d.task) for d in self.done]
        return sum(slow) / len(slow)


# ---- rules of a few lines ----------------------------------------------------------

#: (waiting, machine) -> which task starts where, one at a time; None: nothing more now.
Rule = Callable[[Sequence[Task], Machine], tuple[Task, int | None] | None]


def run_rule(workload: Workload, rule: Rule, *, every_s: float = 0.0) -> Outcome:
    """`every_s`: it is asked not only when something happens, but also so often."""
    machine = Machine(workload.hardware, workload.outsiders)
    coming = deque(sorted(workload.tasks, key=lambda t: (t.arrives_s, t.id)))
    waiting: list[Task] = []
    done: list[Done] = []
    starts: list[tuple[float, int, int | None, int]] = []
    lost = 0
    #: Memory grows between events: it is looked at this often.
    look_s = every_s or 10.0
    while coming or waiting or machine.runs:
        while coming and coming[0].arrives_s <= machine.now:
            waiting.append(coming.popleft())
        while (victim := machine.overflowing()) is not None:
            machine.kill(victim.task.id)
            waiting.append(victim.task)
            lost += 1
        machine.refresh()
        while waiting and (choice := rule(waiting, machine)) is not None:
            task, gpu = choice
            waiting.remove(task)
            machine.start(task, gpu)
            starts.append((machine.now, task.id, gpu, len(machine.on(gpu))))
        assert machine.now < TOO_LONG_S, f"{workload.name}: nothing moves"
        until = machine.now + look_s if waiting or machine.runs else coming[0].arrives_s
        if coming:
            until = min(until, max(coming[0].arrives_s, machine.now + 1e-6))
        run = machine.advance_to_end(until)
        if run is not None:
            done.append(Done(task=run.task, started_s=run.started_s, ended_s=machine.now))
    return Outcome(done=tuple(done), lost=lost, starts=tuple(starts))


# ---- the real core -----------------------------------------------------------------


@dataclass(slots=True)
class _Reporter:
    """A job's reports as the shell sees them: a rate over the last seconds, with noise."""

    random: random.Random
    noise: float
    bias: float
    wobble: float = 0.0
    #: (second, steps) of each report while it trains.
    window: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])
    has_reported: bool = False

    def look(self, now: float, run: Run) -> int | None:
        # Correlated over some seconds, as episodes are.
        self.wobble = 0.8 * self.wobble + 0.6 * self.random.gauss(0.0, self.noise)
        if run.stage == "startup":
            return None
        self.has_reported = True
        if run.stage in ("warmup", "jit"):
            return None
        if run.stage == "train":
            self.window.append((now, run.steps_done))
        while self.window and self.window[0][0] < self.window[-1][0] - RATE_WINDOW_S:
            self.window.popleft()
        if not self.window or now - self.window[-1][0] > RATE_WINDOW_S:
            return None
        (t0, step0), (t1, step1) = self.window[0], self.window[-1]
        if t1 - t0 < RATE_WINDOW_S / 3:
            return None
        return round(1000 * (step1 - step0) / (t1 - t0) * math.exp(self.bias + self.wobble))


@dataclass(slots=True)
class CoreRun:
    """The real core above a machine; one reading a second of virtual time."""

    workload: Workload
    guard: Guard = field(default_factory=Guard)
    policy: Policy = field(default_factory=Policy)
    #: From reading to reading, in whole seconds.
    reading_s: int = 1
    #: What an earlier run learned, as the database would give it back; then what it knows
    #: after this one.
    learned: list[Learned | LearnedPeak] = field(default_factory=list[Learned | LearnedPeak])
    #: Told of every reading, for studies: (now, scheduler, machine).
    watch: Callable[[float, Scheduler, Machine], None] | None = None

    def run(self) -> Outcome:
        load = self.workload
        hardware = load.hardware
        machine = Machine(hardware, load.outsiders)
        scheduler = Scheduler(policy=self.policy, guard=self.guard)
        self.guard.load((r for r in self.learned if isinstance(r, Learned)), Instant(0))
        scheduler.peaks.load(r for r in self.learned if isinstance(r, LearnedPeak))
        chance = random.Random(load.seed)
        coming = deque(sorted(load.tasks, key=lambda t: (t.arrives_s, t.id)))
        tasks = {t.id: t for t in load.tasks}
        reporters: dict[int, _Reporter] = {}
        done: list[Done] = []
        starts: list[tuple[float, int, int | None, int]] = []
        lost = 0
        events: list[Event] = []
        second = 0
        waiting = 0
        #: A lost run is submitted again: its new id, and the task it stands for.
        next_id = max(tasks) + 1
        first_arrival = {t.id: t for t in load.tasks}
        while coming or machine.runs or scheduler.jobs:
            if not machine.runs and not scheduler.jobs:
                second = max(second, math.floor(coming[0].arrives_s))
            second += self.reading_s
            assert second < TOO_LONG_S, f"{load.name}: nothing moves"
            for run in machine.advance_to(float(second)):
                # Its end is known to the millisecond; the core hears of it within the second.
                done.append(
                    Done(
                        task=first_arrival[run.task.id],
                        started_s=run.started_s,
                        ended_s=machine.now,
                    )
                )
                reporters.pop(run.task.id, None)
                events.append(_ended(machine.now, run, Exit(code=0)))
            while (victim := machine.overflowing()) is not None:
                machine.kill(victim.task.id)
                lost += 1
                events.append(_ended(machine.now, victim, Exit(code=1, oom="host")))
                old = victim.task
                again = Task(
                    id=next_id,
                    program=old.program,
                    steps=old.steps,
                    spec=old.spec,
                    arrives_s=float(second),
                )
                first_arrival[next_id] = first_arrival[old.id]
                tasks[next_id] = again
                next_id += 1
                coming.appendleft(again)
            arrived: list[Task] = []
            while coming and coming[0].arrives_s <= machine.now:
                arrived.append(coming.popleft())
            now = Instant(second * 1000)
            if arrived:
                jobs = tuple((JobId(t.id), t.spec) for t in arrived)
                events.append(Submitted(now, second, jobs))
            waiting += len(arrived)
            if not waiting and not coming and machine.fits_when_grown():
                # Nothing is left to decide: the rest runs out by itself.
                while machine.runs:
                    rest = machine.advance_to_end(machine.now + TOO_LONG_S)
                    assert rest is not None
                    done.append(
                        Done(
                            task=first_arrival[rest.task.id],
                            started_s=rest.started_s,
                            ended_s=machine.now,
                        )
                    )
                break
            for run in machine.runs.values():
                if run.task.id not in reporters:
                    bias = chance.gauss(0.0, load.job_noise)
                    reporters[run.task.id] = _Reporter(chance, load.noise, bias)
            rates = {r.task.id: reporters[r.task.id].look(machine.now, r) for r in _by_id(machine)}
            facts = self._facts(now, machine, reporters, rates)
            actions = scheduler.step(now, [*events, MachineSampled(now, facts)])
            events = []
            if SampleNow() in actions:
                fresh = self._facts(now, machine, reporters, rates)
                actions += scheduler.step(now, [MachineSampled(now, fresh)])
            for action in actions:
                if isinstance(action, Learn):
                    self._write(action.rows)
                elif isinstance(action, Launch):
                    gpus = action.placement.gpus
                    gpu = int(gpus[0][4:]) if gpus else None
                    machine.start(tasks[action.job_id], gpu, len(action.placement.cores))
                    waiting -= 1
                    starts.append((machine.now, action.job_id, gpu, len(machine.on(gpu))))
                    events.append(
                        ProcessStarted(now, action.job_id, action.attempt, 1000 + action.job_id)
                    )
            if self.watch is not None:
                self.watch(machine.now, scheduler, machine)
        return Outcome(done=tuple(done), lost=lost, starts=tuple(starts))

    def _write(self, rows: Sequence[Learned | LearnedPeak]) -> None:
        known = {_key(row): row for row in (*self.learned, *rows)}
        # Written down at the end of this run, read at the beginning of the next.
        self.learned = list(known.values())

    def _facts(
        self,
        now: Instant,
        machine: Machine,
        reporters: dict[int, _Reporter],
        rates: dict[int, int | None],
    ) -> MachineFacts:
        hardware = machine.hardware
        machine.refresh()
        gpus = tuple(
            GpuFacts(
                id=GpuId(f"GPU-{g}"),
                index=g,
                mem_mib_total=hardware.gpu_mem_mib,
                mem_mib_free=hardware.gpu_mem_mib - machine.gpu_mem_mib_used(g),
                sm_pct=round(100 * machine.seen[g]),
                kind="A100",
            )
            for g in range(hardware.gpus)
        )
        jobs = []
        for run in _by_id(machine):
            share = 0.0
            p = run.task.program
            if run.gpu is not None and run.trains:
                share = min(1.0, p.gpu_ms * run.per_s / 1000 * p.spread)
            shares: tuple[tuple[GpuId, GpuShare], ...] = ()
            if run.gpu is not None:
                shares = (
                    (
                        GpuId(f"GPU-{run.gpu}"),
                        GpuShare(mem_mib=run.gpu_mem_mib, sm_pct=round(100 * share)),
                    ),
                )
            jobs.append(
                (
                    JobId(run.task.id),
                    JobFacts(
                        cpu_millicores=900,
                        mem_mib=run.mem_mib,
                        gpus=shares,
                        steps_milli_per_s=rates.get(run.task.id),
                        reports=reporters[run.task.id].has_reported,
                    ),
                )
            )
        return MachineFacts(
            taken_at=now,
            gpus_taken_at=now,
            cores=_cores(hardware.cores),
            mem_mib_total=hardware.mem_mib,
            mem_mib_available=hardware.mem_mib - machine.mem_mib_used(),
            gpus=gpus,
            jobs=tuple(jobs),
        )


def _key(row: Learned | LearnedPeak) -> tuple[object, ...]:
    if isinstance(row, LearnedPeak):
        return (row.signature,)
    return (row.kind, row.signatures, row.jobs)


def _by_id(machine: Machine) -> list[Run]:
    return [machine.runs[i] for i in sorted(machine.runs)]


def _cores(count: int) -> tuple[Core, ...]:
    if count not in _CORES:
        _CORES[count] = tuple(Core(number=i, physical=i, numa_node=0) for i in range(count))
    return _CORES[count]


_CORES: dict[int, tuple[Core, ...]] = {}


def _ended(now: float, run: Run, exit_: Exit) -> Event:
    return ProcessExited(Instant(math.floor(now * 1000)), JobId(run.task.id), 1, exit_)
