"""Nouns of the core: jobs, their states, the machine, events and actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from rlqd.core.fairness import Accounted
    from rlqd.core.guard import Learned
    from rlqd.core.learned import LearnedPeak

JobId = NewType("JobId", int)
#: A GPU's UUID: indices change when a board falls off the bus, UUIDs do not.
GpuId = NewType("GpuId", str)
#: Milliseconds on the shell's monotonic clock.  Integers, so that replay is exact.
Instant = NewType("Instant", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What the scheduler needs to know of a job.  Jobs that wait with equal specs are alike:
    when one does not fit, none does."""

    user: int
    priority: int = 0
    gpus: int | None = None  # None: one if the machine has any, else none
    gpu_mem_mib: int | None = None
    sm_pct: int | None = None
    cores: int | None = None
    mem_mib: int | None = None
    exclusive: bool = False
    time_limit_ms: int | None = None
    grace_ms: int = 30_000
    requeue: bool = False
    #: Jobs of one signature are taken to behave alike: program, algorithm, environment.
    signature: str = ""
    #: The throughput guard has no say in its start: its effect is to be measured.
    unguarded: bool = False
    #: Somebody sits in front of it: rlqd never pauses it.
    interactive: bool = False
    #: Its user says that it goes on where it was when it is stopped and run again.
    preemptible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a job is counted for.  GPU amounts are per GPU."""

    cores: int
    mem_mib: int
    gpu_mem_mib: int = 0
    sm_pct: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    gpus: tuple[GpuId, ...]
    cores: tuple[int, ...]
    #: What it was admitted with.
    charge: Charge


class Cause(Enum):
    """Why a job is being stopped."""

    CANCELLED = "cancelled"
    TIMED_OUT = "timed-out"
    REQUEUED = "requeued"
    PREEMPTED = "preempted"
    START_TIMED_OUT = "start-timed-out"


class Outcome(Enum):
    """Values are Slurm's state names."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    LAUNCH_FAILED = "LAUNCH_FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How the command ended: one of `code` and `signal`; `oom` names the memory it ran out of."""

    code: int | None = None
    signal: int | None = None
    oom: str | None = None  # "gpu" or "host"
    #: The limit of its own that it reached; None: the machine's memory, or not known.
    oom_limit_mib: int | None = None
    #: Somebody else than rlqd had asked it to stop: systemd, at a shutdown.
    stopped_by_others: bool = False


# A state holds exactly the data that is valid in it: no `pid` on a queued job.


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """Jobs that have to end first (Slurm's afterok; with `any_end` its afterany)."""

    job_ids: tuple[JobId, ...]
    #: However they end; else they have to complete, and if one does not, this job never starts.
    any_end: bool = False


@dataclass(frozen=True, slots=True)
class Pending:
    since: Instant
    held: bool = False
    #: Not before this: a launch that failed for a passing reason is tried again a little later.
    not_before: Instant = Instant(0)
    launch_failures: int = 0
    #: What of it has not ended yet; None: nothing.
    after: After | None = None
    #: The job it was stopped for.
    preempted_by: JobId | None = None


@dataclass(frozen=True, slots=True)
class Starting:
    placement: Placement
    deadline: Instant
    launch_failures: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    placement: Placement
    pid: int  # the supervisor's
    since: Instant
    deadline: Instant | None
    #: When it last went on after rlqd had paused it.
    rested_at: Instant | None = None
    #: A user let it go on: rlqd does not pause it.
    stays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedOff:
    """Why rlqd paused a job: `jobs` of them on its device are slower than `better`."""

    jobs: int
    better: int
    #: STP of the `jobs`, in thousandths of a job.
    stp: int
    #: Then it is another one's turn.
    until: Instant


@dataclass(frozen=True, slots=True)
class Suspended:
    """Stopped by SIGSTOP.  It keeps what it holds; its time limit stands still."""

    placement: Placement
    pid: int
    ran_ms: int  # so far
    left_ms: int | None  # of its time limit
    #: None: a user paused it.
    backed_off: BackedOff | None = None


@dataclass(frozen=True, slots=True)
class Completing:
    placement: Placement
    pid: int | None  # None: asked to stop before the shell told us the pid
    cause: Cause
    #: When SIGKILL is due (again).
    kill_at: Instant
    #: No grace once there is a pid.
    at_once: bool = False
    #: Before the launch that is being stopped.
    launch_failures: int = 0
    #: Who cancelled it; "": its own user.
    by: str = ""
    #: The job that it is stopped for.
    preempted_by: JobId | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    outcome: Outcome
    exit: Exit
    reason: str


State = Pending | Starting | Running | Suspended | Completing | Finished


