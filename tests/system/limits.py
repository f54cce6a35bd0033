"""Limits that the kernel really enforces, as a program: `PYTHON limits.py`, as root.

tests.system.vm runs it in a virtual machine, once as systemd has booted that and once without
systemd.  It starts a daemon of its own and ends with the first thing that is not as it should be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.protocol.messages import Job
from rlq.transport import is_answering

PATIENCE_S = 300  # processors are emulated
BOX = Path("/sys/fs/cgroup/box")
CONFIG = """
[enforce]
tasks_max = 40
[cpu]
outside = "ignore"
[memory]
reserve = "64M"
[defaults]
mem = "64M"
"""
WIDEN = """
import os
was = os.sched_getaffinity(0)
os.sched_setaffinity(0, range(os.cpu_count()))
print(len(was), len(os.sched_getaffinity(0)), os.cpu_count())
"""
HOG = "x = bytearray(400 << 20)"
WORKER = f"""
import subprocess, sys
print(subprocess.run([sys.executable, "-S", "-c", {HOG!r}]).returncode)
sys.exit(1)
"""
FORKS = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        count += 1
except OSError as error:
    print(count, error, flush=True)
time.sleep(600)
"""


class Queue:
    def __init__(self, folder: Path, without_systemd: bool) -> None:
        self.folder = folder
        config = folder / "rlqd.toml"
        config.write_text(CONFIG)
        enter = 'echo $$ > "$0"; exec "$@"' if without_systemd else 'exec "$@"'
        self.daemon = subprocess.Popen(
            [
                *("sh", "-c", enter, str(BOX / "cgroup.procs")),
                *(sys.executable, "-m", "rlqd", "--config", str(config)),
            ],
            env={**os.environ, "RLQ_STATE_DIR": str(folder)},
        )
        socket = folder / "rlqd.sock"
        wait_until(lambda: is_answering(socket), bool, PATIENCE_S)
        self.client = Client(socket, autostart=False)

    def submit(self, code: str, mem: str | None = None) -> int:
        argv = [sys.executable, "-S", "-c", code]
        log = self.folder / "%j.log"
        return self.client.submit(argv, cwd="/", cores=1, mem=mem, log=log)

    def said(self, number: int) -> str:
        path = self.folder / f"{number}.log"
        return path.read_text().strip() if path.exists() else ""

    def ended(self, number: int) -> Job:
        return wait_until(
            lambda: self.client.get(number), lambda job: job.state.is_final, PATIENCE_S
        )


def check(queue: Queue, means: str) -> None:
    told = queue.client.status().enforcement
    assert (told.means, {"cpuset", "memory", "pids"} - {*told.controllers}) == (means, set()), told
    print("ok ", told.summary, flush=True)

    number = queue.submit(WIDEN)
    assert queue.ended(number).exit_code == 0
    was, after, there = map(int, queue.said(number).split())
    assert was == after < there, queue.said(number)
    print(f"ok  {was} of {there} cores given: a job that takes all has {after}", flush=True)

    limit = "ran out of host memory: it reached its limit of 126 MiB"
    job = queue.ended(queue.submit(HOG, mem="100M"))
    assert (job.state, job.reason) == ("OUT_OF_MEMORY", limit), job
    job = queue.ended(number := queue.submit(WORKER, mem="100M"))
    assert (job.state, job.reason, job.exit_code) == ("OUT_OF_MEMORY", limit, 1), job
    assert queue.said(number) == "-9"
    job = queue.ended(queue.submit(HOG))
    assert job.state == "COMPLETED", job
    print("ok  400 MiB: ended with --mem 100M, a worker too; undeclared no limit", flush=True)

    number = queue.submit(FORKS)
    wait_until(lambda: queue.said(number), lambda said: "unavailable" in said, PATIENCE_S)
    assert int(queue.said(number).split()[0]) < 40
    queue.client.cancel([number], now=True)
    assert queue.ended(number).state == "CANCELLED"
    print(f"ok  a fork bomb is held ({queue.said(number)}), and killed", flush=True)


def main() -> None:
    without_systemd = not Path("/run/systemd/system").is_dir()
    if without_systemd:
        (BOX.parent / "cgroup.subtree_control").write_text("+cpuset +memory +pids +io")
        BOX.mkdir()
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        queue = Queue(Path(folder), without_systemd)
        try:
            check(queue, "cgroup" if without_systemd else "systemd")
        finally:
            queue.client.close()
            queue.daemon.terminate()
            queue.daemon.wait()


if __name__ == "__main__":
    main()
