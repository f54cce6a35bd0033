"""The daemon dies, restarts and is misconfigured; its jobs and its promises stay."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.rlqd import QUIET_CONFIG, Rlqd, configured
from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.errors import UnavailableError, UnreachableError, UsageError
from rlq.protocol.messages import Job
from rlq.protocol.states import JobState

SLEEP = ["sleep", "600"]
KILLS = 100
SEED = int(os.environ.get("RLQ_E2E_SEED", "20261130"))


# ---- kill -9, a hundred times ------------------------------------------------------


@dataclass
class Customer:
    """Submits and cancels all the time, through whatever happens to the daemon.

    A submission whose answer was lost may have been taken or not; its name, used once, tells.
    """

    d: Rlqd
    out: Path
    seed: int
    #: Acknowledged: id -> exit code it is to end with.
    codes: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    stopping: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def run(self) -> None:
        try:
            rng = random.Random(self.seed)
            with Client(self.d.socket, autostart=False) as client:
                number = 0
                while not self.stopping.is_set():
                    number += 1
                    self.submit(client, rng, f"job-{number}")
                    if self.codes and rng.random() < 0.15:
                        self.cancel(client, rng)
                    self.stopping.wait(rng.uniform(0, 0.25))
        except BaseException as failure:
            self.failure = failure

    def submit(self, client: Client, rng: random.Random, name: str) -> None:
        code = rng.choice([0, 0, 0, 3, 41])
        seconds = rng.choice([0, 0, 0.05, 0.2, 0.6])
        script = f'echo "$RLQ_JOB_ID $RLQ_ATTEMPT" >> {self.out}; sleep {seconds}; exit {code}'
        while True:
            job: int | None
            try:
                job = client.submit(["sh", "-c", script], name=name, gpus=0)
            except UnreachableError:
                job = self.taken(client, name)
            if job is not None:
                self.codes[job], self.names[job] = code, name
                return
            if self.stopping.is_set():
                return

    def taken(self, client: Client, name: str) -> int | None:
        while not self.stopping.is_set():
            with contextlib.suppress(UnreachableError):
                found = client.list(name=name)
                assert len(found) <= 1, found
                return found[0].id if found else None
            time.sleep(0.02)
        return None

    def cancel(self, client: Client, rng: random.Random) -> None:
        job = rng.choice([*self.codes])
        # Noted before it is asked: an answer that is lost says nothing.
        self.cancelled.add(job)
        with contextlib.suppress(UnreachableError):
            client.cancel(job, now=rng.random() < 0.5)


def test_a_hundred_kill_9_lose_nothing_and_run_nothing_twice(tmp_path: Path) -> None:
    print(f"RLQ_E2E_SEED={SEED}")
    rng = random.Random(SEED)
    out = tmp_path / "ran"
    with Rlqd(tmp_path) as d:
        customer = Customer(d, out, SEED)
        thread = threading.Thread(target=customer.run)
        thread.start()
        try:
            for _ in range(KILLS):
                # From the first instruction of its start to well into its work.
                d.kill9()
                with os.fdopen(d.spawn(), "rb") as ready:
                    if rng.random() < 0.35:
                        time.sleep(rng.uniform(0, 0.4))
                    else:
                        assert ready.readline() == b"ready\n", d.log()
                        time.sleep(rng.uniform(0, 0.3))
        finally:
            customer.stopping.set()
            thread.join(60)
        d.kill9()
        d.start()
        if customer.failure is not None:
            raise customer.failure

        client = d.client()
        ids = sorted(customer.codes)
        assert len(ids) > KILLS / 2, "the daemon was hardly ever there"
        jobs = client.wait(ids, timeout=60)
        assert {job.id: job.name for job in jobs} == customer.names, "an acknowledged one is lost"
        ran = Counter(line.split()[0] for line in out.read_text().splitlines())
        assert not {job for job, times in ran.items() if times > 1}, "one ran twice"
        for job in jobs:
            if job.state is JobState.CANCELLED:
                assert job.id in customer.cancelled, job
                continue
            code = customer.codes[job.id]
            wanted = JobState.FAILED if code else JobState.COMPLETED
            assert (job.state, job.exit_code) == (wanted, code), job
            assert ran[str(job.id)] == 1, job
        print(f"{len(jobs)} jobs, {sum(job.attempt > 1 for job in jobs)} launched again")
        # All else that is in the queue was submitted once, too: a name is never used twice.
        every = client.list()
        assert max(Counter(job.name for job in every).values()) == 1
        client.wait([job.id for job in every], timeout=60)

        wait_until(d.marked_processes, lambda left: not left)
        run_dir = d.state_dir / "run"
        wait_until(lambda: sorted(os.listdir(run_dir)), lambda left: left == ["supervisor.pyc"])


# ---- stopping and starting ---------------------------------------------------------


def test_sigterm_leaves_jobs_running_and_they_are_found_again(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}]) as d:
        client = d.client()
        job = d.submit_gpu_job(client, 600, gpu_mem="2G")
        waits = client.submit(["true"], gpus=1, gpu_mem="39G")
        before = d.until_state(client, job, JobState.RUNNING)
        before = wait_until(lambda: client.get(job), lambda job: job.pid is not None)
        assert before.pid is not None

        assert d.stop() == 0
        os.kill(before.pid, 0)
        assert not d.socket.exists()
        d.start()
        client = d.client()
        after = client.get(job)
        same = ("state", "pid", "started_at", "attempt", "placement")
        assert {n: getattr(after, n) for n in same} == {n: getattr(before, n) for n in same}
        # What it holds is still its own.
        assert client.get(waits).state is JobState.PENDING
        [changed] = client.cancel(job)
        assert changed.ok
        d.until_state(client, job, JobState.CANCELLED)
        d.until_state(client, waits, JobState.COMPLETED)


def test_an_end_while_no_daemon_runs_is_told_later(tmp_path: Path) -> None:
    flag = tmp_path / "go"
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit(["sh", "-c", f"until [ -e {flag} ]; do sleep 0.02; done; exit 41"])
        d.until_state(client, job, JobState.RUNNING)
        d.stop()
        flag.touch()
        wait_until(
            lambda: [*(d.state_dir / "run").glob(f"{job}.1/exit.json")], lambda found: bool(found)
        )
        d.start()
        done = d.until_state(d.client(), job, JobState.FAILED)
        assert done.exit_code == 41


def test_a_client_that_waits_outlives_a_restart(tmp_path: Path) -> None:
    flag = tmp_path / "go"
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit(["sh", "-c", f"until [ -e {flag} ]; do sleep 0.02; done; exit 5"])
        d.until_state(client, job, JobState.RUNNING)
        is_waiting = threading.Event()
        ended: list[Job] = []

        def wait() -> None:
            with Client(d.socket, autostart=False) as waiter:
                ended.extend(
                    waiter.wait(job, 60, on_update=lambda _: is_waiting.set(), step_ms=50)
                )

        thread = threading.Thread(target=wait)
        thread.start()
        assert is_waiting.wait(30)
        d.kill9()
        d.start()
        flag.touch()
        thread.join(60)
        assert [job.exit_code for job in ended] == [5]


def test_sighup_reads_the_configuration_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}], config=configured(defaults={"gpu_mem": "30G"})) as d:
        client = d.client()
        first = d.submit_gpu_job(client, 600, mem=1000)
        d.until_state(client, first, JobState.RUNNING)
        waits = client.submit(SLEEP, gpus=1, gpu_mem="8G", sm=90)
        wait_until(lambda: client.why(waits), lambda said: "gpu sm" in said.summary)
        assert d.process is not None

        d.config_path.write_text(QUIET_CONFIG + "reserve_afer = '1s'\n")
        d.process.send_signal(signal.SIGHUP)
        log = wait_until(d.log, lambda log: "reserve_after" in log)
        assert "left as it was" in log
        assert client.get(waits).state is JobState.PENDING
        assert client.status().problems == ()

        d.config_path.write_text(configured(defaults={"sm": "10%"}, gpu={"sm_limit": "100%"}))
        client.cancel(first, now=True)
        d.process.send_signal(signal.SIGHUP)
        wait_until(d.log, lambda log: "was read again" in log)
        d.until_state(client, waits, JobState.RUNNING)
        beside = client.submit(["true"], gpus=1, gpu_mem="1G")
        d.until_state(client, beside, JobState.COMPLETED)


def test_a_second_daemon_on_the_state_folder_is_refused_by_the_pid_of_the_first(
    tmp_path: Path,
) -> None:
    with Rlqd(tmp_path) as d:
        assert d.process is not None
        second = subprocess.run(
            [sys.executable, "-m", "rlqd", "--socket", str(tmp_path / "s2")],
            env=d.env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 7
        assert f"pid {d.process.pid}" in second.stderr
        assert "hint:" in second.stderr
        assert d.client().ping().pid == d.process.pid


def pretend_reboot(d: Rlqd, jobs: list[Job]) -> None:
    """While no daemon runs: the jobs' processes die unseen, their claims are of another boot."""
    for job in jobs:
        command = job.pid
        assert command is not None
        folder = d.state_dir / "run" / f"{job.id}.1"
        claim = json.loads((folder / "claim.json").read_text())
        for pid in (claim["pid"], command):
            os.kill(pid, signal.SIGKILL)
        claim["boot_id"] = "00000000-0000-0000-0000-000000000000"
        (folder / "claim.json").write_text(json.dumps(claim))