@dataclass(frozen=True, slots=True)
class Job:
    id: JobId
    spec: JobSpec
    attempt: int  # attempts begun so far; events of an older attempt are stale
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The knobs (docs/configuration.md says what each is for)."""

    gpu_mem_mib_default: int = 4096
    sm_pct_default: int = 20
    cores_default: int = 1
    #: A job that declares none may get so many (core/cores.py).
    cores_most: int = 1
    mem_mib_default: int = 2048
    gpu_mem_mib_reserve: int = 512
    sm_pct_limit: int = 100
    jobs_per_gpu_max: int = 0  # 0: no limit
    cores_reserve: int = 0
    cores_minimum: int = 1
    outside_cpu_counts: bool = True
    mem_mib_reserve: int = 1024
    reserve_after_ms: int = 60_000
    #: How long others may pass a job that only the throughput guard keeps waiting.
    throughput_patience_ms: int = 1_800_000
    #: Whether preemptible jobs are stopped for those of a higher priority.
    preemption: bool = False
    #: A job that was started again is not preempted before it has run for so long.
    preempt_exempt_ms: int = 600_000
    settle_ms: int = 10_000
    margin_pct: int = 10
    launch_retries: int = 3
    launch_retry_delay_ms: int = 5_000
    launch_timeout_ms: int = 60_000
    #: Readings older than this are no readings.
    stale_ms: int = 15_000
    queued_max: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the jobs of one user, or of a group's members together, may have.  None: as much as
    there is."""

    #: "user alice", "group students": in words, and no two limits have the same.
    whose: str
    #: Started and not ended.
    max_jobs: int | None = None
    #: Waiting or started.
    max_submit_jobs: int | None = None
    gpus: int | None = None
    gpu_mem_mib: int | None = None
    cores: int | None = None


