"""Why a job waits, in words: the core's own "no", as data and as one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlq.protocol.messages import Explanation, Holder, LimitReached, Shortage
from rlq.protocol.states import JobState
from rlq.protocol.units import format_duration, format_mib
from rlqd.core import limits, model, placement
from rlqd.core.guard import ONE_JOB, Verdict
from rlqd.core.machine import Scheduler
from rlqd.core.policy import Plan, shortest
from rlqd.core.room import Holding

#: What keeps something from the queue, in words: "claimed by alice until 16:10".
KeptWords = Callable[[model.Booking | model.Quiet], str]


def waiting_reason(core: Scheduler, plan: Plan | None, job: model.Job, kept: KeptWords) -> str:
    """One short sentence on why a pending job has not started."""
    state = job.state
    assert isinstance(state, model.Pending)
    reason = _waiting_reason(core, plan, job, state, kept)
    if state.preempted_by is not None:
        return f"PREEMPTED by job {state.preempted_by}; {reason}"
    return reason


def _stopped_for(core: Scheduler, job_id: model.JobId) -> list[model.JobId]:
    return [
        h.job_id
        for h in core.holdings()
        if isinstance(state := core.jobs[h.job_id].state, model.Completing)
        and state.preempted_by == job_id
    ]


def _waiting_reason(
    core: Scheduler, plan: Plan | None, job: model.Job, state: model.Pending, kept: KeptWords
) -> str:
    if state.held:
        return "held; `rlq release` lets it start"
    if state.after is not None:
        return _after_words(state.after)
    if not core.is_waiting(job):
        why = "its launch failed" if state.launch_failures else "it was stopped from outside"
        left_s = max(0, state.not_before - core.now) / 1000
        return f"{why}; the next try is in {format_duration(left_s)}"
    if core.closed:
        return core.closed
    if plan is None:
        return "the machine has not been read yet"
    is_head = plan.reservation is not None and plan.reservation.job_id == job.id
    if is_head and (leaving := _stopped_for(core, job.id)):
        one = len(leaving) == 1
        return f"waiting for job{'' if one else 's'} {', '.join(map(str, leaving))} to stop for it"
    blocked = plan.blocked.get(job.spec)
    if blocked is None:
        return "starts at the next look"
    if blocked.at_limits:
        return "; ".join(limits.in_words(at) for at in blocked.at_limits)
    if blocked.reserved_for is not None:
        return f"would delay job {blocked.reserved_for}, which waits for the same and comes first"
    assert blocked.no_room is not None
    short = shortest(blocked.no_room)
    words = "waiting for " + ", ".join(_short_words(core, s, kept) for s in short)
    meets = any(isinstance(s.kept, model.Booking) and s.kept.starts_at > core.now for s in short)
    if meets and job.spec.time_limit_ms is None:
        words += "; without a time limit it may still run then"
    return words


def explanation(
    core: Scheduler,
    plan: Plan | None,
    job: model.Job,
    *,
    now_unix: float,
    user_of: Callable[[model.JobId], str],
    kept: KeptWords,
) -> Explanation:
    """The whole story of a pending job."""
    assert isinstance(job.state, model.Pending)
    blocked = plan.blocked.get(job.spec) if plan is not None else None
    alternatives = blocked.no_room.alternatives if blocked and blocked.no_room else ()
    at_limits = blocked.at_limits if blocked is not None else ()
    reservation = plan.reservation if plan is not None else None
    starts_at = None
    if reservation is not None and reservation.job_id == job.id and reservation.starts_at:
        starts_at = now_unix + (reservation.starts_at - core.now) / 1000
    holdings = core.holdings()
    return Explanation(
        id=job.id,
        state=JobState.PENDING,
        summary=waiting_reason(core, plan, job, kept),
        shortages=tuple(
            _shortage(core, s, holdings, now_unix, user_of, kept)
            for alternative in alternatives
            for s in alternative
        ),
        limits=tuple(
            LimitReached(
                whose=at.whose,
                resource=at.resource,
                unit=at.unit,
                used=at.used,
                limit=at.limit,
                need=at.need,
            )
            for at in at_limits
        ),
        jobs_ahead=core.jobs_ahead(job) if core.is_waiting(job) else 0,
        reserved=reservation is not None and reservation.job_id == job.id,
        starts_at=starts_at,
        after=reservation.after if starts_at is not None and reservation else None,
        predicted=starts_at is not None and reservation is not None and reservation.is_predicted,
    )


def _after_words(after: model.After) -> str:
    """ "waits until job 12 completes"; "waits until jobs 12, 13, 14 and 7 more end"."""
    shown = ", ".join(str(i) for i in after.job_ids[:3])
    more = len(after.job_ids) - 3
    jobs = f"job {shown}" if len(after.job_ids) == 1 else f"jobs {shown}"
    jobs += f" and {more} more" if more > 0 else ""
    verb = "end" if after.any_end else "complete"
    return f"waits until {jobs} {verb}{'s' if len(after.job_ids) == 1 else ''}"


def _short_words(core: Scheduler, short: placement.Shortage, kept: KeptWords) -> str:
    where = ""
    if short.gpu is not None:
        where = f" on GPU {_indices(core).get(short.gpu, '?')}"
    if short.verdict is not None:
        return _throughput_words(short.verdict, where)
    if short.kept is not None and short.resource in ("gpu", "machine"):
        what = where.removeprefix(" on ") or "the machine"
        which = ":" if isinstance(short.kept, model.Quiet) else ", which is"
        return f"{what}{which} {kept(short.kept)}"
    if short.resource == "gpu":
        if where:
            return f"a GPU: GPU{where.removeprefix(' on GPU')}: {short.note}"
        # Of a failing driver the core knows that the GPUs cannot be read; here it says why.
        why = core.facts.gpus_problem if core.facts is not None else ""
        return f"a GPU: {why or short.note}"
    if short.resource == "jobs":
        return f"other jobs to end{where} ({short.note})"
    return (
        f"{short.resource}{where}: {_amount(short.need, short.unit)} needed,"
        f" {_amount(short.free, short.unit)} free"
        + (f" ({kept(short.kept)})" if short.kept is not None else "")
    )


def _throughput_words(verdict: Verdict, where: str) -> str:
    """ "6 jobs on GPU 0 give 3.1x one job's speed; a 7th would add 0.02"."""
    jobs = f"{verdict.jobs} job{'s' if verdict.jobs != 1 else ''}{where or ' on the CPU'}"
    if verdict.because == "paused":
        return f"throughput: {jobs} are slower than {verdict.better}, so one of them is paused"
    if verdict.stp is None:
        return f"the speed of the {jobs} to be measured"
    give = "gives" if verdict.jobs == 1 else "give"
    speed = f"{jobs} {give} {verdict.stp / ONE_JOB:.1f}x one job's speed"
    nth = _ordinal(verdict.jobs + 1)
    if verdict.because == "flat":
        added = (verdict.gain or 0) / ONE_JOB
        return f"throughput: {speed}; the last one added {added:z.2f}, so a {nth} is not tried"
    if verdict.because == "alike":
        added = (verdict.gain or 0) / ONE_JOB
        return (
            f"throughput: {speed}; of the same programs in other proportions one more added"
            f" {added:z.2f}, so a {nth} is not tried"
        )
    return f"throughput: {speed}; a {nth} would add {(verdict.gain or 0) / ONE_JOB:z.2f}"


def paused_reason(why: model.BackedOff, where: str) -> str:
    """ "paused by rlqd: 7 jobs on GPU 0 are slower than 6"."""
    return f"paused by rlqd: {why.jobs} jobs on {where} are slower than {why.better}"


def _ordinal(n: int) -> str:
    if n % 100 in (11, 12, 13):
        return f"{n}th"
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th') }"


def _amount(amount: int, unit: str) -> str:
    match unit:
        case "MiB":
            return format_mib(amount)
        case "%":
            return f"{amount}%"
        case _:
            return str(amount)


def _indices(core: Scheduler) -> Mapping[model.GpuId, int]:
    return {g.id: g.index for g in core.facts.gpus} if core.facts is not None else {}


def _shortage(
    core: Scheduler,
    short: placement.Shortage,
    holdings: list[Holding],
    now_unix: float,
    user_of: Callable[[model.JobId], str],
    kept: KeptWords,
) -> Shortage:
    holders = [
        Holder(
            job=h.job_id,
            user=user_of(h.job_id),
            amount=amount,
            ends_at=None if (at := h.expected_end) is None else now_unix + (at - core.now) / 1000,
        )
        for h in holdings
        if (amount := _held(short, h)) > 0
    ]
    if short.kept is not None:
        # What is left is not free for this job, and nobody outside the queue has it.
        words = kept(short.kept)
        holders = [Holder(kept=words)] if short.resource in ("gpu", "machine") else holders
        left = short.total - short.free - sum(h.amount for h in holders)
        if len(holders) != 1 or not holders[0].kept:
            holders.append(Holder(kept=words, amount=max(0, left)))
    outside = short.total - short.free - sum(h.amount for h in holders)
    if outside > 0 and short.resource in ("gpu memory", "gpu sm", "cores", "host memory"):
        holders.append(Holder(amount=outside))
    return Shortage(
        resource=short.resource,
        unit=short.unit,
        need=short.need,
        free=short.free,
        total=short.total,
        gpu=short.gpu,
        gpu_index=None if short.gpu is None else _indices(core).get(short.gpu),
        holders=tuple(holders),
    )


def _held(short: placement.Shortage, holding: Holding) -> int:
    """How much of the short resource this job holds."""
    if short.gpu is not None and short.gpu not in holding.placement.gpus:
        return 0
    match short.resource:
        case "gpu memory":
            return holding.charge.gpu_mem_mib
        case "gpu sm":
            return holding.charge.sm_pct
        case "cores":
            return len(holding.placement.cores)
        case "host memory":
            return holding.charge.mem_mib
        case "jobs":
            return 1
        case _:
            return 0
