"""How much room there is: free now, less what runs is still expected to grow into."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import EXACT, FACTS, GPU_MIB, A, B, Desk, gpu, spec, used

from rlqd.core.model import GpuShare, Instant, JobFacts, JobId, MachineFacts, Policy

ONE_GPU = replace(FACTS, gpus=(gpu(A),))


def gpu_room(desk: Desk, which: int = 0) -> tuple[int | None, int | None]:
    room = desk.core.room()
    assert room is not None
    return (list(room.gpus.values())[which].mem_mib, list(room.gpus.values())[which].sm_pct)


def host_room(desk: Desk) -> int:
    room = desk.core.room()
    assert room is not None
    return room.mem_mib


def with_jobs(facts: MachineFacts, **jobs: JobFacts) -> MachineFacts:
    """`j1=...` is what job 1 uses."""
    return replace(facts, jobs=tuple((JobId(int(k[1:])), v) for k, v in jobs.items()))


def test_outsiders_are_what_is_not_free() -> None:
    desk = Desk(replace(ONE_GPU, gpus=(gpu(free=9_000, sm=30),), mem_mib_available=10_000))
    assert gpu_room(desk) == (9_000, 70)
    assert host_room(desk) == 10_000


def test_reserves_are_kept_free() -> None:
    policy = replace(EXACT, gpu_mem_mib_reserve=512, mem_mib_reserve=1_024, sm_pct_limit=90)
    desk = Desk(ONE_GPU, policy=policy)
    assert gpu_room(desk) == (GPU_MIB - 512, 90)
    assert host_room(desk) == 64_000 - 1_024


def test_a_job_is_counted_in_full_before_its_first_reading() -> None:
    desk = Desk(ONE_GPU)
    desk.run(spec(gpus=1, gpu_mem=10_000, sm=30, mem=8_000))
    assert gpu_room(desk) == (14_000, 70)
    assert host_room(desk) == 56_000


def test_what_a_job_already_uses_is_not_counted_twice() -> None:
    desk = Desk(ONE_GPU)
    desk.run(spec(gpus=1, gpu_mem=10_000, sm=30, mem=8_000))
    grown = replace(ONE_GPU, gpus=(gpu(free=18_000),), mem_mib_available=61_000)
    desk.sample(with_jobs(grown, j1=used(3_000, gpus=[A], gpu_mem=6_000)), after=1_000)
    assert gpu_room(desk) == (14_000, 70)
    assert host_room(desk) == 56_000


def test_a_job_that_takes_more_than_it_said_is_counted_for_what_it_takes() -> None:
    desk = Desk(ONE_GPU)
    desk.run(spec(gpus=1, gpu_mem=1_000, mem=1_000))
    grown = replace(ONE_GPU, gpus=(gpu(free=GPU_MIB - 6_000),), mem_mib_available=61_000)
    desk.sample(with_jobs(grown, j1=used(3_000, gpus=[A], gpu_mem=6_000)), after=1_000)
    assert gpu_room(desk)[0] == GPU_MIB - 6_000
    assert host_room(desk) == 61_000


def test_outsiders_sm_stays_theirs_when_a_job_of_ours_starts() -> None:
    # A job not yet read was taken to be the cause of the load that was there before it.
    desk = Desk(replace(ONE_GPU, gpus=(gpu(sm=48),)))
    desk.run(spec(gpus=1, gpu_mem=1_000, sm=50))
    assert gpu_room(desk)[1] == 2


def test_our_own_sm_is_not_taken_for_outsiders() -> None:
    desk = Desk(ONE_GPU)
    desk.run(spec(gpus=1, gpu_mem=1_000, sm=50))
    ours = JobFacts(cpu_millicores=0, mem_mib=0, gpus=((A, GpuShare(mem_mib=0, sm_pct=45)),))
    desk.sample(replace(with_jobs(ONE_GPU, j1=ours), gpus=(gpu(sm=45),)), after=1_000)
    assert gpu_room(desk)[1] == 50


def test_cores_that_outsiders_keep_busy_are_not_given_out() -> None:
    desk = Desk(replace(FACTS, millicores_outside=5_600))
    (first, second) = desk.submit(spec(cores=2), spec(cores=1))
    assert desk.running() == {first}
    assert second not in desk.launched


def test_outsiders_slow_the_queue_but_never_stop_it() -> None:
    desk = Desk(replace(FACTS, millicores_outside=8_000))
    assert desk.run(spec(cores=1))


def test_gpu_memory_is_offered_again_only_after_a_reading_since_the_release() -> None:
    desk = Desk(ONE_GPU)
    (first,) = desk.run(spec(gpus=1, gpu_mem=20_000))
    (second,) = desk.submit(spec(gpus=1, gpu_mem=20_000), after=1_000)
    before = desk.reading()
    desk.exit(first, after=5)
    assert second not in desk.launched
    assert gpu_room(desk) == (None, None)
    desk.tell(before, after=5)  # begun before the release, delivered after it
    assert second not in desk.launched
    desk.sample(after=5)
    assert second in desk.launched


def test_an_older_reading_that_comes_late_admits_nothing() -> None:
    # The newer reading had cleared the mark that the older one is measured by.
    desk = Desk(ONE_GPU)
    (first,) = desk.run(spec(gpus=1, gpu_mem=20_000))
    old = desk.reading()
    desk.exit(first, after=1_000)
    desk.sample(replace(ONE_GPU, gpus=(gpu(free=1_000),)), after=10)
    (second,) = desk.submit(spec(gpus=1, gpu_mem=20_000), after=10)
    late = replace(old.facts, gpus=(gpu(free=GPU_MIB),))
    desk.tell(replace(old, facts=late), after=10)
    assert second not in desk.launched


@pytest.mark.parametrize("age", [15_000, 15_001])
def test_readings_go_stale(age: int) -> None:
    desk = Desk(ONE_GPU)
    (job,) = desk.submit(spec(gpus=1, gpu_mem=1_000), after=age)
    assert (job in desk.launched) == (age <= Policy().stale_ms)


def test_gpu_readings_go_stale_alone() -> None:
    desk = Desk(ONE_GPU)
    desk.now = 20_000
    now = Instant(desk.now)
    reading = desk.reading()
    desk.tell(replace(reading, facts=replace(ONE_GPU, taken_at=now, gpus_taken_at=Instant(0))))
    on_gpu, on_cpu = desk.submit(spec(gpus=1, gpu_mem=1_000), spec(gpus=0))
    assert on_gpu not in desk.launched
    assert on_cpu in desk.launched


def test_two_gpus_are_measured_each_by_itself() -> None:
    desk = Desk(replace(FACTS, gpus=(gpu(A, free=1_000), gpu(B))))
    (job,) = desk.run(spec(gpus=1, gpu_mem=20_000))
    assert desk.place(job).gpus == (B,)
