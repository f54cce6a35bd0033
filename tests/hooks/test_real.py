"""The real Stable-Baselines3 and SBX, from SB3 2.3 to the newest."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.hooks.conftest import Ended, Jobs

pytestmark = pytest.mark.sac

BEGIN = """
import hashlib, sys, warnings
warnings.simplefilter("ignore")
import gymnasium as gym
from LIBRARY import SAC, PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
hooks = sys.modules.get("_rlq_hooks")
if hooks:
    hooks.INTERVAL_S = hooks.reporter().SEND_INTERVAL_S = 0.02

def digest(model):
    # torch's tensors or JAX's arrays, in the order of their names
    if hasattr(model.policy, "state_dict"):
        arrays = [v.detach().numpy() for _, v in sorted(model.policy.state_dict().items())]
    else:
        import jax
        state = getattr(model.policy, "qf_state", None) or model.policy.vf_state
        arrays = jax.tree_util.tree_leaves((model.policy.actor_state.params, state.params))
    words = b"".join(bytes(memoryview(__import__("numpy").ascontiguousarray(a)).cast("B"))
                     for a in arrays)
    print("weights:", type(model).__name__, model.num_timesteps, hashlib.sha256(words).hexdigest())

def small():
    return dict(policy_kwargs=dict(net_arch=[16, 16]), seed=3)
"""

SB3 = """
def main():
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    class Count(BaseCallback):
        def _on_step(self):
            return True

    sac = SAC("MlpPolicy", "Pendulum-v1", learning_starts=60, batch_size=16, **small())
    sac.learn(120)
    digest(sac)
    sac.learn(30, [Count(), Count()], reset_num_timesteps=False)
    sac.learn(31, CallbackList([Count()]))
    sac.learn(32, lambda locals_, globals_: True, progress_bar=PROGRESS_BAR)
    digest(sac)
    sac.save("sac")
    again = SAC.load("sac", env=sac.get_env())
    inner = PPO("MlpPolicy", "Pendulum-v1", n_steps=8, batch_size=8, **small())
    class Nested(BaseCallback):
        def _on_step(self):
            if self.num_timesteps == 2:
                inner.learn(16)
            return True
    again.learn(33, Nested())
    digest(again)
    digest(inner)
    envs = make_vec_env("Pendulum-v1", n_envs=ENVS, seed=3, vec_env_cls=SubprocVecEnv,
                        vec_env_kwargs=dict(start_method=START))
    ppo = PPO("MlpPolicy", envs, n_steps=8, batch_size=8, **small())
    ppo.learn(40)
    digest(ppo)
    envs.close()

if __name__ == "__main__":
    main()
"""

SBX = """
sac = SAC("MlpPolicy", "Pendulum-v1", learning_starts=60, batch_size=16, **small())
sac.learn(120)
digest(sac)
sac.learn(30, reset_num_timesteps=False)
digest(sac)
"""


def run(
    jobs: Jobs, folder: Path, program: str, *, hooked: bool = True, path: tuple[Path, ...] = ()
) -> Ended:
    env = {} if hooked else {"RLQ_HOOKS": "0"}
    ended = jobs(program, path=path, cwd=folder, file=folder / "train.py", env=env)
    assert ended.code == 0, ended.err
    return ended


def weights(ended: Ended) -> list[str]:
    lines = [line for line in ended.out.splitlines() if line.startswith("weights: ")]
    assert len(lines) >= 2, ended.out
    return lines


def check_sac(ended: Ended) -> None:
    """One learn(120) whose updates begin after step 60."""
    first = [report for report in ended.reports if report["total"] == 120]
    assert first[0]["step"] == 1
    assert first[-1]["step"] == 120
    warm = [report["metrics"]["warming_up"] == 0.0 for report in first]
    assert not warm[0]
    assert warm[-1]
    assert warm == [report["step"] > 61 for report in first], first
    assert (150, 150) in ended.steps


def test_sb3_of_this_machine(jobs: Jobs, tmp_path: Path) -> None:
    body = SB3.replace("START", "'spawn'").replace("ENVS", "1").replace("PROGRESS_BAR", "True")
    program = BEGIN.replace("LIBRARY", "stable_baselines3") + body
    on = run(jobs, tmp_path, program)
    assert "hooks off" not in on.err
    check_sac(on)
    finals = {step for step, total in on.steps if total is not None and step >= total}
    assert finals >= {120, 150, 31, 32, 33, 40}
    assert {total for _, total in on.steps} == {120, 150, 31, 32, 33, 40}, "not the nested 16"
    off = run(jobs, tmp_path, program, hooked=False)
    assert off.reports == []
    assert weights(on) == weights(off)


def test_sbx_of_this_machine(jobs: Jobs, tmp_path: Path) -> None:
    program = BEGIN.replace("LIBRARY", "sbx") + SBX
    on = run(jobs, tmp_path, program)
    assert on.err == ""
    check_sac(on)
    assert weights(on) == weights(run(jobs, tmp_path, program, hooked=False))


def test_the_workload_of_rlq_is_left_to_its_own_reports(jobs: Jobs, tmp_path: Path) -> None:
    words = ["train", "--env", "Pendulum-v1", "--steps", "150", "--device", "cpu", "--out", "out"]
    program = f"""
