"""The machine's clock is set while the daemon runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rlqd import Rlqd

from rlq.protocol.states import JobState
from rlqd.shell.wall_clock import WallClock

DAY_S = 86_400.0


def test_a_clock_that_was_set_is_noticed_once() -> None:
    clock = WallClock(1000.0, 0.0)
    assert clock.set_by_s(1060.0 + 400 * DAY_S, 60.0) == 400 * DAY_S
    assert clock.set_by_s(1120.0 + 400 * DAY_S, 120.0) == 0.0
    assert clock.set_by_s(1180.0, 180.0) == -400 * DAY_S


@pytest.mark.parametrize("corrected_s", [0.0, 30.0, -30.0])
def test_a_time_servers_corrections_are_none(corrected_s: float) -> None:
    clock = WallClock(1000.0, 0.0)
    assert clock.set_by_s(1000.0 + DAY_S + corrected_s, DAY_S) == 0.0


class RlqdWithClock(Rlqd):
    """Its wall clock is off by as many seconds as `set` says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._offset = folder / "offset"
        self.set(0)
        self.program = (
            "-c",
            "import pathlib, time\n"
            f"now, offset = time.time, pathlib.Path({str(self._offset)!r})\n"
            "time.time = lambda: now() + float(offset.read_text())\n"
            "from rlqd.__main__ import main\n"
            "main()\n",
        )

    def set(self, offset_s: float) -> None:
        self._offset.with_suffix(".part").write_text(str(offset_s))
        self._offset.with_suffix(".part").replace(self._offset)


@pytest.mark.parametrize("offset_s", [400 * DAY_S, -400 * DAY_S])
def test_a_set_clock_ends_no_job_and_hides_none(tmp_path: Path, offset_s: float) -> None:
    with RlqdWithClock(tmp_path) as d:
        client = d.client()
        before = client.submit(["true"])
        client.wait([before], 30)
        runs = client.submit(["sleep", "600"], time_limit="10m", log=tmp_path / "log")
        d.until_state(client, runs, JobState.RUNNING)
        d.set(offset_s)
        after = client.submit(["true"])
        assert [job.state for job in client.wait([after], 30)] == [JobState.COMPLETED]
        # Nor at the next start, which reads all times from the database.
        d.stop()
        d.start()
        client = d.client()
        last = client.submit(["true"])
        assert [job.state for job in client.wait([last], 30)] == [JobState.COMPLETED]
        assert client.get(runs).state is JobState.RUNNING
        assert {job.id for job in client.list()} == {before, runs, after, last}
