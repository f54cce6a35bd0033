"""What must hold after every step.  Run by tests and by the simulator.

It may be slow: it looks at every job and plans once more.  A failure is a bug of ours.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from rlqd.core.charge import need_of
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    After,
    Booking,
    Finished,
    GpuId,
    Instant,
    Job,
    JobId,
    Pending,
    Placement,
    Quiet,
    Running,
    Starting,
    Suspended,
)
from rlqd.core.placement import NoRoom, Shortage
from rlqd.core.policy import Reservation
from rlqd.core.states import deadline_of, placement_of


def check(scheduler: Scheduler) -> None:
    """Raises:
    AssertionError: the scheduler contradicts itself.
    """
    assert not scheduler._out, "actions were left behind by the last step"
    for job_id, job in scheduler.jobs.items():
        assert job_id == job.id, (job_id, job)
        _check_job(scheduler, job)
    _check_indices(scheduler)
    _check_holdings(scheduler)
    _check_time(scheduler)
    _check_plan(scheduler)


def _check_job(scheduler: Scheduler, job: Job) -> None:
    state = job.state
    assert not isinstance(state, Finished), f"{job} has ended, yet it is in memory"
    assert job.attempt >= (0 if isinstance(state, Pending) else 1), job
    assert scheduler._specs.get(job.spec) is job.spec, f"the spec of {job} is not shared"
    if isinstance(state, Pending | Starting):
        assert 0 <= state.launch_failures <= scheduler.policy.launch_retries, job
    if isinstance(state, Pending | Running):
        assert state.since <= scheduler.now, job
    if isinstance(state, Running | Suspended):
        limit = job.spec.time_limit_ms
        left = state.deadline if isinstance(state, Running) else state.left_ms
        assert (left is None) == (limit is None), job
    if isinstance(state, Suspended):
        assert state.ran_ms >= 0, job
        assert state.left_ms is None or state.left_ms > 0, job
        if state.backed_off is not None:
            is_left_alone = job.spec.exclusive or job.spec.interactive or job.spec.unguarded
            assert not is_left_alone, job
            assert 1 <= state.backed_off.better < state.backed_off.jobs, job
    # A state whose time is up has been dealt with.
    due = deadline_of(state)
    if due is not None and not isinstance(state, Pending):
        assert due > scheduler.now, f"{job} is overdue at {scheduler.now}"


def _check_indices(scheduler: Scheduler) -> None:
    """Each job is in exactly the index its state belongs to."""
    queue = scheduler._queue
    queued: set[JobId] = set()
    for spec, ids in queue.groups.items():
        assert ids, f"an empty group: {spec}"
        assert all(a < b for a, b in pairwise(ids)), f"out of order: {ids}"
        for job_id in ids:
            assert scheduler.jobs[job_id].spec == spec, job_id
        queued.update(ids)
    assert queue.size == len(queued) == sum(len(ids) for ids in queue.groups.values())
    followed: set[tuple[JobId, JobId]] = set()
    for job in scheduler.jobs.values():
        where = (job.id in queued, job.id in scheduler._delayed, job.id in scheduler._active)
        match job.state:
            case Pending(after=After(job_ids=job_ids)):
                assert where == (False, False, False), (job, where)
                assert job_ids, job
                followed |= {(i, job.id) for i in job_ids}
            case Pending(held=True):
                assert where == (False, False, False), (job, where)
            case Pending(not_before=at):
                due = at <= scheduler.now
                assert where == (due, not due, False), (job, where)
            case _:
                assert where == (False, False, True), (job, where)
    assert followed == {(i, f) for i, fs in scheduler._followers.items() for f in fs}
    known = scheduler.jobs.keys()
    assert scheduler._followers.keys() <= known, "it follows what has ended"
    assert queued | scheduler._delayed | scheduler._active <= known, "an index knows a lost job"
    assert scheduler.footprints.keys() <= scheduler._active, "a footprint without a job"
    users = Counter(job.spec.user for job in scheduler.jobs.values())
    assert +scheduler._submitted_by == users, (scheduler._submitted_by, users)


def _check_holdings(scheduler: Scheduler) -> None:
    """What is held is held once."""
    core_of: dict[int, JobId] = {}
    on_gpu: dict[GpuId, list[JobId]] = {}
    holdings = scheduler.holdings()
    for holding in holdings:
        _check_placement(holding.placement)
        for core in holding.placement.cores:
            other = core_of.setdefault(core, holding.job_id)
            assert other == holding.job_id, f"core {core} is held by {other} and {holding.job_id}"
        for gpu in holding.placement.gpus:
            on_gpu.setdefault(gpu, []).append(holding.job_id)
        _check_charge(scheduler, scheduler.jobs[holding.job_id])
    for holding in holdings:
        if holding.exclusive and holding.placement.gpus:
            for gpu in holding.placement.gpus:
                assert on_gpu[gpu] == [holding.job_id], f"{gpu} is shared: {on_gpu[gpu]}"
        elif holding.exclusive:
            assert len(holdings) == 1, f"{holding.job_id} does not have the machine to itself"
    if limit := scheduler.policy.jobs_per_gpu_max:
        for gpu, ids in on_gpu.items():
            assert len(ids) <= limit, f"more than {limit} jobs on {gpu}: {ids}"


def _check_placement(placement: Placement) -> None:
    charge = placement.charge
    assert len(set(placement.gpus)) == len(placement.gpus), placement
    assert list(placement.cores) == sorted(set(placement.cores)), placement
    assert len(placement.cores) == charge.cores, placement
    assert charge.cores > 0, placement
    assert charge.mem_mib > 0, placement
    assert (charge.gpu_mem_mib > 0) == (charge.sm_pct > 0) == bool(placement.gpus), placement


def _check_charge(scheduler: Scheduler, job: Job) -> None:
    """The charge rule: declared is a floor for ever, what was admitted until it has settled."""
    placement = placement_of(job.state)
    assert placement is not None
    charge = scheduler.charge_of(job)
    footprint = scheduler.footprints.get(job.id)
    assert charge.cores == placement.charge.cores, job
    assert charge.mem_mib >= (job.spec.mem_mib or 0), job
    if placement.gpus:
        assert charge.gpu_mem_mib >= (job.spec.gpu_mem_mib or 0), job
        assert charge.sm_pct >= min(job.spec.sm_pct or 0, 100), job
    if footprint is None:
        assert charge == placement.charge, job
    else:
        assert charge.mem_mib >= footprint.mem_mib_peak, job
        if footprint.settled:
            margin = -(-footprint.mem_mib_peak * scheduler.policy.margin_pct // 100)
            assert charge.mem_mib >= footprint.mem_mib_peak + margin, job
        else:
            assert charge.mem_mib >= placement.charge.mem_mib, job
            assert charge.gpu_mem_mib >= placement.charge.gpu_mem_mib, job


def _check_time(scheduler: Scheduler) -> None:
    wakeup = scheduler.next_wakeup()
    assert wakeup is None or wakeup > scheduler.now, "the next wakeup is now"
    dues: list[Instant] = [] if scheduler._reserve_at is None else [scheduler._reserve_at]
    for job_id in scheduler._active | scheduler._delayed:
        due = deadline_of(scheduler.jobs[job_id].state)
        if due is not None:
            dues.append(due)
    windows: list[Booking | Quiet] = [*scheduler.calendar.bookings, *scheduler.calendar.quiet]
    for window in windows:
        edges = (window.starts_at, window.ends_at)
        dues += [at for at in edges if at is not None and at > scheduler.now]
    assert wakeup == min(dues, default=None), "a deadline will be slept through"
    assert all(at <= scheduler.now for at in scheduler._gpus_fresh_after.values())


def _check_plan(scheduler: Scheduler) -> None:
    """Work conserving: nothing that may start waits.  And every wait can be explained."""
    plan = scheduler.plan()
    if plan is None or scheduler.facts is None:
        return
    if not scheduler.closed:
        # When a booking ends, several devices may come free at once for the head, and which it is
        # promised may change with what was started beside it: then the next look starts more.
        kept = plan.reservation
        ends = {w.ends_at for w in scheduler.calendar.bookings}
        ends |= {w.ends_at for w in scheduler.calendar.quiet if w.ends_at is not None}
        if kept is None or kept.starts_at not in ends:
            assert not plan.starts, f"left waiting: {plan.starts}"
            assert not plan.preempted, f"left running: {plan.preempted}"
        reserve_at = scheduler._reserve_at
        assert (plan.head is None) == (reserve_at is None), (plan.head, reserve_at)
    reserved = plan.reservation.job_id if plan.reservation is not None else plan.head
    assert reserved is None or scheduler.is_waiting(scheduler.jobs[reserved]), reserved
    if plan.reservation is not None:
        _check_promise(scheduler, plan.reservation)
    starting = {start.job_id for start in plan.starts}
    for spec, ids in scheduler._queue.groups.items():
        if starting.issuperset(ids):
            continue
        blocked = plan.blocked[spec]
        if blocked.at_limits:
            for at in blocked.at_limits:
                assert at.used + at.need > at.limit >= 0, at
                assert at.whose in {one.whose for one in scheduler.limits[spec.user]}, at
        elif blocked.no_room is None:
            assert plan.reservation is not None, spec
            assert blocked.reserved_for == plan.reservation.job_id, blocked
        else:
            need = need_of(spec, scheduler.facts, scheduler.policy)
            _check_explained(blocked.no_room, needs_gpu=need.gpus > 0)


def _check_promise(scheduler: Scheduler, kept: Reservation) -> None:
    """The start that is promised does not run into what is booked for others."""
    if (at := kept.starts_at) is None:
        return
    spec = scheduler.jobs[kept.job_id].spec
    limit = spec.time_limit_ms
    for booking in scheduler.calendar.bookings:
        is_over = booking.ends_at <= at
        is_before = limit is not None and at + limit + spec.grace_ms <= booking.starts_at
        if not (is_over or is_before or spec.user in booking.users):
            assert not booking.whole, (kept, booking)
            assert booking.gpus.isdisjoint(kept.placement.gpus), (kept, booking)


def _check_explained(no_room: NoRoom, *, needs_gpu: bool) -> None:
    assert no_room.alternatives, "no room, and no word why"
    for alternative in no_room.alternatives:
        assert alternative, "an alternative that lacks nothing"
        for shortage in alternative:
            _check_shortage(shortage)
            assert needs_gpu or shortage.gpu is None, shortage


def _check_shortage(shortage: Shortage) -> None:
    assert shortage.free >= 0, shortage
    # A number that is short, or words: two jobs too many is no number of free things.
    assert shortage.free < shortage.need or (shortage.resource == "jobs" and shortage.note)
