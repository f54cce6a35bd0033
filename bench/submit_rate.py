"""Durable submissions per second: a shell loop, the API one by one, pipelined, and arrays.

Run: python bench/submit_rate.py [--shell 30] [--single 200] [--pipelined 3000] [--array 10000]
                                 [--repeats 5]
Nothing starts (the queue is drained), so this is the cost of accepting jobs.  Each accepted job
is on disk (SQLite, synchronous=FULL) before its answer.  Every submission carries this
process's environment, as a person's would.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.daemon import PrivateRlqd, rlq_command
from bench.machine import print_machine
from bench.report import tell
from rlq.client import Client
from rlq.specs import make_resources, make_spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shell", type=int, default=30, help="jobs of the shell loop")
    parser.add_argument("--single", type=int, default=200, help="jobs one by one by the API")
    parser.add_argument("--pipelined", type=int, default=3000, help="jobs pipelined by the API")
    parser.add_argument("--array", type=int, default=10_000, help="jobs of one array")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with PrivateRlqd() as rlqd, rlqd.client() as client:
        print_machine(rlqd.folder)
        client.drain()
        arms: dict[str, tuple[int, Callable[[int], None]]] = {
            "shell loop of `rlq submit -- true`": (options.shell, Shell(rlqd)),
            "API, one at a time": (options.single, Single(client)),
            "API, pipelined": (options.pipelined, Pipelined(client)),
            "API, one array": (options.array, Array(client)),
            f"`rlq submit --array 1-{options.array} -- true`": (options.array, ShellArray(rlqd)),
        }
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(options.repeats):
            for name, (jobs, submit) in arms.items():
                began = time.perf_counter()
                submit(jobs)
                rates[name].append(jobs / (time.perf_counter() - began))
        queued = sum(jobs for jobs, _ in arms.values()) * options.repeats
        assert client.status().counts["PENDING"] == queued, "jobs were lost"
    for name, found in rates.items():
        aim = 2000 if name == "API, pipelined" else None
        tell(f"durable submissions, {name}", found, "jobs/s", at_least=aim)


SPEC = make_spec(["true"], resources=make_resources())


class Shell:
    def __init__(self, rlqd: PrivateRlqd) -> None:
        self.rlqd = rlqd

    def __call__(self, jobs: int) -> None:
        loop = f"for i in $(seq {jobs}); do {shlex.join(rlq_command())} submit -- true; done"
        subprocess.run(
            ["sh", "-e", "-c", loop], env=self.rlqd.env, check=True, stdout=subprocess.DEVNULL
        )


class ShellArray:
    def __init__(self, rlqd: PrivateRlqd) -> None:
        self.rlqd = rlqd

    def __call__(self, jobs: int) -> None:
        argv = [*rlq_command(), "submit", "-q", "--array", f"1-{jobs}", "--", "true"]
        subprocess.run(argv, env=self.rlqd.env, check=True, stdout=subprocess.DEVNULL)


class Single:
    def __init__(self, client: Client) -> None:
        self.client = client

    def __call__(self, jobs: int) -> None:
        for _ in range(jobs):
            self.client.submit_many([SPEC])


class Pipelined:
    def __init__(self, client: Client) -> None:
        self.client = client

    def __call__(self, jobs: int) -> None:
        env = dict(os.environ)
        ids = list(self.client.submit_pipelined([SPEC] * jobs, env=env))
        assert len(set(ids)) == jobs


class Array:
    def __init__(self, client: Client) -> None:
        self.client = client

    def __call__(self, jobs: int) -> None:
        assert len(self.client.submit_many([SPEC] * jobs)) == jobs


if __name__ == "__main__":
    main()