#: By uid: the limits that hold for a user's jobs, their own and their groups'.
Limits = Mapping[int, tuple[Limit, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """The throughput guard's knobs (core/guard.py)."""

    enabled: bool = True
    #: One more job must add this much of a job's speed alone.
    threshold_pct: int = 5
    #: Rates are averaged over at least this long.
    observe_ms: int = 15_000
    #: The two halves of an observation may differ by this much.
    steady_pct: int = 15
    #: A program that has reported nothing for so long is taken never to report.
    first_report_ms: int = 60_000
    #: A job that reports, but still does not train after so long, is not waited for.
    patience_ms: int = 180_000
    #: What was learned counts for so long.
    forget_ms: int = 30 * 86_400_000
    #: A figure that differs by so much from what was learned replaces it.
    contradicts_pct: int = 40
    #: A job is paused where fewer were faster (core/backoff.py), for so long at a time.
    pause_youngest: bool = False
    pause_turn_ms: int = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePolicy:
    """Fair share's knobs (core/fairness.py)."""

    half_life_ms: int = 7 * 86_400_000
    age_max_ms: int = 7 * 86_400_000
    age_weight: int = 1_000
    share_weight: int = 10_000
    #: (user, shares); who is not named has `shares_default`.
    shares: tuple[tuple[int, int], ...] = ()
    shares_default: int = 1


# ---- the machine as last read ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A logical CPU; equal `physical`: hyperthread siblings."""

    number: int
    physical: int
    numa_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """None: unknown.  A device with an unknown memory or SM share admits nothing new."""

    id: GpuId
    index: int
    mem_mib_total: int | None
    mem_mib_free: int | None
    sm_pct: int | None
    cores_near: frozenset[int] = frozenset()
    problem: str = ""
    #: Devices of one kind are taken to behave alike: its model's name.
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """One job on one GPU.  None: not readable."""

    mem_mib: int | None
    sm_pct: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    cpu_millicores: int | None
    mem_mib: int
    gpus: tuple[tuple[GpuId, GpuShare], ...] = ()
    #: Training steps per 1000 s; None: it reports none, or has not begun to train.
    steps_milli_per_s: int | None = None
    #: It has reported something.
    reports: bool = False
    #: How long it still runs, by its own progress and present speed; None: it does not tell.
    left_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One look at everything.  `taken_at` and `gpus_taken_at` are when the readings began."""

    taken_at: Instant
    gpus_taken_at: Instant
    cores: tuple[Core, ...]
    #: Busy share of each core by anything, in thousandths; the colder core is preferred.
    busy_permille: tuple[tuple[int, int], ...] = ()
    millicores_outside: int = 0
    mem_mib_total: int = 0
    mem_mib_available: int = 0
    gpus: tuple[GpuFacts, ...] = ()
    #: There are GPUs, but which cannot be read: a failing driver.  "": they are all in `gpus`.
    gpus_problem: str = ""
    jobs: tuple[tuple[JobId, JobFacts], ...] = ()


# ---- what is booked: core/calendar.py ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """Capacity that from `starts_at` to `ends_at` is for jobs of `users` alone.

    Before it starts, another's job may start on it only if it is sure to have ended by then.
    What still runs there when it starts runs on.
    """

    id: int
    starts_at: Instant
    ends_at: Instant
    #: Empty: nobody's jobs.
    users: frozenset[int] = frozenset()
    #: These devices, whole.
    gpus: frozenset[GpuId] = frozenset()
    cores: int = 0
    mem_mib: int = 0
    #: All of the machine.
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """Hours in which the queue may use only a share of the machine; None: all there is.

    Jobs that run run on, and a job that starts before need not end before.
    """

    starts_at: Instant
    #: None: for ever.
    ends_at: Instant | None
    #: So many devices, those with the lowest indices.
    gpus: int | None = None
    cores: int | None = None
    sm_pct: int | None = None


# ---- events: facts from outside ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """All of them enter the queue, or none.  Ids are given by the shell, ascending."""

    now: Instant
    request: int
    jobs: tuple[tuple[JobId, JobSpec], ...]
    held: bool = False
    #: For all of them.  The shell leaves out what it knows to have ended.
    after: After | None = None


@dataclass(frozen=True, slots=True)
class CancelRequested:
    now: Instant
    request: int
    job_id: JobId
    #: Skip the grace period.
    at_once: bool = False
    #: Somebody other than its user; "": its user.
    by: str = ""


@dataclass(frozen=True, slots=True)
class HoldRequested:
    now: Instant
    request: int
    job_id: JobId


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    now: Instant
    request: int
    job_id: JobId


@dataclass(frozen=True, slots=True)
class PrioritySet:
    now: Instant
    request: int
    job_id: JobId
    priority: int


@dataclass(frozen=True, slots=True)
class PauseRequested:
    now: Instant
    request: int
    job_id: JobId


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    now: Instant
    request: int
    job_id: JobId


@dataclass(frozen=True, slots=True)
class RequeueRequested:
    """A finished job carries its row: the core keeps none."""

    now: Instant
    request: int
    job_id: JobId
    finished: Job | None = None


@dataclass(frozen=True, slots=True)
class MachineSampled:
    now: Instant
    facts: MachineFacts


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """Also told for every live process found after a restart of the daemon."""

    now: Instant
    job_id: JobId
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """`passing`: the machine's fault (no pids, no descriptors), worth another try."""

    now: Instant
    job_id: JobId
    attempt: int
    reason: str
    passing: bool


@dataclass(frozen=True, slots=True)
class ProcessExited:
    now: Instant
    job_id: JobId
    attempt: int
    exit: Exit
    #: It ended so long before `now`, while no daemon was there to hear of it.
    ago_ms: int = 0


@dataclass(frozen=True, slots=True)
class ProcessLost:
    """It is gone and left no exit record: a reboot, or its supervisor was killed."""

    now: Instant
    job_id: JobId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchVoided:
    """The daemon died between commit and launch: proved never to have run."""

    now: Instant
    job_id: JobId
    attempt: int


@dataclass(frozen=True, slots=True)
class AdmissionSet:
    """`reason`: why nothing new may start (draining, disk full); "": go on."""

    now: Instant
    reason: str


@dataclass(frozen=True, slots=True)
class CalendarSet:
    """All bookings and quiet hours, on the core's clock; told again when the wall clock jumps."""

    now: Instant
    bookings: tuple[Booking, ...] = ()
    quiet: tuple[Quiet, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramForgotten:
    """What was learned of it is gone from the database."""

    now: Instant
    signature: str


@dataclass(frozen=True, slots=True)
class Tick:
    now: Instant


ProcessEvent = ProcessStarted | LaunchFailed | ProcessExited | ProcessLost | LaunchVoided
#: About one job that there is.
JobRequest = (
    CancelRequested
    | HoldRequested
    | ReleaseRequested
    | PrioritySet
    | PauseRequested
    | ResumeRequested
    | RequeueRequested
)
UserEvent = Submitted | JobRequest
Event = (
    UserEvent
    | MachineSampled
    | ProcessEvent
    | AdmissionSet
    | CalendarSet
    | ProgramForgotten
    | Tick
)

# ---- actions: commands to the shell ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the row.  The shell commits all Persists of a step before its other actions."""

    job: Job


@dataclass(frozen=True, slots=True)
class Launch:
    job_id: JobId
    attempt: int
    placement: Placement
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM, the tree's main process first; a stopped one is woken for it.  Safe to repeat."""

    job_id: JobId
    attempt: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to the whole tree.  Safe to repeat."""

    job_id: JobId
    attempt: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP (`on`) or SIGCONT to the whole tree.  Safe to repeat."""

    job_id: JobId
    attempt: int
    on: bool


@dataclass(frozen=True, slots=True)
class SampleNow:
    """A decision waits for fresh readings: do not wait for the next regular one."""


@dataclass(frozen=True, slots=True)
class Accept:
    """The request did something.  `note` says what, where the new state does not."""

    request: int
    job_id: JobId | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """`impossible`: this machine can never meet it; else the job's state does not allow it."""

    request: int
    message: str
    hint: str | None = None
    impossible: bool = False
    job_id: JobId | None = None


@dataclass(frozen=True, slots=True)
class Learn:
    """Write down what was learned about programs and devices.  Losing it costs time, not jobs."""

    rows: tuple[Learned | LearnedPeak, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """Write down what every user has used by now; a user who is not named has used nothing."""

    users: tuple[Accounted, ...]


Action = (
    Account | Learn | Persist | Launch | Terminate | Kill | Freeze | SampleNow | Accept | Refuse
)
