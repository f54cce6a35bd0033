"""What a job is charged: declared or default until it has settled, then what was measured."""

from __future__ import annotations

from dataclasses import replace

from tests.core.machines import EXACT, FACTS, A, gpu, spec, used

from rlqd.core.charge import Footprint, charge_now, need_of
from rlqd.core.learned import LearnedPeak
from rlqd.core.model import Charge, Instant, JobFacts, JobSpec, Policy
from rlqd.core.room import is_impossible

UNDECLARED = spec(gpus=1, cores=None, mem=None, gpu_mem=None, sm=None)
DEFAULT = need_of(UNDECLARED, FACTS, Policy()).charge


def charge(*readings: JobFacts, declared: bool = False, every_ms: int = 1_000) -> Charge:
    footprint = Footprint()
    for number, reading in enumerate(readings):
        footprint.add(Instant(number * every_ms), reading, EXACT)
    what = spec(gpus=1, mem=3_000, gpu_mem=5_000) if declared else UNDECLARED
    admitted = need_of(what, FACTS, EXACT).charge
    return charge_now(admitted, what, footprint, EXACT)


def reading(mem: int, gpu_mem: int | None) -> JobFacts:
    return used(mem, gpus=[A], gpu_mem=gpu_mem)


def test_nothing_declared_is_charged_the_defaults() -> None:
    assert Charge(cores=1, mem_mib=2_048, gpu_mem_mib=4_096, sm_pct=20) == DEFAULT
    assert charge_now(DEFAULT, UNDECLARED, None, EXACT) == DEFAULT


def test_before_it_has_settled_the_larger_figure_counts() -> None:
    assert charge(reading(100, 100)).gpu_mem_mib == 4_096
    grown = charge(reading(5_000, 9_000))
    assert (grown.mem_mib, grown.gpu_mem_mib) == (5_000, 9_000)


def test_once_settled_the_measured_peak_and_a_margin_count() -> None:
    settled = charge(*[reading(1_000, 2_000)] * 6)
    assert (settled.mem_mib, settled.gpu_mem_mib) == (1_100, 2_200)


def test_declared_is_a_floor_for_ever() -> None:
    settled = charge(*[reading(1_000, 2_000)] * 6, declared=True)
    assert (settled.mem_mib, settled.gpu_mem_mib) == (3_000, 5_000)


def test_a_job_that_grows_has_not_settled() -> None:
    growing = charge(*[reading(200 * n, 300 * n) for n in range(1, 8)])
    assert (growing.mem_mib, growing.gpu_mem_mib) == (2_048, 4_096)


def test_a_few_readings_or_a_short_time_say_nothing_about_stability() -> None:
    few = charge(*[reading(100, 100)] * 3, every_ms=3_000)
    short = charge(*[reading(100, 100)] * 6, every_ms=100)
    assert few.gpu_mem_mib == short.gpu_mem_mib == 4_096


def test_a_peak_is_not_forgotten() -> None:
    settled = charge(reading(8_000, 1_000), *[reading(1_000, 1_000)] * 8)
    assert settled.mem_mib == 8_800


def test_what_cannot_be_read_is_charged_as_admitted() -> None:
    settled = charge(*[reading(1_000, None)] * 6)
    assert settled.mem_mib == 1_100
    assert settled.gpu_mem_mib == 4_096


def test_what_was_learned_is_never_more_than_the_machine_has() -> None:
    # A program that filled the GPU once was refused as impossible ever after.
    huge = LearnedPeak(signature="x", mem_mib=10**9, gpu_mem_mib=10**9, sm_pct=100, at=Instant(0))
    facts = replace(FACTS, gpus=(gpu(A),))
    undeclared = JobSpec(user=1, gpus=1, signature="x")
    assert is_impossible(need_of(undeclared, facts, EXACT, huge), facts, EXACT) is None
    declared = replace(undeclared, gpu_mem_mib=10**9)
    assert is_impossible(need_of(declared, facts, EXACT, huge), facts, EXACT) is not None


def test_a_job_that_only_imports_so_far_has_not_settled() -> None:
    # Flat for ten seconds, it was charged next to nothing, and others were put on its memory.
    importing = Footprint()
    for at in range(0, 60_000, 1_000):
        importing.add(Instant(at), used(300, gpus=(A,), gpu_mem=0), EXACT, is_on_gpu=True)
    assert not importing.settled
    for at in range(60_000, 90_000, 1_000):
        importing.add(Instant(at), used(300, gpus=(A,), gpu_mem=900), EXACT, is_on_gpu=True)
    assert importing.settled


def test_a_job_that_reports_settles_once_it_trains() -> None:
    filling = replace(used(300), reports=True)
    training = replace(filling, steps_milli_per_s=40_000)
    footprint = Footprint()
    for at in range(0, 60_000, 1_000):
        footprint.add(Instant(at), filling, EXACT)
    assert not footprint.settled
    for at in range(60_000, 90_000, 1_000):
        footprint.add(Instant(at), training, EXACT)
    assert footprint.settled
