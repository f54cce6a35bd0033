"""What the core remembers of jobs and programs that are gone stays within bounds."""

from __future__ import annotations

from tests.core.machines import Desk, spec

from rlqd.core import machine
from rlqd.core.guard import Estimate, Guard, Learned, Mix, Occupant
from rlqd.core.learned import SIGNATURES_MAX, LearnedPeak, Peaks
from rlqd.core.model import GuardPolicy, Instant, JobId


def test_specs_of_jobs_that_are_gone_are_swept_out() -> None:
    desk = Desk()
    (stays,) = desk.submit(spec(cores=8, mem=1))
    for n in range(4 * machine.SPECS_SPARE):
        (job,) = desk.submit(spec(cores=8, mem=2 + n))
        desk.cancel(job)
    assert len(desk.core._specs) <= machine.SPECS_SPARE + 10
    assert desk.core.jobs[JobId(stays)].spec.mem_mib == 1


def known(n: int, *, at: int, kind: str = "GPU") -> list[Learned]:
    estimate = Estimate(1000, 1, Instant(at))
    return [Learned(kind, (f"p{i}",), 0, estimate) for i in range(n)]


def test_the_guard_keeps_the_programs_observed_last() -> None:
    guard = Guard()
    for i, row in enumerate(known(20, at=0)):
        guard.solo[row.kind, row.signatures[0]] = Estimate(1000, 1, Instant(i))
    mix = Mix.of("GPU", ["p3", "p19"])
    guard.stp[mix] = Estimate(1500, 1, Instant(100))  # seen together later than alone
    guard.prune(Instant(200), 4)
    assert {one for _, one in guard.solo} == {"p3", "p17", "p18", "p19"}
    assert set(guard.stp) == {mix}
    guard.prune(Instant(200), 3)
    assert {one for _, one in guard.solo} == {"p3", "p18", "p19"}


def test_a_mix_goes_with_a_program_of_it() -> None:
    guard = Guard()
    guard.solo["GPU", "old"] = Estimate(1000, 1, Instant(0))
    guard.solo["GPU", "new"] = Estimate(1000, 1, Instant(9))
    guard.stp[Mix.of("GPU", ["old", "new"])] = Estimate(1500, 1, Instant(1))
    guard.prune(Instant(10), 1)
    assert list(guard.solo) == [("GPU", "new")]
    assert not guard.stp


def test_what_is_too_old_goes_and_what_is_not_stays() -> None:
    guard = Guard(policy=GuardPolicy(forget_ms=100))
    guard.load(known(1, at=50), Instant(100))
    guard.prune(Instant(150))
    assert guard.solo
    guard.prune(Instant(151))
    assert not guard.solo
    peaks = Peaks(forget_ms=100)
    peaks.learn(LearnedPeak(signature="p", mem_mib=1, at=Instant(0)))
    peaks.prune(Instant(101))
    assert not peaks.known
    assert not peaks.take_changes(), "what is forgotten is not written again"


def test_peaks_of_the_programs_that_ended_last_are_kept() -> None:
    peaks = Peaks()
    peaks.load(LearnedPeak(signature=f"p{i}", mem_mib=1, at=Instant(i)) for i in range(9))
    peaks.prune(Instant(10), 2)
    assert set(peaks.known) == {"p7", "p8"}


def test_programs_that_never_report_are_bounded_too() -> None:
    guard = Guard()
    late = Instant(guard.policy.first_report_ms + 1)
    for base in range(6):
        crowd = [
            Occupant(
                job_id=JobId(i),
                signature=f"{base}-{i}",
                since=Instant(0),
                steps_milli_per_s=None,
                reports=bool(i % 2),
            )
            for i in range(SIGNATURES_MAX)
        ]
        guard.observe(late, "GPU-a", "GPU", crowd)
    assert len(guard._mute) <= 2 * SIGNATURES_MAX
    assert len(guard._vocal) <= 2 * SIGNATURES_MAX
