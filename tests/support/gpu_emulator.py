"""Training jobs that share one GPU as kernels do, on a machine that has none.

The GPU is a token: the moment at which the device is free again, kept in a file.  A job that
launches a kernel takes the token under a lock, moves it on by the time the kernel takes, and waits
until then: first come, first served, one kernel at a time, by processes that know nothing of
each other.  Every step of a job is

    think_ms  off the device (its own core)     serve_ms  on the device, one job at a time

and `switch_ms` more on the device where the last kernel was another process's.  Nothing here needs
a CPU: a job sleeps while it "computes", and one that the busy machine wakes too late catches up
with its own clock, so that the rates are the model's on two cores that others use as well.

All the while NVML reads 100 %, with one job as with ten.

What k jobs of one kind achieve together is known in closed form.  As nothing is random, they
fall into step, and the curve is the asymptotic bound of queueing (Denning and Buzen 1978), which
jobs with random times only come near to:

    STP(k) = min(k, (think + serve) / (serve + switch))     for k > 1
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.nvml_stub import StubGpu
from tests.support.rlqd import Rlqd

from rlq import specs
from rlq.client import Client

ROOMY = Path(__file__).parents[2] / "bench" / "roomy_rlqd.py"

#: What a job runs: like a user's script, with the standard library and one line for rlq.
TRAIN = '''\
"""Stands in for a training script; see tests/support/gpu_emulator.py."""

import argparse
import fcntl
import os
import pathlib
import struct
import time

import rlq.job

#: A job that was stopped, or that the machine has starved for so long, does not catch up.
LATE_S_MAX = 2.0
TOKEN = struct.Struct("dq")

parser = argparse.ArgumentParser()
parser.add_argument("--env", default="")
parser.add_argument("--think-ms", type=float, required=True)
parser.add_argument("--serve-ms", type=float, required=True)
parser.add_argument("--switch-ms", type=float, default=0.0)
parser.add_argument("--warm-steps", type=int, default=0)
parser.add_argument("--warm-ms", type=float, default=1.0)
parser.add_argument("--mem", type=int, default=500)
parser.add_argument("--sm", type=int, default=100)
parser.add_argument("--mute", action="store_true")
args = parser.parse_args()


def put_on_gpu(folder, index):
    part = folder / f".{os.getpid()}"
    part.write_text(f"{index} {args.mem} {args.sm} C\\n")
    part.replace(folder / "procs" / str(os.getpid()))


def launch(token_fd, at):
    """Queue one kernel at `at`; when it is done."""
    fcntl.flock(token_fd, fcntl.LOCK_EX)
    try:
        held = os.pread(token_fd, TOKEN.size, 0)
        free_at, last_pid = TOKEN.unpack(held) if held else (0.0, 0)
        done = max(at, free_at) + args.serve_ms / 1000
        if last_pid not in (0, os.getpid()):
            done += args.switch_ms / 1000
        os.pwrite(token_fd, TOKEN.pack(done, os.getpid()), 0)
    finally:
        fcntl.flock(token_fd, fcntl.LOCK_UN)
    return done


def wait(until):
    """The job's own time afterwards."""
    left = until - time.monotonic()
    if left > 0:
        time.sleep(left)
    return until if left > -LATE_S_MAX else time.monotonic()


folder = pathlib.Path(os.environ["RLQ_NVML_STUB"])
index = int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0][-12:])
token = os.open(folder / f"token-{index}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
put_on_gpu(folder, index)
at = time.monotonic()
for step in range(1, 10**9):
    is_warm = step > args.warm_steps
    if is_warm:
        at = wait(at + args.think_ms / 1000)
        at = wait(launch(token, at))
    else:
        at = wait(at + args.warm_ms / 1000)
    if not args.mute:
        rlq.job.report(step, warming_up=0 if is_warm else 1)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A program: `env` sets its signature apart from others'."""

    env: str
    think_ms: float
    serve_ms: float
    #: Added on the device when the kernel before was another job's.
    switch_ms: float = 0.0
    #: Before these it does not train: one each `warm_ms`, off the device.
    warm_steps: int = 0
    warm_ms: float = 1.0
    #: SM share that NVML tells of each process.
    sm: int = 100
    #: It tells nobody how far it is.
    mute: bool = False

    @property
    def signature(self) -> str:
        return f"train.py env={self.env}"

    @property
    def solo_steps_per_s(self) -> float:
        return 1000 / (self.think_ms + self.serve_ms)

    def stp(self, jobs: int) -> float:
        if jobs < 2:
            return float(jobs)
        return min(jobs, (self.think_ms + self.serve_ms) / (self.serve_ms + self.switch_ms))

    def knee(self, threshold: float) -> int:
        """The number after which one more adds less than `threshold`."""
        jobs = 1
        while self.stp(jobs + 1) - self.stp(jobs) >= threshold:
            jobs += 1
        return jobs

    def options(self) -> list[str]:
        given = ("env", "think_ms", "serve_ms", "switch_ms", "warm_steps", "warm_ms", "sm")
        words = [w for n in given for w in (f"--{n.replace('_', '-')}", str(getattr(self, n)))]
        return [*words, "--mute"] if self.mute else words


class EmulatedGpus(Rlqd):
    """A real daemon on a machine with 64 made-up cores and GPUs that are tokens."""

    program = (str(ROOMY),)

    def __init__(self, folder: Path, *, config: str, gpus: int = 1) -> None:
        super().__init__(folder, config=config, gpus=[StubGpu(index=n) for n in range(gpus)])
        self.script = folder / "train.py"
        self.script.write_text(TRAIN)

    def train(
        self, client: Client, *kinds: Kind, count: int = 1, gpu_mem: specs.Size = "600M"
    ) -> list[int]:
        """Submit `count` jobs of each kind in one go, in turn.  They take little of anything but
        the GPU's time."""
        resources = specs.make_resources(gpus=1, cores=1, gpu_mem=gpu_mem, mem="32M")
        jobs = [
            specs.make_spec(
                [sys.executable, str(self.script), *kind.options()], resources=resources
            )
            for kind in kinds
        ]
        return client.submit_many(jobs * count, env=self.user_env)

    def utilisation(self, client: Client, index: int = 0) -> int | None:
        """As NVML reads it now."""
        return {gpu.index: gpu.sm_pct for gpu in client.devices().gpus}.get(index)
