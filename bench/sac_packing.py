"""The founding question: N SAC trainings at once on one machine, started four ways.

Run: python bench/sac_packing.py [--jobs 4] [--steps 60] [--warmup 20] [--repeats 1]
                                 [--algo sb3|sbx] [--env Humanoid-v5] [--arms joblib,bare,tsp,rlq]

    joblib  Parallel(n_jobs=N)(delayed(train)(seed) for seed in range(N))
    bare    N processes at once: `python train.py &`, N times
    tsp     task-spooler with N slots
    rlq     N times `rlq submit -- python train.py`: nothing declared, default configuration

One training script for all (bench/sac_train.py).  Thread variables of the shell that runs this
(OMP_NUM_THREADS and so on) are removed, so that every arm has the defaults.  The order rotates
from repeat to repeat.  Printed are, for each arm:

    wall            from the first submission to the end of the last training, imports included
    steps/s, all    all jobs' steps over the wall time
    steps/s, train  all jobs' steps over the time in which any of them trained
    steps/s, job    one job's own rate while it trains, the mean of all jobs
    at once         how many trained at the same time, at most

and the ratio of "steps/s, all" to that of `bare` in the same repeat.  The steps are counted
after a warm-up; each comes with a gradient step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.daemon import PrivateRlqd
from bench.machine import print_machine
from bench.queues import TaskSpooler
from bench.report import number, ratio
from rlq.protocol.states import JobState

HERE = Path(__file__).resolve().parent
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "NPROC",
    "XLA_FLAGS",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    jobs: int
    steps: int
    warmup: int
    algo: str
    env: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Result:
    wall_s: float
    all_per_s: float
    train_per_s: float
    job_per_s: float
    at_once: int


class ArmFailedError(Exception):
    """It did not finish in time, or a training failed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of each job, after its warm-up")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--algo", choices=("sb3", "sbx"), default="sb3")
    parser.add_argument("--env", default="Humanoid-v5")
    parser.add_argument("--arms", default="joblib,bare,tsp,rlq")
    parser.add_argument("--limit", type=float, default=900, help="seconds that an arm may take")
    options = parser.parse_args()
    sizes = Sizes(
        options.jobs, options.steps, options.warmup, options.algo, options.env, options.limit
    )
    print_machine()
    print(
        f"{sizes.jobs} x {sizes.algo} SAC {sizes.env}, {sizes.steps} steps each after"
        f" {sizes.warmup}, {options.repeats} repeats"
    )
    wanted = [name for name in options.arms.split(",") if name]
    arms = {name: ARMS[name] for name in wanted if not skipped(name)}
    #: By repeat, so that a failed one does not shift the pairs.
    results: dict[str, dict[int, Result]] = {name: {} for name in arms}
    for n in range(options.repeats):
        order = [*arms][n % len(arms) :] + [*arms][: n % len(arms)]
        for name in order:
            try:
                result = run(arms[name], sizes)
            except ArmFailedError as error:
                print(f"{name}: {error}", flush=True)
                continue
            results[name][n] = result
            print(
                f"repeat {n + 1}, {name}: wall {number(result.wall_s)} s,"
                f" {number(result.all_per_s)} steps/s",
                flush=True,
            )
    print_table(results)


def skipped(name: str) -> bool:
    if name == "joblib" and importlib.util.find_spec("joblib") is None:
        print("skipped: joblib is not installed: pip install joblib")
        return True
    if name == "tsp" and shutil.which("tsp") is None:
        print("skipped: task-spooler is not installed: apt-get install task-spooler")
        return True
    return False


# ---- the arms ----------------------------------------------------------------------


