"""Where a job goes: physical cores first, near its GPU, on one node, where it is quiet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import EXACT, FACTS, A, B, Desk, cores, gpu, spec

from rlqd.core.model import Refuse

#: 4 physical cores with 2 threads each: 0 and 4 are siblings, 1 and 5, ...
SMT = replace(FACTS, cores=cores(4, smt=2))
#: Node 0: cores 0 to 3; node 1: cores 4 to 7.
TWO_NODES = replace(FACTS, cores=cores(8, nodes=2))


def test_physical_cores_come_before_hyperthread_siblings() -> None:
    desk = Desk(SMT)
    first, second, third = desk.run(spec(cores=2), spec(cores=2), spec(cores=2))
    assert desk.place(first).cores == (0, 1)
    assert desk.place(second).cores == (2, 3)
    assert desk.place(third).cores == (4, 5)


def test_a_job_that_needs_more_takes_whole_cores_first() -> None:
    desk = Desk(SMT)
    (job,) = desk.run(spec(cores=5))
    assert {0, 1, 2, 3} < set(desk.place(job).cores)


def test_cores_are_near_the_gpu() -> None:
    facts = replace(TWO_NODES, gpus=(gpu(A, near=range(4, 8)),))
    desk = Desk(facts)
    (job,) = desk.run(spec(gpus=1, gpu_mem=1_000, cores=2))
    assert set(desk.place(job).cores) <= {4, 5, 6, 7}


def test_a_job_stays_on_one_numa_node_if_it_can() -> None:
    desk = Desk(TWO_NODES)
    _, second = desk.run(spec(cores=3), spec(cores=4))
    assert desk.place(second).cores == (4, 5, 6, 7)


def test_cores_that_outsiders_keep_hot_are_given_out_last() -> None:
    desk = Desk(replace(FACTS, busy_permille=((0, 900), (1, 100), (2, 900))))
    (job,) = desk.run(spec(cores=2))
    assert desk.place(job).cores == (1, 3)


def test_jobs_spread_over_gpus() -> None:
    desk = Desk(replace(FACTS, gpus=(gpu(A), gpu(B))))
    jobs = desk.run(*[spec(gpus=1, gpu_mem=1_000)] * 4)
    assert [desk.place(j).gpus for j in jobs] == [(A,), (B,), (A,), (B,)]


def test_auto_means_a_gpu_where_there_is_one() -> None:
    with_gpu, without = Desk(replace(FACTS, gpus=(gpu(A),))), Desk()
    (on_gpu,) = with_gpu.run(spec(gpus=None, gpu_mem=1_000))
    (on_cpu,) = without.run(spec(gpus=None, gpu_mem=1_000))
    assert with_gpu.place(on_gpu).gpus == (A,)
    assert without.place(on_cpu).gpus == ()


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (spec(cores=9), "9 cores, this machine has 8"),
        (spec(mem=64_001), "64001 MiB of host memory"),  # in GiB it would look like all there is
        (spec(mem=128 * 1024), "128 GiB of host memory, this machine has 62.5 GiB"),
        (spec(gpus=2, gpu_mem=1), "2 GPUs, this machine has 1"),
        (spec(gpus=1, gpu_mem=24_001), "24001 MiB"),
    ],
)
def test_what_can_never_start_is_refused_with_what_the_machine_has(
    asked: object, word: str
) -> None:
    desk = Desk(replace(FACTS, gpus=(gpu(A),)))
    desk.submit(asked)  # type: ignore[arg-type]
    (refusal,) = [a for a in desk.said if isinstance(a, Refuse)]
    assert refusal.impossible
    assert word in refusal.message
    assert not desk.rows


def test_an_array_with_one_impossible_job_is_refused_as_a_whole() -> None:
    desk = Desk()
    desk.submit(spec(), spec(cores=9))
    assert not desk.rows


def test_a_full_queue_refuses() -> None:
    desk = Desk(policy=replace(EXACT, queued_max=2))
    desk.submit(spec(), spec(), spec())
    assert [type(a).__name__ for a in desk.said] == ["Refuse"]
