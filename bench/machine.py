"""On what a number was measured: one line, and a warning when others were using it."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import psutil

#: More of the machine than this in use by others makes a timing doubtful.
BUSY_PCT_MAX = 10.0


def print_machine(folder: Path | None = None) -> None:
    """`folder`: where a durable benchmark writes; its file system and fsync time are told."""
    busy_pct = psutil.cpu_percent(interval=1.0)
    load = os.getloadavg()[0]
    memory_gib = psutil.virtual_memory().total / 2**30
    print(
        f"machine: {_cpu_model()}, {len(os.sched_getaffinity(0))} CPUs, {memory_gib:.0f} GiB,"
        f" Linux {platform.release()}, Python {platform.python_version()};"
        f" at the start {busy_pct:.0f} % busy, load {load:.1f}"
    )
    if folder is not None:
        print(
            f"disk: {_file_system(folder)}, write + fdatasync of 4 KiB {fsync_ms(folder):.2f} ms"
        )
    sys.stdout.flush()
    if busy_pct > BUSY_PCT_MAX:
        print(
            f"warning: others keep {busy_pct:.0f} % of this machine busy;"
            " these numbers are not worth keeping",
            file=sys.stderr,
        )


def fsync_ms(folder: Path, times: int = 21) -> float:
    """Median of one write + fdatasync: no queue that keeps its word is faster, one by one."""
    path = folder / "fsync-probe"
    spent: list[float] = []
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        for _ in range(times):
            began = time.perf_counter()
            os.write(fd, b"x" * 4096)
            os.fdatasync(fd)
            spent.append((time.perf_counter() - began) * 1e3)
    finally:
        os.close(fd)
        path.unlink()
    return sorted(spent)[times // 2]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    resolved = str(folder.resolve())
    holders = [
        part
        for part in psutil.disk_partitions(all=True)
        if resolved == part.mountpoint or resolved.startswith(part.mountpoint.rstrip("/") + "/")
    ]
    if not holders:
        return "unknown file system"
    return str(max(holders, key=lambda part: len(part.mountpoint)).fstype)
