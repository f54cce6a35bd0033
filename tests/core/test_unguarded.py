"""What is learned can be looked at, forgotten, and passed over for a measurement."""

from __future__ import annotations

from dataclasses import replace

from tests.core.machines import FACTS, GPU_MIB, A, Desk, gpu, spec

from rlqd.core.guard import ONE_JOB, Estimate, Guard, Learned, Occupant
from rlqd.core.learned import LearnedPeak
from rlqd.core.model import (
    GpuShare,
    Instant,
    JobFacts,
    JobId,
    JobSpec,
    ProgramForgotten,
)

GPU = "A100"
SAC = ("sac",)
NOW = Instant(0)


def learned(jobs: int, value: int, signatures: tuple[str, ...] = SAC) -> Learned:
    return Learned(GPU, signatures, jobs, Estimate(value, 1, NOW))


#: 50 steps/s alone; the third job adds nothing.
KNEE_AT_TWO = [learned(0, 50_000), learned(2, 1_800), learned(3, 1_810)]


def sac(*, unguarded: bool = False) -> JobSpec:
    one = spec(gpus=1, gpu_mem=1_000, sm=None)
    return replace(one, signature="sac", unguarded=unguarded)


def with_two_running(rows: list[Learned]) -> Desk:
    """Two jobs on a GPU that reads 100 %, as it does with one tiny kernel."""
    desk = Desk(replace(FACTS, gpus=(replace(gpu(A), kind=GPU),)))
    desk.core.guard.load(rows, NOW)
    ids = desk.run(sac(), sac())
    share = GpuShare(mem_mib=1_000, sm_pct=50)
    facts = JobFacts(
        cpu_millicores=1000, mem_mib=1, gpus=((A, share),), steps_milli_per_s=45_000, reports=True
    )
    busy = replace(gpu(A, free=GPU_MIB - 2_000, sm=100), kind=GPU)
    jobs = tuple((JobId(i), facts) for i in ids)
    desk.sample(replace(FACTS, gpus=(busy,), jobs=jobs), after=1_000)
    return desk


def test_an_unguarded_job_starts_where_the_guard_would_keep_it_waiting() -> None:
    desk = with_two_running(KNEE_AT_TWO)
    (waits,) = desk.submit(sac())
    assert waits not in desk.running()
    (goes,) = desk.submit(sac(unguarded=True))
    assert goes in desk.running()


def test_an_unguarded_job_still_needs_room() -> None:
    desk = with_two_running(KNEE_AT_TWO)
    (waits,) = desk.submit(replace(sac(unguarded=True), gpu_mem_mib=23_000))
    assert waits not in desk.running()


def test_what_is_forgotten_is_found_out_anew() -> None:
    desk = with_two_running([*KNEE_AT_TWO, learned(2, 1_900, ("ppo", "sac"))])
    desk.core.peaks.load([LearnedPeak(signature="sac", mem_mib=9, at=NOW)])
    (job,) = desk.submit(sac())
    assert job not in desk.running()
    desk.tell(ProgramForgotten(NOW, "sac"))
    assert desk.core.guard.known(Instant(desk.now)) == []
    assert desk.core.peaks.get("sac", Instant(desk.now)) is None


def test_forgetting_one_program_leaves_the_others() -> None:
    guard = Guard()
    guard.load([*KNEE_AT_TWO, learned(0, 9_000, ("ppo",)), learned(2, 1_900, ("ppo",))], NOW)
    guard.forget("sac")
    assert {row.signatures for row in guard.known(NOW)} == {("ppo",)}


def test_what_is_too_old_to_count_is_not_shown() -> None:
    guard = Guard()
    guard.load(KNEE_AT_TWO, NOW)
    assert len(guard.known(Instant(guard.policy.forget_ms))) == 3
    assert guard.known(Instant(guard.policy.forget_ms + 1)) == []


# ---- what the jobs on a device achieve ---------------------------------------------


def occupant(number: int, rate: int | None, signature: str = "sac") -> Occupant:
    return Occupant(job_id=JobId(number), signature=signature, since=NOW, steps_milli_per_s=rate)


def guard_that_knows_sac() -> Guard:
    guard = Guard()
    guard.load([learned(0, 50_000)], NOW)
    return guard


def test_throughput_is_each_rate_over_its_rate_alone() -> None:
    found = guard_that_knows_sac().throughput(GPU, [occupant(1, 40_000), occupant(2, 25_000)])
    assert (found.jobs, found.stp) == (2, 1300)
    assert found.antt == (1250 + 2000) // 2


def test_throughput_of_a_device_is_unknown_while_one_job_on_it_is() -> None:
    guard = guard_that_knows_sac()
    one = occupant(1, 50_000)
    for other in (occupant(2, None), occupant(2, 50_000, "unknown"), occupant(2, 50_000, "")):
        found = guard.throughput(GPU, [one, other])
        assert (found.jobs, found.stp, found.antt) == (2, None, None)
    assert guard.throughput(GPU, [one]).stp == ONE_JOB
    assert guard.throughput("another kind", [one]).stp is None
    assert guard.throughput(GPU, []).stp is None
