"""What rate the throughput guard is given: of training, in the present company, and nothing
older."""

from __future__ import annotations

import time

import pytest

from rlqd.core.model import GpuId, JobId
from rlqd.shell.progress import (
    METRICS_MAX,
    RECENT_S_MAX,
    WINDOW_MAX,
    Company,
    Tracker,
    recent_s,
)

A, B = GpuId("GPU-a"), GpuId("GPU-b")
ONE, TWO, THREE = JobId(1), JobId(2), JobId(3)


class Job:
    """Reports twice a second, of its own clock."""

    def __init__(self) -> None:
        self.tracker = Tracker()
        self.t = 100.0
        self.step = 0

    def run(self, seconds: float, *, rate: int, warming: bool = False) -> None:
        for _ in range(round(2 * seconds)):
            self.t += 0.5
            self.step += rate // 2
            self.tracker.add(self.t, self.step, None, {"warming_up": float(warming)})

    @property
    def rate(self) -> int | None:
        found = self.tracker.training_milli_per_s(time.time())
        return None if found is None else round(found / 1000)


def test_a_rate_is_known_after_a_third_of_the_window() -> None:
    job = Job()
    job.run(3, rate=50)
    assert job.rate is None
    job.run(0.5, rate=50)
    assert job.rate == 50


def test_only_the_last_seconds_count() -> None:
    job = Job()
    job.run(20, rate=50)
    job.run(RECENT_S_MAX + 0.5, rate=10)
    assert job.rate == 10


def test_warming_up_has_no_rate_and_leaves_no_trace_in_the_one_after() -> None:
    job = Job()
    job.run(20, rate=1000, warming=True)
    assert job.rate is None
    job.run(3, rate=50)
    assert job.rate is None, "too short"
    job.run(1, rate=50)
    assert job.rate == 50


def test_a_program_that_warms_up_again_is_measured_anew() -> None:
    job = Job()
    job.run(10, rate=50)
    job.run(2, rate=1000, warming=True)
    assert job.rate is None
    job.run(4, rate=20)
    assert job.rate == 20


def test_a_program_that_counts_from_nought_again_is_measured_anew() -> None:
    job = Job()
    job.run(10, rate=1000)
    job.step = 0
    job.run(4, rate=20)
    assert job.rate == 20


def test_a_job_not_heard_of_has_no_rate() -> None:
    job = Job()
    job.run(10, rate=50)
    assert job.tracker.training_milli_per_s(time.time() + 8) is not None
    assert job.tracker.training_milli_per_s(time.time() + 10) is None


@pytest.mark.parametrize(("observe_ms", "seconds"), [(15_000, 9.0), (60_000, 9.0), (2_000, 1.2)])
def test_a_rate_is_over_less_than_an_observation(observe_ms: int, seconds: float) -> None:
    assert recent_s(observe_ms) == pytest.approx(seconds)


class Machine:
    """Jobs on devices, and their daemon that looks at them."""

    def __init__(self) -> None:
        self.company = Company()
        self.jobs: dict[JobId, Job] = {}
        self.on: dict[JobId, tuple[GpuId, ...]] = {}

    def add(self, job_id: JobId, *gpus: GpuId) -> Job:
        self.on[job_id] = gpus
        self.jobs[job_id] = Job()
        self.look()
        return self.jobs[job_id]

    def look(self) -> None:
        reporting = {i: j.tracker for i, j in self.jobs.items() if j.tracker.window}
        self.company.look(self.on, reporting)

    def rates(self) -> list[int | None]:
        return [job.rate for job in self.jobs.values()]

    def run(self, seconds: float, *, rate: int) -> None:
        for job in self.jobs.values():
            job.run(seconds, rate=rate)
        self.look()


def settled_pair() -> tuple[Machine, Job, Job]:
    machine = Machine()
    first, second = machine.add(ONE, A), machine.add(TWO, A)
    machine.run(1, rate=50)
    machine.run(20, rate=50)
    assert (first.rate, second.rate) == (50, 50)
    return machine, first, second


