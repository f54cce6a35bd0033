"""What each verb does to a job in each state: one table a verb, one answer a request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.core.machines import Desk, spec

from rlqd.core.model import Accept, Refuse


def held(desk: Desk) -> int:
    return desk.submit(spec(), held=True)[0]


def waiting(desk: Desk) -> int:
    desk.run(spec(cores=8))
    return desk.submit(spec(cores=8))[0]


def starting(desk: Desk) -> int:
    return desk.submit(spec())[0]


def running(desk: Desk) -> int:
    return desk.run(spec(limit=60_000))[0]


def suspended(desk: Desk) -> int:
    job = running(desk)
    desk.pause(job)
    return job


def cancelling(desk: Desk) -> int:
    job = running(desk)
    desk.cancel(job)
    return job


def requeuing(desk: Desk) -> int:
    job = running(desk)
    desk.requeue(job)
    return job


def finished(desk: Desk) -> int:
    job = running(desk)
    desk.exit(job)
    return job


TABLE = [
    # state, verb, accepted, effects, the state then
    (held, "cancel", True, [], "Finished"),
    (waiting, "cancel", True, [], "Finished"),
    (starting, "cancel", True, ["Terminate"], "Completing"),
    (running, "cancel", True, ["Terminate"], "Completing"),
    (suspended, "cancel", True, ["Terminate"], "Completing"),
    (cancelling, "cancel", True, [], "Completing"),
    (requeuing, "cancel", True, [], "Completing"),
    (finished, "cancel", False, [], "Finished"),
    (held, "hold", True, [], "Pending"),
    (waiting, "hold", True, [], "Pending"),
    (running, "hold", False, [], "Running"),
    (finished, "hold", False, [], "Finished"),
    (held, "release", True, ["Launch"], "Starting"),
    (waiting, "release", True, [], "Pending"),
    (running, "release", False, [], "Running"),
    (waiting, "pause", False, [], "Pending"),
    (starting, "pause", False, [], "Starting"),
    (running, "pause", True, ["Freeze"], "Suspended"),
    (suspended, "pause", True, [], "Suspended"),
    (cancelling, "pause", False, [], "Completing"),
    (waiting, "resume", False, [], "Pending"),
    (running, "resume", True, [], "Running"),
    (suspended, "resume", True, ["Freeze"], "Running"),
    (cancelling, "resume", False, [], "Completing"),
    (waiting, "requeue", True, [], "Pending"),
    (starting, "requeue", True, ["Terminate"], "Completing"),
    (running, "requeue", True, ["Terminate"], "Completing"),
    (suspended, "requeue", True, ["Terminate"], "Completing"),
    (cancelling, "requeue", False, [], "Completing"),
    (requeuing, "requeue", True, [], "Completing"),
    (finished, "requeue", True, ["Launch"], "Starting"),
]


@pytest.mark.parametrize(("state", "verb", "accepted", "effects", "then"), TABLE)
def test_the_table(
    state: Callable[[Desk], int], verb: str, accepted: bool, effects: list[str], then: str
) -> None:
    desk = Desk()
    job = state(desk)
    answer = getattr(desk, verb)(job, after=10)
    assert isinstance(answer, Accept if accepted else Refuse)
    assert desk.effects() == effects
    assert type(desk.state(job)).__name__ == then


def test_a_cancelled_job_never_starts_again_whatever_it_was_stopped_for() -> None:
    desk = Desk()
    job = requeuing(desk)
    desk.cancel(job)
    desk.exit(job, after=10)
    assert desk.outcome(job).value == "CANCELLED"


def test_a_requeued_job_runs_again_as_a_new_attempt() -> None:
    desk = Desk()
    job = requeuing(desk)
    desk.exit(job, after=10)
    assert desk.launched[job].attempt == 2


def test_the_time_limit_stands_still_while_a_job_is_paused() -> None:
    desk = Desk()
    job = running(desk)  # 60 s
    desk.pause(job, after=20_000)
    desk.tell(after=3_600_000)
    assert desk.effects() == []
    desk.resume(job)
    desk.sample(after=39_999)
    assert desk.effects() == []
    desk.tell(after=1)
    assert desk.effects() == ["Terminate"]
