"""The messages.  Times of day are Unix seconds (float); durations carry their unit in the name."""

from __future__ import annotations

from typing import Any

import msgspec

from rlq.protocol.states import JobState


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The base of every request and reply."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of what messages are made of."""


# ---- what a job is -----------------------------------------------------------------


class Resources(Part, frozen=True, kw_only=True):
    """What a job asks for.  None: not declared; the daemon's default, then what is measured."""

    #: GPUs; 0: none; None (`auto`): one GPU if the machine has any, else none.
    gpus: int | None = None
    #: Memory on each GPU.
    gpu_mem_mib: int | None = None
    #: Share of each GPU's streaming multiprocessors, 1 to 100.
    sm_pct: int | None = None
    cores: int | None = None
    #: Host memory.
    mem_mib: int | None = None
    #: No other job of the queue beside it: on its GPUs, or for a job without GPU on the machine.
    exclusive: bool = False
    time_limit_ms: int | None = None


class JobSpec(Part, frozen=True, kw_only=True):
    """A submission: exactly what to run, where, as whom; and what it may use."""

    argv: tuple[str, ...]
    cwd: str
    #: This job's own variables, on top of `Submit.env`.
    env: dict[str, str] = {}
    umask: int = 0o022
    #: (soft, hard) by the name of setrlimit(2), -1: unlimited.  Set by the daemon, from the
    #: process that submitted it: what a client says here is overwritten.
    rlimits: dict[str, tuple[int, int]] = {}
    name: str = ""
    resources: Resources = Resources()
    #: Higher goes first; -1000 to 1000; on a daemon for several users, above 0 for operators only.
    priority: int = 0
    #: From SIGTERM to SIGKILL; None: the daemon's default.
    grace_ms: int | None = None
    #: Queue it again when the machine reboots under it.
    requeue: bool = False
    #: Start in the queue, but held.
    held: bool = False
    #: Jobs that must have completed before it starts.
    after: tuple[int, ...] = ()
    #: However they end: else it is cancelled when one of them does not complete.
    after_any: bool = False
    #: Let its Python programs report by themselves (docs/reporting.md).
    hooks: bool = True
    #: Variables whose values the user gave with --env: rlqd overrides none of these.
    env_given: tuple[str, ...] = ()
    #: Versions of "torch" and "jaxlib" in the command's Python, as far as the client can tell:
    #: some memory caps exist only from some version on.
    frameworks: dict[str, str] = {}
    #: Absolute path; "" lets the daemon choose.  `%j` is the job's id, `%x` its name.
    log_path: str = ""
    #: Charge and pack it like other jobs of this name; "": the daemon tells by the command.
    like: str = ""
    #: Rotate the log at this size, keeping one older part; None: unbounded.
    log_mib_max: int | None = None
    #: Start it while there is room, whether it makes the machine faster or not: what
    #: `rlq calibrate` measures is what the throughput guard would prevent.
    unguarded: bool = False
    #: It goes on where it was when it is stopped and run again: rlqd may do so for a job of higher
    #: priority, where that is configured.
    preemptible: bool = False
    #: Words before `argv` when it is started, which it is neither shown nor known by: a program
    #: that joins it to the terminal of `rlq run`.
    via: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # A job's environment holds tokens and passwords: it is never printed.
        return f"JobSpec(argv={self.argv!r}, cwd={self.cwd!r}, name={self.name!r}, env=<hidden>)"


class Placement(Part, frozen=True, kw_only=True):
    """Where a job runs."""

    gpus: tuple[str, ...] = ()  # UUIDs
    gpu_indices: tuple[int, ...] = ()  # as nvidia-smi numbers them
    cores: tuple[int, ...] = ()  # logical CPU numbers


class Usage(Part, frozen=True, kw_only=True):
    """What a job was last measured at.  None: not readable."""

    cpu_cores: float | None = None
    mem_mib: int | None = None
    gpu_mem_mib: int | None = None
    sm_pct: int | None = None
    #: Its readings have been stable for long enough to be charged by them.
    settled: bool = False


