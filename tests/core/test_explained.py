"""Every wait explains itself, with the numbers the decision was made with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import FACTS, A, B, Desk, gpu, spec

from rlqd.core.model import GpuFacts, MachineFacts
from rlqd.core.placement import Shortage
from rlqd.core.policy import shortest

ONE_GPU = replace(FACTS, gpus=(gpu(A),))
TWO_GPUS = replace(FACTS, gpus=(gpu(A), gpu(B)))


def why(desk: Desk, job: int) -> tuple[Shortage, ...]:
    plan = desk.core.plan()
    assert plan is not None
    blocked = plan.blocked[desk.rows[job].spec]
    assert blocked.no_room is not None
    return shortest(blocked.no_room)


def test_cores() -> None:
    desk = Desk()
    desk.run(spec(cores=6))
    (job,) = desk.submit(spec(cores=4))
    (short,) = why(desk, job)
    assert (short.resource, short.need, short.free, short.total) == ("cores", 4, 2, 8)


def test_host_memory() -> None:
    desk = Desk()
    desk.run(spec(mem=60_000))
    (job,) = desk.submit(spec(mem=8_000))
    (short,) = why(desk, job)
    assert (short.resource, short.need, short.free) == ("host memory", 8_000, 4_000)
    assert short.total == 64_000


def test_gpu_memory_and_sm_of_one_gpu_are_short_together() -> None:
    desk = Desk(ONE_GPU)
    desk.run(spec(gpus=1, gpu_mem=20_000, sm=80))
    (job,) = desk.submit(spec(gpus=1, gpu_mem=8_000, sm=40))
    mem, sm = why(desk, job)
    assert (mem.resource, mem.need, mem.free, mem.gpu) == ("gpu memory", 8_000, 4_000, A)
    assert (sm.resource, sm.need, sm.free, sm.gpu) == ("gpu sm", 40, 20, A)


def test_the_gpu_nearest_to_fitting_comes_first() -> None:
    desk = Desk(TWO_GPUS)
    desk.run(spec(gpus=1, gpu_mem=20_000, sm=80), spec(gpus=1, gpu_mem=20_000, sm=10))
    (job,) = desk.submit(spec(gpus=1, gpu_mem=8_000, sm=40))
    assert [s.gpu for s in why(desk, job)] == [B]


def test_a_gpu_that_left_the_bus_is_the_reason() -> None:
    # The GPU that was left had room, so that nothing at all was said to be short.
    desk = Desk(TWO_GPUS)
    running = desk.run(spec(gpus=2, gpu_mem=24_000, sm=100))
    (job,) = desk.submit(spec(gpus=2, gpu_mem=1_000))
    desk.sample(ONE_GPU, after=1_000)
    desk.exit(*running)
    desk.sample(after=1_000)
    (short,) = why(desk, job)
    assert (short.resource, short.need, short.free, short.total) == ("gpu", 2, 1, 1)


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (replace(ONE_GPU, gpus=(gpu(problem="fell off the bus", free=None),)), "fell off"),
        (replace(ONE_GPU, gpus=(gpu(free=None),)), "memory cannot be read"),
        (replace(ONE_GPU, gpus=(gpu(sm=None),)), "utilisation cannot be read"),
        (replace(ONE_GPU, gpus=(), gpus_problem="version mismatch"), "no GPU can be read"),
    ],
)
def test_an_unknown_reading_admits_nothing_and_says_so(facts: MachineFacts, word: str) -> None:
    desk = Desk(facts)
    (job,) = desk.submit(spec(gpus=1, gpu_mem=1_000))
    assert not desk.launched
    assert word in why(desk, job)[0].note
    desk.sample(ONE_GPU, after=1_000)
    assert job in desk.launched


def test_an_unknown_reading_disturbs_nothing_that_runs() -> None:
    desk = Desk(ONE_GPU)
    desk.run(spec(gpus=1, gpu_mem=1_000))
    lost: tuple[GpuFacts, ...] = (gpu(problem="fell off the bus", free=None, total=None, sm=None),)
    desk.sample(replace(ONE_GPU, gpus=lost), after=1_000)
    assert desk.effects() == []


def test_exclusive_says_who_has_what() -> None:
    desk = Desk(ONE_GPU)
    desk.run(spec(gpus=1, gpu_mem=1_000, exclusive=True))
    (job,) = desk.submit(spec(gpus=1, gpu_mem=1_000))
    (short,) = why(desk, job)
    assert (short.resource, short.gpu, short.note) == ("jobs", A, "a job has it to itself")


def test_a_gpu_that_cannot_be_read_just_now_is_no_reason_to_refuse() -> None:
    desk = Desk(replace(ONE_GPU, gpus_problem="a board does not answer"))
    (job,) = desk.submit(spec(gpus=2, gpu_mem=1_000))
    assert job in desk.rows
    assert why(desk, job)[0].note
