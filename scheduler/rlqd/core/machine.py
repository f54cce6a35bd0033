"""The state machine: `step(events) -> actions`.  Every transition of a job is in this file.

The rules, on top:

    PENDING      --admitted-->          CONFIGURING   Launch
    PENDING      --what it is to follow did not complete-->  CANCELLED
    CONFIGURING  --process started-->   RUNNING
    CONFIGURING  --launch failed-->     PENDING (a passing reason, a few times) or LAUNCH_FAILED
    CONFIGURING  --launch voided-->     PENDING       proved never to have run
    RUNNING      --pause/resume-->      SUSPENDED / RUNNING   Freeze
    RUNNING      --fewer were faster--> SUSPENDED, and its turn later RUNNING (core/backoff.py)
    RUNNING      --cancel, time limit, requeue-->  COMPLETING   Terminate, after the grace Kill
    RUNNING      --a higher priority--> COMPLETING, and PENDING again (core/preemption.py)
    RUNNING      --exited-->            COMPLETED, FAILED or OUT_OF_MEMORY
    RUNNING      --lost, or stopped by others as at a shutdown-->  NODE_FAIL, or PENDING with
                                        --requeue
    COMPLETING   --exited or lost-->    what it was stopped for: CANCELLED, TIMEOUT, PENDING

A step takes all facts known at this moment and decides once.  A job that has ended leaves
memory; a late word about it, or about an attempt that was given up on, is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from rlqd.core import backoff
from rlqd.core import policy as policies
from rlqd.core.calendar import Calendar, never_fits
from rlqd.core.charge import Footprint, charge_now, need_of
from rlqd.core.crowd import Crowd, Device
from rlqd.core.fairness import Capacity, Fairness, Ranking, Rate
from rlqd.core.guard import Guard, Learned
from rlqd.core.learned import LearnedPeak, Peaks
from rlqd.core.limits import Standing, in_words, never_within, too_many_submitted
from rlqd.core.model import (
    Accept,
    Account,
    Action,
    AdmissionSet,
    After,
    BackedOff,
    CalendarSet,
    CancelRequested,
    Cause,
    Charge,
    Completing,
    Event,
    Exit,
    Finished,
    Freeze,
    GpuId,
    HoldRequested,
    Instant,
    Job,
    JobFacts,
    JobId,
    JobRequest,
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
    ProcessEvent,
    ProcessExited,
    ProcessLost,
    ProcessStarted,
    ProgramForgotten,
    Refuse,
    ReleaseRequested,
    RequeueRequested,
    ResumeRequested,
    Running,
    SampleNow,
    Starting,
    State,
    Submitted,
    Suspended,
    Terminate,
    Tick,
)
from rlqd.core.policy import Plan
from rlqd.core.queue import WaitingQueue
from rlqd.core.room import Holding, Prediction, Room, is_impossible, measure
from rlqd.core.states import (
    KILL_AGAIN_MS,
    SEVERAL,
    backed_off_by,
    deadline_of,
    device_of,
    end_of,
    is_in_line,
    known_end,
    on_this_clock,
    placement_of,
    running_since,
)

#: How far off a prediction from a job's progress is taken to be, either way.
PREDICTION_MARGIN_PCT = 10
#: Specs of jobs that are gone are swept out once they are more than the others and this.
SPECS_SPARE = 1_000


@dataclass(frozen=True, slots=True)
class _No:
    message: str
    hint: str
    impossible: bool = False


@dataclass(slots=True)
class Scheduler:
    """Owns all jobs that have not ended.  Mutated only by `step`."""

    policy: Policy = field(default_factory=Policy)
    jobs: dict[JobId, Job] = field(default_factory=dict[JobId, Job])
    facts: MachineFacts | None = None
    now: Instant = field(default=Instant(0))
    #: Why nothing new may start; "": all is well.
    closed: str = ""
    #: What is booked, and when the queue may use only a share.
    calendar: Calendar = field(default_factory=Calendar)
    footprints: dict[JobId, Footprint] = field(default_factory=dict[JobId, Footprint])
    guard: Guard = field(default_factory=Guard)
    peaks: Peaks = field(default_factory=Peaks)
    #: Replaced as a whole, never changed.
    limits: Limits = field(default_factory=dict[int, tuple[Limit, ...]])
    fairness: Fairness = field(default_factory=Fairness)
    #: The blocked job that has the reservation, as of the last pass.
    promised: JobId | None = None
    _queue: WaitingQueue = field(default_factory=WaitingQueue)
    #: Everything but Pending.
    _active: set[JobId] = field(default_factory=set[JobId])
    #: Pending, not held, but not yet due.
    _delayed: set[JobId] = field(default_factory=set[JobId])
    #: Jobs that wait or run, by user.
    _submitted_by: Counter[int] = field(default_factory=Counter[int])
    #: By job, those that wait for its end.
    _followers: dict[JobId, set[JobId]] = field(default_factory=dict[JobId, set[JobId]])
    #: What ended in this step, or was gone after a restart: their followers are to be told.
    _ended: dict[JobId, Outcome] = field(default_factory=dict[JobId, Outcome])
    #: A GPU that a job has left admits nothing until it was read after this.  Kept for ever,
    #: one number per GPU: an older reading may still come late.
    _gpus_fresh_after: dict[GpuId, Instant] = field(default_factory=dict[GpuId, Instant])
    #: Which GPUs were left before this is not known: a reading from before it does not count.
    _born_at: Instant = field(default=Instant(0))
    #: Equal specs are one object, and a waiting job costs little memory.
    _specs: dict[JobSpec, JobSpec] = field(default_factory=dict[JobSpec, JobSpec])
    _reserve_at: Instant | None = None
    _out: list[Action] = field(default_factory=list[Action])

    @classmethod
    def restore(cls, rows: Iterable[Job], policy: Policy, now: Instant) -> Scheduler:
        """Rebuild after a restart from the rows of jobs that have not ended.

        The shell then reports, for each job that may have a process, what became of it:
        ProcessStarted, ProcessExited, ProcessLost or LaunchVoided.

        The shell's clock may have begun anew (a reboot), so a moment that lies further ahead
        than it ever can is of the old clock.  And the time that no daemon was there to hear of
        a start is not counted against it.
        """
        scheduler = cls(policy=policy, now=now, _born_at=now)
        for job in rows:
            assert not isinstance(job.state, Finished), job
            scheduler._enter(replace(job, state=on_this_clock(now, job, policy)))
        # An end and what it means to followers are one commit, so this is a damaged row.
        gone = scheduler._followers.keys() - scheduler.jobs.keys()
        scheduler._ended = dict.fromkeys(sorted(gone), Outcome.NODE_FAIL)
        return scheduler

    def step(self, now: Instant, events: Iterable[Event] = ()) -> list[Action]:
        """Take facts in, return what the shell must do, in order."""
        assert now >= self.now, "the shell's clock ran backwards"
        self.now = now
        assert not self._out
        was_read = False
        for event in events:
            self._apply(event)
            was_read |= isinstance(event, MachineSampled)
        self._expire()
        self._back_off(was_read=was_read)
        self._tell_followers()
        self.fairness.settle(now, self.facts)
        self._start_what_fits()
        learned: list[Learned | LearnedPeak] = []
        learned += self.guard.take_changes()
        learned += self.peaks.take_changes()
        if learned:
            self._out.append(Learn(tuple(learned)))
        if accounted := self.fairness.take_changes(now):
            self._out.append(Account(accounted))
        out, self._out = self._out, []
        return out

    def next_wakeup(self) -> Instant | None:
        """When to step again if nothing happens before, or None.  Strictly after `now`."""
        times = [deadline_of(self.jobs[i].state) for i in (*self._active, *self._delayed)]
        times += (self._reserve_at, self.calendar.next_edge(self.now))
        return min((at for at in times if at is not None and at > self.now), default=None)

    # ---- questions -----------------------------------------------------------------

    def holdings(self) -> list[Holding]:
        """Derived from job states, so that it cannot drift from them; by job id."""
        measured = dict(self.facts.jobs) if self.facts is not None else {}
        return [
            self._holding(self.jobs[job_id], measured.get(job_id))
            for job_id in sorted(self._active)
        ]

    def _holding(self, job: Job, measured: JobFacts | None = None) -> Holding:
        placement = placement_of(job.state)
        assert placement is not None
        return Holding(
            job_id=job.id,
            user=job.spec.user,
            placement=placement,
            charge=self.charge_of(job),
            exclusive=job.spec.exclusive,
            signature=policies.counted_as(job.spec, placement, self.policy),
            since=running_since(self.now, job),
            ends_at=known_end(self.now, job),
            is_paused=isinstance(job.state, Suspended),
            backed_off=backed_off_by(job),
            prediction=self._prediction(job, measured),
            yields_above=self._yields_above(job),
            is_leaving=isinstance(job.state, Completing),
        )

    def _yields_above(self, job: Job) -> int | None:
        if not (self.policy.preemption and job.spec.preemptible):
            return None
        match job.state:
            case Running(since=since):
                ran_ms = self.now - since
            case Suspended(ran_ms=ran_ms, backed_off=BackedOff()):
                pass
            case _:
                return None
        is_exempt = job.attempt > 1 and ran_ms < self.policy.preempt_exempt_ms
        return None if is_exempt else job.spec.priority

    def _prediction(self, job: Job, measured: JobFacts | None) -> Prediction | None:
        """Of a job that has outlived it: any moment now, which lets nobody pass in its name."""
        if measured is None or measured.left_ms is None or not isinstance(job.state, Running):
            return None
        assert self.facts is not None
        off_ms = measured.left_ms * PREDICTION_MARGIN_PCT // 100
        ends_at = self.facts.taken_at + measured.left_ms
        early, late = Instant(ends_at - off_ms), Instant(ends_at + off_ms)
        return Prediction(max(self.now, early), max(self.now, late))

    def charge_of(self, job: Job) -> Charge:
        placement = placement_of(job.state)
        assert placement is not None
        print_ = self.footprints.get(job.id)
        return charge_now(placement.charge, job.spec, print_, self.policy, self.peak_of(job.spec))

    def peak_of(self, spec: JobSpec) -> LearnedPeak | None:
        """What jobs of its signature were measured at."""
        return self.peaks.get(spec.signature, self.now)

    def room(self, holdings: Sequence[Holding] | None = None) -> Room | None:
        """What is left for one more job; None: the machine has not been read, or too long ago.

        Args:
            holdings: if they are known already.
        """
        if self.facts is None or self.now - self.facts.taken_at > self.policy.stale_ms:
            return None
        fresh_after = {
            gpu.id: max(self._born_at, self._gpus_fresh_after.get(gpu.id, Instant(0)))
            for gpu in self.facts.gpus
        }
        held = self.holdings() if holdings is None else holdings
        return measure(self.now, self.facts, held, fresh_after, self.policy)

    def plan(self) -> Plan | None:
        """What would start now and why the rest waits; None: nothing may be decided now."""
        holdings = self.holdings()
        room = self.room(holdings)
        if room is None or self.facts is None:
            return None
        scene = policies.Scene(
            now=self.now,
            facts=self.facts,
            policy=self.policy,
            guard=self.guard,
            peaks=self.peaks,
            calendar=self.calendar,
            waiting_since=self._since,
            standing=Standing.of(
                self.limits, ((self.jobs[h.job_id].spec.user, h) for h in holdings)
            ),
            ranking=self._ranking(holdings, self.facts),
            promised=self._promised_spec(),
        )
        return policies.plan(scene, self._queue, room, holdings)

    def ranking(self) -> Ranking | None:
        """How the users stand; None: the machine has not been read."""
        return None if self.facts is None else self._ranking(self.holdings(), self.facts)

    def _ranking(self, holdings: Sequence[Holding], facts: MachineFacts) -> Ranking:
        capacity = Capacity.of(facts)
        held = [(h.user, capacity.rate_of(h)) for h in holdings]
        return self.fairness.ranking(self.now, held, self._queue.users(), self._since)

    def _promised_spec(self) -> JobSpec | None:
        job = self.jobs.get(self.promised) if self.promised is not None else None
        return job.spec if job is not None and self.is_waiting(job) else None

    def jobs_ahead(self, job: Job) -> int:
        """How many go before it; 0 too while the machine has not been read."""
        ranking = self.ranking()
        if ranking is None:
            return 0
        return self._queue.ahead_of(job.spec, job.id, ranking, self.rate_of, self._promised_spec())

    def rate_of(self, spec: JobSpec) -> Rate:
        """What such a job would take of the machine."""
        assert self.facts is not None
        need = need_of(spec, self.facts, self.policy, self.peak_of(spec))
        return Capacity.of(self.facts).rate(
            need.charge, [None] * need.gpus, exclusive=need.exclusive
        )

    def is_waiting(self, job: Job) -> bool:
        """In the queue proper: pending, not held, due."""
        return self._queue.contains(job.spec, job.id)

    # ---- events --------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        match event:
            case Submitted():
                self._submitted(event)
            case CancelRequested():
                self._cancel(event)
            case HoldRequested():
                self._hold(event)
            case ReleaseRequested():
                self._release(event)
            case PrioritySet():
                self._prioritize(event)
            case PauseRequested():
                self._pause(event)
            case ResumeRequested():
                self._resume(event)
            case RequeueRequested():
                self._requeue(event)
            case MachineSampled(facts=facts):
                self._sampled(facts)
            case ProcessStarted(pid=pid):
                if job := self._current(event):
                    self._started(job, pid)
            case LaunchFailed():
                if job := self._current(event):
                    self._launch_failed(job, event)
            case ProcessExited(exit=exit_, ago_ms=ago_ms):
                if job := self._current(event):
                    if placement_of(job.state) is not None:
                        self._count(job, self._holding(job), Instant(self.now - ago_ms))
                        self.fairness.stop(job.id, self.now)
                    self._exited(job, exit_)
            case ProcessLost(reason=reason):
                if job := self._current(event):
                    self.fairness.lost(job.id, self.now)
                    self._lost(job, reason)
            case LaunchVoided():
                if job := self._current(event):
                    self.fairness.lost(job.id, self.now)
                    self._voided(job)
            case AdmissionSet(reason=reason):
                self.closed = reason
            case CalendarSet(bookings=bookings, quiet=quiet):
                self.calendar = Calendar.of(bookings, quiet)
            case ProgramForgotten(signature=signature):
                self.guard.forget(signature)
                self.peaks.forget(signature)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _current(self, event: ProcessEvent) -> Job | None:
        """The job, unless the event is about an attempt that was given up on: then None."""
        job = self.jobs.get(event.job_id)
        return job if job is not None and job.attempt == event.attempt else None

    # ---- what users ask for --------------------------------------------------------

    def _submitted(self, event: Submitted) -> None:
        no = self._refusal([spec for _, spec in event.jobs])
        if no is not None:
            self._out.append(Refuse(event.request, no.message, no.hint, no.impossible))
            return
        for followed in event.after.job_ids if event.after is not None else ():
            if followed not in self.jobs:  # one whose row is damaged: nobody will tell of its end
                self._ended.setdefault(followed, Outcome.NODE_FAIL)
        for job_id, spec in event.jobs:
            assert job_id not in self.jobs, job_id
            state = Pending(self.now, held=event.held, after=event.after)
            job = Job(job_id, spec, attempt=0, state=state)
            self._enter(job)
            self._out.append(Persist(self.jobs[job_id]))
        self._out.append(Accept(event.request))

    def _refusal(self, specs: Sequence[JobSpec]) -> _No | None:
        """Why these cannot join the queue, or None if they can."""
        if len(self.jobs) + len(specs) > self.policy.queued_max:
            return _No(
                f"the queue is full: {len(self.jobs)} jobs wait or run,"
                f" the limit is {self.policy.queued_max}",
                hint="cancel some, or raise scheduling.max_queued",
            )
        for user, more in Counter(spec.user for spec in specs).items():
            if at := too_many_submitted(self.limits, self._submitted_by, user, more):
                return _No(
                    in_words(at),
                    hint="wait until some have ended, or cancel some",
                )
        if self.facts is None:
            return None
        for spec in dict.fromkeys(specs):
            need = need_of(spec, self.facts, self.policy, self.peak_of(spec))
            if broken := never_within(self.limits, spec.user, need):
                return _No(
                    f"this job can never start here: {in_words(broken[0])}",
                    hint="ask for less; the limit is set in the daemon's configuration",
                    impossible=True,
                )
            why = is_impossible(need, self.facts, self.policy)
            if why is None and (quiet := self.calendar.for_ever()) is not None:
                why = never_fits(need, quiet)
            if why is not None:
                return _No(
                    f"this job can never start here: {why}",
                    hint="ask for less (`rlq gpus` shows what there is)",
                    impossible=True,
                )
        return None

    def _cancel(self, event: CancelRequested) -> None:
        if (job := self._live(event)) is None:
            return
        match job.state:
            case Pending():
                reason = f"{_cancelled(event.by)} before it started"
                self._to(job, Finished(Outcome.CANCELLED, Exit(), reason))
            case Completing():
                # Whatever it was stopped for: once confirmed, a cancel is never retried.
                kill_at = self.now if event.at_once else job.state.kill_at
                at_once = event.at_once or job.state.at_once
                by = job.state.by if job.state.cause is Cause.CANCELLED else event.by
                state = replace(job.state, cause=Cause.CANCELLED, kill_at=kill_at, by=by)
                self._to(job, replace(state, at_once=at_once))
            case Starting() | Running() | Suspended():
                self._stop(job, Cause.CANCELLED, at_once=event.at_once, by=event.by)
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)
        self._out.append(Accept(event.request, event.job_id))

    def _hold(self, event: HoldRequested) -> None:
        if (job := self._live(event)) is None:
            return
        match job.state:
            case Pending(held=True):
                self._out.append(Accept(event.request, job.id, "already held"))
            case Pending():
                self._to(job, replace(job.state, held=True))
                self._out.append(Accept(event.request, job.id))
            case Starting() | Running() | Suspended() | Completing():
                self._refuse(event, "it has started already", "`rlq pause` stops a running job")
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    def _release(self, event: ReleaseRequested) -> None:
        if (job := self._live(event)) is None:
            return
        match job.state:
            case Pending(held=True):
                self._to(job, replace(job.state, held=False))
                self._out.append(Accept(event.request, job.id))
            case Pending():
                self._out.append(Accept(event.request, job.id, "was not held"))
            case Starting() | Running() | Suspended() | Completing():
                self._refuse(event, "it has started already", None)
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    def _prioritize(self, event: PrioritySet) -> None:
        if (job := self._live(event)) is None:
            return
        if job.spec.priority == event.priority:
            self._out.append(Accept(event.request, job.id, f"has priority {event.priority}"))
            return
        self._to(replace(job, spec=replace(job.spec, priority=event.priority)), job.state)
        self._out.append(Accept(event.request, job.id))

    def _pause(self, event: PauseRequested) -> None:
        if (job := self._live(event)) is None:
            return
        match job.state:
            case Running():
                self._freeze(job)
                self._out.append(Accept(event.request, job.id))
            case Suspended(backed_off=BackedOff()):
                # From now on the user's: rlqd does not let it go on.
                self._to(job, replace(job.state, backed_off=None))
                self._out.append(Accept(event.request, job.id))
            case Suspended():
                self._out.append(Accept(event.request, job.id, "already paused"))
            case Pending():
                self._refuse(event, "it has not started yet", "`rlq hold` keeps it from starting")
            case Starting():
                self._refuse(event, "it is just starting", "try again in a moment")
            case Completing():
                self._refuse(event, "it is being stopped", None)
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    def _resume(self, event: ResumeRequested) -> None:
        if (job := self._live(event)) is None:
            return
        match job.state:
            case Suspended():
                self._thaw(job, by_user=True)
                self._out.append(Accept(event.request, job.id))
            case Running():
                self._out.append(Accept(event.request, job.id, "was not paused"))
            case Pending():
                self._refuse(event, "it has not started yet", "`rlq release` frees a held job")
            case Starting() | Completing():
                self._refuse(event, "it is not paused", None)
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    def _requeue(self, event: RequeueRequested) -> None:
        # Asked twice at once: by the second time it is in the queue again.
        if event.finished is not None and event.job_id not in self.jobs:
            if (no := self._refusal([event.finished.spec])) is not None:
                self._refuse(event, no.message, no.hint)
                return
            job = replace(event.finished, state=Pending(self.now))
            self._enter(job)
            self._out.append(Persist(self.jobs[job.id]))
            self._out.append(Accept(event.request, job.id))
            return
        if (job_ := self._live(event)) is None:
            return
        match job_.state:
            case Pending():
                self._out.append(Accept(event.request, job_.id, "is in the queue already"))
                return
            case Starting() | Running() | Suspended():
                self._stop(job_, Cause.REQUEUED)
            case Completing(cause=Cause.TIMED_OUT | Cause.START_TIMED_OUT):
                self._to(job_, replace(job_.state, cause=Cause.REQUEUED))
            case Completing(cause=Cause.REQUEUED | Cause.PREEMPTED):
                pass
            case Completing():
                self._refuse(event, "it is being cancelled", "requeue it once it has ended")
                return
            case Finished():
                raise AssertionError(f"{job_} is still in memory")
            case _:
                assert_never(job_.state)
        self._out.append(Accept(event.request, job_.id))

    def _live(self, event: JobRequest) -> Job | None:
        job = self.jobs.get(event.job_id)
        if job is None:
            self._refuse(event, "it has ended already", None)
        return job

    def _refuse(self, event: JobRequest, message: str, hint: str | None) -> None:
        self._out.append(Refuse(event.request, message, hint, job_id=event.job_id))

    def _freeze(self, job: Job, why: BackedOff | None = None) -> None:
        """`why`: rlqd's reason; None: a user asked for it."""
        state = job.state
        assert isinstance(state, Running), job
        left_ms = None if state.deadline is None else max(1, state.deadline - self.now)
        ran_ms = self.now - state.since
        self._to(job, Suspended(state.placement, state.pid, ran_ms, left_ms, why))
        self._out.append(Freeze(job.id, job.attempt, on=True))

    def _thaw(self, job: Job, *, by_user: bool) -> None:
        state = job.state
        assert isinstance(state, Suspended), job
        deadline = None if state.left_ms is None else Instant(self.now + state.left_ms)
        since = Instant(self.now - state.ran_ms)
        rested_at = None if by_user else self.now
        self._to(job, Running(state.placement, state.pid, since, deadline, rested_at, by_user))
        self._out.append(Freeze(job.id, job.attempt, on=False))

    # ---- what the machine says -----------------------------------------------------

    def _sampled(self, facts: MachineFacts) -> None:
        self.facts = facts
        for job_id, measured in facts.jobs:
            job = self.jobs.get(job_id)
            if job is not None and isinstance(job.state, Running):
                footprint = self.footprints.setdefault(job_id, Footprint())
                on_gpu = bool(job.state.placement.gpus)
                footprint.add(facts.taken_at, measured, self.policy, is_on_gpu=on_gpu)
        holdings = self.holdings()
        for holding in holdings:
            self._count(self.jobs[holding.job_id], holding, self.now)
        Crowd.of(holdings, facts).observe(self.now, self.guard)

    def _count(self, job: Job, holding: Holding, until: Instant) -> None:
        """Charge its user for what it has held."""
        begun = job.state.since if isinstance(job.state, Running) else None
        self.fairness.count(holding, begun, until)

    def _started(self, job: Job, pid: int) -> None:
        match job.state:
            case Starting(placement=placement):
                limit = job.spec.time_limit_ms
                deadline = None if limit is None else Instant(self.now + limit)
                self._to(job, Running(placement, pid, self.now, deadline))
            case Completing(pid=None):
                # It was asked to stop while being born: now there is a pid to signal.
                grace_ms = 0 if job.state.at_once else job.spec.grace_ms
                kill_at = Instant(self.now + grace_ms)
                self._to(job, replace(job.state, pid=pid, kill_at=kill_at))
                self._out.append(Terminate(job.id, job.attempt))
            case Completing():
                # Told again after a restart: the signal may have been lost between the
                # commit and the kill(2).  Signals are safe to repeat; a wait is not.
                self._out.append(Terminate(job.id, job.attempt))
            case Suspended():
                self._out.append(Freeze(job.id, job.attempt, on=True))
            case Running():
                self._out.append(Freeze(job.id, job.attempt, on=False))
            case Pending():
                pass  # told twice, of an attempt that is over
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    def _launch_failed(self, job: Job, event: LaunchFailed) -> None:
        match job.state:
            case Starting(launch_failures=before):
                self._retry_launch(job, before + 1, event.reason, passing=event.passing)
            case Completing(cause=Cause.START_TIMED_OUT, launch_failures=before):
                self._retry_launch(job, before + 1, event.reason, passing=event.passing)
            case Completing():
                self._finish_stop(job, Exit(), event.reason)
            case Running() | Suspended():
                # Found alive after a restart of the daemon, and so told as started, while its
                # supervisor had not got as far as the command.
                self._to(job, Finished(Outcome.LAUNCH_FAILED, Exit(), event.reason))
            case Pending():
                pass
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    def _exited(self, job: Job, exit_: Exit) -> None:
        match job.state:
            case Starting() | Running() | Suspended():
                # An exit may overtake the start: a short process.
                self._ended_unasked(job, exit_)
            case Completing(pid=None, cause=Cause.START_TIMED_OUT):
                # It had started after all, was told nothing, and came to its own end.
                self._ended_unasked(job, exit_)
            case Completing():
                self._finish_stop(job, exit_, "")
            case Pending():
                pass
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    def _ended_unasked(self, job: Job, exit_: Exit) -> None:
        if not exit_.stopped_by_others or exit_.code == 0:
            self._to(job, end_of(exit_))
        elif job.spec.requeue:
            # Not at once: this may be a shutdown, which would stop it again.
            not_before = Instant(self.now + self.policy.launch_retry_delay_ms)
            self._to(job, Pending(self.now, not_before=not_before))
        else:
            reason = "it was stopped from outside rlqd, as at a shutdown"
            self._to(job, Finished(Outcome.NODE_FAIL, exit_, reason))

    def _lost(self, job: Job, reason: str) -> None:
        match job.state:
            case Starting() | Running() | Suspended():
                if job.spec.requeue:
                    self._to(job, Pending(self.now))
                else:
                    self._to(job, Finished(Outcome.NODE_FAIL, Exit(), reason))
            case Completing():
                self._finish_stop(job, Exit(), reason)
            case Pending():
                pass
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    def _voided(self, job: Job) -> None:
        match job.state:
            case Starting(launch_failures=failures):
                self._to(job, Pending(self.now, launch_failures=failures))
            case Completing():
                self._finish_stop(job, Exit(), "")
            case Running() | Suspended():
                # It was told as started, so it ran; somebody has removed the proof of it.
                self._lost(job, "its records in the state folder are gone")
            case Pending():
                pass
            case Finished():
                raise AssertionError(f"{job} is still in memory")
            case _:
                assert_never(job.state)

    # ---- time ----------------------------------------------------------------------

    def _expire(self) -> None:
        for job_id in sorted((*self._active, *self._delayed)):
            job = self.jobs[job_id]
            if self._is_due(job):
                self._expire_one(job)
                # A grace of nothing: the kill is due with the time limit.
                job = self.jobs[job_id]
                if isinstance(job.state, Completing) and self._is_due(job):
                    self._expire_one(job)

    def _is_due(self, job: Job) -> bool:
        due = deadline_of(job.state)
        return due is not None and due <= self.now

    def _expire_one(self, job: Job) -> None:
        match job.state:
            case Pending():
                self._delayed.remove(job.id)
                self._queue.add(job.spec, job.id)
            case Starting():
                self._stop(job, Cause.START_TIMED_OUT)
            case Running():
                self._stop(job, Cause.TIMED_OUT)
            case Completing():
                kill_again_at = Instant(self.now + KILL_AGAIN_MS)
                self._to(job, replace(job.state, kill_at=kill_again_at))
                self._out.append(Kill(job.id, job.attempt))
            case Suspended(placement=placement, backed_off=BackedOff()):
                device = device_of(placement)
                assert device != SEVERAL, job
                # The smallest number that was too many counts for all of them.
                why = min((other for _, other in self._paused_on(device)), key=lambda w: w.jobs)
                self._thaw(job, by_user=False)
                if len(self._at_work_on(device)) >= why.jobs:
                    # It is another one's turn.
                    self._pause_one(device, why)
            case Suspended() | Finished():
                raise AssertionError(f"{job} has no deadline")
            case _:
                assert_never(job.state)

    # ---- backing off ---------------------------------------------------------------

    def _back_off(self, *, was_read: bool) -> None:
        """core/backoff.py says why and whom."""
        paused = [job for i in sorted(self._active) if backed_off_by(job := self.jobs[i])]
        for device in dict.fromkeys(device_of(p) for j in paused if (p := placement_of(j.state))):
            assert device != SEVERAL
            here = self._paused_on(device)
            going_on = backoff.going_on(here, len(self._at_work_on(device)))
            for job_id in going_on if self._backs_off else [job_id for job_id, _ in here]:
                self._thaw(self.jobs[job_id], by_user=False)
        if self._backs_off and was_read and self.facts is not None:
            crowd = Crowd.of(self.holdings(), self.facts)
            for device in crowd.devices():
                self._compare(crowd, device)

    @property
    def _backs_off(self) -> bool:
        return self.guard.policy.enabled and self.guard.policy.pause_youngest

    def _compare(self, crowd: Crowd, device: Device) -> None:
        """Those that run on a device, with fewer of them; or with those of them before a pause."""
        occupants = crowd.occupants.get(device, [])
        kind = crowd.kind(self.guard, device)
        stp = self.guard.measured(device or "cpu", kind, occupants)
        if stp is None:
            return
        for job_id, why in self._paused_on(device):
            if stp <= why.stp:
                self._thaw(self.jobs[job_id], by_user=False)
                return
        if (youngest := self._next_to_pause(device)) is None:
            return
        (without,) = (o for o in occupants if o.job_id == youngest)
        better = self.guard.faster(self.now, kind, occupants, without)
        if better is not None:
            why = BackedOff(jobs=len(occupants), better=better, stp=stp, until=self.now)
            self._pause_one(device, why)

    def _pause_one(self, device: Device, why: BackedOff) -> None:
        if self._backs_off and (job_id := self._next_to_pause(device)) is not None:
            until = Instant(self.now + self.guard.policy.pause_turn_ms)
            self._freeze(self.jobs[job_id], replace(why, until=until))

    def _next_to_pause(self, device: Device) -> JobId | None:
        at_work = self._at_work_on(device)
        if any(job.spec.unguarded for job in at_work):
            return None  # somebody measures
        if any(isinstance(job.state, Completing) for job in at_work):
            return None  # one leaves anyway
        found = backoff.next_to_pause(
            (
                backoff.Candidate(
                    job_id=job.id,
                    priority=job.spec.priority,
                    since=job.state.since,
                    rested_at=job.state.rested_at,
                )
                for job in at_work
                if isinstance(job.state, Running)
                and not (job.state.stays or job.spec.exclusive or job.spec.interactive)
                and device_of(job.state.placement) == device
            ),
            self.now,
            self.guard.policy.pause_turn_ms,
        )
        return None if found is None else found.job_id

    def _on(self, device: Device) -> list[Job]:
        held = [(self.jobs[i], placement_of(self.jobs[i].state)) for i in sorted(self._active)]
        return [job for job, place in held if place and device in (place.gpus or (None,))]

    def _at_work_on(self, device: Device) -> list[Job]:
        return [job for job in self._on(device) if not isinstance(job.state, Suspended)]

    def _paused_on(self, device: Device) -> list[tuple[JobId, BackedOff]]:
        return [(job.id, why) for job in self._on(device) if (why := backed_off_by(job))]

    def _tell_followers(self) -> None:
        """A job that is cancelled here may have followers of its own: until all are told."""
        for ended in (queue := [*self._ended]):
            for job_id in sorted(self._followers.get(ended, ())):
                job = self.jobs[job_id]
                assert isinstance(job.state, Pending)
                assert job.state.after is not None
                outcome = self._ended[ended]
                if outcome is Outcome.COMPLETED or job.state.after.any_end:
                    left = tuple(i for i in job.state.after.job_ids if i != ended)
                    after = replace(job.state.after, job_ids=left) if left else None
                    self._to(job, replace(job.state, since=self.now, after=after))
                else:
                    reason = f"job {ended}, which it was to follow, ended as {outcome.value}"
                    self._to(job, Finished(Outcome.CANCELLED, Exit(), reason))
                    queue.append(job_id)
        self._ended.clear()

    # ---- admission -----------------------------------------------------------------

    def _start_what_fits(self) -> None:
        self._reserve_at = None
        if self.closed or not self._queue.size:
            return
        users = self._queue.users_count
        while (plan := self.plan()) is not None:
            self._start(plan)
            is_settled = plan.reservation is not None and self._queue.users_count == users
            if not plan.starts or is_settled or (users == 1 and not self.limits):
                break
            # What was given has changed who is first, or who is at a limit: those who wait are
            # looked at once more, so that the reservation is given now.
        if plan is None:
            return
        if plan.reservation is not None:
            self.promised = plan.reservation.job_id
        if plan.head is not None:
            self._reserve_at = Instant(self._since[plan.head] + self.policy.reserve_after_ms)

    def _start(self, plan: Plan) -> None:
        for start in plan.starts:
            job = self.jobs[start.job_id]
            assert isinstance(job.state, Pending)
            begun = replace(job, attempt=job.attempt + 1)
            deadline = Instant(self.now + self.policy.launch_timeout_ms)
            state = Starting(start.placement, deadline, job.state.launch_failures)
            self._to(begun, state)
            self._out.append(Launch(job.id, begun.attempt, start.placement, job.spec))
        for job_id in plan.preempted:
            assert plan.preempted_for is not None
            self._preempt(self.jobs[job_id], plan.preempted_for)
        if plan.preempted:
            self._expire()  # a grace of nothing

    @property
    def _since(self) -> _Since:
        return _Since(self.jobs)

    # ---- transitions ---------------------------------------------------------------

    def _preempt(self, job: Job, by: JobId) -> None:
        state = job.state
        assert isinstance(state, Running | Suspended), job
        kill_at = Instant(self.now + job.spec.grace_ms)
        self._to(
            job,
            Completing(state.placement, state.pid, Cause.PREEMPTED, kill_at, preempted_by=by),
        )
        self._out.append(Terminate(job.id, job.attempt))

    def _stop(self, job: Job, cause: Cause, *, at_once: bool = False, by: str = "") -> None:
        match job.state:
            case Starting(placement=placement, launch_failures=failures):
                # Told at once, though there may be no command yet: a start can hang, in an
                # open(2) on a dead network disk, and then only SIGKILL ends it.
                kill_at = Instant(self.now + (0 if at_once else job.spec.grace_ms))
                self._to(job, Completing(placement, None, cause, kill_at, at_once, failures, by))
                # Not for being late: it may yet come to its own end, and exit code 0 must mean it.
                if cause is not Cause.START_TIMED_OUT:
                    self._out.append(Terminate(job.id, job.attempt))
            case Running(placement=placement, pid=pid) | Suspended(placement=placement, pid=pid):
                grace_ms = 0 if at_once else job.spec.grace_ms
                kill_at = Instant(self.now + grace_ms)
                self._to(job, Completing(placement, pid, cause, kill_at, at_once, by=by))
                self._out.append(Terminate(job.id, job.attempt))
            case Pending() | Completing() | Finished():
                raise AssertionError(f"{job} cannot be stopped")
            case _:
                assert_never(job.state)

    def _finish_stop(self, job: Job, exit_: Exit, reason: str) -> None:
        assert isinstance(job.state, Completing)
        match job.state.cause:
            case Cause.CANCELLED:
                reason = reason or _cancelled(job.state.by)
                self._to(job, Finished(Outcome.CANCELLED, exit_, reason))
            case Cause.TIMED_OUT:
                self._to(job, Finished(Outcome.TIMEOUT, exit_, "reached its time limit"))
            case Cause.REQUEUED:
                self._to(job, Pending(self.now))
            case Cause.PREEMPTED:
                self._to(job, Pending(self.now, preempted_by=job.state.preempted_by))
            case Cause.START_TIMED_OUT:
                failures = job.state.launch_failures + 1
                self._retry_launch(job, failures, "it did not start in time", passing=True)
            case _:
                assert_never(job.state.cause)

    def _retry_launch(self, job: Job, failures: int, reason: str, *, passing: bool) -> None:
        if passing and failures <= self.policy.launch_retries:
            not_before = Instant(self.now + self.policy.launch_retry_delay_ms)
            self._to(job, Pending(self.now, not_before=not_before, launch_failures=failures))
        else:
            self._to(job, Finished(Outcome.LAUNCH_FAILED, Exit(), reason))

    def _to(self, job: Job, state: State) -> None:
        """The one place where a job changes."""
        before = self.jobs[job.id]
        self._leave(before)
        if job.id == self.promised and not is_in_line(state):
            self.promised = None
        released = placement_of(before.state)
        after = replace(job, state=state)
        if released is None and placement_of(state) is not None:
            self.fairness.began(job.id, self.now)
        if released is not None and placement_of(state) is None:
            self._count(before, self._holding(before), self.now)
            self.fairness.left(job.id)
            self._released(before, released)
        if isinstance(state, Finished):
            self._ended[job.id] = state.outcome
        else:
            self._enter(after)
        self._out.append(Persist(after))

    def _released(self, job: Job, placement: Placement) -> None:
        footprint = self.footprints.pop(job.id, None)
        if footprint is not None and footprint.settled and job.spec.signature:
            self.peaks.learn(footprint.peak(job.spec.signature, self.now))
        for gpu in placement.gpus:
            self._gpus_fresh_after[gpu] = self.now
        if SampleNow() not in self._out:
            self._out.append(SampleNow())

    def _enter(self, job: Job) -> None:
        spec = self._specs.setdefault(job.spec, job.spec)
        if spec is not job.spec:
            job = replace(job, spec=spec)
        self.jobs[job.id] = job
        self._submitted_by[job.spec.user] += 1
        match job.state:
            case Pending(after=After(job_ids=job_ids)):
                for followed in job_ids:
                    self._followers.setdefault(followed, set()).add(job.id)
            case Pending(held=True):
                pass
            case Pending(not_before=at) if at > self.now:
                self._delayed.add(job.id)
            case Pending():
                self._queue.add(job.spec, job.id)
            case Starting() | Running() | Suspended() | Completing():
                self._active.add(job.id)
            case Finished():
                raise AssertionError(f"{job} has ended")
            case _:
                assert_never(job.state)

    def _leave(self, job: Job) -> None:
        del self.jobs[job.id]
        self._submitted_by[job.spec.user] -= 1
        self._active.discard(job.id)
        self._delayed.discard(job.id)
        if isinstance(job.state, Pending):
            if self._queue.contains(job.spec, job.id):
                self._queue.remove(job.spec, job.id)
            after = job.state.after.job_ids if job.state.after is not None else ()
            for followed in dict.fromkeys(after):  # whoever asked may have named one twice
                followers = self._followers[followed]
                followers.remove(job.id)
                if not followers:
                    del self._followers[followed]
        if len(self._specs) > 2 * len(self.jobs) + SPECS_SPARE:
            self._specs = {job.spec: job.spec for job in self.jobs.values()}


def _cancelled(by: str) -> str:
    return f"cancelled by {by}" if by else "cancelled"


class _Since(dict[JobId, Instant]):
    """Since when a pending job waits, looked up when asked."""

    def __init__(self, jobs: dict[JobId, Job]) -> None:
        super().__init__()
        self._jobs = jobs

    def __missing__(self, job_id: JobId) -> Instant:
        state = self._jobs[job_id].state
        assert isinstance(state, Pending)
        return state.since
