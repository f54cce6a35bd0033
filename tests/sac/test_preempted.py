"""A real training that is stopped for a job of higher priority, and goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.rlqd import Rlqd, configured

from rlq.protocol.states import JobState

pytestmark = pytest.mark.sac


def test_it_makes_way_for_the_urgent_and_resumes_at_its_step(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = configured(
        scheduling={"preemption": "priority"}, defaults={"mem": "64M", "grace": "60s"}
    )
    with Rlqd(tmp_path, config=config) as d, d.client() as client:
        words = ["--env", "Pendulum-v1", "--steps", "800", "--checkpoint-freq", "100"]
        said = d.rlq("submit", "sac", *words, "--out", str(out), "--preemptible", "-q")
        training = int(said.stdout)
        d.until(
            client,
            [training],
            lambda jobs: jobs[0].progress is not None and jobs[0].progress.step >= 250,
            limit_s=120,
        )
        urgent = client.submit(["sleep", "1"], gpus=0, exclusive=True, priority=5)
        (waiting,) = d.until(client, [training], lambda jobs: jobs[0].state is JobState.PENDING)
        assert waiting.preempted_by == urgent
        assert waiting.reason.startswith(f"PREEMPTED by job {urgent}; ")
        assert client.wait(urgent)[0].state is JobState.COMPLETED
        (done,) = client.wait(training)
        log = Path(done.log_path).read_text()
        assert (done.state, done.attempt) == (JobState.COMPLETED, 2), log
        assert f"by job {urgent}" in d.rlq("show", str(training)).stdout
    (stopped_at,) = json.loads(next(out.rglob("result.json")).read_text())["resumed_from"]
    assert 250 <= stopped_at < 800
    assert f"resuming at step {stopped_at:,}" in log