def test_a_newcomer_makes_those_beside_it_be_measured_afresh() -> None:
    machine, first, _ = settled_pair()
    machine.add(THREE, A)
    assert first.rate is None
    machine.run(0.5, rate=20)  # its first report: it trains
    machine.run(4, rate=20)
    assert machine.rates() == [20, 20, 20]


def test_so_does_one_that_ends() -> None:
    machine, first, _ = settled_pair()
    del machine.jobs[TWO], machine.on[TWO]
    machine.look()
    assert first.rate is None
    first.run(4, rate=100)
    assert first.rate == 100


def test_so_does_one_that_begins_to_train() -> None:
    machine, first, second = settled_pair()
    third = machine.add(THREE, A)
    for seconds in (1, 10):
        first.run(seconds, rate=50)
        second.run(seconds, rate=50)
        third.run(seconds, rate=1000, warming=True)
        machine.look()
    assert machine.rates() == [50, 50, None]
    machine.run(0.5, rate=30)
    assert machine.rates() == [None, None, None]
    machine.run(4, rate=30)
    assert machine.rates() == [30, 30, 30]


def test_what_happens_on_another_device_disturbs_nobody() -> None:
    machine, first, second = settled_pair()
    machine.add(THREE, B)
    machine.add(JobId(4))  # on the CPU
    assert (first.rate, second.rate) == (50, 50)


def test_a_job_on_two_devices_keeps_company_on_both() -> None:
    machine, first, _ = settled_pair()
    machine.add(THREE, B, A)
    assert first.rate is None


def test_a_flood_of_reports_at_one_moment_is_kept_as_the_last_of_them() -> None:
    tracker = Tracker()
    tracker.add(1.0, 0, None, {})
    for step in range(100_000):
        tracker.add(2.0, step, None, {})
    assert len(tracker.window) <= 3
    assert tracker.window[-1] == (2.0, 99_999)
    assert tracker.steps_per_s() == 99_999


def test_reports_in_quick_succession_are_bounded_and_leave_the_rate_right() -> None:
    tracker = Tracker()
    for number in range(100_000):
        tracker.add(number / 1000, number, None, {})
    assert len(tracker.window) <= WINDOW_MAX
    assert tracker.steps_per_s() == pytest.approx(1000)


def test_only_so_many_names_of_metrics_are_kept_and_those_go_on_being_told() -> None:
    tracker = Tracker()
    for number in range(10_000):
        tracker.add(float(number), number, None, {f"m{number}": 1.0, "m0": float(number)})
    tracker.add(10_000.0, 10_000, None, {"warming_up": 1.0})
    assert len(tracker.metrics) <= METRICS_MAX + 1
    assert tracker.metrics["m0"] == 9_999
    assert tracker.phase == "warming up", "the daemon's own word is never crowded out"


def test_how_long_a_job_still_runs_follows_from_its_progress() -> None:
    job = Job()
    job.run(10, rate=50)
    assert job.tracker.left_ms(job.tracker.reported_at) is None, "of how many steps?"
    job.tracker.total = job.step + 1_000
    assert job.tracker.left_ms(job.tracker.reported_at) == 20_000
    # A report that is old by now, and one that says it should have ended.
    assert job.tracker.left_ms(job.tracker.reported_at + 5) == 15_000
    assert job.tracker.left_ms(job.tracker.reported_at + 60) == 0


def test_a_job_that_warms_up_or_stands_still_predicts_nothing() -> None:
    job = Job()
    job.run(10, rate=1_000, warming=True)
    job.tracker.total = job.step + 1_000
    assert job.tracker.left_ms(job.tracker.reported_at) is None
    still = Tracker(total=10)
    still.add(1.0, 5, None, {})
    still.add(2.0, 5, None, {})
    assert still.left_ms(still.reported_at) is None
