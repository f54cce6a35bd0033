"""From the end of one job to the start of the next, told by the jobs themselves.

Run: python bench/turnaround.py [--jobs 20] [--seconds 0.1] [--repeats 5] [--no-limits]
The queue has one core, so that the second job can start only when the first has ended: its
exit record is on disk, its end is committed, and nothing of it is left running.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.daemon import ONE_CORE, PrivateRlqd
from bench.machine import print_machine
from bench.report import tell
from bench.stamps import gaps_ms, read_stamps, stamp_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a job")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--no-limits", action="store_true", help='enforce.mode = "off": no control group per job'
    )
    options = parser.parse_args()
    medians: list[float] = []
    everything: list[float] = []
    config = f'{ONE_CORE}[enforce]\nmode = "off"\n' if options.no_limits else ONE_CORE
    with PrivateRlqd(config) as rlqd, rlqd.client() as client:
        print_machine(rlqd.folder)
        job = stamp_command(rlqd.folder)
        for n in range(options.repeats):
            out = rlqd.folder / f"stamps-{n}"
            client.drain()
            for _ in range(options.jobs):
                client.submit([*job, str(out), str(options.seconds)], gpus=0)
            client.drain(on=False)
            stamps = read_stamps(out, options.jobs, 60 + 10 * options.jobs)
            gaps = gaps_ms(stamps)
            assert min(gaps) > 0, "two jobs ran on one core at the same time"
            medians.append(statistics.median(gaps))
            everything += gaps
    tell("end of one job to start of the next, medians of runs", medians, "ms", at_most=50)
    tell("end of one job to start of the next, all", everything, "ms")


if __name__ == "__main__":
    main()
