"""What one reading of the host costs rlqd: 50 jobs of 3 processes beside other processes.

Run: .venv/bin/python bench/host_monitor.py [--jobs 50] [--children 3] [--others 300]
Prints the CPU time of a reading, and its share of one core at one reading per second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import print_machine
from rlqd.adapters.host import HostMonitor

# Each supervisor's children hold 20 MiB of their own; the last line keeps all of them asleep.
_SUPERVISOR = """
import os, sys
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20) * 20)
        break
print(flush=True)
sys.stdin.read()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--children", type=int, default=3)
    parser.add_argument("--others", type=int, default=300)
    parser.add_argument("--readings", type=int, default=60)
    options = parser.parse_args()
    print_machine()
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [subprocess.Popen(["sleep", "600"]) for _ in range(options.others)]
        jobs = []
        for _ in range(options.jobs):
            argv = [sys.executable, "-S", "-c", _SUPERVISOR, str(options.children)]
            jobs.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        started += jobs
        for job in jobs:
            assert job.stdout is not None
            for _ in range(1 + options.children):
                job.stdout.readline()
        measure([job.pid for job in jobs], options.readings)
    finally:
        for process in started:
            if process.stdin is not None:
                process.stdin.close()  # ends the supervisor and all its children
            else:
                process.kill()
        for process in started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def measure(supervisors: list[int], readings: int) -> None:
    monitor = HostMonitor()
    costs_ms = []
    for _ in range(readings):
        before = time.process_time()
        reading = monitor.read(supervisors)
        costs_ms.append((time.process_time() - before) * 1e3)
        time.sleep(1.0)  # the daemon's own rhythm, for which the budget of Pss is made
    listed = sum(name.isdecimal() for name in os.listdir("/proc"))
    members = sum(len(tree.pids) for tree in reading.trees.values())
    steady_ms = costs_ms[5:]
    print(f"{len(reading.trees)} trees, {members} processes in them, {listed} in /proc")
    print(f"first reading: {costs_ms[0]:.1f} ms of CPU")
    print(
        f"steady: mean {statistics.mean(steady_ms):.2f} ms, median "
        f"{statistics.median(steady_ms):.2f} ms, max {max(steady_ms):.2f} ms "
        f"({len(steady_ms)} readings, 1 per second)"
    )
    print(f"share of one core at 1 Hz: {statistics.mean(steady_ms) / 10:.2f} %")


if __name__ == "__main__":
    main()
