"""Which waiting jobs start now.  Pure: reads values, returns values.

In rank order (core/queue.py), each job that fits starts, and those behind a job that does not
may go before it (backfill).  So that a big job is not passed by small ones for ever, the first
blocked job that has waited long enough gets a reservation (EASY backfill; Lifka 1995): the
earliest moment at which it will fit, from the ends that are known or predicted.  From then on a
job behind it starts only if it is sure to end before that moment, or fits beside the reserved job
as well.

    sure end of the candidate  <=  start of the reserved job

Only the right side may be a prediction (Tsafrir, Etsion and Feitelson 2007, who split the time a
job is predicted to end at from the time it is killed at).  The candidate's own end is its time
limit, which is enforced: were it predicted, one that runs on would hold up the reserved job for
as long as it likes, and the next one after it.  On the right side a wrong prediction costs a
bounded wait.  Too early (the job runs on): fewer may pass, and nobody waits for them.  Too late
(it ends at once): the reserved job waits for those let past meanwhile, each of which ends within
its own limit, and from that moment nobody who would end later is let past.  So it is the early
edge of the prediction that counts there, and the late edge that people are told.

A job that only the throughput guard keeps waiting has room, and nothing is kept for it: others
that do help may pass it.  But not for ever: once it has waited `throughput_patience_ms`, nothing
more starts on one device until the guard lets it in there, on the empty device at the latest.

What is booked for others (core/calendar.py) is no room: each job looks at the room without it,
now and at the moment it is promised.

The reservation is a promise: it stays with its job until that starts, though by fair share
another user's job comes first by now.  Else it would be nobody's: while it is kept free for A,
B's jobs end, B holds less, and B's next job would outrank it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlqd.core.calendar import Calendar, Outlook
from rlqd.core.charge import Need, host_amounts_of, need_of, need_on
from rlqd.core.cores import doublings, variant, worth
from rlqd.core.crowd import Crowd, Device
from rlqd.core.fairness import Capacity, Ranking
from rlqd.core.guard import ONE_JOB, Guard, Verdict
from rlqd.core.learned import Peaks
from rlqd.core.limits import AtLimit, Standing, amounts_of
from rlqd.core.model import GpuId, Instant, JobId, JobSpec, MachineFacts, Placement, Policy
from rlqd.core.placement import NoRoom, Shortage, host_amounts_short, pick_cores, place
from rlqd.core.preemption import victims
from rlqd.core.queue import WaitingQueue
from rlqd.core.room import Holding, Room


@dataclass(frozen=True, slots=True)
class Start:
    job_id: JobId
    spec: JobSpec
    placement: Placement


@dataclass(slots=True)
class Reservation:
    """What is kept for a blocked job.  `extra` is the room beside it once it runs."""

    job_id: JobId
    #: About when; None: the jobs it waits for have no known end.
    starts_at: Instant | None
    placement: Placement
    #: `extra` as those who would run beside it see it.
    outlook: Outlook
    policy: Policy
    #: What everybody has once it runs: its place in its user's and groups' limits is kept too.
    standing: Standing
    #: Who is sure to end by then passes it; None: nobody.
    shadow: Instant | None = None
    #: The job whose end it waits for, and whether that end is predicted.
    after: JobId | None = None
    is_predicted: bool = False
    #: Kept free of others altogether, until the guard lets the job in.
    kept_free: frozenset[Device] = frozenset()

    @property
    def extra(self) -> Room:
        return self.outlook.room

    def admits(self, user: int, need: Need, placement: Placement, ends_at: Instant | None) -> bool:
        """Whether starting this job now leaves the reserved job's start where it is."""
        if self.standing.exceeded(user, need):
            return False
        if not self.kept_free.isdisjoint(placement.gpus or (None,)):
            return False
        if self.kept_free or self._ends_in_time(ends_at):
            return True
        extra = self.outlook.of(user, ends_at)
        return (
            need.charge.cores <= min(extra.cores_usable, len(extra.cores_free))
            and need.charge.mem_mib <= extra.mem_mib
            and not extra.is_exclusive
            and not (need.exclusive and not placement.gpus and extra.jobs)
            and all(self._has_room_on(gpu, need) for gpu in placement.gpus)
        )

    def beside(self, need: Need, room: Room) -> Room:
        """`room` without the GPUs on which this job would be in the reserved job's way."""
        return room.only(gpu for gpu in room.gpus if self._has_room_on(gpu, need))

    def _has_room_on(self, id_: GpuId, need: Need) -> bool:
        if self.kept_free:
            return id_ not in self.kept_free
        gpu = self.extra.gpus[id_]
        return (
            gpu.mem_mib is not None
            and gpu.sm_pct is not None
            and need.charge.gpu_mem_mib <= gpu.mem_mib
            and need.charge.sm_pct <= gpu.sm_pct
            and not gpu.is_exclusive
            and not (need.exclusive and gpu.jobs)
            and not 0 < self.policy.jobs_per_gpu_max <= gpu.jobs
        )

    def take(self, started: Holding, need: Need) -> None:
        """It was admitted beside the reservation: its share of `extra` is gone."""
        self.standing.add(started.user, amounts_of(need))
        if not self.kept_free and not self._ends_in_time(started.ends_at):
            self.outlook.take(started)

    def _ends_in_time(self, ends_at: Instant | None) -> bool:
        return self.shadow is not None and ends_at is not None and ends_at <= self.shadow


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a group of equal jobs waits: no room, room that is kept for another job, or a limit of
    its user or of one of the user's groups."""

    no_room: NoRoom | None
    reserved_for: JobId | None = None
    at_limits: tuple[AtLimit, ...] = ()