def test_after_a_reboot_a_job_is_node_fail_or_queued_again_if_it_wanted(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with Rlqd(tmp_path) as d:
        client = d.client()
        plain = client.submit(SLEEP)
        again = client.submit(
            ["sh", "-c", f"echo x >> {runs}; [ $RLQ_ATTEMPT = 2 ] || exec sleep 600"], requeue=True
        )
        jobs = d.until(client, [plain, again], lambda jobs: all(job.pid for job in jobs))
        wait_until(runs.exists, bool)
        d.kill9()
        pretend_reboot(d, jobs)
        d.start()
        client = d.client()
        failed = d.until_state(client, plain, JobState.NODE_FAIL)
        assert "reboot" in failed.reason
        done = d.until_state(client, again, JobState.COMPLETED)
        assert done.attempt == 2
        assert runs.read_text() == "x\nx\n"


@pytest.mark.parametrize("daemon_lives", [True, False])
def test_a_shutdown_s_sigterm_is_a_reboot_too(tmp_path: Path, daemon_lives: bool) -> None:
    # It was recorded as killed by SIGTERM: FAILED, and not queued again.
    runs = tmp_path / "runs"
    ends = f"echo x >> {runs}; [ $RLQ_ATTEMPT = 2 ] || exec sleep 600"
    saves = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    with Rlqd(tmp_path) as d:
        client = d.client()
        again = client.submit(["sh", "-c", ends], requeue=True)
        once = client.submit(["sh", "-c", saves], log=tmp_path / "log")
        jobs = d.until(client, [again, once], lambda jobs: all(job.pid for job in jobs))
        wait_until(lambda: runs.exists() and (tmp_path / "log").read_text(), bool)
        if not daemon_lives:
            d.stop()
        # systemd's SIGTERM goes to the whole scope, the supervisor and its command.
        for job in jobs:
            folder = d.state_dir / "run" / f"{job.id}.1"
            supervisor = json.loads((folder / "claim.json").read_text())["pid"]
            assert job.pid is not None
            os.kill(supervisor, signal.SIGTERM)
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGTERM)
            if not daemon_lives:
                wait_until((folder / "exit.json").exists, bool)
        if not daemon_lives:
            d.start()
            client = d.client()
        lost = d.until_state(client, once, JobState.NODE_FAIL)
        assert "from outside" in lost.reason
        assert lost.exit_code == 143
        done = d.until_state(client, again, JobState.COMPLETED)
        assert done.attempt == 2
        assert runs.read_text() == "x\nx\n"