class Arm:
    """Made and entered before the clock starts; `start` submits all trainings."""

    def __init__(self, folder: Path, sizes: Sizes, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.sizes = sizes
        self.env = env

    def start(self) -> None:
        raise NotImplementedError

    def trouble(self) -> str:
        """Why the trainings can no longer all succeed, or ""."""
        return ""

    def stop(self) -> None:
        """End whatever still runs."""

    def out(self, seed: int) -> Path:
        return self.folder / f"{seed}.json"

    def train_argv(self, seed: int) -> list[str]:
        one = self.sizes
        return [
            *(sys.executable, str(HERE / "sac_train.py"), str(self.out(seed))),
            *("--algo", one.algo, "--env", one.env, "--seed", str(seed)),
            *("--steps", str(one.steps), "--warmup", str(one.warmup)),
        ]


class Bare(Arm):
    """`python train.py &`, N times."""

    def __init__(self, folder: Path, sizes: Sizes, env: Mapping[str, str]) -> None:
        super().__init__(folder, sizes, env)
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for seed in range(self.sizes.jobs):
            self._spawn(self.train_argv(seed))

    def trouble(self) -> str:
        failed = [c.returncode for c in self._children if c.poll() not in (None, 0)]
        return f"a training failed: {self._last_words()}" if failed else ""

    def stop(self) -> None:
        for child in self._children:
            if child.poll() is None:
                # A session each: its worker processes go with it.
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def _spawn(self, argv: list[str]) -> None:
        with (self.folder / "output").open("ab") as output:
            self._children.append(
                subprocess.Popen(
                    argv,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _last_words(self) -> str:
        lines = (self.folder / "output").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Joblib(Bare):
    """`Parallel(n_jobs=N)(delayed(train)(seed) for seed in range(N))`."""

    def start(self) -> None:
        one = self.sizes
        self._spawn(
            [
                *(sys.executable, str(HERE / "sac_joblib.py"), str(one.jobs), str(self.folder)),
                *(one.algo, one.env, str(one.steps), str(one.warmup)),
            ]
        )


class Tsp(Arm):
    """task-spooler with N slots."""

    def __init__(self, folder: Path, sizes: Sizes, env: Mapping[str, str]) -> None:
        super().__init__(folder, sizes, env)
        self._queue = TaskSpooler(slots=sizes.jobs)
        self._env = {k: v for k, v in self._queue.env.items() if k not in THREAD_VARIABLES}
        self._ids: list[str] = []

    def start(self) -> None:
        for seed in range(self.sizes.jobs):
            self._ids.append(self._tsp(*self.train_argv(seed)))

    def trouble(self) -> str:
        for seed, job in enumerate(self._ids):
            if self._tsp("-s", job) == "finished" and not self.out(seed).exists():
                return f"training {seed} failed: `tsp -o` names its output"
        return ""

    def stop(self) -> None:
        for job in self._ids:
            if self._tsp("-s", job) == "running":
                # The server starts each job in a process group of its own.
                with suppress(ProcessLookupError):
                    os.killpg(int(self._tsp("-p", job)), signal.SIGKILL)
        self._queue.__exit__(None, None, None)

    def _tsp(self, *args: str) -> str:
        done = subprocess.run(
            ["tsp", *args], env=self._env, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()


class RlqArm(Arm):
    """Nothing declared, everything at its default."""

    def __init__(self, folder: Path, sizes: Sizes, env: Mapping[str, str]) -> None:
        super().__init__(folder, sizes, env)
        self._rlqd = PrivateRlqd(config="")
        self._rlqd.__enter__()
        self._client = self._rlqd.client()
        self._ids: list[int] = []

    def start(self) -> None:
        for seed in range(self.sizes.jobs):
            self._ids.append(self._client.submit(self.train_argv(seed), env=self.env))

    def trouble(self) -> str:
        jobs = [self._client.get(job) for job in self._ids]
        failed = [job for job in jobs if job.state.is_final and job.state != JobState.COMPLETED]
        return f"job {failed[0].id}: {failed[0].state} {failed[0].reason}" if failed else ""

    def stop(self) -> None:
        self._client.close()
        self._rlqd.__exit__(None, None, None)


ARMS: dict[str, type[Arm]] = {"joblib": Joblib, "bare": Bare, "tsp": Tsp, "rlq": RlqArm}


def run(make: type[Arm], sizes: Sizes) -> Result:
    env = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlq-packing-")))
        arm = make(folder, sizes, env)
        stack.callback(arm.stop)
        began = time.monotonic()
        arm.start()
        outs = [arm.out(seed) for seed in range(sizes.jobs)]
        while not all(out.exists() for out in outs):
            if time.monotonic() - began > sizes.limit_s:
                done = sum(out.exists() for out in outs)
                raise ArmFailedError(
                    f"only {done} of {sizes.jobs} trainings ended in {sizes.limit_s:.0f} s"
                )
            if why := arm.trouble():
                raise ArmFailedError(why)
            time.sleep(0.1)
        found = [json.loads(out.read_text()) for out in outs]
    spans = [(one["begin"], one["end"]) for one in found]
    steps = sum(one["steps"] for one in found)
    wall_s = max(end for _, end in spans) - began
    return Result(
        wall_s=wall_s,
        all_per_s=steps / wall_s,
        train_per_s=steps / covered_s(spans),
        job_per_s=statistics.mean(one["steps"] / (one["end"] - one["begin"]) for one in found),
        at_once=max(sum(b <= begin < e for b, e in spans) for begin, _ in spans),
    )


def covered_s(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them was under way."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# ---- what came of it ---------------------------------------------------------------


def print_table(results: Mapping[str, Mapping[int, Result]]) -> None:
    print(f"{'':8}{'wall s':>9}{'steps/s, all':>14}{'train':>9}{'job':>9}{'at once':>9}")
    for name, by_repeat in results.items():
        runs = list(by_repeat.values())
        if not runs:
            print(f"{name:8}  no result")
            continue
        columns = (
            [run.wall_s for run in runs],
            [run.all_per_s for run in runs],
            [run.train_per_s for run in runs],
            [run.job_per_s for run in runs],
        )
        wall, whole, train, job = (number(statistics.median(column)) for column in columns)
        at_once = max(run.at_once for run in runs)
        print(f"{name:8}{wall:>9}{whole:>14}{train:>9}{job:>9}{at_once:>9}")
    bare = results.get("bare", {})
    for name, by_repeat in results.items():
        pairs = [(by_repeat[n], bare[n]) for n in by_repeat if n in bare]
        if name == "bare" or not pairs:
            continue
        whole = ratio([a.all_per_s for a, _ in pairs], [b.all_per_s for _, b in pairs])
        train = ratio([a.train_per_s for a, _ in pairs], [b.train_per_s for _, b in pairs])
        print(
            f"{name} / bare, steps/s of all jobs: {whole} with imports, {train} while training"
            f" (n={len(pairs)})"
        )


if __name__ == "__main__":
    main()
