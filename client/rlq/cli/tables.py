"""Tables of jobs, for terminals and for pipes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rlq.cli.output import NONE, Cell, Column, Row, print_table, print_tsv
from rlq.protocol.bookings import format_clock
from rlq.protocol.messages import Act, Job, Placement, Progress
from rlq.protocol.states import JobState
from rlq.protocol.units import format_duration

STATE_STYLES = {
    JobState.PENDING: "yellow",
    JobState.CONFIGURING: "cyan",
    JobState.RUNNING: "green",
    JobState.SUSPENDED: "magenta",
    JobState.COMPLETING: "cyan",
    JobState.COMPLETED: "dim",
    JobState.CANCELLED: "dim",
}
#: What does not fit 80 columns.
SHORT_STATES = {
    JobState.CONFIGURING: "STARTING",
    JobState.COMPLETING: "STOPPING",
    JobState.OUT_OF_MEMORY: "OUT OF MEM",
    JobState.LAUNCH_FAILED: "NOT RUN",
    JobState.NODE_FAIL: "NODE FAIL",
}
#: A waiting job that `rlq hold` keeps from starting.
HELD = "HELD"
STATES_SHOWN = {word: state.value for state, word in SHORT_STATES.items()}

PLAIN_HEADER = (
    *("ID", "NAME", "USER", "STATE", "DEVICE", "CORES", "PROGRESS_PCT", "STEPS_PER_S", "ETA_S"),
    *("TIME_S", "EXIT_CODE", "REASON", "RESULT"),
)


def print_jobs(jobs: Sequence[Job], now: float) -> None:
    """Oldest first, as in a queue: what starts next stands nearer the top."""
    ordered = sorted(jobs, key=lambda job: job.id)
    several = len({job.uid for job in jobs}) > 1
    reports = any(job.progress is not None for job in jobs)
    columns = [
        Column("ID", "right"),
        Column("NAME", least=8),
        *([Column("USER", least=5)] if several else []),
        Column("STATE"),
        Column("DEVICE"),
        Column("CORES", least=5),
        *(
            [Column("DONE", "right"), Column("STEPS/S", "right"), Column("ETA", "right")]
            if reports
            else []
        ),
        Column("TIME", "right"),
    ]
    print_table(columns, [_row(job, now, several=several, reports=reports) for job in ordered])


def _row(job: Job, now: float, *, several: bool, reports: bool) -> Row:
    head: list[Cell | str] = [
        Cell(str(job.id), "bold"),
        job.name,
        *([job.user] if several else []),
        Cell(state_word(job), STATE_STYLES.get(job.state, "red")),
    ]
    if job.state is JobState.SUSPENDED and job.reason:
        return Row(head, rest=Cell(job.reason, "dim"))
    if job.state is JobState.PENDING:
        since = format_duration(now - job.submitted_at)
        return Row(head, rest=Cell(pending_reason(job) or f"since {since}", "dim"))
    if job.state.is_final and job.reason and job.state is not JobState.COMPLETED:
        took = "" if job.started_at is None else f" ({spent(job, now)})"
        return Row(head, rest=Cell(job.reason + took, "dim"))
    return Row(
        [
            *head,
            device(job.placement),
            cores_cell(job.placement),
            *(progress_cells(job.progress, live=not job.state.is_final) if reports else []),
            spent(job, now),
        ]
    )


def print_history(jobs: Sequence[Job], now: float) -> None:
    several = len({job.uid for job in jobs}) > 1
    reports = any(job.progress is not None for job in jobs)
    scores = any(result_of(job) is not None for job in jobs)
    columns = [
        Column("ID", "right"),
        Column("NAME", least=8),
        *([Column("USER", least=5)] if several else []),
        Column("STATE"),
        Column("ENDED"),
        Column("TIME", "right"),
        Column("DEVICE"),
        Column("CORES", least=5),
        *([Column("STEPS/S", "right")] if reports else []),
        *([Column("RESULT", "right")] if scores else []),
    ]
    rows: list[Row] = []
    for job in jobs:
        cells: list[Cell | str] = [
            Cell(str(job.id), "bold"),
            job.name,
            *([job.user] if several else []),
            Cell(state_word(job), STATE_STYLES.get(job.state, "red")),
            clock(job.ended_at, now),
            spent(job, now),
        ]
        if job.state is not JobState.COMPLETED and job.reason:
            # What went wrong is worth more than where.
            rows.append(Row(cells, rest=Cell(job.reason, "dim")))
            continue
        cells += [device(job.placement), cores_cell(job.placement)]
        if reports:
            cells.append(rate(job.progress.steps_per_s if job.progress else None))
        if scores:
            cells.append(score(result_of(job)))
        rows.append(Row(cells))
    print_table(columns, rows)


#: Instead of a speed and an ETA that would mislead.
WARMING_UP = "warming up"
#: Metrics that tell how good a training is, the surest first.
RESULT_METRICS = ("mean_reward", "ep_rew_mean")


def result_of(job: Job) -> float | None:
    """How well it does: the reward of its last evaluation, else of its training episodes."""
    metrics = job.progress.metrics if job.progress is not None else {}
    return next((metrics[name] for name in RESULT_METRICS if name in metrics), None)


def score(result: float | None) -> str:
    if result is None:
        return NONE
    return f"{result:.0f}" if abs(result) >= 10_000 else f"{result:.1f}"


def print_jobs_plain(jobs: Iterable[Job], now: float) -> None:
    """In the order given; a field without a value is `-`."""
    print_tsv(PLAIN_HEADER, (_plain_row(job, now) for job in jobs))


def _plain_row(job: Job, now: float) -> list[str]:
    progress = job.progress
    speed = None if progress is None else progress.steps_per_s
    eta_s = None if progress is None else progress.eta_s
    if is_warming_up(progress) and not job.state.is_final:
        speed = eta_s = None
    return [
        str(job.id),
        job.name or NONE,
        job.user,
        job.state.value,
        device(job.placement),
        cores(job.placement),
        NONE if (pct := done_pct(progress)) is None else str(pct),
        NONE if speed is None else f"{speed:g}",
        NONE if eta_s is None else f"{eta_s:.0f}",
        NONE if (seconds := spent_s(job, now)) is None else f"{seconds:.0f}",
        NONE if job.exit_code is None else str(job.exit_code),
        job.reason or NONE,
        NONE if (result := result_of(job)) is None else f"{result:g}",
    ]


def ended_reason(job: Job) -> str:
    """The reason, unless the exit code or signal says it already."""
    said = {f"exit code {job.exit_code}", f"signal {job.signal}"}
    return "" if job.state is JobState.COMPLETED or job.reason in said else job.reason


# ---- cells -------------------------------------------------------------------------


def state_word(job: Job) -> str:
    if job.held and job.state is JobState.PENDING:
        return HELD
    return SHORT_STATES.get(job.state, job.state.value)


def pending_reason(job: Job) -> str:
    if job.held:
        return job.reason or f"held: rlq release {job.id}"
    return job.reason


def device(placement: Placement | None) -> str:
    if placement is None:
        return NONE
    if not placement.gpus and not placement.gpu_indices:
        return "cpu"
    return "gpu" + compress(placement.gpu_indices) if placement.gpu_indices else "gpu?"


def cores(placement: Placement | None) -> str:
    return (compress(placement.cores) if placement is not None else "") or NONE


def cores_cell(placement: Placement | None) -> str:
    """'#0-3': numbers of cores; a bare 0 reads as "none"."""
    shown = cores(placement)
    return shown if shown == NONE else f"#{shown}"


def cores_words(placement: Placement | None) -> str:
    """'core 0', 'cores 0-3 (4)'."""
    shown = cores(placement)
    if placement is None or shown == NONE:
        return shown
    number = len(placement.cores)
    return f"core {shown}" if number == 1 else f"cores {shown} ({number})"


def is_warming_up(progress: Progress | None) -> bool:
    """Nothing is learned yet: steps are quicker now than they will be."""
    return progress is not None and bool(progress.metrics.get("warming_up"))


def compress(numbers: Iterable[int]) -> str:
    """'0-3,8' of 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def done_pct(progress: Progress | None) -> int | None:
    if progress is None or not progress.total:
        return None
    # Rounded down: 100 % is done and nothing less.
    return max(0, min(100, 100 * progress.step // progress.total))


def progress_cells(progress: Progress | None, *, live: bool) -> list[str]:
    """DONE, STEPS/S, ETA."""
    if progress is None:
        return [NONE, NONE, NONE]
    pct = done_pct(progress)
    eta = progress.eta_s if live else None
    if live and is_warming_up(progress):
        return [count(progress.step) if pct is None else f"{pct}%", NONE, WARMING_UP]
    return [
        count(progress.step) if pct is None else f"{pct}%",
        rate(progress.steps_per_s),
        NONE if eta is None else format_duration(eta),
    ]


def rate(steps_per_s: float | None) -> str:
    if steps_per_s is None:
        return NONE
    if steps_per_s >= 10_000:
        return count(steps_per_s)
    return f"{steps_per_s:.0f}" if steps_per_s >= 100 else f"{steps_per_s:.1f}"


def count(number: float) -> str:
    """'950', '12.3k', '4.5M'."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + unit
    return f"{number:.0f}"


def spent_s(job: Job, now: float) -> float | None:
    """Seconds it ran, so far or in all; None: it has not started."""
    if job.started_at is None:
        return None
    return max(0.0, (job.ended_at or now) - job.started_at)


def spent(job: Job, now: float) -> str:
    seconds = spent_s(job, now)
    return NONE if seconds is None else format_duration(seconds)


def exit_word(job: Job) -> str:
    if job.exit_code is not None:
        return str(job.exit_code)
    return f"sig{job.signal}" if job.signal is not None else NONE


ACTS_DONE = {
    "cancel": "cancelled",
    "hold": "held",
    "release": "released",
    "pause": "paused",
    "resume": "resumed",
    "requeue": "requeued",
    "prioritize": "priority set",
}


def act_in_words(act: Act) -> str:
    """ "cancelled by root (uid 0) at 2026-11-30 11:20:01, at once" """
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(act.at))
    detail = f", {act.detail}" if act.detail else ""
    return f"{ACTS_DONE.get(act.verb, act.verb)} by {act.user} (uid {act.uid}) at {at}{detail}"


def clock(at: float | None, now: float) -> str:
    """'14:03' today, else '28 Nov 14:03'."""
    return NONE if at is None else format_clock(at, now)
