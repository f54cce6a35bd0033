"""`rlq submit -- true`: the whole process, from exec to exit, beside Python doing nothing.

Run: python bench/submit_time.py [--times 30]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.daemon import PrivateRlqd, rlq_command
from bench.machine import print_machine
from bench.report import tell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=30)
    options = parser.parse_args()
    with PrivateRlqd() as rlqd, rlqd.client() as client:
        print_machine(rlqd.folder)
        client.drain()
        commands = {
            "`rlq submit -- true`": [*rlq_command(), "submit", "--", "true"],
            "`rlq list` of those": [*rlq_command(), "list"],
            "`rlq --version`": [*rlq_command(), "--version"],
            "`python -c pass` (the floor)": [sys.executable, "-c", "pass"],
        }
        spent: dict[str, list[float]] = {name: [] for name in commands}
        for argv in commands.values():
            run_ms(argv, rlqd.env)  # into the page cache
        for _ in range(options.times):
            for name, argv in commands.items():
                spent[name].append(run_ms(argv, rlqd.env))
    for name, found in spent.items():
        aim = 150 if "submit" in name else None
        tell(f"whole process, {name}", found, "ms", at_most=aim)


def run_ms(argv: Sequence[str], env: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