class Progress(Part, frozen=True, kw_only=True):
    """What the job itself reported (`rlq.job.report`)."""

    step: int
    total: int | None = None
    steps_per_s: float | None = None
    eta_s: float | None = None
    metrics: dict[str, float] = {}
    reported_at: float = 0.0


class Job(Part, frozen=True, kw_only=True):
    id: int
    name: str
    user: str
    uid: int
    state: JobState
    #: Why it waits, or why it ended so: one sentence, "" when there is nothing to say.
    reason: str = ""
    held: bool = False
    #: Jobs it waits for, of those it was submitted to follow.
    after: tuple[int, ...] = ()
    priority: int = 0
    argv: tuple[str, ...] = ()
    cwd: str = ""
    resources: Resources = Resources()
    attempt: int = 0
    #: The job it was last stopped for; it was queued again then.
    preempted_by: int | None = None
    submitted_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    placement: Placement | None = None
    usage: Usage | None = None
    progress: Progress | None = None
    #: The supervisor's and the command's process ids, while it runs.
    pid: int | None = None
    log_path: str = ""
    #: Jobs of one signature are charged and packed alike; "": nothing tells it from others.
    signature: str = ""


class Attempt(Part, frozen=True, kw_only=True):
    """One that is over of a job that was queued again."""

    number: int
    #: How it ended: a final JobState, or Slurm's REQUEUED or PREEMPTED.
    state: str
    reason: str = ""
    #: None: it never ran.
    started_at: float | None = None
    ended_at: float = 0.0
    exit_code: int | None = None
    signal: int | None = None


# ---- selections --------------------------------------------------------------------


class Selection(Part, frozen=True, kw_only=True):
    """Which jobs a verb is about: the jobs that match every field that is set."""

    #: Inclusive ranges; (7, 7) is one job.
    ids: tuple[tuple[int, int], ...] = ()
    #: A shell pattern over names.
    name: str | None = None
    states: tuple[JobState, ...] = ()
    #: Numeric user id; None: for `list` everybody, for a verb that acts the caller.
    uid: int | None = None
    #: All jobs (that the verb can apply to).
    all: bool = False
    #: Everybody's, not the caller's alone: of a verb that acts, for administrators.
    everybody: bool = False


# ---- requests ----------------------------------------------------------------------


class Ping(Message, frozen=True, kw_only=True):
    """Who is there?  Answered even to a peer of another minor version."""


class Submit(Message, frozen=True, kw_only=True):
    """Add jobs: all of them or none."""

    jobs: tuple[JobSpec, ...]
    #: The environment that all of them share: one array of 10,000 jobs carries it once.
    env: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Submit(jobs={self.jobs!r}, env=<hidden>)"


class List(Message, frozen=True, kw_only=True):
    selection: Selection = Selection()
    #: Newest first and at most this many; 0: no limit.  The daemon may end a page sooner: ask on
    #: with `before` until there are `total`.
    limit: int = 0
    #: Only jobs with an id below this one (for paging); 0: from the newest.
    before: int = 0


class Cancel(Message, frozen=True, kw_only=True):
    selection: Selection
    #: Skip the grace period.
    now: bool = False


class Hold(Message, frozen=True, kw_only=True):
    selection: Selection


class Release(Message, frozen=True, kw_only=True):
    selection: Selection


class Prioritize(Message, frozen=True, kw_only=True):
    """Give jobs that have not ended another priority, -1000 to 1000."""

    selection: Selection
    priority: int


class Pause(Message, frozen=True, kw_only=True):
    selection: Selection


class Resume(Message, frozen=True, kw_only=True):
    selection: Selection


class Requeue(Message, frozen=True, kw_only=True):
    selection: Selection


class Wait(Message, frozen=True, kw_only=True):
    """Answered when every selected job has ended, or after `timeout_ms` (at most 30,000)."""

    selection: Selection
    timeout_ms: int = 10_000


class Why(Message, frozen=True, kw_only=True):
    id: int


class Environment(Message, frozen=True, kw_only=True):
    """The variables of one's own job."""

    id: int


