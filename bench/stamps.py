"""Jobs that write down when they started and ended, and the gaps between them."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_IN_PYTHON = """
import sys, time
start = time.monotonic_ns()
time.sleep(float(sys.argv[2]))
with open(sys.argv[1], "a") as file:
    file.write(f"{start} {time.monotonic_ns()}\\n")
"""


def stamp_command(folder: Path) -> list[str]:
    """The program of the job; FILE and SECONDS are to be added."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("no C compiler: Python's own start is counted in every gap", file=sys.stderr)
        return [sys.executable, "-I", "-S", "-c", _IN_PYTHON]
    program = folder / "stamp"
    source = Path(__file__).with_name("stamp.c")
    subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
    return [str(program)]


def read_stamps(path: Path, wanted: int, limit_s: float) -> list[tuple[int, int]]:
    """(start, end) of each job in ns, by start; waits until `wanted` jobs have ended.

    Raises:
        TimeoutError: they have not, by `limit_s`.
    """
    lines = wait_for(
        lambda: path.read_text().splitlines() if path.exists() else [],
        lambda found: len(found) >= wanted,
        limit_s,
    )
    pairs = [line.split() for line in lines]
    return sorted((int(start), int(end)) for start, end in pairs)


def gaps_ms(stamps: list[tuple[int, int]]) -> list[float]:
    """From the end of one job to the start of the next."""
    return [(start - end) / 1e6 for (_, end), (start, _) in itertools.pairwise(stamps)]


def wait_for(read: Callable[[], T], wanted: Callable[[T], bool], limit_s: float) -> T:
    """Raises TimeoutError, with what was seen last."""
    deadline = time.monotonic() + limit_s
    while not wanted(seen := read()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not so after {limit_s} s; last seen: {seen!r:.200}")
        time.sleep(0.02)
    return seen
