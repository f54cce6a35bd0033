"""Real SB3 and SBX trainings that are stopped, killed, damaged and resumed."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.sac.conftest import StartRun
from tests.support.waiting import wait_until

pytestmark = pytest.mark.sac


def result_of(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def curve_steps(out: Path) -> list[int]:
    with (out / "curve.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def checkpoint_steps(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir())


@pytest.mark.parametrize(("algo", "env"), [("sb3", "Pendulum-v1"), ("sbx", "Humanoid-v5")])
def test_stopped_and_resumed_it_ends_exactly_at_its_steps(
    algo: str, env: str, start_run: StartRun, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--algo", algo, "--env", env, "--steps", "1500", "--out", str(out)]
    first = start_run(*options, "--checkpoint-freq", "100")
    first.wait_for_step(250)
    first.process.send_signal(signal.SIGTERM)
    first.process.send_signal(signal.SIGTERM)  # the queue may say it twice
    assert first.finish() == 128 + signal.SIGTERM, first.text
    stopped_at = checkpoint_steps(out)[-1]
    assert 250 <= stopped_at < 1500
    assert not (out / "result.json").exists()
    # Until its buffer is filled (learning_starts=20) its speed says nothing, and it says so.
    told = [(report["step"] <= 20, report["metrics"]["warming_up"]) for report in first.reports]
    assert all(is_early == bool(warming_up) for is_early, warming_up in told)

    second = start_run(*options, "--eval-freq", "500")
    assert second.finish() == 0, second.text
    assert f"resuming at step {stopped_at:,}" in second.text
    result = result_of(out)
    assert result["steps"] == 1500
    assert result["resumed_from"] == [stopped_at]
    assert result["device"] == "cpu"
    assert result["train_s"] <= result["wall_s"]
    steps = curve_steps(out)
    assert steps == sorted(set(steps))
    assert steps[-1] == 1500
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoint_steps(out)[-1] == 1500
    # What the queue heard: it never goes back, and the result comes last.
    heard = [report["step"] for report in second.reports]
    assert heard == sorted(heard)
    assert stopped_at <= heard[0]
    last = second.reports[-1]
    assert (last["step"], last["total"]) == (1500, 1500)
    assert last["metrics"]["mean_reward"] == pytest.approx(result["mean_reward"])

    third = start_run(*options)
    assert third.finish() == 0
    assert "already finished" in third.text
    assert third.reports[-1]["step"] == 1500
    assert result_of(out) == result

    fourth = start_run(*options, "--seed", "1")
    assert fourth.finish() == 2
    assert "seed was 0, now 1" in fourth.text
    assert "--no-resume" in fourth.text

    fifth = start_run(*options, "--set", "batch_size=17")
    assert fifth.finish() == 2
    assert "batch_size was 16, now 17" in fifth.text


def test_from_a_damaged_checkpoint_it_falls_back_to_the_older_one(
    start_run: StartRun, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--env", "Pendulum-v1", "--out", str(out), "--checkpoint-freq", "100"]
    assert start_run(*options, "--steps", "400", "--no-save-buffer").finish() == 0
    assert checkpoint_steps(out) == [300, 400]
    with (out / "checkpoints/step-000000400/model.zip").open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")

    longer = start_run(*options, "--steps", "600")  # a finished run can be made longer
    assert longer.finish() == 0, longer.text
    assert "step-000000400 is damaged" in longer.text
    assert "resuming at step 300" in longer.text
    assert "no updates before step 320" in longer.text
    assert result_of(out)["steps"] == 600
    assert checkpoint_steps(out) == [500, 600]

    again = start_run(*options, "--steps", "50", "--no-resume")
    assert again.finish() == 0, again.text
    assert result_of(out)["steps"] == 50
    assert result_of(out / "old-1")["steps"] == 600


def test_several_environments_outlive_a_signal_but_not_the_main_process(
    start_run: StartRun, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--env", "Pendulum-v1", "--n-envs", "2", "--out", str(out), "--steps", "1201"]
    first = start_run(*options)
    first.wait_for_step(200)
    os.killpg(first.process.pid, signal.SIGTERM)  # workers, fork server and all
    assert first.finish() == 128 + signal.SIGTERM, first.text
    stopped_at = checkpoint_steps(out)[-1]
    assert stopped_at % 2 == 0

    second = start_run(*options)
    second.wait_for_step(stopped_at + 100)
    workers = group(second.process.pid) - {second.process.pid}
    assert len(workers) >= 2
    second.process.kill()
    second.process.wait()
    wait_until(lambda: group(second.process.pid), lambda living: not living)

    third = start_run(*options)
    assert third.finish() == 0, third.text
    assert result_of(out)["steps"] == 1202
    assert result_of(out)["resumed_from"][-1] >= stopped_at


def group(leader: int) -> set[int]:
    """Pids of the living processes of a process group."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(pgrp) == leader and state != "Z":
                found.add(int(entry.name))
    return found


@pytest.mark.parametrize("env", ["Humanoid-v4", "Humanoid-v5", "HalfCheetah-v5", "Hopper-v5"])
def test_it_trains_in_every_environment(env: str, start_run: StartRun, tmp_path: Path) -> None:
    run = start_run("--env", env, "--steps", "60", "--out", str(tmp_path / "out"))
    assert run.finish() == 0, run.text
    assert result_of(tmp_path / "out")["steps"] == 60
    assert "arning" not in run.text.replace("warning: batch", ""), "a note nobody needs"
    assert not (tmp_path / "MUJOCO_LOG.TXT").exists()


def test_two_runs_do_not_share_a_folder(start_run: StartRun, tmp_path: Path) -> None:
    options = ["--env", "Pendulum-v1", "--steps", "1e6", "--out", str(tmp_path / "out")]
    first = start_run(*options)
    first.wait_for_step(1)
    second = start_run(*options)
    assert second.finish() == 7
    assert "another run is writing" in second.text
    first.process.send_signal(signal.SIGINT)
    assert first.finish() == 128 + signal.SIGINT


def test_without_a_cuda_device_it_says_so(start_run: StartRun, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    run = start_run(
        "--env", "Pendulum-v1", "--steps", "100", "--device", "cuda", "--out", str(tmp_path / "o")
    )
    assert run.finish() == 3
    assert "torch sees no CUDA device" in run.text
