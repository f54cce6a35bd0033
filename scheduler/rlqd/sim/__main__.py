"""Replay one seed: `python -m rlqd.sim SEED [--jobs N] [-v]`.  Exit code 1: a violation."""

from __future__ import annotations

import argparse
import sys
import traceback

from rlqd.sim.world import JOBS, World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlqd.sim", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--jobs", type=int, default=JOBS, help="how many are submitted")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the whole trace")
    options = parser.parse_args()
    world = World(options.seed, jobs=options.jobs, tracing=True)
    failure: AssertionError | None = None
    try:
        world.run()
    except AssertionError as error:
        failure = error
    for line in world.trace if options.verbose or failure is None else world.trace[-40:]:
        print(line)
    print(f"seed {world.seed}: {world.faults}")
    print(f"{world.steps} steps, {world.crashes} crashes, {world.contract.launches} launches")
    if failure is None:
        print("all promises kept")
        return 0
    traceback.print_exception(failure, file=sys.stdout)
    print(f"BROKEN at {world.now}: {failure}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
