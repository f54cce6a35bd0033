"""The state of every random generator a training draws from, as JSON data.

SB3 seeds all of them again when a model is loaded; without this a resumed run would draw the
numbers of its beginning once more. The episodes under way are lost on a resume: MuJoCo's state
is not saved, and every environment starts a new episode.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm


def capture(model: BaseAlgorithm) -> dict[str, Any]:
    env = model.get_env()
    assert env is not None
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    keys = numpy_state["state"]["key"]
    numpy_state = {**numpy_state, "state": {**numpy_state["state"], "key": keys.tolist()}}
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": numpy_state,
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "action_space": model.action_space.np_random.bit_generator.state,
        "envs": [generator.bit_generator.state for generator in env.get_attr("np_random")],
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [bytes(s.numpy()).hex() for s in torch.cuda.get_rng_state_all()]
    if (key := getattr(model, "key", None)) is not None:  # SBX
        state["jax"] = np.asarray(key).tolist()
    return state


def restore(model: BaseAlgorithm, state: dict[str, Any]) -> None:
    env = model.get_env()
    assert env is not None
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        states = [_tensor(text) for text in state["cuda"]]
        if len(states) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(states)
    model.action_space.np_random.bit_generator.state = state["action_space"]
    for index, generator_state in enumerate(state["envs"]):
        bits = getattr(np.random, generator_state["bit_generator"])()
        bits.state = generator_state
        env.set_attr("np_random", np.random.Generator(bits), indices=[index])
    if "jax" in state:
        import jax.numpy as jnp

        model.key = jnp.asarray(np.array(state["jax"], np.uint32))  # type: ignore[attr-defined]


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
