"""What a job is charged: declared or default until it has settled, then what was measured."""

from __future__ import annotations

from tests.core.machines import EXACT, FACTS, A, spec, used

from rlqd.core.charge import Footprint, charge_now, need_of
from rlqd.core.model import Charge, Instant, JobFacts, Policy

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
