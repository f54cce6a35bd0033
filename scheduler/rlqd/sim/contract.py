"""What the outside world was promised, checked on the stream of events and actions alone.

Shares no code with the core: a checker that calls what it checks agrees with its bugs.  It
recomputes room from first principles and in the job's disfavour only where every correct core
must agree: what is declared is a floor for ever, what a job was admitted with is one until it
can have settled, its measured peak (with the margin once it has settled for sure) always is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlqd.core.model import (
    Accept,
    Account,
    Action,
    AdmissionSet,
    After,
    Booking,
    CalendarSet,
    CancelRequested,
    Cause,
    Completing,
    Event,
    Finished,
    Freeze,
    GpuFacts,
    GpuId,
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
    Learn,
    Limit,
    Limits,
    MachineFacts,
    MachineSampled,
    Outcome,
    PauseRequested,
    Pending,
    Persist,
    Placement,
    Policy,
    PrioritySet,
    ProcessExited,
    ProcessLost,
    ProcessStarted,
    Quiet,
    Refuse,
    ReleaseRequested,
    RequeueRequested,
    ResumeRequested,
    Running,
    SampleNow,
    Submitted,
    Terminate,
)

#: From the moment the head could run to its launch: one reading, one report, one step.
SLACK_MS = 3_000
#: What a user holds counts as so much use already (docs/fairness.md).
HELD_COUNTS_AS_S = 3_600.0
#: Charges are known here to the margin only, and age is worth a little: who has had so many
#: times more than another has clearly had more.
CLEARLY = 1.3


class ContractViolation(AssertionError):
    """A promise to the outside world was broken."""


def demand(holds: bool, promise: str) -> None:
    if not holds:
        raise ContractViolation(promise)


@dataclass(slots=True)
class Attempt:
    """A launch whose end has not been told."""

    job_id: JobId
    number: int
    spec: JobSpec
    placement: Placement
    launched_at: Instant
    pid: int | None = None
    warned_at: Instant | None = None
    running: bool = False
    #: It is on its way out: SIGKILL comes, if nothing else helps.
    stopping: bool = False
    paused: bool = False
    #: For how long it has run, but for the time since then; None: it does not run now.
    ran_ms: int = 0
    runs_since: Instant | None = None
    #: rlqd paused it at that moment, and last let it go on at this one.
    backed_off_at: Instant | None = None
    rested_at: Instant | None = None
    #: A user let it go on.
    stays: bool = False
    #: It has reached its time limit.
    is_over: bool = False
    #: For whom it was stopped, and when.
    preempted_by: JobId | None = None
    preempted_at: Instant | None = None
    #: When it ends at the latest, if nobody pauses it; None: nobody knows.
    ends_at: Instant | None = None
    #: When it says it ends, which may be a lie.
    told_end: Instant | None = None
    mem_mib_peak: int = 0
    gpu_mem_mib_peak: int | None = None
    #: When readings of it were taken while it ran, since the daemon's last start.
    read_at: list[Instant] = field(default_factory=list[Instant])

    def promised_end(self) -> Instant | None:
        """Others may have been let past until then; None: nobody."""
        known = [at for at in (self.ends_at, self.told_end) if at is not None]
        return min(known, default=None)

    def runs(self, now: Instant, *, on: bool) -> None:
        if self.runs_since is not None:
            self.ran_ms += now - self.runs_since
        self.runs_since = now if on else None

    def may_have_settled(self, policy: Policy) -> bool:
        return len(self.read_at) >= 5 and self.read_at[-1] - self.read_at[0] >= policy.settle_ms

    def floor(self, policy: Policy, first: int, declared: int | None, peak: int | None) -> int:
        """The least that it must be counted for."""
        if peak is None or not self.read_at:
            return first
        with_margin = max((peak * (100 + policy.margin_pct) + 99) // 100, declared or 0)
        unsettled = max(first, peak)
        return min(unsettled, with_margin) if self.may_have_settled(policy) else unsettled

    def mem_mib_most(self, policy: Policy) -> int:
        """The most host memory that it may be counted for."""
        first = self.spec.mem_mib or policy.mem_mib_default
        return max(first, (self.mem_mib_peak * (100 + policy.margin_pct) + 99) // 100)


@dataclass(slots=True)
class Head:
    """The best-ranked waiting job, due for a reservation: nobody may hold it up any more."""

    job_id: JobId
    #: Those that ran when it became due and still do.
    before_it: set[tuple[JobId, int]]
    #: The latest known end of those.
    deadline: Instant
    #: Another job had been promised the room before: that one goes first, once.
    has_yielded: bool = False


@dataclass(slots=True)
class Contract:
    policy: Policy
    #: Nothing outside the queue happens in this run: the starvation bound is demanded.
    calm: bool = False
    #: For how long rlqd may pause a job by itself; None: it may not.
    turn_ms: int | None = None
    limits: Limits = field(default_factory=dict[int, tuple[Limit, ...]])
    specs: dict[JobId, JobSpec] = field(default_factory=dict[JobId, JobSpec])
    waiting_since: dict[JobId, Instant] = field(default_factory=dict[JobId, Instant])
    held: set[JobId] = field(default_factory=set[JobId])
    #: What each has yet to see the end of, and those that saw a wrong one.
    follows: dict[JobId, After] = field(default_factory=dict[JobId, After])
    doomed: set[JobId] = field(default_factory=set[JobId])
    paused: set[JobId] = field(default_factory=set[JobId])
    cancelled: set[JobId] = field(default_factory=set[JobId])
    hurried: set[JobId] = field(default_factory=set[JobId])
    final: dict[JobId, Finished] = field(default_factory=dict[JobId, Finished])
    alive: dict[JobId, Attempt] = field(default_factory=dict[JobId, Attempt])
    begun: set[tuple[JobId, int]] = field(default_factory=set[tuple[JobId, int]])
    #: Came to their own end, unasked: run again only if somebody asks.
    done: set[JobId] = field(default_factory=set[JobId])
    #: Stopped by others, as at a shutdown, before they were done; what became of them is due.
    stopped: set[JobId] = field(default_factory=set[JobId])
    #: Somebody asked for another run since the last launch.
    again: set[JobId] = field(default_factory=set[JobId])
    left_at: dict[GpuId, Instant] = field(default_factory=dict[GpuId, Instant])
    facts: MachineFacts | None = None
    closed: bool = False
    bookings: tuple[Booking, ...] = ()
    quiet: tuple[Quiet, ...] = ()
    #: Jobs for which all that was stopped has gone: when they have to run.
    cleared_for: dict[JobId, Instant] = field(default_factory=dict[JobId, Instant])
    #: When a job last started or ended.
    changed_at: Instant = field(default=Instant(0))
    preemptions: int = 0
    #: Launches that met a booking or quiet hours.
    beside_bookings: int = 0
    head: Head | None = None
    launches: int = 0
    #: By user, in seconds of the whole machine.  Not decayed: a run is short beside a half-life.
    used_s: dict[int, float] = field(default_factory=dict[int, float])
    used_until: Instant = field(default=Instant(0))
    #: Jobs that were the first in the queue at some time: the room may be promised to them.
    may_be_promised: set[JobId] = field(default_factory=set[JobId])
    #: Launches that another user's equal job could have had.
    contested: int = 0

    # ---- the stream ----------------------------------------------------------------

    def restarted(self) -> None:
        """The daemon came back: its measurements are gone, promises are not."""
        self.facts = None
        self.closed = False
        for attempt in self.alive.values():
            attempt.read_at.clear()
            attempt.mem_mib_peak = 0
            attempt.gpu_mem_mib_peak = None

    def observe(self, now: Instant, events: Sequence[Event], actions: Sequence[Action]) -> None:
        self._use(now)
        for event in events:
            self._event(now, event)
        asked = self._answered(events, actions)
        # What a request does comes before its answer: take them together, answer first.
        segment: list[Action] = []
        for action in actions:
            segment.append(action)
            if isinstance(action, Accept | Refuse):
                if isinstance(action, Accept):
                    self._accepted(asked[action.request])
                for one in segment:
                    self._action(now, one)
                segment.clear()
        for action in segment:
            self._action(now, action)
        self._turns(now)
        self._preemptions_lead_somewhere(now)
        if any(isinstance(e, Submitted | RequeueRequested) for e in asked.values()):
            self._queued_within_limits()
        self._starvation(now)

    def finish(self) -> None:
        missing = self.specs.keys() - self.final.keys()
        demand(not missing, f"acknowledged, and never ended: {sorted(missing)[:5]}")
        demand(not self.alive, f"ended, and processes live on: {list(self.alive)[:5]}")

    # ---- events --------------------------------------------------------------------

    def _event(self, now: Instant, event: Event) -> None:
        match event:
            case MachineSampled(facts=facts):
                self.facts = facts
                for job_id, measured in facts.jobs:
                    self._measured(job_id, measured, facts.taken_at)
            case AdmissionSet(reason=reason):
                self.closed = bool(reason)
            case CalendarSet(bookings=bookings, quiet=quiet):
                self.bookings, self.quiet = bookings, quiet
            case ProcessStarted(job_id=job_id, attempt=number, pid=pid):
                if attempt := self._attempt(job_id, number):
                    if attempt.pid is None and attempt.spec.time_limit_ms is not None:
                        attempt.ends_at = Instant(
                            now + attempt.spec.time_limit_ms + attempt.spec.grace_ms
                        )
                    attempt.pid = pid
            case (
                ProcessExited(job_id=job_id, attempt=number)
                | ProcessLost(job_id=job_id, attempt=number)
                | LaunchFailed(job_id=job_id, attempt=number)
                | LaunchVoided(job_id=job_id, attempt=number)
            ):
                if attempt := self._attempt(job_id, number):
                    del self.alive[job_id]
                    self.changed_at = now
                    by = attempt.preempted_by
                    if by is not None and all(a.preempted_by != by for a in self.alive.values()):
                        self.cleared_for[by] = Instant(now + SLACK_MS)
                    if isinstance(event, ProcessExited) and attempt.warned_at is None:
                        is_stopped = event.exit.stopped_by_others and event.exit.code != 0
                        (self.stopped if is_stopped else self.done).add(job_id)
                    for gpu in attempt.placement.gpus:
                        self.left_at[gpu] = now
            case _:
                pass

    def _attempt(self, job_id: JobId, number: int) -> Attempt | None:
        attempt = self.alive.get(job_id)
        return attempt if attempt is not None and attempt.number == number else None

    def _measured(self, job_id: JobId, facts: JobFacts, at: Instant) -> None:
        attempt = self.alive.get(job_id)
        if attempt is None or not attempt.running:
            return
        attempt.read_at.append(at)
        attempt.told_end = None if facts.left_ms is None else Instant(at + facts.left_ms)
        attempt.mem_mib_peak = max(attempt.mem_mib_peak, facts.mem_mib)
        known = [s.mem_mib for _, s in facts.gpus if s.mem_mib is not None]
        if known:
            attempt.gpu_mem_mib_peak = max(attempt.gpu_mem_mib_peak or 0, *known)

    # ---- requests and their answers ------------------------------------------------

    def _answered(self, events: Sequence[Event], actions: Sequence[Action]) -> dict[int, Event]:
        """The requests by number, each of which has exactly one answer."""
        asked: dict[int, Event] = {}
        for event in events:
            match event:
                case (
                    Submitted()
                    | CancelRequested()
                    | HoldRequested()
                    | ReleaseRequested()
                    | PrioritySet()
                    | PauseRequested()
                    | ResumeRequested()
                    | RequeueRequested()
                ):
                    asked[event.request] = event
                case _:
                    pass
        answers = Counter(a.request for a in actions if isinstance(a, Accept | Refuse))
        demand(answers == Counter(asked.keys()), f"asked {list(asked)}, answered {answers}")
        return asked

    def _accepted(self, event: Event) -> None:
        match event:
            case Submitted(jobs=jobs, held=held, after=after):
                for job_id, spec in jobs:
                    demand(job_id not in self.specs, f"one id for two jobs: {job_id}")
                    self.specs[job_id] = spec
                    self.waiting_since[job_id] = event.now
                    if held:
                        self.held.add(job_id)
                    if after is not None:
                        self.follows[job_id] = after
                        for one in after.job_ids:
                            if (end := self.final.get(one)) is not None:
                                self._followed_ended(one, end.outcome)
            case CancelRequested(job_id=job_id, at_once=at_once):
                self.cancelled.add(job_id)
                if at_once:
                    self.hurried.add(job_id)
            case HoldRequested(job_id=job_id):
                self.held.add(job_id)
            case ReleaseRequested(job_id=job_id):
                self.held.discard(job_id)
            case PrioritySet(job_id=job_id, priority=priority):
                spec = replace(self.specs[job_id], priority=priority)
                self.specs[job_id] = spec
                if attempt := self.alive.get(job_id):
                    attempt.spec = spec
            case PauseRequested(job_id=job_id):
                self.paused.add(job_id)
                if attempt := self.alive.get(job_id):
                    attempt.backed_off_at = None
            case ResumeRequested(job_id=job_id):
                attempt = self.alive.get(job_id)
                if attempt and (job_id in self.paused or attempt.backed_off_at is not None):
                    attempt.stays = True
                self.paused.discard(job_id)
            case RequeueRequested(job_id=job_id):
                self.again.add(job_id)
                # Of a finished job: it lives again.
                if self.final.pop(job_id, None) is not None:
                    self.doomed.discard(job_id)
                    self.cancelled.discard(job_id)
                    self.hurried.discard(job_id)
            case _:
                pass

    # ---- actions -------------------------------------------------------------------

    def _action(self, now: Instant, action: Action) -> None:
        match action:
            case Persist(job=job):
                self._persisted(now, job)
            case Launch(job_id=job_id, attempt=number, placement=placement, spec=spec):
                self._launched(now, job_id, number, placement, spec)
            case Terminate(job_id=job_id, attempt=number):
                attempt = self._signalled(job_id, number, "SIGTERM")
                if attempt.warned_at is None:
                    attempt.warned_at = now
                attempt.paused = False
            case Kill(job_id=job_id, attempt=number):
                attempt = self._signalled(job_id, number, "SIGKILL")
                if attempt.warned_at is None:
                    demand(attempt.pid is None, f"SIGKILL without SIGTERM: {job_id}")
                    return  # it hangs in its start, and there was nobody to warn
                in_time = now - attempt.warned_at >= attempt.spec.grace_ms
                demand(in_time or job_id in self.hurried, f"SIGKILL within the grace: {job_id}")
            case Freeze(job_id=job_id, attempt=number, on=on):
                attempt = self._signalled(job_id, number, "SIGSTOP or SIGCONT")
                if on:
                    demand(attempt.warned_at is None, f"stopped while it is to end: {job_id}")
                    if job_id not in self.paused and attempt.backed_off_at is None:
                        self._backs_off(now, attempt)
                else:
                    demand(job_id not in self.paused, f"woken, and nobody resumed it: {job_id}")
                    if attempt.backed_off_at is not None:
                        attempt.backed_off_at = None
                        attempt.rested_at = now
                attempt.paused = on
            case SampleNow() | Learn() | Account() | Accept() | Refuse():
                pass

    def _backs_off(self, now: Instant, attempt: Attempt) -> None:
        """rlqd pauses a job by itself."""
        job_id, spec = attempt.job_id, attempt.spec
        demand(self.turn_ms is not None, f"stopped, and nobody paused it: {job_id}")
        assert self.turn_ms is not None
        alone = spec.exclusive or spec.interactive or spec.unguarded or attempt.stays
        demand(not alone, f"paused by rlqd, which must let it run: {job_id}")
        others = [
            a
            for a in self.alive.values()
            if a is not attempt and a.running and a.placement.gpus == attempt.placement.gpus
        ]
        demand(bool(others), f"paused by rlqd, and nobody gains by it: {job_id}")
        early = attempt.rested_at is not None and now - attempt.rested_at < self.turn_ms
        demand(not early, f"paused by rlqd again before it has run for a turn: {job_id}")
        attempt.backed_off_at = now

    def _turns(self, now: Instant) -> None:
        for attempt in self.alive.values():
            at = attempt.backed_off_at
            if at is not None and attempt.warned_at is None:
                assert self.turn_ms is not None
                in_time = now - at < self.turn_ms
                demand(in_time, f"paused by rlqd for longer than a turn: {attempt.job_id}")

    def _signalled(self, job_id: JobId, number: int, what: str) -> Attempt:
        attempt = self._attempt(job_id, number)
        demand(attempt is not None, f"{what} to an attempt that is over: {job_id}/{number}")
        assert attempt is not None
        return attempt

    def _persisted(self, now: Instant, job: Job) -> None:
        demand(job.id in self.specs, f"persisted, and nobody submitted it: {job.id}")
        demand(job.spec == self.specs[job.id], f"changed its spec: {job.id}")
        demand(job.id not in self.final, f"final is final: {self.final.get(job.id)} {job}")
        if attempt := self.alive.get(job.id):
            attempt.running = isinstance(job.state, Running)
            attempt.runs(now, on=attempt.running)
            if (
                isinstance(job.state, Completing)
                and job.state.cause is Cause.PREEMPTED
                and attempt.preempted_by is None
            ):
                self._preempted(now, attempt, job.state.preempted_by)
            is_over = isinstance(job.state, Completing) and job.state.cause is Cause.TIMED_OUT
            if is_over and attempt.spec.time_limit_ms is not None and not attempt.is_over:
                attempt.is_over = True
                in_time = attempt.ran_ms >= attempt.spec.time_limit_ms
                demand(in_time, f"its time limit counted while it was paused: {job.id}")
            attempt.stopping = isinstance(job.state, Completing)
        if job.id in self.stopped and not isinstance(job.state, Completing):
            self._was_stopped(job)
        match job.state:
            case Finished():
                demand(job.id not in self.alive, f"ended with a live process: {job.id}")
                self.final[job.id] = job.state
                if job.id in self.doomed:
                    demand(job.state.outcome is Outcome.CANCELLED, f"followed in vain: {job.id}")
                self.follows.pop(job.id, None)
                self._followed_ended(job.id, job.state.outcome)
                self.waiting_since.pop(job.id, None)
                self.held.discard(job.id)
                self.paused.discard(job.id)
            case Pending(since=since):
                demand(job.id not in self.alive, f"queued with a live process: {job.id}")
                if job.id in self.cancelled:
                    raise ContractViolation(f"queued after its cancel was confirmed: {job.id}")
                self.waiting_since[job.id] = since
                self.paused.discard(job.id)
            case _:
                self.waiting_since.pop(job.id, None)

    def _was_stopped(self, job: Job) -> None:
        self.stopped.discard(job.id)
        if job.id in self.cancelled or job.id in self.again:
            return
        if job.spec.requeue:
            demand(isinstance(job.state, Pending), f"stopped by others, not queued again: {job}")
        else:
            is_failed = isinstance(job.state, Finished) and job.state.outcome is Outcome.NODE_FAIL
            demand(is_failed, f"stopped by others, and not the machine's fault: {job}")

    # ---- limits --------------------------------------------------------------------

    def _sharers(self, user: int, limit: Limit) -> set[int]:
        """The users whose jobs count towards this limit of `user`."""
        return {user} | {u for u, mine in self.limits.items() if limit in mine}

    def _queued_within_limits(self) -> None:
        for user, mine in self.limits.items():
            for limit in mine:
                sharers = self._sharers(user, limit)
                queued = [
                    j for j, s in self.specs.items() if s.user in sharers and j not in self.final
                ]
                most = limit.max_submit_jobs
                within = most is None or len(queued) <= most
                demand(within, f"{limit.whose}: {len(queued)} jobs wait or run, not {most}")

    def _within_limits(self, job_id: JobId, spec: JobSpec, gpus: int) -> None:
        """Counted from launches; GPU memory at the least that every job must be counted for."""
        for limit in self.limits.get(spec.user, ()):
            sharers = self._sharers(spec.user, limit)
            theirs = [a for a in self.alive.values() if a.spec.user in sharers]
            gpu_mem_mib = gpus * (spec.gpu_mem_mib or self.policy.gpu_mem_mib_default)
            for one in theirs:
                first = one.spec.gpu_mem_mib or self.policy.gpu_mem_mib_default
                declared, peak = one.spec.gpu_mem_mib, one.gpu_mem_mib_peak
                least = one.floor(self.policy, first, declared, peak)
                gpu_mem_mib += len(one.placement.gpus) * least
            cores = [a.spec.cores or self.policy.cores_default for a in theirs]
            all_cores = sum(cores) + (spec.cores or self.policy.cores_default)
            all_gpus = sum(len(a.placement.gpus) for a in theirs) + gpus
            for what, has, most in (
                ("jobs", len(theirs) + 1, limit.max_jobs),
                ("cores", all_cores, limit.cores),
                ("GPUs", all_gpus if gpus else 0, limit.gpus),
                ("MiB of GPU memory", gpu_mem_mib if gpus else 0, limit.gpu_mem_mib),
            ):
                within = most is None or has <= most
                demand(within, f"job {job_id}: {limit.whose} has {has} {what}, not {most}")

    def _is_at_limit(self, job_id: JobId) -> bool:
        """Its user may start no such job now, so that nothing needs to be kept for it."""
        try:
            spec = self.specs[job_id]
            self._within_limits(job_id, spec, spec.gpus or 0)
        except ContractViolation:
            return True
        return False

    def _followed_ended(self, ended: JobId, outcome: Outcome) -> None:
        for job_id, after in [*self.follows.items()]:
            if ended not in after.job_ids:
                continue
            if outcome is not Outcome.COMPLETED and not after.any_end:
                self.doomed.add(job_id)
            elif left := tuple(i for i in after.job_ids if i != ended):
                self.follows[job_id] = replace(after, job_ids=left)
            else:
                del self.follows[job_id]

    # ---- preemption ----------------------------------------------------------------

    def _preempted(self, now: Instant, attempt: Attempt, by: JobId | None) -> None:
        job_id = attempt.job_id
        demand(self.policy.preemption, f"preempted, which nobody has configured: {job_id}")
        demand(attempt.spec.preemptible, f"preempted, and never said to resume: {job_id}")
        is_waiting = by in self.waiting_since and by not in self.held
        demand(is_waiting, f"preempted for a job that does not wait: {job_id} for {by}")
        assert by is not None
        is_higher = self.specs[by].priority > attempt.spec.priority
        demand(is_higher, f"preempted for one of no higher priority: {job_id} for {by}")
        is_exempt = attempt.number > 1 and attempt.ran_ms < self.policy.preempt_exempt_ms
        demand(not is_exempt, f"preempted again after {attempt.ran_ms} ms: {job_id}")
        others = [a.preempted_at for a in self.alive.values() if a.preempted_by == by]
        earlier = [at for at in others if at is not None]
        if self.calm and earlier:
            # What was stopped before was to be enough; so it is unless something has changed.
            is_news = min(earlier) == now or self.changed_at > min(earlier)
            demand(is_news, f"preempted while others make room already: {job_id} for {by}")
        attempt.preempted_by, attempt.preempted_at = by, now
        self.preemptions += 1

    def _preemptions_lead_somewhere(self, now: Instant) -> None:
        if not self.calm or self.closed:
            self.cleared_for.clear()
            return
        for job_id, due in list(self.cleared_for.items()):
            if job_id not in self.waiting_since or self._is_outranked(job_id):
                del self.cleared_for[job_id]
                continue
            if any(a.warned_at is not None for a in self.alive.values()):
                # Who is on the way out, for whatever reason, was counted as gone.
                self.cleared_for[job_id] = Instant(now + SLACK_MS)
                continue
            demand(now <= due, f"jobs were preempted for {job_id}, which did not start by {due}")

    def _is_outranked(self, job_id: JobId) -> bool:
        """Somebody before it has come meanwhile, and may have taken its place."""
        mine = (-self.specs[job_id].priority, job_id)
        others = [*self.waiting_since, *(a.job_id for a in self.alive.values())]
        return any((-self.specs[i].priority, i) < mine for i in others)

    # ---- launches: an independent measure of room ----------------------------------

    def _launched(
        self, now: Instant, job_id: JobId, number: int, placement: Placement, spec: JobSpec
    ) -> None:
        demand(job_id in self.specs, f"launched, and nobody submitted it: {job_id}")
        demand(spec == self.specs[job_id], f"launched with another spec: {job_id}")
        demand(job_id not in self.cancelled, f"launched after its cancel: {job_id}")
        demand(job_id not in self.final, f"launched after its end: {job_id}")
        demand(job_id not in self.held, f"launched while held: {job_id}")
        demand(job_id not in self.follows, f"launched before what it follows ended: {job_id}")
        demand(job_id not in self.doomed, f"launched though what it follows failed: {job_id}")
        demand(not self.closed, f"launched while nothing new may start: {job_id}")
        twice = job_id in self.done and job_id not in self.again
        demand(not twice, f"ran to its end, and is run again: {job_id}")
        demand((job_id, number) not in self.begun, f"launched twice: {job_id}/{number}")
        demand(job_id not in self.alive, f"two live processes of one job: {job_id}")
        facts = self.facts
        demand(facts is not None, f"launched on a machine never read: {job_id}")
        assert facts is not None
        fresh = now - facts.taken_at <= self.policy.stale_ms
        demand(fresh, f"launched on an old reading: {job_id}")
        self._within_limits(job_id, spec, len(placement.gpus))
        self._fits_host(job_id, spec, placement, facts)
        gpus = {gpu.id: gpu for gpu in facts.gpus}
        wanted = spec.gpus if spec.gpus is not None else int(bool(gpus or facts.gpus_problem))
        demand(len(set(placement.gpus)) == len(placement.gpus) == wanted, f"GPUs: {placement}")
        for gpu_id in placement.gpus:
            demand(gpu_id in gpus, f"launched on a GPU that is not there: {job_id}")
            self._fits_gpu(now, job_id, spec, gpus[gpu_id], facts)
        self._exclusive(job_id, spec, placement)
        self._leaves_what_is_booked(now, job_id, spec, placement, facts)
        self._keeps_quiet(now, job_id, spec, placement, facts)
        self._claims()
        self._in_turn(job_id, spec)
        self.begun.add((job_id, number))
        self.done.discard(job_id)
        self.again.discard(job_id)
        self.launches += 1
        self.changed_at = now
        self.cleared_for.pop(job_id, None)
        ends_at = None
        if spec.time_limit_ms is not None:
            ends_at = Instant(now + spec.time_limit_ms + spec.grace_ms)
        self.alive[job_id] = Attempt(
            job_id, number, spec, placement, launched_at=now, ends_at=ends_at
        )
        self._claims()
        head = self.head
        if (
            head is not None
            and head.job_id != job_id
            and job_id in self.may_be_promised
            and not head.has_yielded
        ):
            self.head = Head(head.job_id, *self._those_that_run(now), has_yielded=True)

    def _fits_host(
        self, job_id: JobId, spec: JobSpec, placement: Placement, facts: MachineFacts
    ) -> None:
        policy = self.policy
        there = {core.number for core in facts.cores}
        mine = set(placement.cores)
        taken = {c for a in self.alive.values() for c in a.placement.cores if c in there}
        demand(len(mine) == len(placement.cores), f"a core given twice: {placement}")
        demand(len(mine) == (spec.cores or policy.cores_default), f"cores: {placement}")
        demand(mine <= there, f"cores this machine has not: {sorted(mine - there)}")
        demand(not mine & taken, f"cores of another job: {sorted(mine & taken)}")
        outside = (facts.millicores_outside + 500) // 1000 if policy.outside_cpu_counts else 0
        usable = max(
            len(there) - policy.cores_reserve - outside, min(policy.cores_minimum, len(there))
        )
        demand(len(mine) + len(taken) <= usable, f"job {job_id}: cores that outsiders keep busy")
        uses = dict(facts.jobs)
        growth = 0
        for attempt in self.alive.values():
            now_uses = uses[attempt.job_id].mem_mib if attempt.job_id in uses else 0
            first = attempt.spec.mem_mib or policy.mem_mib_default
            floor = attempt.floor(policy, first, attempt.spec.mem_mib, attempt.mem_mib_peak)
            growth += max(0, floor - now_uses)
        need = spec.mem_mib or policy.mem_mib_default
        left = facts.mem_mib_available - policy.mem_mib_reserve - growth - need
        demand(left >= 0, f"job {job_id}: {-left} MiB of host memory too many")

    def _fits_gpu(
        self, now: Instant, job_id: JobId, spec: JobSpec, gpu: GpuFacts, facts: MachineFacts
    ) -> None:
        policy = self.policy
        known = not gpu.problem and gpu.mem_mib_total is not None
        demand(known, f"job {job_id}: launched on {gpu.id}, which is unknown")
        assert gpu.mem_mib_free is not None, f"job {job_id}: memory of {gpu.id} is unknown"
        assert gpu.sm_pct is not None, f"job {job_id}: utilisation of {gpu.id} is unknown"
        age = now - facts.gpus_taken_at
        demand(age <= policy.stale_ms, f"job {job_id}: the reading of {gpu.id} is {age} ms old")
        read_since = facts.gpus_taken_at >= self.left_at.get(gpu.id, 0)
        demand(read_since, f"job {job_id}: {gpu.id} was not read since a job left it")
        growth = 0
        sm_charged = 0
        sm_ours = 0
        here = [a for a in self.alive.values() if gpu.id in a.placement.gpus]
        uses = dict(facts.jobs)
        for attempt in here:
            shares = dict(uses[attempt.job_id].gpus) if attempt.job_id in uses else {}
            share = shares.get(gpu.id)
            first = attempt.spec.gpu_mem_mib or policy.gpu_mem_mib_default
            floor = attempt.floor(
                policy, first, attempt.spec.gpu_mem_mib, attempt.gpu_mem_mib_peak
            )
            mem_mib = 0 if share is None or share.mem_mib is None else share.mem_mib
            growth += max(0, floor - mem_mib)
            declared = attempt.spec.sm_pct
            if not attempt.may_have_settled(policy):
                declared = declared or policy.sm_pct_default
            sm_charged += declared or 0
            # What a job started since the reading took of the SM is no part of the reading.
            if attempt.job_id in uses:
                hidden = share is None or share.sm_pct is None
                sm_ours += 100 if hidden or share is None else share.sm_pct or 0
        need = spec.gpu_mem_mib or policy.gpu_mem_mib_default
        left = gpu.mem_mib_free - policy.gpu_mem_mib_reserve - growth - need
        demand(left >= 0, f"job {job_id}: {-left} MiB of GPU memory too many on {gpu.id}")
        outside = max(0, gpu.sm_pct - sm_ours)
        sm_left = (
            policy.sm_pct_limit - outside - sm_charged - (spec.sm_pct or policy.sm_pct_default)
        )
        demand(sm_left >= 0, f"job {job_id}: {-sm_left}% of {gpu.id} too many")
        limit = policy.jobs_per_gpu_max
        demand(limit == 0 or len(here) < limit, f"job {job_id}: too many jobs on {gpu.id}")

    def _exclusive(self, job_id: JobId, spec: JobSpec, placement: Placement) -> None:
        for other in self.alive.values():
            shared = set(placement.gpus) & set(other.placement.gpus)
            if spec.exclusive and placement.gpus:
                demand(not shared, f"job {job_id} wants its GPU to itself")
            elif spec.exclusive:
                demand(False, f"job {job_id} wants the machine to itself")
            if other.spec.exclusive and other.placement.gpus:
                demand(not shared, f"job {other.job_id} has its GPU to itself")
            elif other.spec.exclusive:
                demand(False, f"job {other.job_id} has the machine to itself")

    # ---- bookings ------------------------------------------------------------------

    def _leaves_what_is_booked(
        self, now: Instant, job_id: JobId, spec: JobSpec, placement: Placement, facts: MachineFacts
    ) -> None:
        """No stranger starts on booked capacity, nor before it if it may still be there."""
        sure_end = None
        if spec.time_limit_ms is not None:
            sure_end = now + spec.time_limit_ms + spec.grace_ms
        met = [
            b
            for b in self.bookings
            if spec.user not in b.users
            and b.ends_at > now
            and (sure_end is None or sure_end > b.starts_at)
        ]
        for booking in met:
            self.beside_bookings += 1
            demand(not booking.whole, f"job {job_id}: all of the machine is booked: {booking}")
            on_it = set(placement.gpus) & booking.gpus
            demand(not on_it, f"job {job_id}: a booked GPU: {booking}")
            alone = spec.exclusive and not placement.gpus
            demand(not alone, f"job {job_id}: a machine of which a part is booked: {booking}")
            self._leaves_amounts(now, job_id, spec, placement, facts, booking, met)

    def _leaves_amounts(
        self,
        now: Instant,
        job_id: JobId,
        spec: JobSpec,
        placement: Placement,
        facts: MachineFacts,
        booking: Booking,
        met: Sequence[Booking],
    ) -> None:
        policy = self.policy
        moment = max(now, booking.starts_at)
        there = [b for b in met if b.starts_at <= moment < b.ends_at]
        gone = [
            a
            for a in self.alive.values()
            if a.stopping or (moment > now and a.ends_at is not None and a.ends_at <= moment)
        ]
        stay = [a for a in self.alive.values() if a not in gone]
        cores_kept = mem_kept = 0
        for other in there:
            theirs = [a for a in self.alive.values() if a.spec.user in other.users]
            cores_kept += max(0, other.cores - sum(len(a.placement.cores) for a in theirs))
            mem_kept += max(0, other.mem_mib - sum(a.mem_mib_most(policy) for a in theirs))
        total = max(len(facts.cores) - policy.cores_reserve, policy.cores_minimum)
        used = sum(len(a.placement.cores) for a in stay) + len(placement.cores)
        if cores_kept:
            demand(used + cores_kept <= total, f"job {job_id}: booked cores at {moment}")
        uses = dict(facts.jobs)
        growth = 0
        for attempt in stay:
            now_uses = uses[attempt.job_id].mem_mib if attempt.job_id in uses else 0
            first = attempt.spec.mem_mib or policy.mem_mib_default
            floor = attempt.floor(policy, first, attempt.spec.mem_mib, attempt.mem_mib_peak)
            growth += max(0, floor - now_uses)
        left = facts.mem_mib_available - policy.mem_mib_reserve - growth
        left += sum(a.mem_mib_most(policy) for a in gone)
        need = spec.mem_mib or policy.mem_mib_default
        if mem_kept:
            demand(left - need >= mem_kept, f"job {job_id}: booked host memory at {moment}")

    def _keeps_quiet(
        self, now: Instant, job_id: JobId, spec: JobSpec, placement: Placement, facts: MachineFacts
    ) -> None:
        for hours in self.quiet:
            if now < hours.starts_at or (hours.ends_at is not None and hours.ends_at <= now):
                continue
            self.beside_bookings += 1
            if hours.gpus is not None:
                lowest = sorted(facts.gpus, key=lambda g: g.index)[: hours.gpus]
                strays = set(placement.gpus) - {g.id for g in lowest}
                demand(not strays, f"job {job_id}: {strays} in quiet hours")
            if hours.cores is not None:
                used = sum(len(a.placement.cores) for a in self.alive.values())
                within = used + len(placement.cores) <= hours.cores
                demand(within, f"job {job_id}: more cores than in quiet hours")
            if hours.sm_pct is not None and placement.gpus:
                share = spec.sm_pct or self.policy.sm_pct_default
                demand(share <= hours.sm_pct, f"job {job_id}: more of a GPU than in quiet hours")

    # ---- fair share ----------------------------------------------------------------

    def _use(self, now: Instant) -> None:
        for attempt in self.alive.values():
            user, share = attempt.spec.user, self._share(attempt.spec, attempt.placement)
            self.used_s[user] = self.used_s.get(user, 0) + share * (now - self.used_until) / 1000
        self.used_until = now

    def _share(self, spec: JobSpec, placement: Placement) -> float:
        """Of the machine, by what was asked for: the largest of its shares."""
        facts = self.facts
        if facts is None:
            return 0.0
        mem = (spec.mem_mib or self.policy.mem_mib_default) / facts.mem_mib_total
        shares = [len(placement.cores) / len(facts.cores), mem]
        totals = {gpu.id: gpu.mem_mib_total for gpu in facts.gpus}
        on_gpus = 0.0
        for gpu in placement.gpus:
            gpu_mem = (spec.gpu_mem_mib or self.policy.gpu_mem_mib_default) / (
                totals.get(gpu) or 10**9
            )
            sm = (spec.sm_pct or self.policy.sm_pct_default) / 100
            on_gpus += 1.0 if spec.exclusive else max(gpu_mem, sm)
        shares.append(on_gpus / max(1, len(totals)))
        if spec.exclusive and not placement.gpus:
            shares.append(1.0)
        return max(shares)

    def _had(self, user: int) -> float:
        """Used and held, in seconds of the whole machine."""
        held = sum(
            self._share(a.spec, a.placement) for a in self.alive.values() if a.spec.user == user
        )
        return self.used_s.get(user, 0.0) + HELD_COUNTS_AS_S * held

    def _eligible(self) -> set[JobId]:
        return self.waiting_since.keys() - self.held - self.follows.keys()

    def _first_of_each(self) -> dict[int, JobId]:
        """The first waiting job of each user."""
        first: dict[int, JobId] = {}
        for job_id in sorted(
            (j for j in self._eligible() if not self._is_at_limit(j)),
            key=lambda j: (-self.specs[j].priority, j),
        ):
            first.setdefault(self.specs[job_id].user, job_id)
        return first

    def _in_turn(self, job_id: JobId, spec: JobSpec) -> None:
        """Of two jobs that are alike, the one whose user has clearly had less goes first."""
        if not self.calm or job_id in self.may_be_promised:
            return
        for other_id in self._eligible():
            other = self.specs[other_id]
            if other.user == spec.user or other.user in self.limits:
                continue
            if replace(other, user=spec.user) == spec:
                self.contested += 1
                mine, theirs = self._had(spec.user), self._had(other.user)
                demand(
                    mine <= CLEARLY * theirs + 1.0,
                    f"job {job_id} starts before job {other_id}, which is alike, though its user"
                    f" has had {mine:.0f} s of the machine and the other {theirs:.0f} s",
                )

    # ---- starvation ----------------------------------------------------------------

    def _starvation(self, now: Instant) -> None:
        """Once the head is due, it runs when those that ran before it have gone.

        What is started later must have ended by then or leave room beside it.  A job that ends
        early counts for as long as was announced, by its time limit or its own progress: a
        backfilled job was promised that long.

        The head is the first job of the user who has clearly had least.  Another one may have
        been promised the room before it became so: that one goes first.
        """
        if not self.calm or self.closed:
            return
        head_id = self._head_id()
        if head_id is None:
            self.head = None
            return
        if self.head is None or self.head.job_id != head_id:
            self.head = None
            if now - self.waiting_since[head_id] >= self.policy.reserve_after_ms:
                self.head = Head(head_id, *self._those_that_run(now))
            return
        self.head.before_it &= {(a.job_id, a.number) for a in self.alive.values()}
        # One that ranks before it was at a limit, and no longer is: it may go first, too.
        head = self.specs[head_id]
        for a in self.alive.values():
            ranks = (-a.spec.priority, a.job_id) < (-head.priority, head_id)
            if (
                a.launched_at == now
                and a.spec.user in self.limits
                and (ranks or a.spec.user != head.user)
            ):
                self.head.before_it.add((a.job_id, a.number))
                self.head.deadline = max(self.head.deadline, a.ends_at or now)
        if self.head.before_it:
            told = [a.promised_end() for a in self.alive.values() if a.told_end is not None]
            self.head.deadline = max(self.head.deadline, now, *[at for at in told if at])
            if self.facts is not None and len(self.facts.gpus) > 1:
                # Where it is to start may change for a GPU whose end is known by then.
                ends = [a.ends_at for a in self.alive.values() if a.ends_at is not None]
                self.head.deadline = max(self.head.deadline, *ends, now)
            return
        demand(
            now <= self.head.deadline + SLACK_MS,
            f"job {head_id} is held up by jobs that came after it: "
            f"{_names(self.alive.values())} run at {now}, it was due by {self.head.deadline}",
        )

    def _those_that_run(self, now: Instant) -> tuple[set[tuple[JobId, int]], Instant]:
        ends = [a.ends_at for a in self.alive.values() if a.ends_at is not None]
        return {(a.job_id, a.number) for a in self.alive.values()}, max(ends, default=now)

    def _head_id(self) -> JobId | None:
        """None: nobody waits, or it is not clear who is first."""
        first = self._claims()
        return first[0] if len(first) == 1 else None

    def _claims(self) -> list[JobId]:
        """Whose job may be the first in the queue at this moment."""
        first = self._first_of_each()
        had = {user: self._had(user) for user in first}
        least = min(had.values(), default=0.0)
        claims = [first[user] for user in first if had[user] <= CLEARLY * least + 1.0]
        self.may_be_promised.update(claims)
        return claims


def _names(attempts: Iterable[Attempt]) -> str:
    return ", ".join(f"{a.job_id}/{a.number} (ends {a.ends_at})" for a in attempts)