class Attempts(Message, frozen=True, kw_only=True):
    """The earlier attempts of a job."""

    id: int


class Devices(Message, frozen=True, kw_only=True):
    pass


class Status(Message, frozen=True, kw_only=True):
    pass


class Profile(Message, frozen=True, kw_only=True):
    """What was learned of programs and of devices."""

    #: A shell pattern over signatures, or a part of one; "": all.
    pattern: str = ""


class Share(Message, frozen=True, kw_only=True):
    """How the users stand by fair share, and how a waiting job's rank is made up."""

    job: int | None = None


class Forget(Message, frozen=True, kw_only=True):
    """Drop what was learned of a program, and of every mix it was in."""

    signature: str


class Audit(Message, frozen=True, kw_only=True):
    """What administrators did, newest first: to one's own jobs; for administrators, all of it."""

    #: Only acts on this job.
    job: int | None = None
    #: At most this many; 0: as many as one reply holds.
    limit: int = 0
    #: Only acts with a number below this one (for paging); 0: from the newest.
    before: int = 0


class Drain(Message, frozen=True, kw_only=True):
    """Start nothing more (`on`), or go on starting (`on=False`)."""

    on: bool = True


class Reserve(Message, frozen=True, kw_only=True):
    """Book capacity for some users' jobs, or all of the machine for nobody's (administrators)."""

    #: "": the daemon makes one up.
    name: str = ""
    #: Login names.
    users: tuple[str, ...] = ()
    #: Devices by number, and so many more of the daemon's choice.
    gpu_indices: tuple[int, ...] = ()
    gpus: int = 0
    #: None: for each GPU what a job gets that declares nothing.
    cores: int | None = None
    mem_mib: int | None = None
    starts_at: float
    ends_at: float
    #: All of the machine, for nobody's jobs.
    maintenance: bool = False


class Claim(Message, frozen=True, kw_only=True):
    """Book one GPU at once, for the caller's work outside the queue."""

    gpu_index: int
    for_ms: int


class Unbook(Message, frozen=True, kw_only=True):
    """End what is booked: by its name, or (`claim`) the caller's claim."""

    name: str = ""
    claim: bool = False
    #: Which claim; None: the caller's only one.
    gpu_index: int | None = None


class Bookings(Message, frozen=True, kw_only=True):
    """What is booked and not over."""


class Stop(Message, frozen=True, kw_only=True):
    """Ask the daemon to exit.  Running jobs run on."""


class ListKeys(Message, frozen=True, kw_only=True):
    """The server's key, and the enrolled ones: one's own; all for an administrator."""


class EnrolKey(Message, frozen=True, kw_only=True):
    """Whoever holds the secret half of `key` may come in over the network as `user`."""

    user: str
    #: As `rlq.protocol.keys` writes it.
    key: str


class RevokeKey(Message, frozen=True, kw_only=True):
    """One key, or all of a user's; the other is ""."""

    user: str = ""
    key: str = ""


Request = (
    Ping
    | Submit
    | List
    | Cancel
    | Hold
    | Release
    | Prioritize
    | Pause
    | Resume
    | Requeue
    | Wait
    | Why
    | Environment
    | Attempts
    | Devices
    | Status
    | Profile
    | Share
    | Forget
    | Audit
    | Drain
    | Reserve
    | Claim
    | Unbook
    | Bookings
    | Stop
    | ListKeys
    | EnrolKey
    | RevokeKey
)

# ---- replies -----------------------------------------------------------------------


class Error(Message, frozen=True, kw_only=True):
    """The request failed as a whole, and changed nothing."""

    kind: str  # rlq.errors.RlqError.kind
    message: str
    hint: str | None = None


class Pong(Message, frozen=True, kw_only=True):
    version: str
    protocol: int
    pid: int


class Submitted(Message, frozen=True, kw_only=True):
    """Durable: the jobs survive whatever comes now."""

    ids: tuple[int, ...]
    #: The daemon's log path of each job.
    log_paths: tuple[str, ...] = ()
    #: Things the user should know, such as a request that must wait for a lost GPU.
    warnings: tuple[str, ...] = ()


