"""A SAC training as people write it, and as every arm of sac_packing runs it.

Run: python bench/sac_train.py OUT --algo sb3 --env Humanoid-v5 --steps 300 --warmup 100 --seed 0
Nothing about threads, cores or devices: what a person pastes from the documentation.  The one
addition is a callback that writes down when the steps were taken (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from stable_baselines3.common.callbacks import BaseCallback


class Clock(BaseCallback):
    """Writes `{"begin": s, "end": s, "steps": n}`: the steps after the warm-up, all with an
    update of the networks (the first of which compiles, in JAX)."""

    def __init__(self, out: Path, warmup: int) -> None:
        super().__init__()
        self.out = out
        self.warmup = warmup
        self.begin = 0.0

    def _on_step(self) -> bool:
        if self.num_timesteps == self.warmup:
            self.begin = time.monotonic()
        return True

    def _on_training_end(self) -> None:
        steps = self.num_timesteps - self.warmup
        found = {"begin": self.begin, "end": time.monotonic(), "steps": steps}
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(self.out)


def train(out: str, algo: str, env: str, steps: int, warmup: int, seed: int) -> None:
    sac: Any
    if algo == "sbx":
        from sbx import SAC as sac
    else:
        from stable_baselines3 import SAC as sac
    # Gradient steps begin halfway through the warm-up, so that what is timed is training.
    model = sac("MlpPolicy", gym.make(env), learning_starts=warmup // 2, seed=seed)
    model.learn(total_timesteps=steps + warmup, callback=Clock(Path(out), warmup))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--algo", choices=("sb3", "sbx"), default="sb3")
    parser.add_argument("--env", default="Humanoid-v5")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(options.out, options.algo, options.env, options.steps, options.warmup, options.seed)


if __name__ == "__main__":
    main()