def test_a_drain_outlives_a_restart(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        runs = client.submit(SLEEP)
        d.until_state(client, runs, JobState.RUNNING)
        assert "draining" in d.rlq("drain").stdout
        d.stop()
        d.start()
        client = d.client()
        assert client.status().draining
        waits = client.submit(["true"])
        wait_until(lambda: client.why(waits), lambda said: "drain" in said.summary)
        assert client.get(runs).state is JobState.RUNNING
        d.rlq("drain", "--off")
        d.until_state(client, waits, JobState.COMPLETED)
        assert not client.status().draining


def test_a_default_time_limit_that_goes_away_does_not_keep_the_daemon_from_starting(
    tmp_path: Path,
) -> None:
    # A running job's deadline came from a default that the next daemon did not have.
    with Rlqd(tmp_path, config=configured(defaults={"time_limit": "1h"})) as d:
        client = d.client()
        job = client.submit(["sleep", "600"])
        d.until_state(client, job, JobState.RUNNING)
        d.kill9()
        d.config_path.write_text(QUIET_CONFIG)
        d.start()
        assert client.get(job).state is JobState.RUNNING


def test_a_job_whose_records_were_removed_ends_as_lost_and_harms_nobody(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        flag = tmp_path / "go"
        job = client.submit(["sh", "-c", f"while ! [ -e {flag} ]; do sleep 0.05; done"])
        d.until_state(client, job, JobState.RUNNING)
        shutil.rmtree(d.state_dir / "run" / f"{job}.1")
        flag.touch()
        d.until_state(client, job, JobState.NODE_FAIL)
        after = client.submit(["true"])
        d.until_state(client, after, JobState.COMPLETED)


def test_one_damaged_row_does_not_keep_the_daemon_from_starting(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        bad, good = (client.submit(["true"], held=True) for _ in range(2))
        d.kill9()
        with contextlib.closing(sqlite3.connect(d.state_dir / "rlq.db")) as db:
            db.execute("UPDATE job SET detail = '{}' WHERE id = ?", (bad,))
            db.commit()
        d.start()
        assert f"job {bad} cannot be read" in d.log()
        damaged = client.get(bad)
        assert (damaged.state, damaged.reason) == (
            JobState.NODE_FAIL,
            "its record in the database is damaged",
        )
        with pytest.raises(UsageError, match=f"job {bad} cannot be queued again"):
            client.requeue(bad)
        client.release(good)
        d.until_state(client, good, JobState.COMPLETED)
        with contextlib.closing(sqlite3.connect(d.state_dir / "rlq.db")) as db:
            db.execute("UPDATE job SET spec = '{' WHERE id = ?", (good,))
            db.commit()
        # Nor is anybody else's job hidden by it.
        assert [job.id for job in client.list()] == [good, bad]
        assert client.wait(good)[0].state is JobState.COMPLETED
        with pytest.raises(UsageError, match=f"job {good} cannot be queued again"):
            client.requeue(good)


def test_a_queue_of_the_first_rlq_goes_on_where_it_was(tmp_path: Path) -> None:
    d = Rlqd(tmp_path)
    d.state_dir.mkdir(mode=0o700, exist_ok=True)
    with contextlib.closing(sqlite3.connect(d.state_dir / "rlq.db")) as db:
        db.executescript((Path(__file__).parent / "old_database.sql").read_text())
    with d:
        client = d.client()
        waiting = d.until_state(client, 8, JobState.COMPLETED)
        assert (waiting.name, waiting.priority) == ("waiting", 5)
        assert {job.name: job.state for job in client.list() if job.id < 8} == {
            "done": JobState.COMPLETED,
            "failed": JobState.FAILED,
            "cancelled": JobState.CANCELLED,
            "again": JobState.COMPLETED,
            # The machine they ran on is another one.
            "running": JobState.NODE_FAIL,
            "paused": JobState.NODE_FAIL,
            "held": JobState.PENDING,
        }
        client.release(7)
        d.until_state(client, 7, JobState.COMPLETED)
        client.requeue(2)
        d.until_state(client, 2, JobState.FAILED)
        [before] = client.attempts(2)
        assert (before.number, before.state, before.exit_code) == (1, "FAILED", 3)
        assert client.submit(["true"], gpus=0) == 9
    assert (d.state_dir / "rlq.db.v2.bak").exists()


CONTRADICTS = """
from rlqd.__main__ import main
from rlqd.core.machine import Scheduler
from rlqd.shell import pump

pump.DISTRUST_MS = 5_000
start_what_fits = Scheduler._start_what_fits

def contradict(self):
    assert self.closed or all(spec.cores != 2 for spec in self._queue.groups), "a planted bug"
    start_what_fits(self)

Scheduler._start_what_fits = contradict
main()
"""


def test_a_bug_in_the_scheduler_stops_neither_the_daemon_nor_the_queue_for_ever(
    tmp_path: Path,
) -> None:
    daemon = Rlqd(tmp_path)
    daemon.program = ("-c", CONTRADICTS)
    with daemon as d:
        client = d.client()
        running = client.submit(SLEEP, gpus=0, cores=1)
        d.until_state(client, running, JobState.RUNNING)
        client.drain()
        culprit = client.submit(["true"], gpus=0, cores=2)
        good = client.submit(["true"], gpus=0, cores=1)
        client.drain(on=False)

        def cancelled() -> bool:
            with contextlib.suppress(UnavailableError):
                client.cancel(culprit)
            return client.get(culprit).state is JobState.CANCELLED

        wait_until(lambda: " ".join(client.status().problems), lambda said: "contradicted" in said)
        wait_until(cancelled, bool)
        d.until_state(client, good, JobState.COMPLETED)
        assert client.get(running).state is JobState.RUNNING
        assert not client.status().problems
        assert "AssertionError: a planted bug" in d.log()
