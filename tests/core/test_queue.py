"""A long queue costs what its kinds of jobs cost.  Counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.machines import Desk, spec

from rlqd.core import policy
from rlqd.core.charge import Need
from rlqd.core.model import Placement, Policy
from rlqd.core.placement import NoRoom, place
from rlqd.core.room import Room


class Counter:
    """The real `place`, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, need: Need, room: Room, policy: Policy, *rest: Any) -> Placement | NoRoom:
        self.calls += 1
        return place(need, room, policy, *rest)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(policy, "place", counter)
    return counter


def test_a_pass_over_100_000_queued_jobs_looks_at_one_per_kind(counted: Counter) -> None:
    desk = Desk()
    desk.run(spec(cores=8))
    kinds = [spec(cores=n, user=user) for n in (1, 2) for user in (1, 2, 3)]
    desk.submit(*[kind for kind in kinds for _ in range(100_000 // len(kinds))])
    counted.calls = 0
    desk.core.step(desk.core.now)
    assert counted.calls <= 2 * len(kinds)


def test_starting_costs_one_look_per_start(counted: Counter) -> None:
    desk = Desk()
    desk.submit(*[spec(cores=8)] * 1_000)
    counted.calls = 0
    desk.core.step(desk.core.now)
    assert counted.calls <= 2


def test_on_a_full_machine_20_000_kinds_of_jobs_cost_one_look(counted: Counter) -> None:
    desk = Desk()
    desk.run(spec(cores=8, mem=1_000))
    desk.submit(*[spec(cores=1, mem=n) for n in range(1, 20_001)])
    counted.calls = 0
    plan = desk.core.plan()
    assert plan is not None
    assert counted.calls <= 2
    assert len(plan.blocked) == 20_000, "every one is told why"


def test_jobs_that_are_too_large_for_the_host_do_not_hide_one_that_fits() -> None:
    desk = Desk()
    desk.run(spec(cores=4, mem=60_000))
    desk.submit(*[spec(cores=1, mem=n) for n in range(5_000, 6_000)])
    desk.submit(*[spec(cores=n, mem=1) for n in (5, 6, 7, 8)])
    (small,) = desk.submit(spec(cores=4, mem=4_000))
    assert small in desk.running()


def test_higher_priority_first_then_older_first() -> None:
    desk = Desk()
    (running,) = desk.run(spec(cores=8))
    old, young, urgent = desk.submit(spec(cores=8), spec(cores=8), spec(cores=8, priority=1))
    order: list[int] = []
    current = running
    for _ in range(3):
        desk.exit(current)
        (current,) = desk.running()
        order.append(current)
    assert order == [urgent, old, young]
