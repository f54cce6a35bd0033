"""Measurements of rlq, each printed as one ratio or rate with the machine it was taken on.

Rule 1: a benchmark runs alone (`python bench/NAME.py`) and with all others (`python -m bench`).
Rule 2: it repeats, alternates what it compares, and prints the median with its spread.
Rule 3: it asserts nothing about speed: `tests/bench` checks that it runs, docs/benchmarks.md
        holds what it printed, and where.
Rule 4: every daemon is a private one in a temporary folder, ended by pid.
"""
