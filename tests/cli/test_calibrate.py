"""The curve that `rlq calibrate` measures, from a daemon whose jobs share a machine by formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Invoke
from tests.support.fake_daemon import FakeDaemon, make_job

from rlq.cli import calibration
from rlq.cli.calibration import Calibration, Curve
from rlq.client import Client
from rlq.errors import UnavailableError
from rlq.protocol import messages as m
from rlq.protocol.states import JobState

SOLO = 50.0


class Shared:
    """Each look at a job is a second later for it, and its steps are what STP(k) leaves it."""

    def __init__(self, daemon: FakeDaemon, stp: Callable[[int], float], slots: int = 99) -> None:
        self.daemon = daemon
        self.stp = stp
        self.slots = slots
        daemon.answers[m.List] = self.list
        daemon.answers[m.Why] = m.Explanation(
            id=1, state=JobState.PENDING, summary="waiting for cores: 1 needed, 0 free"
        )

    @property
    def live(self) -> list[m.Job]:
        return [job for job in self.daemon.jobs.values() if not job.state.is_final]

    def list(self, request: m.Request) -> m.Reply:
        assert isinstance(request, m.List)
        for job in self.live[: self.slots]:
            rate = SOLO * self.stp(min(len(self.live), self.slots)) / min(len(self.live), 99)
            before = job.progress or m.Progress(step=0, reported_at=1.0)
            at = before.reported_at + 1000  # thousands, so that whole steps are exact enough
            progress = m.Progress(step=round(before.step + 1000 * rate), reported_at=at)
            self.daemon.set(job.id, state=JobState.RUNNING, progress=progress)
        jobs, missing = self.daemon._select(request.selection)
        return m.Jobs(jobs=tuple(jobs), total=len(jobs), missing=missing)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "POLL_S", 0.0)
    monkeypatch.setattr(calibration, "START_PATIENCE_S", 0.0)


def spec(number: int) -> m.JobSpec:
    return m.JobSpec(argv=("true",), cwd="/", name=f"n{number}", unguarded=True)


@pytest.fixture
def measure(client: Client) -> Callable[[int], Curve]:
    def run(jobs_max: int = 32) -> Curve:
        curve = Curve("CPU")
        one = Calibration(client, 0.0, say=lambda _: None)
        try:
            one.measure(curve, spec, jobs_max)
        finally:
            one.stop()
        return curve

    return run


def stops_at(knee: int) -> Callable[[int], float]:
    return lambda k: min(k, knee) * 1.0


def test_it_goes_on_until_the_total_has_not_grown_twice(
    daemon: FakeDaemon, measure: Callable[[int], Curve]
) -> None:
    Shared(daemon, stops_at(3))
    curve = measure(32)
    assert [point.jobs for point in curve.points] == [1, 2, 3, 4, 5]
    assert (curve.knee, curve.knee_is_seen) == (3, True)
    assert [round(point.stp, 2) for point in curve.points] == [1, 2, 3, 3, 3]
    assert [round(point.antt, 2) for point in curve.points] == [1, 1, 1, 1.33, 1.67]
    assert "added nothing" in curve.ended
    assert all(job.state is JobState.CANCELLED for job in daemon.jobs.values())


def test_it_ends_where_no_more_jobs_fit(
    daemon: FakeDaemon, measure: Callable[[int], Curve]
) -> None:
    Shared(daemon, lambda k: float(k), slots=2)
    curve = measure(32)
    assert [point.jobs for point in curve.points] == [1, 2]
    assert not curve.knee_is_seen
    assert "waiting for cores" in curve.ended
    assert "each still helped when it ended" in calibration.verdict(curve)
    assert all(job.state is JobState.CANCELLED for job in daemon.jobs.values())


def test_it_ends_at_the_number_asked_for(
    daemon: FakeDaemon, measure: Callable[[int], Curve]
) -> None:
    Shared(daemon, lambda k: float(k))
    assert [point.jobs for point in measure(3).points] == [1, 2, 3]


def test_a_job_that_ends_meanwhile_is_an_error_and_the_others_are_stopped(
    daemon: FakeDaemon, measure: Callable[[int], Curve]
) -> None:
    shared = Shared(daemon, lambda k: float(k))

    def second_fails(request: m.Request) -> m.Reply:
        if 2 in daemon.jobs and not daemon.jobs[2].state.is_final:
            daemon.set(2, state=JobState.FAILED, reason="exit code 1")
        return shared.list(request)

    daemon.answers[m.List] = second_fails
    with pytest.raises(UnavailableError, match="job 2 has ended: FAILED") as raised:
        measure(32)
    assert raised.value.hint == "rlq logs 2"
    assert daemon.jobs[1].state is JobState.CANCELLED


def test_warming_up_is_not_training(daemon: FakeDaemon, client: Client) -> None:
    looks = []

    def warm_after_five(request: m.Request) -> m.Reply:
        looks.append(request)
        metrics = {"warming_up": 1.0 if len(looks) <= 5 else 0.0}
        progress = m.Progress(step=len(looks), reported_at=float(len(looks)), metrics=metrics)
        return m.Jobs(jobs=(make_job(1, JobState.RUNNING, progress=progress),), total=1)

    daemon.answers[m.List] = warm_after_five
    Calibration(client, 0.0, say=lambda _: None).until_training([1])
    assert len(looks) == 7


def test_the_plot_and_the_table_fit_80_columns(
    daemon: FakeDaemon, measure: Callable[[int], Curve]
) -> None:
    Shared(daemon, lambda k: 300.0 * min(k, 30))
    curve = measure(32)
    shown = f"{calibration.plot(curve)}\n{calibration.table(curve)}"
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("<- knee") == 2


def test_a_machine_that_is_not_idle_is_refused(
    daemon: FakeDaemon, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    daemon.add(make_job(1, JobState.RUNNING), make_job(2), make_job(3, JobState.COMPLETED))
    result = invoke("calibrate", "--env", "Pendulum-v1")
    assert result.exit_code == 7
    assert "the machine is not idle: job " in result.stderr
    assert "--force" in result.stderr
    assert not daemon.submitted
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_cuda_is_refused(daemon: FakeDaemon, invoke: Invoke) -> None:
    for device in ("cuda", "both"):
        result = invoke("calibrate", "--device", device)
        assert result.exit_code == 7
        assert "hint: --device cpu" in result.stderr


def test_the_figures_are_written_as_they_are_shown(
    daemon: FakeDaemon, measure: Callable[[int], Curve], tmp_path: Path
) -> None:
    from rlq.cli.commands.calibrate import write

    Shared(daemon, stops_at(2))
    curve = measure(32)
    write(tmp_path, {"curves": [calibration.document(curve)]}, [curve], "SAC")
    [told] = json.loads((tmp_path / "calibration.json").read_text())["curves"]
    assert (told["knee"], told["knee_is_seen"]) == (2, True)
    assert [point["stp"] for point in told["points"]] == [1.0, 2.0, 2.0, 2.0]
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")
