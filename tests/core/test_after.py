"""Jobs that follow others: `--after` and `--after-any`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import EXACT, Desk, spec

from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    CancelRequested,
    Exit,
    Finished,
    Instant,
    JobId,
    Outcome,
    ProcessExited,
)


def reason(desk: Desk, job_id: int) -> str:
    state = desk.state(job_id)
    assert isinstance(state, Finished)
    return state.reason


def test_it_starts_once_all_it_follows_have_completed() -> None:
    desk = Desk()
    first, second = desk.run(spec(), spec())
    (follower,) = desk.submit(spec(), follow=[first, second])
    desk.sample()
    desk.exit(first)
    assert follower not in desk.running()
    desk.exit(second)
    desk.sample()
    assert follower in desk.running()


def test_if_one_fails_it_is_cancelled_and_says_why() -> None:
    desk = Desk()
    first, second = desk.run(spec(), spec())
    (follower,) = desk.submit(spec(), follow=[first, second])
    desk.exit(first, code=1)
    assert desk.outcome(follower) is Outcome.CANCELLED
    assert reason(desk, follower) == f"job {first}, which it was to follow, ended as FAILED"
    desk.exit(second)


@pytest.mark.parametrize("code", [0, 1])
def test_to_name_a_job_twice_is_to_name_it_once(code: int) -> None:
    desk = Desk()
    (first,) = desk.run(spec())
    (follower,) = desk.submit(spec(), follow=[first, first])
    desk.exit(first, code=code)
    desk.sample()
    assert (follower in desk.running()) == (code == 0)


def test_a_long_chain_goes_with_its_first() -> None:
    desk = Desk()
    (first,) = desk.submit(spec(), held=True)
    order = [desk.submission(spec(), follow=[first + n]) for n in range(2_000)]
    chain = [
        replace(one, request=100 + n, jobs=((JobId(first + n + 1), spec()),))
        for n, one in enumerate(order)
    ]
    desk.tell(*chain)
    desk.cancel(first)
    assert not desk.core.jobs
    last = first + len(chain)
    assert reason(desk, last) == f"job {last - 1}, which it was to follow, ended as CANCELLED"


def test_with_any_end_it_starts_however_they_end() -> None:
    desk = Desk()
    failed, cancelled = desk.run(spec(), spec())
    (follower,) = desk.submit(spec(), follow=[failed, cancelled], any_end=True)
    desk.exit(failed, code=1)
    desk.cancel(cancelled)
    assert follower not in desk.running()
    desk.exit(cancelled, code=0)
    desk.sample()
    assert follower in desk.running()


def test_what_is_queued_again_has_not_ended() -> None:
    desk = Desk()
    (first,) = desk.run(spec())
    (follower,) = desk.submit(spec(), follow=[first])
    desk.requeue(first)
    desk.exit(first)
    desk.sample()
    assert first in desk.running()
    assert follower not in desk.running()
    desk.exit(first)
    desk.sample()
    assert follower in desk.running()


def test_a_held_follower_waits_for_both() -> None:
    desk = Desk()
    (first,) = desk.run(spec())
    (follower,) = desk.submit(spec(), follow=[first], held=True)
    desk.exit(first)
    desk.sample()
    assert follower not in desk.running()
    desk.release(follower)
    assert follower in desk.running()


def test_one_that_ends_as_it_is_named_is_not_missed() -> None:
    """Its end is known to the core, and not yet to the shell that took the submission."""
    desk = Desk()
    (first,) = desk.run(spec())
    attempt = desk.launched[first].attempt
    ended = ProcessExited(Instant(0), JobId(first), attempt, Exit(code=0))
    submission = desk.submission(spec(), follow=[first])
    desk.tell(ended, submission)
    desk.sample()
    assert submission.jobs[0][0] in desk.running()


@pytest.mark.parametrize("any_end", [False, True])
def test_a_restart_keeps_what_it_waits_for(any_end: bool) -> None:
    desk = Desk()
    (first,) = desk.run(spec())
    (follower,) = desk.submit(spec(), follow=[first], any_end=any_end)
    desk.core = Scheduler.restore([*desk.core.jobs.values()], EXACT, Instant(desk.now))
    desk.start(first)
    desk.sample()
    assert follower not in desk.running()
    desk.exit(first)
    desk.sample()
    assert follower in desk.running()


@pytest.mark.parametrize(("any_end", "runs"), [(False, False), (True, True)])
def test_one_whose_row_is_damaged_counts_as_failed(any_end: bool, runs: bool) -> None:
    desk = Desk()
    (first,) = desk.submit(spec(), held=True)
    (follower,) = desk.submit(spec(), follow=[first], any_end=any_end)
    (row,) = (job for job in desk.core.jobs.values() if job.id == follower)
    desk.core = Scheduler.restore([row], EXACT, Instant(desk.now))
    desk.sample()
    assert (follower in desk.running()) == runs
    if not runs:
        assert desk.outcome(follower) is Outcome.CANCELLED


def test_two_ends_at_once_cancel_it_once() -> None:
    desk = Desk()
    first, second = desk.submit(spec(), spec(), held=True)
    (follower,) = desk.submit(spec(), follow=[first, second])
    desk.tell(*(CancelRequested(Instant(0), 100 + j, JobId(j)) for j in (first, second)))
    assert desk.outcome(follower) is Outcome.CANCELLED
