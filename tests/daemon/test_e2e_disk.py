"""The state folder's disk is full: said clearly, nothing half-done, no end lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.rlqd import Rlqd
from tests.support.waiting import wait_until

from rlq.errors import UnavailableError
from rlq.protocol.states import JobState

DISK_MIB = 64


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a disk of its own, of DISK_MIB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "rlq-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Filler:
    """Takes the disk's space, to the last byte or leaving some."""

    def __init__(self, disk: Path) -> None:
        self.path = disk / "filler"

    def fill(self, *, leaving_mib: int = 0) -> None:
        with self.path.open("ab") as filler:
            found = os.statvfs(self.path)
            free = found.f_bavail * found.f_frsize - leaving_mib * 2**20
            while free > 0:
                try:
                    written = os.write(filler.fileno(), bytes(min(free, 2**20)))
                except OSError:
                    return
                free -= written

    def empty(self) -> None:
        self.path.unlink(missing_ok=True)


def a_daemon_on(disk: Path) -> Rlqd:
    d = Rlqd(disk.parent)
    d.state_dir = disk / "state"
    return d


def job_until(flag: Path, code: int) -> list[str]:
    return ["sh", "-c", f"until [ -e {flag} ]; do sleep 0.02; done; exit {code}"]


def test_nearly_full_starts_nothing_and_says_so(small_disk: Path, tmp_path: Path) -> None:
    filler = Filler(small_disk)
    filler.fill(leaving_mib=16)
    with a_daemon_on(small_disk) as d:
        client = d.client()
        waits = client.submit(["true"])
        wait_until(lambda: client.why(waits).summary, lambda text: "full" in text)
        assert any("MiB is free" in problem for problem in client.status().problems)
        assert "MiB is free" in d.rlq("status").stderr

        filler.empty()
        d.until_state(client, waits, JobState.COMPLETED)
        assert client.status().problems == ()


def test_a_full_disk_refuses_changes_and_loses_no_end(small_disk: Path, tmp_path: Path) -> None:
    filler = Filler(small_disk)
    flag = tmp_path / "go"
    with a_daemon_on(small_disk) as d:
        client = d.client()
        ends = client.submit(job_until(flag, 41), log=tmp_path / "log")
        runs = client.submit(["sleep", "600"], log=tmp_path / "log2", requeue=True)
        d.until(client, [ends, runs], lambda jobs: all(j.state == "RUNNING" for j in jobs))

        filler.fill()
        # The database may have room left in pages of its own: ask until it has none.
        taken: list[int] = []

        def submit_until_refused() -> None:
            for _ in range(1000):
                job = client.submit(["true"], env={"BIG": os.urandom(30_000).hex()})
                taken.append(job)

        with pytest.raises(UnavailableError, match="disk"):
            submit_until_refused()
        refused = d.rlq("submit", "--", "true", check=False)
        assert refused.returncode == 7, refused
        assert "hint:" in refused.stderr
        # It goes on answering, and tells what is wrong.
        wait_until(
            lambda: client.status().problems,
            lambda problems: any("nothing can be changed" in p for p in problems),
        )
        assert {ends, runs} <= {job.id for job in client.list()}
        # The one that fills the disk must be stoppable, though nothing can be written down.
        assert client.get(runs).state is JobState.RUNNING
        pid = client.get(runs).pid
        cancelled = d.rlq("cancel", str(runs), check=False)
        assert (cancelled.returncode, "asked" in cancelled.stderr) == (7, True), cancelled
        wait_until(lambda: Path(f"/proc/{pid}").exists(), lambda exists: not exists)

        # A job that ends meanwhile has its room for the exit record already.
        flag.touch()
        record = d.state_dir / "run" / f"{ends}.1" / "exit.json"
        wait_until(record.exists, bool)

        filler.empty()
        done = d.until_state(client, ends, JobState.FAILED)
        assert done.exit_code == 41
        stopped = d.until_state(client, runs, JobState.FAILED)
        assert stopped.reason == "killed by SIGTERM", "who asked for that gets it not again"
        assert client.status().problems == ()
        again = client.submit(["true"], log=tmp_path / "log3")
        d.until_state(client, again, JobState.COMPLETED)
        for job in client.wait(taken, timeout=60):
            assert job.state is JobState.COMPLETED, "an acknowledged one is lost"


def test_a_daemon_restarted_on_a_full_disk_loses_no_running_job(
    small_disk: Path, tmp_path: Path
) -> None:
    filler = Filler(small_disk)
    with a_daemon_on(small_disk) as d:
        client = d.client()
        runs = client.submit(["sleep", "600"], log=tmp_path / "log")
        before = d.until_state(client, runs, JobState.RUNNING)
        before = wait_until(lambda: client.get(runs), lambda job: job.pid is not None)
        d.kill9()
        filler.fill()
        with os.fdopen(d.spawn(), "rb") as ready:
            answer = ready.read().decode()
        # Either it serves, or it says why not in words; it never dies of a traceback.
        assert "Traceback" not in d.log(), d.log()
        if answer != "ready\n":
            assert "full" in answer or "disk" in answer or "space" in answer, answer
            assert d.process is not None
            assert d.process.wait(30) == 7
        filler.empty()
        if answer != "ready\n":
            d.start()
        client = d.client()
        after = wait_until(lambda: client.get(runs), lambda job: job.pid is not None)
        assert (after.state, after.pid) == (JobState.RUNNING, before.pid)
        changes = wait_until(lambda: _cancelled(d, runs), bool)
        assert changes
        d.until_state(client, runs, JobState.CANCELLED)


def _cancelled(d: Rlqd, job: int) -> bool:
    return d.rlq("cancel", "--now", str(job), check=False).returncode == 0


def test_a_log_on_a_full_disk_costs_the_output_and_not_the_job(
    small_disk: Path, tmp_path: Path
) -> None:
    """The state folder is elsewhere; only the log's disk is full."""
    filler = Filler(small_disk)
    with Rlqd(tmp_path) as d:
        client = d.client()
        filler.fill()
        log = small_disk / "job.log"
        out = tmp_path / "done"
        # What the command does about a failing write is its own business: this one goes on.
        script = f"for i in 1 2 3; do echo line $i 2>/dev/null || true; done; touch {out}; exit 3"
        for log_max in (None, "1M"):
            out.unlink(missing_ok=True)
            job = client.submit(["sh", "-c", script], log=log, log_max=log_max)
            done = d.until_state(client, job, JobState.FAILED)
            assert done.exit_code == 3
            assert out.exists()
        assert client.status().problems == ()
