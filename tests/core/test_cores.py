"""Opt-in: a job that declares no cores gets more than the default where they were measured to
help it and nobody else could use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import EXACT, FACTS, Desk, cores, spec

from rlqd.core.cores import doublings, variant, worth
from rlqd.core.guard import Estimate
from rlqd.core.model import Instant, JobSpec

CPU = "CPU, 16 cores"
JOB = replace(spec(cores=None), signature="sac")


def desk(known: dict[int, int], *, most: int = 8, physical: int = 16) -> Desk:
    """`known`: thousandths of a step per second, by cores."""
    facts = replace(FACTS, cores=cores(physical))
    found = Desk(facts=facts, policy=replace(EXACT, cores_most=most))
    for n, rate in known.items():
        key = (f"CPU, {physical} cores", variant("sac", n, 1))
        found.core.guard.solo[key] = Estimate(rate, 1, Instant(0))
    return found


def given(one: Desk, *jobs: JobSpec) -> list[int]:
    return [len(one.place(job).cores) for job in one.submit(*jobs)]


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ({}, (1, None)),
        ({2: 90}, (1, None)),
        ({1: 100}, (1, 2)),
        ({1: 100, 2: 104}, (1, None)),
        ({1: 100, 2: 105}, (2, 4)),
        ({1: 100, 2: 160, 4: 165}, (2, None)),
        ({1: 100, 2: 160, 4: 260, 8: 400}, (8, None)),
        ({1: 100, 2: 60}, (1, None)),
    ],
)
def test_each_core_has_to_add_the_threshold(
    known: dict[int, int], found: tuple[int, int | None]
) -> None:
    assert worth(known, 1, 8, threshold_pct=5) == found


def test_numbers_double_up_to_the_most() -> None:
    assert doublings(1, 8) == [1, 2, 4, 8]
    assert doublings(3, 13) == [3, 6, 12]


def test_by_default_nobody_gets_more_than_the_default() -> None:
    assert given(desk({1: 50_000}, most=1), JOB) == [1]


def test_the_first_job_of_a_program_gets_the_default() -> None:
    assert given(desk({}), JOB) == [1]


def test_the_next_one_on_an_idle_machine_tries_two() -> None:
    assert given(desk({1: 50_000}), JOB) == [2]


def test_nothing_is_tried_beside_others() -> None:
    one = desk({1: 50_000})
    one.run(spec())
    assert given(one, JOB) == [1]


def test_what_paid_is_given_beside_others_too() -> None:
    one = desk({1: 50_000, 2: 80_000, 4: 81_000})
    one.run(spec())
    assert given(one, JOB) == [2]


def test_a_program_that_gained_too_little_goes_back_to_one() -> None:
    assert given(desk({1: 50_000, 2: 51_000}), JOB) == [1]


def test_who_waits_has_the_cores() -> None:
    assert given(desk({1: 50_000, 2: 80_000}), JOB, JOB) == [1, 2], "the last has nobody behind it"


def test_no_more_than_half_of_what_is_free() -> None:
    assert given(desk({1: 50_000, 2: 80_000, 4: 99_000}, physical=6), JOB) == [1]
    assert given(desk({1: 50_000, 2: 80_000, 4: 81_000}, physical=4), JOB) == [2]
    assert given(desk({1: 50_000}, physical=2), JOB) == [1]


def test_declared_cores_are_what_a_job_gets() -> None:
    assert given(desk({1: 50_000, 2: 80_000}), replace(JOB, cores=1)) == [1]


def test_a_job_with_more_cores_is_a_program_of_its_own() -> None:
    one = desk({1: 50_000})
    given(one, JOB)
    (holding,) = one.core.holdings()
    assert holding.signature == "sac cores=2"
