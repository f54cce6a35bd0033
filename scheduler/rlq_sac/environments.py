"""Environments: what their spaces are, and making them without noise.

gymnasium is imported inside the functions: it takes 0.2 s that `--help` need not wait for.
"""

from __future__ import annotations

import difflib
import math
import signal
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlq.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    import gymnasium

INSTALL_HINT = "install what the workload needs: pip install 'rlq[sac]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """What a replay buffer needs to know of an environment."""

    observation_shape: tuple[int, ...]
    #: numpy's name: "float64" for MuJoCo, "float32" for Pendulum.
    observation_dtype: str
    action_shape: tuple[int, ...]
    action_dtype: str

    @property
    def action_dim(self) -> int:
        return math.prod(self.action_shape)


def spaces_of(env_id: str) -> Spaces:
    """The spaces of the environment, made once for it.

    Raises:
        UsageError: no such environment, or one that SAC cannot be trained on.
        UnavailableError: a package it needs is not installed.
    """
    try:
        import gymnasium
        from gymnasium import error, spaces
    except ImportError as missing:
        raise UnavailableError(f"{missing.name} is not installed", hint=INSTALL_HINT) from None
    try:
        env = make(env_id)
    except (error.DependencyNotInstalled, ImportError) as missing:
        if ":" in env_id and isinstance(missing, ModuleNotFoundError):
            raise UsageError(f"cannot import the module of {env_id!r}: {missing}") from None
        raise UnavailableError(
            f"{env_id} needs a package that is missing: {_first_line(missing)}", hint=INSTALL_HINT
        ) from None
    except error.UnregisteredEnv:
        raise _unknown(env_id, list(gymnasium.registry)) from None
    except error.Error as problem:
        known = list(gymnasium.registry)
        if env_id not in known:
            raise _unknown(env_id, known) from None
        raise UsageError(f"cannot make {env_id}: {_first_line(problem)}") from None
    try:
        observation, action = env.observation_space, env.action_space
    finally:
        env.close()
    if not isinstance(action, spaces.Box):
        raise UsageError(
            f"{env_id} has {type(action).__name__} actions; SAC needs continuous ones",
            hint="take an environment with a Box action space, such as Pendulum-v1",
        )
    if not isinstance(observation, spaces.Box):
        raise UsageError(
            f"{env_id} has {type(observation).__name__} observations; MlpPolicy needs a Box",
            hint="flatten them in the environment (gymnasium.wrappers.FlattenObservation)",
        )
    return Spaces(
        observation_shape=observation.shape,
        observation_dtype=observation.dtype.name,
        action_shape=action.shape,
        action_dtype=action.dtype.name,
    )


def make(env_id: str) -> gymnasium.Env[Any, Any]:
    """The environment, without a renderer.

    Hidden are only notes that tell the user nothing new: that a version is not the latest
    (Humanoid-v4 is what they asked for), and what MuJoCo thinks of gymnasium's own model files.
    """
    import gymnasium

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r".*is out of date.*", category=DeprecationWarning
        )
        spec = gymnasium.registry.get(env_id)
        if spec is not None and "mujoco" in str(spec.entry_point):
            _tame_mujoco()
        return gymnasium.make(env_id)


def make_in_worker(env_id: str) -> gymnasium.Env[Any, Any]:
    """The environment in a process of SubprocVecEnv.

    A signal to the whole group must not take the workers away from under a main process that
    is about to write a checkpoint: they end when its pipe closes, however that comes about.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return make(env_id)


def _tame_mujoco() -> None:
    """MuJoCo writes warnings to a file MUJOCO_LOG.TXT in the current folder: not in ours."""
    try:
        import mujoco
    except ImportError:
        return  # gymnasium says so in better words
    seen: set[str] = set()

    def show(message: bytes | str) -> None:
        text = message.decode(errors="replace") if isinstance(message, bytes) else message
        if "settotalmass" in text or text in seen:
            return
        seen.add(text)
        print(f"mujoco: {text}", file=sys.stderr)

    mujoco.set_mju_user_warning(show)


def _unknown(env_id: str, known: list[str]) -> UsageError:
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(env_id.lower(), by_lower, n=3, cutoff=0.6)
    hint = (
        f"did you mean {' or '.join(by_lower[name] for name in near)}?"
        if near
        else "`python -c 'import gymnasium; gymnasium.pprint_registry()'` lists them"
    )
    return UsageError(f"there is no environment {env_id!r}", hint=hint)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