@dataclass(slots=True)
class Plan:
    starts: list[Start] = field(default_factory=list[Start])
    blocked: dict[JobSpec, Blocked] = field(default_factory=dict[JobSpec, Blocked])
    reservation: Reservation | None = None
    #: The head of the blocked jobs, if it has no reservation yet and time alone may give it one.
    head: JobId | None = None
    #: To be stopped so that the head can start.
    preempted: tuple[JobId, ...] = ()
    preempted_for: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a pass goes by."""

    now: Instant
    facts: MachineFacts
    policy: Policy
    guard: Guard
    peaks: Peaks
    calendar: Calendar
    #: Asked for the blocked head of the queue only.
    waiting_since: Mapping[JobId, Instant]
    #: Used up like the room.
    standing: Standing
    #: Used up: it counts what this pass gives to whom.
    ranking: Ranking
    #: The group of the job that has the reservation: it keeps it though others' claims may be
    #: better by now.  A head that changed with every job that ends would never be met.
    promised: JobSpec | None = None


def plan(scene: Scene, queue: WaitingQueue, room: Room, holdings: Sequence[Holding]) -> Plan:
    """Decide.  `room` is used up."""
    now, policy, standing = scene.now, scene.policy, scene.standing
    result = Plan()
    outlook = Outlook(
        calendar=scene.calendar, room=room, holders=[*holdings], at=now, policy=policy
    )
    crowd = Crowd.of(holdings, scene.facts, queue.size)
    capacity = Capacity.of(scene.facts)
    walk = queue.in_order(scene.ranking, scene.promised)
    for job_id, spec in walk:
        if at := _at_limits(scene, spec):
            walk.skip()
            result.blocked[spec] = Blocked(None, at_limits=at)
            continue
        ends_at = latest_end(now, spec)
        seen = outlook.of(spec.user, ends_at)
        if (result.reservation is not None or result.head is not None) and (
            short := _without_a_look(scene, spec, seen)
        ):
            walk.skip()
            result.blocked[spec] = Blocked(NoRoom((tuple(short),)))
            continue
        need, found = choose(scene, spec, seen, crowd)
        if spec.gpus is None and (at := standing.exceeded(spec.user, need)):
            walk.skip()
            result.blocked[spec] = Blocked(None, at_limits=at)
            continue
        if isinstance(found, NoRoom):
            walk.skip()
            result.blocked[spec] = Blocked(found)
            if only_throughput(found):
                waits_ms = now - scene.waiting_since[job_id]
                is_first = result.reservation is None and result.head is None
                if is_first and waits_ms >= policy.throughput_patience_ms:
                    kept_standing = standing.with_(spec.user, amounts_of(need))
                    result.reservation = _keep_free(job_id, need, found, outlook, kept_standing)
                continue
            if result.reservation is None and result.head is None:
                # For one job in a pass.
                made = None if result.preempted else _make_room(scene, spec, outlook, queue.size)
                if made:
                    result.preempted, result.preempted_for = tuple(h.job_id for h in made), job_id
                    # From now on they count as gone, at the soonest at once.
                    leaving = [replace(h, ends_at=now, prediction=None) for h in made]
                    outlook.holders = [h for h in outlook.holders if h not in made] + leaving
                    outlook.changed()
                waits_ms = now - scene.waiting_since[job_id]
                # What was made free for it is nobody else's meanwhile, nor what it would start on
                # but for a GPU's next reading: within a second a lesser job would take its cores.
                is_due = any(gpu.guess is not None for gpu in seen.gpus.values()) and isinstance(
                    place(need, seen.guessed(), policy), Placement
                )
                if made is not None or is_due or waits_ms >= policy.reserve_after_ms:
                    kept_standing = standing.with_(spec.user, amounts_of(need))
                    result.reservation = reserve(job_id, spec, need, outlook, kept_standing)
                else:
                    result.head = job_id
            continue
        kept = result.reservation
        if kept is not None and not kept.admits(spec.user, need, found, ends_at):
            # The GPU that is best for it is kept; another may do.
            if need.gpus:
                need, found = choose(scene, spec, kept.beside(need, seen), crowd)
            if not isinstance(found, Placement) or not kept.admits(
                spec.user, need, found, ends_at
            ):
                walk.skip()
                result.blocked[spec] = Blocked(None, kept.job_id)
                continue
        standing.add(spec.user, amounts_of(need))
        walk.give(spec.user, capacity.rate(need.charge, found.gpus, exclusive=need.exclusive))
        started = Holding(
            job_id=job_id,
            user=spec.user,
            placement=found,
            charge=need.charge,
            exclusive=need.exclusive,
            signature=counted_as(spec, found, policy),
            since=now,
            ends_at=ends_at,
        )
        outlook.take(started)
        if result.reservation is not None:
            result.reservation.take(started, need)
        crowd.add(now, job_id, started.signature, found.gpus)
        result.starts.append(Start(job_id, spec, found))
    return result


def _make_room(
    scene: Scene, spec: JobSpec, outlook: Outlook, waiting: int
) -> tuple[Holding, ...] | None:
    """Whom to stop so that this job starts (core/preemption.py); None: stopping does not help."""
    if not scene.policy.preemption:
        return None
    ahead = replace(outlook, room=outlook.room.guessed(), holders=[*outlook.holders])
    ends_at = latest_end(scene.now, spec)

    def fits() -> bool:
        crowd = Crowd.of(ahead.holders, scene.facts, waiting)
        _, found = choose(scene, spec, ahead.of(spec.user, ends_at), crowd)
        return isinstance(found, Placement)

    return victims(spec.priority, ahead, fits)


def _at_limits(scene: Scene, spec: JobSpec) -> tuple[AtLimit, ...]:
    """What its user may not have more of, wherever it would run.

    Of a job that may run with or without a GPU that is what it takes without: the rest is known
    once it is decided where it would go.
    """
    if not scene.standing.is_limited(spec.user):
        return ()
    learned = scene.peaks.get(spec.signature, scene.now)
    gpus = spec.gpus or 0
    return scene.standing.exceeded(
        spec.user, need_on(gpus, spec, scene.facts, scene.policy, learned)
    )


def counted_as(spec: JobSpec, placement: Placement, policy: Policy) -> str:
    """The program that the guard takes a running job for."""
    if spec.cores is not None:
        return spec.signature
    return variant(spec.signature, len(placement.cores), policy.cores_default)


def _without_a_look(scene: Scene, spec: JobSpec, room: Room) -> list[Shortage]:
    """Cores or host memory of which even the host has not enough.

    Once what is kept is settled, there is nothing more to find out about such a job: a queue of
    20,000 different programs on a full machine must not cost 20,000 looks at every device.  Where
    it would run makes no difference to this part of its need.
    """
    learned = scene.peaks.get(spec.signature, scene.now)
    return host_amounts_short(*host_amounts_of(spec, scene.facts, scene.policy, learned), room)


def choose(
    scene: Scene, spec: JobSpec, room: Room, crowd: Crowd
) -> tuple[Need, Placement | NoRoom]:
    """Where one more job of this kind would go, by room and by what it would add."""
    guard, policy = scene.guard, scene.policy
    learned = scene.peaks.get(spec.signature, scene.now)

    def judge(device: Device) -> Verdict:
        return crowd.judge(scene.now, guard, spec, device)

    need = need_of(spec, scene.facts, policy, learned)
    found = place(need, room, policy, judge)
    first = _with_cores(scene, spec, need, found, room, crowd)
    if spec.gpus is not None or need.gpus == 0:
        return first
    # It may run on either.  The CPU is chosen only on knowledge, never for a try: a job stays
    # where it starts, and for some the CPU is a hundred times slower.
    on_cpu = need_on(0, spec, scene.facts, policy, learned)
    gain_cpu = expected_gain(crowd, guard, spec, None, judge(None))
    if gain_cpu is None or gain_cpu * 100 < guard.policy.threshold_pct * ONE_JOB:
        return first
    if isinstance(found, Placement):
        gpu = found.gpus[0]
        gain_gpu = expected_gain(crowd, guard, spec, gpu, judge(gpu))
        if gain_gpu is None or gain_gpu >= gain_cpu:
            return first
    elsewhere = place(on_cpu, room, policy, judge)
    if not isinstance(elsewhere, Placement):
        return first
    return _with_cores(scene, spec, on_cpu, elsewhere, room, crowd)


def _with_cores(
    scene: Scene,
    spec: JobSpec,
    need: Need,
    found: Placement | NoRoom,
    room: Room,
    crowd: Crowd,
) -> tuple[Need, Placement | NoRoom]:
    """The same with more cores, where nobody else could use them (core/cores.py)."""
    least, most = scene.policy.cores_default, scene.policy.cores_most
    is_alone = isinstance(found, Placement) and crowd.waiting == 1
    is_alone &= not scene.standing.is_limited(spec.user)  # more might pass the limit
    if spec.cores is not None or most <= least or not spec.signature or not is_alone:
        return need, found
    assert isinstance(found, Placement)
    kind = crowd.kind(scene.guard, found.gpus[0] if found.gpus else None)
    known = {
        n: rate
        for n in doublings(least, most)
        if (rate := scene.guard.solo_of(kind, variant(spec.signature, n, least))) is not None
    }
    best, trial = worth(known, least, most, scene.guard.policy.threshold_pct)
    cores = trial if trial is not None and room.jobs == 0 else best
    if cores == least or 2 * cores > min(room.cores_usable, len(room.cores_free)):
        return need, found
    more = replace(need, charge=replace(need.charge, cores=cores))
    near = frozenset(c for gpu in found.gpus for c in room.gpus[gpu].facts.cores_near)
    placement = replace(found, cores=pick_cores(cores, room, near), charge=more.charge)
    return more, placement


def expected_gain(
    crowd: Crowd, guard: Guard, spec: JobSpec, device: Device, verdict: Verdict
) -> int | None:
    """What one more job there adds, in thousandths of its speed alone on its best device; None:
    not known."""
    solos = {
        d: solo
        for d in crowd.devices()
        if (solo := guard.solo_of(crowd.kinds[d], spec.signature)) is not None
    }
    if device not in solos or verdict.gain is None or not spec.signature:
        return None
    if device is None and len(solos) < 2:
        return None  # slow or fast, compared with what?
    return verdict.gain * solos[device] // max(solos.values())


def only_throughput(no_room: NoRoom) -> bool:
    """It would fit somewhere, and is left waiting because it would not help."""
    return any(
        all(short.resource == "throughput" for short in alternative)
        for alternative in no_room.alternatives
    )


def latest_end(now: Instant, spec: JobSpec) -> Instant | None:
    """When a job that starts now has ended at the latest: SIGKILL comes after the grace."""
    limit = spec.time_limit_ms
    return None if limit is None else Instant(now + limit + spec.grace_ms)


def reserve(
    job_id: JobId, spec: JobSpec, need: Need, outlook: Outlook, standing: Standing
) -> Reservation | None:
    """The earliest end, of a running job or of what is booked, after which `need` fits; None if
    it does not even on a machine without jobs (outsiders hold it, or a reading is unknown).

    Args:
        standing: with this job.
    """
    now, policy = outlook.at, outlook.policy
    ahead = replace(outlook, room=outlook.room.guessed(), holders=[*outlook.holders])

    def fits() -> Placement | None:
        ahead.changed()
        found = place(need, ahead.of(spec.user, latest_end(ahead.at, spec)), policy)
        return found if isinstance(found, Placement) else None

    def reservation(
        found: Placement,
        starts_at: Instant | None,
        shadow: Instant | None,
        after: Holding | None = None,
    ) -> Reservation:
        ahead.at = now if starts_at is None else starts_at
        ahead.take(
            Holding(
                job_id=job_id,
                user=spec.user,
                placement=found,
                charge=need.charge,
                exclusive=need.exclusive,
                signature=spec.signature,
                since=ahead.at,
                ends_at=latest_end(ahead.at, spec) if starts_at is not None else None,
            )
        )
        return Reservation(
            job_id,
            starts_at,
            found,
            ahead,
            policy,
            standing,
            shadow=shadow,
            after=None if after is None else after.job_id,
            is_predicted=after is not None and after.expected_end != after.ends_at,
        )

    if (found := fits()) is not None:
        # All it may wait for is a GPU's next reading.
        return reservation(found, now, now)
    # Jobs without a known end come last, the oldest first: that order does not change as they
    # run, so the reservation stays on one device and is met when that device has emptied.
    expected = {h.job_id: h.expected_end for h in outlook.holders}
    by_end = sorted(
        outlook.holders,
        key=lambda h: (expected[h.job_id] is None, expected[h.job_id] or 0, h.job_id),
    )
    ends = outlook.calendar.ends(now)
    for number, holding in enumerate(by_end):
        end = expected[holding.job_id]
        while ends and (end is None or ends[0] < end):
            ahead.at = ends.pop(0)
            if (found := fits()) is not None:
                return reservation(found, ahead.at, ahead.at)
        ahead.release(holding)
        if end is not None:
            ahead.at = max(ahead.at, end)
        if (found := fits()) is not None:
            # By then those before it have gone; but a prediction is only a guess, and so is the
            # moment then: what stays in the way of nothing is reckoned to stay.
            stay = [h for h in by_end[:number] if not (h.is_end_sure and holding.is_end_sure)]
            found = _keep_running(fits, ahead, stay) or found
            return reservation(found, end, holding.earliest_end, holding)
    for at in ends:
        ahead.at = at
        if (found := fits()) is not None:
            return reservation(found, at, at)
    return None


def _keep_free(
    job_id: JobId, need: Need, no_room: NoRoom, outlook: Outlook, standing: Standing
) -> Reservation:
    """For a job that has room, and that others of other programs have passed for long enough.

    The emptiest of its devices: what is kept free does not fill up, so that stays the emptiest,
    and each job that leaves it brings it nearer to where the guard has nothing to say.

    Args:
        standing: with this job.
    """
    where = {
        short.gpu
        for alternative in no_room.alternatives
        if all(short.resource == "throughput" for short in alternative)
        for short in alternative
    }
    gpus = [outlook.room.gpus[gpu] for gpu in where if gpu is not None]
    emptiest = min(gpus, key=lambda g: (g.jobs, g.facts.index), default=None)
    kept: Device = None if emptiest is None else emptiest.facts.id
    placement = Placement(gpus=() if kept is None else (kept,), cores=(), charge=need.charge)
    return Reservation(
        job_id, None, placement, outlook, outlook.policy, standing, kept_free=frozenset({kept})
    )


def _keep_running(
    fits: Callable[[], Placement | None], ahead: Outlook, released: Sequence[Holding]
) -> Placement | None:
    """Put back into `ahead` the jobs that need not leave for the job to fit.

    Nobody knows when the last of those it waits for leaves.  It may be at once, and then the
    others are still there: what they have is no room beside it.
    """
    found: Placement | None = None
    for holding in reversed(released):
        ahead.take(holding)
        if (still := fits()) is not None:
            found = still
        else:
            ahead.release(holding)
    return found


def shortest(no_room: NoRoom) -> tuple[Shortage, ...]:
    """The alternative nearest to fitting."""
    return no_room.alternatives[0] if no_room.alternatives else ()
