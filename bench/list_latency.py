"""A list of 100 jobs out of a long queue: does it stay flat as the queue grows?

Run: python bench/list_latency.py [--sizes 1000,10000,100000] [--times 30]
Asked by the API on an open connection, and by the whole `rlq list -n 100` process.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.daemon import PrivateRlqd, rlq_command
from bench.machine import print_machine
from bench.report import tell
from bench.submit_time import run_ms
from rlq.client import Client
from rlq.protocol.states import JobState
from rlq.specs import make_resources, make_spec

CHUNK = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,10000,100000", help="queue lengths, ascending")
    parser.add_argument("--times", type=int, default=30)
    options = parser.parse_args()
    sizes = sorted(int(size) for size in options.sizes.split(","))
    spec = make_spec(["python", "train.py", "--lr", "3e-4"], resources=make_resources())
    with PrivateRlqd() as rlqd, rlqd.client() as client:
        print_machine(rlqd.folder)
        client.drain()
        queued = 0
        for size in sizes:
            while queued < size:
                queued += len(client.submit_many([spec] * min(CHUNK, size - queued)))
            newest = [list_ms(client) for _ in range(options.times)]
            waiting = [list_ms(client, JobState.PENDING) for _ in range(options.times)]
            # Each `rlq list -n 100` prints to a pipe, so in its plain form.
            argv = [*rlq_command(), "list", "-n", "100"]
            whole = [run_ms(argv, rlqd.env) for _ in range(max(1, options.times // 3))]
            wanted = min(100, size)
            tell(f"list of {wanted} out of {size:,} queued, API", newest, "ms", at_most=50)
            tell(f"the same, only PENDING, out of {size:,}", waiting, "ms", at_most=50)
            tell(f"`rlq list -n 100`, whole process, out of {size:,}", whole, "ms")


def list_ms(client: Client, *states: JobState) -> float:
    began = time.perf_counter()
    found = client.list(states=states, limit=100)
    spent_ms = (time.perf_counter() - began) * 1e3
    assert found, "the queue is empty"
    return spent_ms


if __name__ == "__main__":
    main()
