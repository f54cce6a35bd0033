"""How a job is stopped: SIGTERM, the grace, SIGKILL, and what became of it in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import EXACT, Desk, spec

from rlqd.core.model import (
    CancelRequested,
    Completing,
    Exit,
    Finished,
    Instant,
    JobId,
    LaunchFailed,
    Outcome,
    Pending,
    ProcessExited,
    Starting,
)


def test_sigkill_comes_when_the_grace_is_over_and_not_before() -> None:
    desk = Desk()
    (job,) = desk.run(spec(grace=5_000))
    desk.cancel(job)
    assert desk.effects() == ["Terminate"]
    desk.tell(after=4_999)
    assert desk.effects() == []
    desk.tell(after=1)
    assert desk.effects() == ["Kill"]


def test_sigkill_is_repeated_until_the_process_is_gone() -> None:
    desk = Desk()
    (job,) = desk.run(spec(grace=0))
    desk.cancel(job)
    assert desk.effects() == ["Terminate", "Kill"]
    desk.tell(after=5_000)
    assert desk.effects() == ["Kill"]
    desk.exit(job, after=1)
    desk.tell(after=60_000)
    assert desk.effects() == []


def test_a_time_limit_with_no_grace_kills_at_once() -> None:
    # The kill fell due in the step that set it, and the next wakeup skipped what was due.
    desk = Desk()
    desk.run(spec(limit=10_000, grace=0))
    desk.tell(after=10_000)
    assert desk.effects() == ["Terminate", "Kill"]
    wakeup = desk.core.next_wakeup()
    assert wakeup is not None
    assert wakeup > desk.now


def test_a_time_limit_counts_from_the_start_of_the_process() -> None:
    desk = Desk()
    (job,) = desk.submit(spec(limit=10_000))
    desk.start(job, after=3_000)
    desk.tell(after=9_999)
    assert desk.effects() == []
    desk.tell(after=1)
    assert desk.effects() == ["Terminate"]
    desk.exit(job, after=1)
    assert desk.state(job) == Finished(
        Outcome.TIMEOUT, desk.exit_of(job), "reached its time limit"
    )


def test_who_cancelled_it_is_in_the_reason_unless_it_was_its_user() -> None:
    desk = Desk()
    waits, runs, starts, own = desk.submit(*[spec(cores=4)] * 2, spec(cores=8), spec())
    desk.start(waits)
    by_root = [CancelRequested(Instant(0), n, JobId(n), by="root") for n in (waits, starts, runs)]
    desk.tell(*by_root)
    desk.tell(CancelRequested(Instant(0), 9, JobId(own)))
    reasons = {}
    for job in (waits, runs):
        desk.exit(job)
    for job in (waits, runs, starts, own):
        state = desk.state(job)
        assert isinstance(state, Finished)
        reasons[job] = state.reason
    assert reasons == {
        waits: "cancelled by root",
        runs: "cancelled by root",
        starts: "cancelled by root before it started",
        own: "cancelled before it started",
    }


def test_the_first_to_cancel_it_is_named() -> None:
    desk = Desk()
    (job,) = desk.run(spec(grace=60_000))
    desk.tell(CancelRequested(Instant(0), 1, JobId(job)))
    desk.tell(CancelRequested(Instant(0), 2, JobId(job), at_once=True, by="root"))
    desk.exit(job)
    assert desk.state(job) == Finished(Outcome.CANCELLED, desk.exit_of(job), "cancelled")


def test_cancel_at_once_skips_the_rest_of_the_grace() -> None:
    desk = Desk()
    (job,) = desk.run(spec(grace=60_000))
    desk.cancel(job)
    assert desk.effects() == ["Terminate"]
    desk.cancel(job, at_once=True, after=1)
    assert desk.effects() == ["Kill"]
    assert isinstance(desk.state(job), Completing)


def test_cancel_at_once_of_a_job_that_is_just_starting_gives_no_grace_either() -> None:
    desk = Desk()
    (job,) = desk.submit(spec(grace=60_000))
    desk.cancel(job, at_once=True)
    assert desk.effects() == ["Terminate", "Kill"]
    desk.start(job, after=1_000)
    assert desk.effects() == ["Terminate", "Kill"]


def test_a_start_that_hangs_can_be_cancelled() -> None:
    # It waited for a pid that never came, and held its cores for ever.
    desk = Desk()
    (job,) = desk.submit(spec(grace=2_000))
    desk.cancel(job)
    assert desk.effects() == ["Terminate"]
    assert desk.core.next_wakeup() is not None
    desk.sample(after=2_001)
    assert desk.effects() == ["Kill"]


def test_a_start_that_comes_too_late_is_stopped_and_tried_again_a_few_times() -> None:
    # The count was forgotten on the way, and the job was launched for ever.
    desk = Desk(policy=replace(EXACT, launch_retries=2))
    (job,) = desk.submit(spec())
    for attempt in (1, 2, 3):
        assert desk.launched[job].attempt == attempt
        desk.sample(after=61_000)
        desk.start(job)
        assert desk.effects() == ["Terminate"]
        desk.exit(job, after=10)
        desk.sample(after=5_000)
    assert desk.outcome(job) is Outcome.LAUNCH_FAILED


def test_a_job_that_was_told_nothing_and_ended_is_not_run_again() -> None:
    # Its start was reported too late, after its end: it was taken for one that never started.
    desk = Desk()
    (job,) = desk.submit(spec())
    desk.tell(after=61_000)
    desk.exit(job, after=1, code=0)
    assert desk.outcome(job) is Outcome.COMPLETED


def test_a_launch_that_fails_for_good_is_not_tried_again_because_it_was_slow() -> None:
    desk = Desk()
    (job,) = desk.submit(spec())
    desk.tell(after=61_000)
    desk.tell(LaunchFailed(Instant(0), JobId(job), 1, "no such file", False), after=1)
    assert desk.outcome(job) is Outcome.LAUNCH_FAILED


def test_a_job_that_reached_a_limit_of_its_own_is_told_which() -> None:
    desk = Desk()
    (job, other) = desk.run(spec(), spec())
    killed = Exit(signal=9, oom="host", oom_limit_mib=1116)
    desk.tell(
        ProcessExited(Instant(0), JobId(job), 1, killed),
        ProcessExited(Instant(0), JobId(other), 1, Exit(signal=9, oom="host")),
    )
    reason = "ran out of host memory: it reached its limit of 1116 MiB"
    assert desk.state(job) == Finished(Outcome.OUT_OF_MEMORY, killed, reason)
    assert desk.outcome(other) is Outcome.OUT_OF_MEMORY
    assert desk.exit_of(other).oom_limit_mib is None


#: As systemd ends a job at a shutdown: of SIGTERM, with an exit code, or just when it was done.
KILLED = Exit(signal=15, stopped_by_others=True)
LEFT = Exit(code=143, stopped_by_others=True)
DONE = Exit(code=0, stopped_by_others=True)


def stopped_by_others(desk: Desk, job: int, exit_: Exit, *, after: int = 0) -> None:
    attempt = desk.launched[job].attempt
    desk.tell(ProcessExited(Instant(0), JobId(job), attempt, exit_), after=after)


@pytest.mark.parametrize("exit_", [KILLED, LEFT])
@pytest.mark.parametrize("state", ["starting", "running", "paused"])
def test_a_job_that_somebody_else_stopped_has_not_failed_by_itself(
    exit_: Exit, state: str
) -> None:
    desk = Desk()
    (job,) = desk.submit(spec())
    if state != "starting":
        desk.start(job)
    if state == "paused":
        desk.pause(job)
    stopped_by_others(desk, job, exit_)
    reason = "it was stopped from outside rlqd, as at a shutdown"
    assert desk.state(job) == Finished(Outcome.NODE_FAIL, exit_, reason)


@pytest.mark.parametrize("exit_", [KILLED, LEFT])
def test_with_requeue_it_waits_again_and_not_for_the_same_shutdown(exit_: Exit) -> None:
    desk = Desk()
    (job,) = desk.run(spec(requeue=True))
    stopped_by_others(desk, job, exit_)
    desk.sample()
    assert isinstance(desk.state(job), Pending)
    desk.sample(after=EXACT.launch_retry_delay_ms)
    assert isinstance(desk.state(job), Starting)
    assert desk.launched[job].attempt == 2


def test_it_may_be_stopped_so_any_number_of_times() -> None:
    desk = Desk(policy=replace(EXACT, launch_retries=0))
    (job,) = desk.submit(spec(requeue=True))
    for _ in range(5):
        desk.start(job)
        stopped_by_others(desk, job, KILLED)
        desk.sample(after=EXACT.launch_retry_delay_ms)
    assert isinstance(desk.state(job), Starting)


@pytest.mark.parametrize("requeue", [False, True])
def test_a_job_that_was_done_when_somebody_else_stopped_it_is_done(requeue: bool) -> None:
    desk = Desk()
    (job,) = desk.run(spec(requeue=requeue))
    stopped_by_others(desk, job, DONE)
    assert desk.state(job) == Finished(Outcome.COMPLETED, DONE, "")


@pytest.mark.parametrize("exit_", [KILLED, LEFT, DONE])
def test_what_rlqd_itself_was_stopping_ends_as_that(exit_: Exit) -> None:
    desk = Desk()
    cancelled, late = desk.run(spec(requeue=True), spec(requeue=True, limit=1_000))
    desk.cancel(cancelled)
    stopped_by_others(desk, cancelled, exit_)
    desk.tell(after=1_000)
    stopped_by_others(desk, late, exit_)
    assert desk.outcome(cancelled) is Outcome.CANCELLED
    assert desk.outcome(late) is Outcome.TIMEOUT


def test_a_start_that_was_late_and_then_stopped_by_others_is_lost_too() -> None:
    desk = Desk()
    once, again = desk.submit(spec(), spec(requeue=True))
    desk.tell(after=61_000)
    stopped_by_others(desk, once, KILLED)
    stopped_by_others(desk, again, KILLED)
    assert desk.outcome(once) is Outcome.NODE_FAIL
    assert isinstance(desk.state(again), Pending)