class Jobs(Message, frozen=True, kw_only=True):
    jobs: tuple[Job, ...]
    #: How many jobs the selection matches, beyond the limit too.
    total: int
    #: Ids that were named one by one and do not exist.
    missing: tuple[int, ...] = ()


class Change(Part, frozen=True, kw_only=True):
    """What a verb did to one job."""

    id: int
    ok: bool
    state: JobState | None = None
    #: Why not, or what now: "already COMPLETED", "stopping, SIGKILL in 30 s".
    message: str = ""
    #: rlq.errors kind when not ok: "not-found", "not-permitted" or "usage".
    kind: str = ""


class Changed(Message, frozen=True, kw_only=True):
    changes: tuple[Change, ...]


class Waited(Message, frozen=True, kw_only=True):
    """`done`: all have ended.  Otherwise ask again."""

    done: bool
    jobs: tuple[Job, ...]
    missing: tuple[int, ...] = ()
    #: They are too many for one reply: `jobs` are some of those that run.  `List` has them all.
    partial: bool = False
    #: How many of those waited for have ended.
    ended: int = 0


class Holder(Part, frozen=True, kw_only=True):
    """Who has what a job waits for."""

    #: A job of the queue, or None for processes outside it.
    job: int | None = None
    user: str = ""
    amount: int = 0
    #: When it is expected to end; None: nobody knows.
    ends_at: float | None = None
    #: It is kept, not held: why, in words.
    kept: str = ""


class Shortage(Part, frozen=True, kw_only=True):
    """One resource a job waits for.  Amounts are in `unit`."""

    #: "gpu memory", "gpu sm", "cores", "host memory", "gpu", "machine"
    resource: str
    unit: str
    need: int
    free: int
    total: int
    #: The device's UUID and number, for a GPU's resource.
    gpu: str | None = None
    gpu_index: int | None = None
    holders: tuple[Holder, ...] = ()


class LimitReached(Part, frozen=True, kw_only=True):
    """One limit of the job's user, or of a group of the user's, that keeps it waiting.  Amounts
    are in `unit`."""

    #: "user alice", "group students"
    whose: str
    #: "jobs", "gpu", "gpu memory", "cores"
    resource: str
    unit: str
    used: int
    limit: int
    need: int


class Explanation(Message, frozen=True, kw_only=True):
    """Why a job is where it is."""

    id: int
    state: JobState
    #: One sentence for people.
    summary: str
    #: The alternatives tried, the nearest to fitting first; each a set of shortages.
    shortages: tuple[Shortage, ...] = ()
    #: It waits for jobs of its own user or group to end, whatever room there is.
    limits: tuple[LimitReached, ...] = ()
    #: Jobs that go before it.
    jobs_ahead: int = 0
    #: It holds the reservation: nothing that would delay it is started.
    reserved: bool = False
    #: Earliest start, from the ends that are known; None: nobody knows.
    starts_at: float | None = None
    #: The job whose end it waits for then, and whether that is predicted from its progress: it
    #: may be sooner or later.
    after: int | None = None
    predicted: bool = False


class Variables(Message, frozen=True, kw_only=True):
    env: dict[str, str]


class AttemptList(Message, frozen=True, kw_only=True):
    """The answer to Attempts, the first first; the latest attempt is the Job itself."""

    attempts: tuple[Attempt, ...]


class Throughput(Part, frozen=True, kw_only=True):
    """What the queue's jobs on one device achieve just now (Eyerman and Eeckhout 2008)."""

    jobs: int = 0
    #: System throughput: the sum of each job's steps/s over its steps/s alone, so how many times
    #: one job's speed they give.  None: not all report, or one was never measured alone.
    stp: float | None = None
    #: Average normalised turnaround time: how many times longer a job takes than alone.
    antt: float | None = None


