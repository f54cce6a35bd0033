"""Who is stopped for a job of higher priority: few, the youngest, and only where it helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import EXACT, FACTS, GPU_MIB, A, B, Desk, gpu, spec

from rlqd.core.guard import Estimate, Learned
from rlqd.core.model import (
    Completing,
    Instant,
    JobId,
    JobSpec,
    Pending,
    Policy,
)

ONE_GPU = replace(FACTS, gpus=(gpu(A),))
TWO_GPUS = replace(FACTS, gpus=(gpu(A), gpu(B)))
ALLOWED = replace(EXACT, preemption=True, preempt_exempt_ms=60_000)


def low(mem: int = 8_000, *, grace: int = 30_000) -> JobSpec:
    return replace(spec(gpus=1, gpu_mem=mem, grace=grace), preemptible=True)


def urgent(mem: int = GPU_MIB, *, priority: int = 5) -> JobSpec:
    return spec(gpus=1, gpu_mem=mem, priority=priority)


def desk(facts: object = ONE_GPU, policy: Policy = ALLOWED) -> Desk:
    assert isinstance(facts, type(FACTS))
    return Desk(facts, policy=policy)


def stopped(at: Desk) -> set[int]:
    return {i for i in at.running() if isinstance(at.state(i), Completing)}


def test_a_job_of_higher_priority_has_a_preemptible_one_stopped_and_takes_its_place() -> None:
    at = desk()
    (first,) = at.run(low())
    (head,) = at.submit(urgent())
    assert stopped(at) == {first}
    assert at.effects() == ["Terminate"]
    at.tell(after=30_000)
    assert at.effects() == ["Kill"]
    at.exit(first, after=1)
    # Its GPU memory is offered once it was read again, as after any end.
    assert head not in at.launched
    at.sample(after=10)
    assert head in at.launched
    assert at.state(first) == Pending(Instant(30_001), preempted_by=JobId(head))


def test_what_was_preempted_runs_again_when_there_is_room() -> None:
    at = desk()
    (first,) = at.run(low(grace=0))
    (head,) = at.submit(urgent())
    at.exit(first)
    at.sample(after=10)
    at.start(head)
    assert first not in at.running()
    at.exit(head)
    at.sample(after=10)
    assert at.launched[first].attempt == 2


@pytest.mark.parametrize(
    ("policy", "running", "waiting"),
    [
        pytest.param(replace(ALLOWED, preemption=False), low(), urgent(), id="not allowed"),
        pytest.param(ALLOWED, replace(low(), preemptible=False), urgent(), id="does not resume"),
        pytest.param(ALLOWED, low(), urgent(priority=0), id="of the same priority"),
        pytest.param(ALLOWED, replace(low(), priority=9), urgent(), id="of a lower priority"),
    ],
)
def test_nobody_is_stopped_who_need_not_be(
    policy: Policy, running: JobSpec, waiting: JobSpec
) -> None:
    at = desk(policy=policy)
    at.run(running)
    at.submit(waiting)
    assert not stopped(at)


def test_as_few_as_possible_are_stopped_and_the_youngest_of_those() -> None:
    at = desk()
    old, middle = at.run(low(8_000), low(8_000))
    at.sample(after=1_000)
    (young,) = at.run(low(4_000))
    at.submit(urgent(12_000))  # 4,000 are free; the youngest alone would not do
    assert stopped(at) == {middle}
    assert {old, young} <= at.running()


def test_those_of_one_gpu_are_stopped_not_some_on_each() -> None:
    at = desk(TWO_GPUS)
    jobs = at.run(*[low(12_000)] * 4)
    on = {i: at.place(i).gpus[0] for i in jobs}
    at.submit(urgent())
    assert sorted(on[i] for i in stopped(at)) in ([A, A], [B, B])


def test_nobody_is_stopped_where_it_would_not_be_enough() -> None:
    at = desk()
    at.run(low(8_000), replace(low(8_000), preemptible=False))
    at.submit(urgent())
    assert not stopped(at)


def test_nobody_is_stopped_for_a_job_that_the_guard_would_not_start_then() -> None:
    at = desk(replace(FACTS, gpus=(replace(gpu(A), kind="A100"),)))
    rows = [
        Learned("A100", mix, jobs, Estimate(value, 1, Instant(0)))
        for mix, jobs, value in (
            (("sac",), 0, 50_000),
            (("sac",), 2, 1_000),
            (("sac",), 3, 1_000),
        )
    ]
    at.core.guard.load(rows, Instant(0))
    (stays,) = at.run(replace(low(8_000), signature="sac", preemptible=False))
    (yields,) = at.run(replace(low(14_000), signature="other"))
    at.submit(*[replace(urgent(12_000), signature="sac")] * 4)
    assert not stopped(at)
    assert {stays, yields} <= at.running()


def test_while_somebody_makes_room_nobody_else_is_stopped_for_it() -> None:
    at = desk(TWO_GPUS)
    at.run(low(20_000), low(20_000))
    at.submit(urgent())
    assert len(stopped(at)) == 1
    for _ in range(5):
        at.sample(after=1_000)
    assert len(stopped(at)) == 1


def test_the_room_that_is_made_is_not_given_to_others_meanwhile() -> None:
    at = desk()
    old, young = at.run(low(12_000), low(12_000))
    (head,) = at.submit(urgent())
    assert stopped(at) == {old, young}
    at.exit(young, after=1)
    (other,) = at.submit(spec(gpus=1, gpu_mem=4_000))
    at.sample(after=10)
    assert other not in at.launched
    at.exit(old)
    at.sample(after=10)
    assert head in at.launched


def test_one_that_was_started_again_runs_for_a_while_before_it_is_its_turn_again() -> None:
    at = desk()
    (first,) = at.run(low(grace=0))
    (head,) = at.submit(urgent())
    at.exit(first)
    at.sample(after=10)
    at.start(head)
    at.exit(head)
    at.sample(after=10)
    at.start(first)
    at.submit(urgent())
    at.sample(after=59_999)
    assert not stopped(at)
    at.sample(after=1)
    assert stopped(at) == {first}


def test_a_cancel_of_one_that_is_preempted_is_final() -> None:
    at = desk()
    (first,) = at.run(low())
    at.submit(urgent())
    at.cancel(first)
    at.exit(first)
    assert at.outcome(first).value == "CANCELLED"


def test_a_daemon_that_comes_back_knows_for_whom_it_stops_it() -> None:
    at = desk()
    (first,) = at.run(low())
    (head,) = at.submit(urgent())
    at.core = type(at.core).restore([at.rows[first], at.rows[head]], ALLOWED, Instant(at.now))
    at.tell(at.started(first))
    assert at.effects() == ["Terminate"]
    at.exit(first)
    assert at.state(first) == Pending(Instant(0), preempted_by=JobId(head))
