"""What a training declares to the queue before it starts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlq.errors import UsageError
from rlq_sac import environments
from rlq_sac.identity import check_folder
from rlq_sac.plan import BASE_MIB, WORKER_MIB, buffer_rows, plan, row_bytes
from rlq_sac.settings import Settings

PENDULUM = Settings(
    algo="sb3",
    env="Pendulum-v1",
    steps=10_000,
    seed=0,
    device="cpu",
    n_envs=1,
    keywords={},
    out=Path("out"),
    eval_freq=0,
    eval_episodes=1,
    checkpoint_freq=0,
    save_buffer=True,
    resume=True,
)


def settings(**changes: Any) -> Settings:
    return dataclasses.replace(PENDULUM, **changes)


@pytest.mark.sac
@pytest.mark.parametrize("env", ["Pendulum-v1", "Humanoid-v5", "HalfCheetah-v5"])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("optimized", [False, True])
def test_the_buffer_is_what_sb3_allocates(env: str, n_envs: int, optimized: bool) -> None:
    from stable_baselines3.common.buffers import ReplayBuffer

    made = environments.make(env)
    buffer = ReplayBuffer(
        1000,
        made.observation_space,
        made.action_space,
        device="cpu",
        n_envs=n_envs,
        optimize_memory_usage=optimized,
        handle_timeout_termination=not optimized,
    )
    made.close()
    allocated = sum(a.nbytes for a in vars(buffer).values() if isinstance(a, np.ndarray))
    asked = settings(env=env, n_envs=n_envs, keywords={"buffer_size": 1000})
    assert buffer_rows(asked) * row_bytes(environments.spaces_of(env), optimized) == allocated


def test_only_the_rows_that_will_be_filled_are_declared() -> None:
    # Humanoid-v5: 2 x 348 float64, 17 float32, 3 float32 are 5,648 bytes a row.
    short = plan(settings(env="Humanoid-v5", steps=10_000))
    assert short.buffer_mib == -(-10_000 * 5648 // 2**20) == 54
    assert short.buffer_mib_allocated == -(-1_000_000 * 5648 // 2**20) == 5387
    assert plan(settings(env="Humanoid-v5", steps=10**8)).buffer_mib == 5387
    capped = settings(env="Humanoid-v5", steps=10**8, keywords={"buffer_size": 1000})
    assert plan(capped).buffer_mib == 6


def test_memory_is_the_process_its_workers_and_the_buffer() -> None:
    one, four = plan(settings()), plan(settings(n_envs=4))
    assert one.mem_mib == BASE_MIB["sb3"] + one.buffer_mib
    assert four.mem_mib == BASE_MIB["sb3"] + 4 * WORKER_MIB + four.buffer_mib
    assert plan(settings(algo="sbx")).mem_mib == BASE_MIB["sbx"] + one.buffer_mib


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("auto", None)])
def test_the_device_decides_the_gpus(device: str, gpus: int | None) -> None:
    assert plan(settings(device=device)).gpus == gpus


@pytest.mark.parametrize("n_envs", [1, 2, 8])
def test_every_environment_is_charged_a_core(n_envs: int) -> None:
    assert plan(settings(n_envs=n_envs)).cores == n_envs


def test_what_will_surprise_is_said() -> None:
    assert plan(settings()).warnings == ()
    (rounded,) = plan(settings(n_envs=3)).warnings
    assert "10002" in rounded
    (disk,) = plan(settings(env="Humanoid-v5", steps=10**6)).warnings
    assert "--no-save-buffer" in disk
    assert plan(settings(env="Humanoid-v5", steps=10**6, save_buffer=False)).warnings == ()
    (idle,) = plan(settings(keywords={"learning_starts": 10_000})).warnings
    assert "nothing is learned" in idle


def leave_checkpoint(out: Path, identity: dict[str, Any], step: int = 5) -> None:
    folder = out / "checkpoints" / f"step-{step:09d}"
    folder.mkdir(parents=True)
    state = {"format": 1, "step": step, "files": {}, "state": {"identity": identity}}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_folder_of_another_run_is_refused_before_anything_is_queued(tmp_path: Path) -> None:
    ours = settings(out=tmp_path, keywords={"learning_rate": 0.001})
    check_folder(ours)
    leave_checkpoint(tmp_path, settings().identity())
    with pytest.raises(UsageError, match="learning_rate was not set") as refused:
        check_folder(ours)
    assert "--out" in str(refused.value.hint)
    assert "--no-resume" in str(refused.value.hint)
    check_folder(dataclasses.replace(ours, resume=False))
    check_folder(settings(out=tmp_path))


def test_a_damaged_checkpoint_says_nothing_of_its_run(tmp_path: Path) -> None:
    leave_checkpoint(tmp_path, settings().identity(), step=5)
    leave_checkpoint(tmp_path, settings(seed=1).identity(), step=6)
    (tmp_path / "checkpoints" / "step-000000006" / "state.json").write_text("{")
    check_folder(settings(out=tmp_path))


def test_the_plan_looks_at_the_folders_of_the_other_seeds(tmp_path: Path) -> None:
    leave_checkpoint(tmp_path / "s1", settings(seed=1, n_envs=2).identity())
    asked = [
        *(sys.executable, "-m", "rlq_sac", "plan", "--env", "Pendulum-v1", "--steps", "9"),
        *("--out", str(tmp_path / "s0")),
    ]
    assert subprocess.run(asked, check=False, capture_output=True).returncode == 0
    refused = subprocess.run(
        [*asked, "--also", "1", str(tmp_path / "s1")], check=False, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "is of another run: n_envs was 2, now 1" in refused.stderr
