"""Through the real daemon: an unchanged program's progress is in `rlq list`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.hooks.conftest import PROGRAMS
from tests.support.rlqd import Rlqd

from rlq.protocol.states import JobState

TRAIN = """
from stable_baselines3.common.base_class import BaseAlgorithm
BaseAlgorithm().learn(700)
"""


def test_an_unchanged_program_reports_and_one_without_hooks_does_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with Rlqd(tmp_path) as d:
        client = d.client()
        env = {**d.user_env, "PYTHONPATH": str(PROGRAMS)}
        argv = [sys.executable, str(tmp_path / "train.py")]
        hooked = client.submit(argv, env=env, mem="64M")
        bare = client.submit(argv, env=env, mem="64M", hooks=False)
        done = d.until_state(client, hooked, JobState.COMPLETED)
        assert Path(done.log_path).read_text() == ""
        assert done.progress is not None
        assert (done.progress.step, done.progress.total) == (700, 700)
        assert done.progress.metrics["warming_up"] == 0.0
        assert d.until_state(client, bare, JobState.COMPLETED).progress is None


def test_a_program_in_another_language_reports_with_rlq_report(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        script = f"for i in 1 2 3; do {sys.executable} -m rlq report $i 3; done"
        job = client.submit(["sh", "-ec", script], env=d.user_env, mem="64M")
        done = d.until_state(client, job, JobState.COMPLETED)
        assert done.progress is not None
        assert (done.progress.step, done.progress.total) == (3, 3)
