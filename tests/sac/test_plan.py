"""What a training declares to the queue before it starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlq_sac import environments
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
