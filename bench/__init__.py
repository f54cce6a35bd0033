"""Measurements of rlq, each printed as one ratio or rate with the machine it was taken on.

Rule 1: a benchmark runs alone (`python bench/NAME.py`) and with all others (`python -m bench`).
Rule 2: it repeats, alternates what it compares, and prints the median with its spread.
Rule 3: it asserts nothing about speed: `tests/bench` checks that it runs, docs/benchmarks.md
        holds what it printed, and where.
Rule 4: every daemon is a private one in a temporary folder, ended by pid; also when the benchmark
        is told to stop.
"""

import signal
import sys

# By default SIGTERM ends Python without unwinding, and daemons and jobs would stay behind; a
# shell's background jobs ignore Ctrl-C as well.
for _number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(_number, lambda number, _frame: sys.exit(128 + number))
