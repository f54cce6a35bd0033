"""What a checkpoint holds of a model: its replay buffer and its random generators."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytestmark = pytest.mark.sac


def buffer_of(rows: int, **options: Any) -> Any:
    from stable_baselines3.common.buffers import ReplayBuffer

    observation = gymnasium.spaces.Box(-1, 1, (3,), np.float64)
    action = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    return ReplayBuffer(rows, observation, action, device="cpu", **options)


def fill(buffer: Any, rows: int) -> None:
    draws = np.random.default_rng(1)
    for _ in range(rows):
        n = buffer.n_envs
        buffer.add(
            draws.normal(size=(n, 3)),
            draws.normal(size=(n, 3)),
            draws.normal(size=(n, 2)),
            draws.normal(size=n),
            draws.random(n) < 0.5,
            [{"TimeLimit.truncated": bool(draws.random() < 0.5)} for _ in range(n)],
        )


@pytest.mark.parametrize("rows", [0, 1, 7, 10, 15])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_envs": 2},
        {"optimize_memory_usage": True, "handle_timeout_termination": False},
    ],
)
def test_a_buffer_comes_back_as_it_was(tmp_path: Path, rows: int, options: dict[str, Any]) -> None:
    from rlq_sac import replay

    size = 10 * options.get("n_envs", 1)
    saved, loaded = buffer_of(size, **options), buffer_of(size, **options)
    fill(saved, rows)
    replay.save(saved, tmp_path / "buffer.npz")
    replay.load(loaded, tmp_path / "buffer.npz")
    assert (loaded.pos, loaded.full) == (saved.pos, saved.full)
    arrays = [name for name, value in vars(saved).items() if isinstance(value, np.ndarray)]
    assert "observations" in arrays
    for name in arrays:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(saved, name), err_msg=name)


def test_only_rows_in_use_are_written(tmp_path: Path) -> None:
    from rlq_sac import replay

    buffer = buffer_of(1_000_000)
    fill(buffer, 10)
    replay.save(buffer, tmp_path / "buffer.npz")
    assert (tmp_path / "buffer.npz").stat().st_size < 10_000


def test_the_buffer_of_another_environment_is_refused(tmp_path: Path) -> None:
    from rlq_sac import replay

    replay.save(buffer_of(10, n_envs=1), tmp_path / "buffer.npz")
    with pytest.raises(ValueError, match="shape"):
        replay.load(buffer_of(20, n_envs=2), tmp_path / "buffer.npz")


def test_every_random_generator_goes_on_where_it_was() -> None:
    import torch
    from stable_baselines3 import SAC

    from rlq_sac import random_state

    model = SAC("MlpPolicy", "Pendulum-v1", seed=1, policy_kwargs={"net_arch": [4]}, device="cpu")
    env = model.get_env()
    assert env is not None
    env.reset()

    def draw() -> list[Any]:
        assert env is not None
        return [
            random.random(),
            np.random.normal(),
            torch.rand(1).item(),
            model.action_space.sample().tolist(),
            np.asarray(env.reset()).tolist(),
        ]

    draw()
    state = json.loads(json.dumps(random_state.capture(model)))
    expected = draw()
    assert all(a != b for a, b in zip(expected, draw(), strict=True)), "nothing random was drawn"
    model.set_random_seed(1)
    env.reset()  # uses the seed up, as training._load_model does
    random_state.restore(model, state)
    assert draw() == expected