class Booking(Part, frozen=True, kw_only=True):
    """Capacity that is for some users' jobs alone, or for nobody's."""

    #: "reservation", "maintenance" or "claim"
    kind: str
    name: str
    #: Who made it.
    by: str
    #: Whose jobs may use it; empty: nobody's.
    users: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()  # UUIDs
    gpu_indices: tuple[int, ...] = ()  # -1: it cannot be read now
    cores: int = 0
    mem_mib: int = 0
    starts_at: float
    ends_at: float
    #: Other users' jobs on its devices that have no sure end before it starts.
    jobs: tuple[int, ...] = ()


class Quiet(Part, frozen=True, kw_only=True):
    """Hours in which the queue uses only a share of the machine.  None: all there is."""

    starts_at: float
    #: None: for ever.
    ends_at: float | None = None
    gpus: int | None = None
    cores: int | None = None
    sm_pct: int | None = None


class GpuProcess(Part, frozen=True, kw_only=True):
    pid: int
    user: str
    command: str
    #: The job it belongs to, or None: outside the queue.
    job: int | None = None
    mem_mib: int | None = None
    sm_pct: int | None = None
    #: Whether it is a client of the CUDA MPS server; None: MPS is not in use, or not known yet.
    mps: bool | None = None


class Gpu(Part, frozen=True, kw_only=True):
    uuid: str
    index: int
    name: str
    #: "" when all is well, else what is wrong, in words.
    problem: str = ""
    mem_mib_total: int | None = None
    mem_mib_free: int | None = None
    sm_pct: int | None = None
    temperature_c: int | None = None
    power_w: int | None = None
    mig: bool | None = None
    cores_near: tuple[int, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    #: Memory and SM share promised to the queue's jobs, beyond what they use now included.
    mem_mib_charged: int = 0
    sm_pct_charged: int = 0
    #: The queue's jobs on it, and what they achieve together: see Throughput.
    throughput: Throughput = Throughput()


class Host(Part, frozen=True, kw_only=True):
    cores: int
    cores_physical: int
    cores_assigned: int
    #: Cores' worth of work done by processes outside the queue.
    cores_outside: float
    mem_mib_total: int
    mem_mib_available: int
    mem_mib_charged: int
    #: Of the jobs without GPU.
    throughput: Throughput = Throughput()


class Machine(Message, frozen=True, kw_only=True):
    """The answer to Devices."""

    host: Host
    gpus: tuple[Gpu, ...] = ()
    #: "" or why NVML cannot be read at all, in words.
    nvml_problem: str = ""
    #: There is no NVIDIA driver here, and so nothing is wrong.
    nvml_absent: bool = False
    #: What is booked for now.
    bookings: tuple[Booking, ...] = ()
    quiet: Quiet | None = None


class SoloRate(Part, frozen=True, kw_only=True):
    """The training speed of a program alone on a device."""

    device: str  # a kind: its model, or "CPU, 16 cores"; ", shared" when outsiders use it
    steps_per_s: float
    observations: int = 1
    learned_at: float = 0.0


class Profiled(Part, frozen=True, kw_only=True):
    """What is known of one program.  None: not known."""

    signature: str
    #: Jobs whose peaks were learned.
    runs: int = 0
    learned_at: float = 0.0
    mem_mib: int | None = None
    gpu_mem_mib: int | None = None
    sm_pct: int | None = None
    cpu_cores: float | None = None
    solo: tuple[SoloRate, ...] = ()


class CurvePoint(Part, frozen=True, kw_only=True):
    jobs: int
    #: How many times one job's speed so many jobs give.
    stp: float
    observations: int = 1
    learned_at: float = 0.0


class Curve(Part, frozen=True, kw_only=True):
    """STP against the number of jobs, on one kind of device, for one mix of programs."""

    device: str
    #: One that is repeated has so many parts of the whole.
    signatures: tuple[str, ...]
    #: From two jobs on; one job gives 1 by definition.
    points: tuple[CurvePoint, ...] = ()


class Profiles(Message, frozen=True, kw_only=True):
    """By signature, and by device and mix."""

    programs: tuple[Profiled, ...] = ()
    curves: tuple[Curve, ...] = ()


class EnrolledKey(Part, frozen=True, kw_only=True):
    key: str
    user: str
    enrolled_at: float
    enrolled_by: str


class Keys(Message, frozen=True, kw_only=True):
    """The answer to ListKeys."""

    #: The daemon's own public key, and where it listens; "": not for other machines.
    server_key: str = ""
    endpoint: str = ""
    keys: tuple[EnrolledKey, ...] = ()


class Enforcement(Part, frozen=True, kw_only=True):
    """By what jobs are held to their limits."""

    #: "systemd" (a scope per job), "cgroup" (a control group per job), "affinity" (pinned only);
    #: "": of an older rlqd, which does not tell.
    means: str = ""
    #: Of "cpuset", "memory", "pids" and "io": those whose limits the kernel enforces.
    controllers: tuple[str, ...] = ()
    #: Why it is no more than that.
    problem: str = ""
    #: One sentence for people.
    summary: str = ""


class Act(Part, frozen=True, kw_only=True):
    """Something an administrator did."""

    number: int
    at: float
    #: Who did it.
    user: str
    uid: int
    #: The verb: "cancel", "drain".
    verb: str
    #: None: it was about the daemon.
    job: int | None = None
    #: Whose job.
    owner: str = ""
    #: What more there is to say: "at once", a signature.
    detail: str = ""


class Acts(Message, frozen=True, kw_only=True):
    acts: tuple[Act, ...]
    #: There are older ones: ask on with `before`.
    more: bool = False


class Booked(Message, frozen=True, kw_only=True):
    """The answer to Reserve and Claim.  It survives whatever comes."""

    booking: Booking


class Calendar(Message, frozen=True, kw_only=True):
    """By start."""

    bookings: tuple[Booking, ...] = ()
    #: The quiet hours that hold now, or that come next.
    quiet: Quiet | None = None


class UserShare(Part, frozen=True, kw_only=True):
    """One user's standing (docs/fairness.md).  Use is decayed."""

    user: str
    uid: int
    shares: int
    #: `shares` of all users' shares, 0 to 1.
    part: float
    #: The largest of the job's shares of GPUs, cores and memory, over time.
    machine_hours: float
    gpu_hours: float
    core_hours: float
    #: Share of the machine held now, 0 to 1.
    held: float
    #: `machine_hours`, and what is held as if for `Shares.held_counts_as_s`.
    counted_hours: float
    #: 1: has had nothing; 0.5: a fair part; towards 0: far more.
    factor: float


class JobRank(Part, frozen=True, kw_only=True):
    """How a waiting job's rank is made up: priority first, then age + share."""

    id: int
    user: str
    priority: int
    waited_s: float
    age: int
    share: int
    #: Jobs that start before it if there is room for one after the other.
    jobs_ahead: int
    reserved: bool = False


class Shares(Message, frozen=True, kw_only=True):
    """Whoever has used something, holds something or waits; who goes first, first."""

    users: tuple[UserShare, ...]
    half_life_s: float
    held_counts_as_s: float
    age_weight: int
    age_max_s: float
    share_weight: int
    job: JobRank | None = None


class DaemonStatus(Message, frozen=True, kw_only=True):
    version: str
    pid: int
    uid: int
    started_at: float
    state_dir: str
    socket: str
    draining: bool
    #: Things that are wrong now and what to do: disk full, NVML lost, clock odd.
    problems: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    rss_mib: int = 0
    #: Absolute path of the configuration read, "" for built-in defaults.
    config_path: str = ""
    #: Free-form numbers about the daemon itself (loop latency, commits), for doctors.
    stats: dict[str, Any] = {}
    enforcement: Enforcement = Enforcement()


class Ok(Message, frozen=True, kw_only=True):
    message: str = ""


Reply = (
    Error
    | Pong
    | Submitted
    | Jobs
    | Changed
    | Waited
    | Explanation
    | Variables
    | AttemptList
    | Machine
    | Profiles
    | Shares
    | Booked
    | Calendar
    | Keys
    | Acts
    | DaemonStatus
    | Ok
)