import sys, runpy
sys.argv = ["rlq_sac", *{words!r}]
from stable_baselines3.common import base_class
reporter = sys.modules["_rlq_hooks"].reporter()
reporter.report = lambda *a, **k: print("a report of the hooks")
runpy.run_module("rlq_sac", run_name="__main__")
"""
    ended = jobs(program, cwd=tmp_path, path=())
    assert ended.code == 0, ended.err
    assert "a report of the hooks" not in ended.out
    assert ended.steps[-1] == (150, 150)


# ---- older versions ----------------------------------------------------------------

#: SB3 -> the newest gymnasium it takes.
VERSIONS = {"2.3.2": "0.29.1", "2.4.1": "1.0.0", "2.6.0": "1.1.1"}
#: SB3 up to 2.6 imports it.
PANDAS = ("pandas", "python-dateutil", "pytz", "tzdata", "six")
CACHE = Path(tempfile.gettempdir()) / f"rlq-tests-sb3-{os.getuid()}"


def installed(name: str, *packages: str) -> Path:
    """A folder with `packages` and nothing else; kept from one test run to the next."""
    CACHE.mkdir(mode=0o700, exist_ok=True)
    if CACHE.stat().st_uid != os.getuid():
        pytest.skip(f"{CACHE} belongs to somebody else")
    folder = CACHE / name
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            words = ["--quiet", "--no-deps", "--target", f"{scratch}/new", *packages]
            pip = subprocess.run(
                [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *words],
                text=True,
                capture_output=True,
                timeout=240,
            )
            if pip.returncode != 0:
                pytest.skip(f"cannot install {packages}: {pip.stderr.strip()[-300:]}")
            if not folder.is_dir():  # unless another worker was faster
                os.rename(f"{scratch}/new", folder)
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_sb3(jobs: Jobs, tmp_path: Path, version: str) -> None:
    gymnasium = VERSIONS[version]
    path = (
        installed(
            f"sb3-{version}-gymnasium-{gymnasium}",
            f"stable_baselines3=={version}",
            f"gymnasium=={gymnasium}",
        ),
        installed("pandas", *PANDAS),
    )
    body = SB3.replace("START", "'fork'").replace("ENVS", "2").replace("PROGRESS_BAR", "False")
    begin = BEGIN.replace("LIBRARY", "stable_baselines3")
    program = f"{begin}import stable_baselines3\nprint(stable_baselines3.__version__)\n{body}"
    on = run(jobs, tmp_path, program, path=path)
    assert on.out.startswith(f"{version}\n")
    assert "hooks off" not in on.err
    check_sac(on)
    assert {total for _, total in on.steps} == {120, 150, 31, 32, 33, 40}
