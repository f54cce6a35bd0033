"""What rlqd costs while it only watches: CPU and memory with 50 running jobs that sleep.

Run: python bench/idle.py [--jobs 50] [--window 20] [--repeats 5] [--settle 15]
Cores are made up (bench/roomy_rlqd.py): the jobs, their supervisors and the readings are real.
Told beside it: what the jobs' supervisors hold, one per running job.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.daemon import QUIET, PrivateRlqd
from bench.machine import print_machine
from bench.report import tell
from bench.stamps import wait_for
from rlq.protocol.states import JobState

PROGRAM = (str(Path(__file__).with_name("roomy_rlqd.py")),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--window", type=float, default=20, help="seconds of one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--settle", type=float, default=15, help="seconds before the first")
    options = parser.parse_args()
    with PrivateRlqd(QUIET, PROGRAM) as rlqd, rlqd.client() as client:
        print_machine(rlqd.folder)
        ids = [client.submit(["sleep", "100000"], gpus=0) for _ in range(options.jobs)]
        jobs = wait_for(
            lambda: client.list(),
            lambda seen: sum(job.state == JobState.RUNNING for job in seen) == len(ids),
            120,
        )
        daemon = psutil.Process(rlqd.pid)
        supervisors = [psutil.Process(job.pid) for job in jobs if job.pid is not None]
        assert len(supervisors) == len(ids)
        time.sleep(options.settle)
        cpu_pct: list[float] = []
        theirs_pct: list[float] = []
        rss_mib: list[float] = []
        for _ in range(options.repeats):
            before, theirs_before = cpu_s(daemon), sum(map(cpu_s, supervisors))
            began = time.monotonic()
            time.sleep(options.window)
            spent_s = time.monotonic() - began
            cpu_pct.append((cpu_s(daemon) - before) / spent_s * 100)
            theirs_pct.append((sum(map(cpu_s, supervisors)) - theirs_before) / spent_s * 100)
            rss_mib.append(daemon.memory_info().rss / 2**20)
        pss_mib = sum(p.memory_full_info().pss for p in supervisors) / 2**20
    what = f"with {options.jobs} running jobs"
    tell(f"rlqd idle CPU {what}", cpu_pct, "% of a core", at_most=1)
    tell(f"rlqd memory (RSS) {what}", rss_mib, "MiB", at_most=80)
    tell("the supervisors' CPU, together", theirs_pct, "% of a core")
    tell("the supervisors' memory (PSS), together", [pss_mib], "MiB")


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
