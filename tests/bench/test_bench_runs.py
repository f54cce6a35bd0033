"""Each benchmark runs alone, with the smallest sizes, and prints its machine and its result.

No speed is asserted: other people's work on the machine that runs the tests is not rlq's.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Benchmark, its smallest sizes, what its result begins with.
BENCHMARKS = [
    (
        "submit_rate",
        "--shell 1 --single 2 --pipelined 5 --array 10 --repeats 1",
        "durable submissions, API, pipelined",
    ),
    ("submit_time", "--times 1", "whole process, `rlq submit -- true`"),
    ("turnaround", "--jobs 3 --seconds 0.01 --repeats 1", "end of one job to start of the next"),
    ("list_latency", "--sizes 5,20 --times 1", "list of 20 out of 20 queued, API"),
    ("scheduling_pass", "--sizes 50 --shapes 1,5 --times 2", "pass, new readings"),
    ("idle", "--jobs 2 --window 0.2 --repeats 1 --settle 0", "rlqd idle CPU with 2 running jobs"),
    (
        "rivals",
        "--only task-spooler,nq --jobs 2 --rounds 1 --seconds 0.01",
        "submissions by a shell loop, rlq",
    ),
]


def run(name: str, sizes: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / f"{name}.py"), *sizes.split()],
        capture_output=True,
        text=True,
        timeout=240,
        cwd="/",  # it finds the repository by itself
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "sizes", "result"), BENCHMARKS, ids=[b[0] for b in BENCHMARKS])
def test_it_prints_its_machine_and_its_result(name: str, sizes: str, result: str) -> None:
    printed = run(name, sizes)
    assert re.search(r"^machine: .+ CPUs, .+ GiB, Linux .+ load [\d.]+$", printed, re.M), printed
    assert re.search(rf"^{re.escape(result)}.*: [\d.,]+ \S+.* \(.+, n=\d+\)", printed, re.M), (
        printed
    )


@pytest.mark.sac
@pytest.mark.skipif(
    importlib.util.find_spec("stable_baselines3") is None, reason="needs the `sac` extra"
)
def test_the_packing_benchmark_trains_and_compares() -> None:
    printed = run(
        "sac_packing",
        "--jobs 2 --steps 3 --warmup 4 --env Pendulum-v1 --arms bare,rlq --limit 200",
    )
    assert re.search(r"^rlq +[\d.]+ +[\d.]+ +[\d.,]+ +[\d.,]+ +[12]$", printed, re.M), printed
    assert "rlq / bare, steps/s of all jobs:" in printed


def test_an_unknown_benchmark_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "no-such"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert "there is no benchmark no-such; there are: submit_rate" in done.stderr
