"""The training itself.  Importing this module imports torch, and for SBX jax.

All bookkeeping happens in SB3's callback, which runs after the environment has stepped but
before the transition is stored. So it looks one step back: `done` steps are stored and learned
from, and a checkpoint taken there is a state between two steps, not in the middle of one.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import os
import platform
import sys
import time
from typing import Any, Protocol

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

import rlq.job
from rlq.errors import RefusedError, UnavailableError
from rlq_sac import checkpoints, identity, random_state, replay, results
from rlq_sac.environments import make, make_in_worker
from rlq_sac.plan import steps_run
from rlq_sac.results import CurvePoint
from rlq_sac.settings import Algo, Settings
from rlq_sac.stopping import StopRequest

#: The evaluation environments draw other starts than the training's.
_EVAL_SEED_OFFSET = 10_000
_LOOK_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 10.0
#: Points of the training curve between evaluations.
_CURVE_POINTS = 100
_EXIT_DONE = 0


class Say(Protocol):
    def __call__(self, message: str) -> None: ...


def say(message: str) -> None:
    print(message, flush=True)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def train(settings: Settings, stop: StopRequest) -> int:
    """Train, or go on training, to the end or to a stop; the exit code.

    Raises:
        UsageError: the folder holds another run's checkpoints.
        RefusedError: the device that was asked for is not there.
        UnavailableError: an environment's worker process died.
    """
    folder = settings.out / "checkpoints"
    checkpoint = checkpoints.newest(folder, warn) if settings.resume else None
    if checkpoint is not None:
        identity.check_same_run(
            settings, checkpoint.state["identity"], f"checkpoint {checkpoint.path}"
        )
    _limit_threads()
    _check_device(settings)
    # A resumed run takes its generators' states from the checkpoint.
    vec_env = _vec_env(settings)
    eval_env = None
    try:
        eval_env = make_vec_env(
            functools.partial(make, settings.env), seed=settings.seed + _EVAL_SEED_OFFSET
        )
        model = _new_model(settings, vec_env)
        if checkpoint is not None:
            model = _load_model(settings, vec_env, checkpoint)
        return _Training(settings, stop, model, eval_env, checkpoint).run()
    except (EOFError, ConnectionError) as error:
        if settings.n_envs == 1:
            raise
        if stop:  # the signal went to the workers before they could ignore it
            return stop.exit_code
        raise UnavailableError(
            f"a worker process of the environment ended: {type(error).__name__}",
            hint="was memory short? with fewer --n-envs less is needed",
        ) from error
    finally:
        _close(vec_env)
        if eval_env is not None:
            eval_env.close()


class _Training:
    """One session: from the start or a checkpoint to the end or a stop."""

    def __init__(
        self,
        settings: Settings,
        stop: StopRequest,
        model: OffPolicyAlgorithm,
        eval_env: VecEnv,
        checkpoint: checkpoints.Checkpoint | None,
    ) -> None:
        self._settings = settings
        self._stop = stop
        self._model = model
        self._eval_env = eval_env
        self._goal = steps_run(settings)
        self._gradient_steps: int = _gradient_steps(settings)
        self._refill_until: int | None = None
        self._curve: list[CurvePoint] = []
        self._resumed_from: list[int] = []
        self._wall_before_s = 0.0
        self._train_before_s = 0.0
        #: In this session, on evaluations and checkpoints.
        self._aside_s = 0.0
        self._eval: tuple[float, float] | None = None
        if checkpoint is not None:
            self._take_up(checkpoint)
        self._checkpoint_step = None if checkpoint is None else checkpoint.step
        self._start_step = model.num_timesteps
        self._began_s = time.monotonic()
        self._eval_due = _Due(settings.eval_freq, self._start_step)
        self._checkpoint_due = _Due(settings.checkpoint_freq, self._start_step)
        self._curve_due = _Due(max(settings.steps // _CURVE_POINTS, 1), self._start_step)
        self._look_at_s = 0.0
        self._line_at_s = self._began_s
        self._line_step = self._start_step
        self._line_aside_s = 0.0
        self._rate: float | None = None

    def _take_up(self, checkpoint: checkpoints.Checkpoint) -> None:
        state = checkpoint.state
        self._curve = results.read_curve(self._settings.out / "curve.csv", checkpoint.step)
        self._resumed_from = [*state["resumed_from"], checkpoint.step]
        self._wall_before_s = state["wall_s"]
        self._train_before_s = state["train_s"]
        buffer = self._model.replay_buffer
        assert buffer is not None
        rows = buffer.size() * self._model.n_envs
        capacity = buffer.buffer_size * self._model.n_envs
        need = min(max(self._model.learning_starts, self._model.batch_size), capacity)
        say(f"resuming at step {checkpoint.step:,} from {checkpoint.path}")
        if checkpoint.step >= self._model.learning_starts and rows < need:
            # Updates from a handful of transitions would spoil the policy: let it act first.
            self._refill_until = checkpoint.step + need - rows
            self._model.gradient_steps = 0
            say(f"the replay buffer was not saved: no updates before step {self._refill_until:,}")

    def run(self) -> int:
        settings = self._settings
        remaining = self._goal - self._start_step
        if self._stop:
            return self._stopped()
        say(
            f"training {settings.algo} SAC on {settings.env}, seed {settings.seed}: "
            f"{self._goal:,} steps on {self._device()}"
        )
        if remaining > 0:
            self._model.learn(
                remaining,
                callback=_Callback(self),
                reset_num_timesteps=not self._resumed_from,
            )
        done = self._model.num_timesteps
        if done < self._goal:  # the callback ended it
            return self._stopped()
        self._save(done)
        if not self._evaluate(done):
            return self._stopped()
        self._finish(done)
        return _EXIT_DONE

    def after_step(self, done: int) -> bool:
        """`done` steps are complete; False ends the training."""
        if self._refill_until is not None and done >= self._refill_until:
            self._model.gradient_steps = self._gradient_steps
            self._refill_until = None
        if not self._stop:
            now = time.monotonic()
            if now >= self._look_at_s:
                self._look_at_s = now + _LOOK_INTERVAL_S
                self._tell(done, now)
            if self._curve_due(done) and not self._eval_due.would(done):
                self._add_point(done)
            if self._eval_due(done):
                self._evaluate(done)
            if self._checkpoint_due(done) and not self._stop:
                self._save(done)
        if self._stop:
            self._save(done)
            return False
        return True

    # ---- telling -------------------------------------------------------------------

    def _tell(self, done: int, now: float) -> None:
        since_line_s = now - self._line_at_s - (self._aside_s - self._line_aside_s)
        # Steps that fill the replay buffer are fast, and say nothing of the speed of training.
        fills = done <= self._model.learning_starts or self._refill_until is not None
        metrics: dict[str, float | None] = {
            "ep_rew_mean": self._train_reward(),
            "warming_up": float(fills),
        }
        if since_line_s > 0 and done > self._line_step:
            metrics["fps"] = self._rate or (done - self._line_step) / since_line_s
        if self._eval is not None:
            metrics["mean_reward"] = self._eval[0]
        rlq.job.report(
            min(done, self._settings.steps),
            self._settings.steps,
            **{name: value for name, value in metrics.items() if value is not None},
        )
        if now - self._line_at_s >= _LINE_INTERVAL_S and since_line_s > 0:
            self._rate = (done - self._line_step) / since_line_s
            self._line_at_s, self._line_step = now, done
            self._line_aside_s = self._aside_s
            self._say_line(done)

    def _say_line(self, done: int) -> None:
        parts = [f"step {done:,}/{self._goal:,} ({100 * done / self._goal:.1f} %)"]
        if self._rate:
            parts.append(f"{self._rate:.1f} steps/s")
        if (reward := self._train_reward()) is not None:
            parts.append(f"reward {reward:.1f}")
        if self._eval is not None:
            parts.append(f"evaluated {self._eval[0]:.1f}")
        if self._rate:
            parts.append(f"{_duration((self._goal - done) / self._rate)} to go")
        say("  ".join(parts))

    def _train_reward(self) -> float | None:
        episodes = self._model.ep_info_buffer
        if not episodes:
            return None
        return results.finite(sum(float(e["r"]) for e in episodes) / len(episodes))

    def _device(self) -> str:
        if self._settings.algo == "sbx":
            import jax

            return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
        return str(self._model.device)

    # ---- times ---------------------------------------------------------------------

    def _wall_s(self) -> float:
        return self._wall_before_s + time.monotonic() - self._began_s

    def _train_s(self) -> float:
        return self._train_before_s + time.monotonic() - self._began_s - self._aside_s

    # ---- evaluation ----------------------------------------------------------------

    def _evaluate(self, done: int) -> bool:
        """Evaluate and add a point to the curve; False: a stop came in between."""
        began_s = time.monotonic()
        try:
            mean, std = evaluate_policy(
                self._model,
                self._eval_env,
                n_eval_episodes=self._settings.eval_episodes,
                deterministic=True,
                callback=self._give_up_on_stop,
            )
        except _StoppedError:
            return False
        finally:
            self._aside_s += time.monotonic() - began_s
        assert isinstance(mean, float)
        assert isinstance(std, float)
        self._eval = (float(mean), float(std))
        self._add_point(done, *self._eval)
        return True

    def _give_up_on_stop(self, _locals: dict[str, Any], _globals: dict[str, Any]) -> None:
        if self._stop:
            raise _StoppedError

    def _add_point(self, done: int, mean: float | None = None, std: float | None = None) -> None:
        reward = self._train_reward()
        if mean is None and reward is None:
            return
        if self._curve and self._curve[-1].step == done:
            self._curve.pop()
        self._curve.append(
            CurvePoint(
                step=done,
                wall_s=self._wall_s(),
                train_reward=reward,
                eval_mean=mean,
                eval_std=std,
            )
        )

    # ---- files ---------------------------------------------------------------------

    def _save(self, done: int) -> None:
        """A checkpoint, if there is none of this step; what goes wrong is told, not raised."""
        if done == self._checkpoint_step:
            return
        began_s = time.monotonic()
        model = self._model
        counted = model.num_timesteps
        buffer = model.replay_buffer
        assert buffer is not None
        writers = {"model.zip": model.save}
        if self._settings.save_buffer:
            writers["replay_buffer.npz"] = functools.partial(replay.save, buffer)
        state = {
            "identity": self._settings.identity(),
            "wall_s": self._wall_s(),
            "train_s": self._train_s(),
            "resumed_from": self._resumed_from,
            "random": random_state.capture(model),
            "versions": _versions(self._settings.algo),
        }
        try:
            model.num_timesteps = done
            checkpoints.write(self._settings.out / "checkpoints", done, state, writers)
            self._checkpoint_step = done
        except Exception as error:
            # On a full disk zipfile and torch raise what they like, not OSError only; hours of
            # training must not end for it.
            warn(f"no checkpoint at step {done:,}, the older ones stand: {_one_line(error)}")
        finally:
            model.num_timesteps = counted
            self._aside_s += time.monotonic() - began_s
        self._write_curve()

    def _write_curve(self) -> None:
        try:
            results.write_curve(self._settings.out / "curve.csv", self._curve)
        except OSError as error:
            warn(f"curve.csv is not up to date: {error}")

    def _stopped(self) -> int:
        assert self._stop
        if self._checkpoint_step is None:
            say("stopped before the first checkpoint")
        else:
            say(f"stopped; resume from step {self._checkpoint_step:,} with the same command")
        rlq.job.flush()
        return self._stop.exit_code

    def _finish(self, done: int) -> None:
        settings = self._settings
        assert self._eval is not None
        mean, std = self._eval
        train_s = self._train_s()
        rate = done / train_s if train_s > 0 else None
        title = f"SAC ({settings.algo}) on {settings.env}, seed {settings.seed}"
        self._write_curve()
        try:
            results.draw_curve(settings.out / "curve.png", self._curve, title)
        except Exception as error:  # a plot is not worth a result: a full disk, no fonts
            warn(f"no curve.png: {_one_line(error)}")
        results.write_result(
            settings.out / "result.json",
            {
                "done": True,
                "algo": settings.algo,
                "env": settings.env,
                "seed": settings.seed,
                "n_envs": settings.n_envs,
                "steps": done,
                "wall_s": round(self._wall_s(), 3),
                "train_s": round(train_s, 3),
                "steps_per_s": None if rate is None else round(rate, 3),
                "mean_reward": results.finite(mean),
                "std_reward": results.finite(std),
                "eval_episodes": settings.eval_episodes,
                "device": self._device(),
                "resumed_from": self._resumed_from,
                "versions": _versions(settings.algo),
                "identity": settings.identity(),
            },
        )
        rlq.job.report(
            settings.steps,
            settings.steps,
            mean_reward=mean,
            std_reward=std,
            **({} if rate is None else {"fps": rate}),
        )
        rlq.job.flush()
        say(
            f"finished {done:,} steps in {_duration(self._wall_s())}"
            f" ({rate or 0:.1f} steps/s): reward {mean:.1f} ± {std:.1f} over"
            f" {settings.eval_episodes} episodes; results in {settings.out}"
        )


class _Callback(BaseCallback):
    def __init__(self, training: _Training) -> None:
        super().__init__()
        self._training = training

    def _on_step(self) -> bool:
        return self._training.after_step(self.num_timesteps - self.training_env.num_envs)


class _StoppedError(Exception):
    """Leaves an evaluation."""


class _Due:
    """Every `freq` steps, counted from 0 and not from where a session starts."""

    def __init__(self, freq: int, start: int) -> None:
        self._freq = freq
        self._next = (start // freq + 1) * freq if freq else None

    def would(self, done: int) -> bool:
        return self._next is not None and done >= self._next

    def __call__(self, done: int) -> bool:
        if not self.would(done):
            return False
        self._next = (done // self._freq + 1) * self._freq
        return True


# ---- making things -----------------------------------------------------------------


def _vec_env(settings: Settings) -> VecEnv:
    if settings.n_envs == 1:
        return make_vec_env(functools.partial(make, settings.env), seed=settings.seed)
    return make_vec_env(
        functools.partial(make_in_worker, settings.env),
        n_envs=settings.n_envs,
        seed=settings.seed,
        vec_env_cls=SubprocVecEnv,
    )


def _close(vec_env: VecEnv) -> None:
    try:
        vec_env.close()
    except (EOFError, ConnectionError):
        # One worker is gone, and close() stopped at it; the others ignore SIGTERM, with which
        # multiprocessing would wait for them for ever.
        for process in getattr(vec_env, "processes", []):
            process.kill()


def _new_model(settings: Settings, vec_env: VecEnv) -> OffPolicyAlgorithm:
    keywords = copy.deepcopy(dict(settings.keywords))  # SB3 adds to the dictionaries it is given
    keywords["gradient_steps"] = _gradient_steps(settings)
    policy_kwargs = keywords.get("policy_kwargs", {})
    if "activation_fn" in policy_kwargs:
        policy_kwargs["activation_fn"] = _activation(settings.algo, policy_kwargs["activation_fn"])
    model: OffPolicyAlgorithm = _sac(settings.algo)(
        "MlpPolicy", vec_env, seed=settings.seed, device=_torch_device(settings), **keywords
    )
    return model


def _load_model(
    settings: Settings, vec_env: VecEnv, checkpoint: checkpoints.Checkpoint
) -> OffPolicyAlgorithm:
    path = checkpoint.file("model.zip")
    assert path is not None
    model: OffPolicyAlgorithm = _sac(settings.algo).load(
        path, env=vec_env, device=_torch_device(settings)
    )
    model.gradient_steps = _gradient_steps(settings)  # it may have been saved while refilling
    buffer_path = checkpoint.file("replay_buffer.npz")
    if buffer_path is not None:
        assert model.replay_buffer is not None
        replay.load(model.replay_buffer, buffer_path)
    # load() has seeded everything afresh. A reset uses the environments' seeds up; the
    # generators' states hold from here on, learn() resets once more.
    vec_env.reset()
    random_state.restore(model, checkpoint.state["random"])
    return model


def _sac(algo: Algo) -> Any:
    if algo == "sb3":
        from stable_baselines3 import SAC

        return SAC
    import sbx

    return sbx.SAC


def _gradient_steps(settings: Settings) -> int:
    """With several environments one update per transition, not per step of all of them."""
    given: int | None = settings.keywords.get("gradient_steps")
    if given is not None:
        return given
    return 1 if settings.n_envs == 1 else -1


def _activation(algo: Algo, name: str) -> Any:
    if algo == "sbx":
        import flax.linen

        return getattr(flax.linen, name)
    classes = {"relu": "ReLU", "tanh": "Tanh", "elu": "ELU", "gelu": "GELU", "silu": "SiLU"}
    return getattr(torch.nn, classes.get(name, "LeakyReLU"))


# ---- the machine -------------------------------------------------------------------


def _torch_device(settings: Settings) -> str:
    # SBX computes in jax (JAX_PLATFORMS); torch holds its samples, on the CPU.
    return "cpu" if settings.algo == "sbx" else settings.device


def _check_device(settings: Settings) -> None:
    if settings.device != "cuda":
        return
    hint = "use --device cpu, or look with nvidia-smi and `rlq gpus`"
    if settings.algo == "sb3":
        if not torch.cuda.is_available():
            raise RefusedError("torch sees no CUDA device here", hint=hint)
        return
    import jax

    try:
        jax.devices("cuda")
    except RuntimeError as error:
        raise RefusedError(
            f"jax sees no CUDA device here: {_one_line(error)}", hint=hint
        ) from None


def _limit_threads() -> None:
    """No more threads than cores this process may use; the queue's own variables go first."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))


def _versions(algo: Algo) -> dict[str, str]:
    packages = ["gymnasium", "mujoco", "numpy", "stable-baselines3", "torch"]
    if algo == "sbx":
        packages += ["sbx-rl", "jax", "jaxlib", "flax", "optax"]
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


# ---- words -------------------------------------------------------------------------


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
