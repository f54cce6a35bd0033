"""Every verb that acts, through the real command and the Client, against a real daemon."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.rlqd import Rlqd, configured
from tests.support.waiting import wait_until

from rlq.errors import NotFoundError, NotPermittedError, UsageError
from rlq.protocol.messages import Cancel, Changed, Drain, List, Reserve, Selection, Stop
from rlq.protocol.states import JobState

SLEEP = ["sleep", "600"]


def test_hold_release_pause_resume_requeue_wait_and_why(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = int(d.rlq("submit", "-q", "--hold", "--", *SLEEP).stdout)
        assert "held" in d.rlq("why", str(job)).stdout
        assert client.get(job).held
        [refused] = client.pause(job)
        assert not refused.ok
        assert d.rlq("pause", str(job), check=False).returncode == 2
        d.rlq("release", str(job))
        d.until_state(client, job, JobState.RUNNING)
        assert d.rlq("hold", str(job), check=False).returncode == 2

        d.rlq("pause", str(job))
        d.until_state(client, job, JobState.SUSPENDED)
        assert d.rlq("wait", "--timeout", "0.1s", str(job), check=False).returncode != 0
        d.rlq("resume", str(job))
        d.until_state(client, job, JobState.RUNNING)

        first = client.get(job)
        d.rlq("requeue", str(job))
        again = d.until_state(client, job, JobState.RUNNING)
        again = wait_until(lambda: client.get(job), lambda j: j.attempt == 2 and j.pid is not None)
        assert again.pid != first.pid
        d.rlq("cancel", "--now", str(job))
        d.until_state(client, job, JobState.CANCELLED)
        assert "CANCELLED" in d.rlq("why", str(job)).stdout

        # An ended job is queued again, too, under its old id; what became of it before is kept.
        client.requeue(job)
        d.until_state(client, job, JobState.RUNNING)
        assert [(a.number, a.state) for a in client.attempts(job)] == [
            (1, "REQUEUED"),
            (2, "CANCELLED"),
        ]
        assert "2  CANCELLED after" in d.rlq("show", str(job)).stdout
        client.cancel(job, now=True)
        [done] = client.wait(job, timeout=30)
        assert (done.state, done.attempt) == (JobState.CANCELLED, 3)


def test_a_job_follows_others_across_a_restart(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        first = client.submit(["true"], held=True)
        second = int(d.rlq("submit", "-q", "--after", str(first), "--", "false").stdout)
        third = int(d.rlq("submit", "-q", "--after", str(second), "--", "true").stdout)
        last = int(d.rlq("submit", "-q", "--after-any", f"{second}-{third}", "--", "true").stdout)
        assert f"waits until job {first} completes" in d.rlq("why", str(second)).stdout
        assert client.get(last).after == (second, third)
        d.kill9()
        d.start()
        client.release(first)
        d.until_state(client, second, JobState.FAILED)
        gone = d.until_state(client, third, JobState.CANCELLED)
        assert gone.reason == f"job {second}, which it was to follow, ended as FAILED"
        d.until_state(client, last, JobState.COMPLETED)

        # What has ended already is not waited for, or waited for in vain.
        at_once = client.submit(["true"], after=[first])
        d.until_state(client, at_once, JobState.COMPLETED)
        with pytest.raises(UsageError, match=f"job {second} has ended as FAILED"):
            client.submit(["true"], after=[second])
        d.until_state(
            client, client.submit(["true"], after=[second], after_any=True), JobState.COMPLETED
        )
        with pytest.raises(NotFoundError, match="there is no job 99"):
            client.submit(["true"], after=[99])


def test_wait_passes_on_how_the_job_ended(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        assert d.rlq("submit", "--wait", "--", "true").returncode == 0
        failed = d.rlq("submit", "--wait", "--", "sh", "-c", "exit 41", check=False)
        assert failed.returncode == 1
        job = json.loads(d.rlq("history", "--json").stdout)
        assert "41" in json.dumps(job)


def test_what_does_not_exist_is_not_found(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        for verb in ("cancel", "hold", "release", "pause", "resume", "requeue", "show", "why"):
            gone = d.rlq(verb, "99", check=False)
            assert gone.returncode == 4, (verb, gone)
        with pytest.raises(NotFoundError):
            client.get(99)
        with pytest.raises(NotFoundError):
            client.wait(99)


def test_a_verb_without_a_selection_does_nothing(tmp_path: Path) -> None:
    """By hand-made messages too: nothing named is not everything."""
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit(SLEEP)
        with pytest.raises(UsageError):
            client.request(Cancel(selection=Selection()))
        assert d.rlq("cancel", check=False).returncode == 2
        d.until_state(client, job, JobState.RUNNING)


def test_a_selection_by_name_takes_what_matches(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        a = client.submit(SLEEP, name="sac-1", held=True)
        b = client.submit(SLEEP, name="sac-2", held=True)
        c = client.submit(SLEEP, name="ppo-1", held=True)
        d.rlq("cancel", "--name", "sac-*")
        jobs = client.wait([a, b], timeout=30)
        assert {job.state for job in jobs} == {JobState.CANCELLED}
        assert client.get(c).state is JobState.PENDING
        d.rlq("release", f"{a}-{c}", check=False)
        d.until_state(client, c, JobState.RUNNING)


def test_drain_lets_running_jobs_run_and_starts_nothing(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        runs = client.submit(SLEEP)
        d.until_state(client, runs, JobState.RUNNING)
        client.drain()
        waits = client.submit(["true"])
        assert "drain" in wait_until(lambda: client.why(waits).summary, bool)
        assert "drain" in d.rlq("status").stdout
        assert client.get(runs).state is JobState.RUNNING
        client.drain(False)
        d.until_state(client, waits, JobState.COMPLETED)


def test_list_show_and_logs_agree_with_the_client(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        secret = "hunter2-do-not-print"
        argv = ["sh", "-c", "echo hello; echo to-stderr >&2; exit 3"]
        job = client.submit(argv, name="talks", set_env={"API_TOKEN": secret})
        done = d.until_state(client, job, JobState.FAILED)
        assert d.rlq("logs", str(job)).stdout == "hello\nto-stderr\n"
        shown = json.loads(d.rlq("show", "--json", str(job)).stdout)
        assert secret not in json.dumps(shown)
        assert secret not in d.rlq("show", str(job)).stdout
        assert secret not in d.rlq("list", "--json").stdout + d.rlq("history", "--json").stdout
        assert client.environment(job)["API_TOKEN"] == secret
        assert done.exit_code == 3
        assert secret not in d.log()
        for path in (d.state_dir, d.state_dir / "rlq.db"):
            assert path.stat().st_mode & 0o077 == 0


# ---- two users ---------------------------------------------------------------------

NOBODY = "nobody"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


@pytest.fixture(scope="module")
def client_code() -> Iterator[Path]:
    """The client and what it imports, where every user can read it."""
    import click
    import msgspec
    import rich
    import zmq

    import rlq

    with tempfile.TemporaryDirectory(prefix="rlq-code-") as folder:
        os.chmod(folder, 0o755)
        site = Path(zmq.__file__).parents[1]
        for package in (click, msgspec, rich, zmq):
            source = Path(package.__file__ or "").parent
            shutil.copytree(source, Path(folder) / source.name)
        for name in ("pyzmq.libs", "markdown_it", "mdurl", "pygments"):
            if (site / name).exists():
                shutil.copytree(site / name, Path(folder) / name)
        shutil.copytree(Path(rlq.__file__).parent, Path(folder) / "rlq")
        yield Path(folder)


def python_for_everybody() -> str:
    """Of this version, since the copied extensions are; and not below somebody's home."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    for place in (sys.executable, f"/usr/bin/python{mine}", f"/usr/local/bin/python{mine}"):
        try:
            tried = subprocess.run([place, "-c", ""], user=NOBODY, cwd="/", check=False)
        except OSError:
            continue
        if tried.returncode == 0:
            return place
    pytest.skip(f"no Python {mine} that {NOBODY} may run")


def rlq_as_nobody(d: Rlqd, code: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python_for_everybody(), "-m", "rlq", *args],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(code),
            "RLQ_SOCKET": str(d.socket),
            "HOME": "/nonexistent",
            "TOKEN": "nobodys-secret",
        },
        cwd="/",
        user=NOBODY,
        group=pwd.getpwnam(NOBODY).pw_gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@as_root
def test_a_job_runs_as_whoever_submitted_it_and_is_theirs_alone(
    tmp_path: Path, client_code: Path
) -> None:
    with Rlqd(tmp_path, shared=True) as d:
        root = d.client()
        logs = Path(d._short.name) / "logs"
        logs.mkdir()
        logs.chmod(0o1777)

        def nobody(*args: str) -> subprocess.CompletedProcess[str]:
            return rlq_as_nobody(d, client_code, *args)

        log = logs / "who.log"
        script = "id -un; id -G; umask; cat /etc/shadow && echo READ; sleep 600"
        done = nobody("submit", "-q", "--log", str(log), "--", "sh", "-c", script)
        assert done.returncode == 0, done
        theirs = int(done.stdout)
        job = d.until_state(root, theirs, JobState.RUNNING)
        assert job.user == NOBODY
        text = wait_until(lambda: log.read_text() if log.exists() else "", lambda t: "denied" in t)
        account = pwd.getpwnam(NOBODY)
        assert text.split("\n")[:2] == [NOBODY, str(account.pw_gid)]
        assert "READ" not in text
        assert log.stat().st_uid == account.pw_uid
        job = wait_until(lambda: root.get(theirs), lambda job: job.pid is not None)
        status = Path(f"/proc/{job.pid}/status").read_text()
        uid = account.pw_uid
        assert f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in status

        # Root's job is not nobody's to touch, or to look into.
        mine = root.submit(SLEEP, name="roots", set_env={"SECRET": "roots-secret"})
        d.until_state(root, mine, JobState.RUNNING)
        for verb in ("cancel", "pause", "requeue"):
            refused = nobody(verb, str(mine))
            assert refused.returncode == 5, (verb, refused)
            assert "root's job" in refused.stderr + refused.stdout
        assert nobody("show", "--env", str(mine)).returncode == 5
        everything = nobody("list", "--json").stdout + nobody("show", "--json", str(mine)).stdout
        assert "roots" in everything
        assert "roots-secret" not in everything
        assert nobody("drain").returncode == 5
        raised = nobody("submit", "--priority", "1", "--", "true")
        assert (raised.returncode, "administrator" in raised.stderr) == (5, True)
        assert nobody("update", str(theirs), "--priority", "1").returncode == 5
        assert nobody("update", str(mine), "--priority", "-1").returncode == 5
        assert nobody("update", str(theirs), "--priority", "-7").returncode == 0
        assert root.get(theirs).priority == -7
        used = {one["user"]: one for one in json.loads(nobody("share", "--json").stdout)["users"]}
        assert used[NOBODY]["held"] > 0
        assert used["root"]["held"] > 0
        assert nobody("profile", "--forget", "anything").returncode == 5
        assert nobody("daemon", "stop").returncode == 5
        # By pattern one acts on one's own.
        assert nobody("cancel", "--now", "--all", "--yes").returncode == 0
        d.until_state(root, theirs, JobState.CANCELLED)
        assert root.get(mine).state is JobState.RUNNING
        assert "nobodys-secret" in root.environment(theirs)["TOKEN"]

        # And root, by pattern too: nobody's next job stays.
        done = nobody("submit", "-q", "--log", str(log), "--", *SLEEP)
        other = int(done.stdout)
        root.cancel(Selection(all=True), now=True)
        d.until_state(root, mine, JobState.CANCELLED)
        d.until_state(root, other, JobState.RUNNING)

        # Others' jobs are not theirs, by any name; and what root does to them is on record.
        assert nobody("cancel", "--all-users", "--yes").returncode == 5
        assert nobody("cancel", "--user", "root", "--yes").returncode == 5
        root.cancel(other, now=True)
        ended = d.until_state(root, other, JobState.CANCELLED)
        assert ended.reason == "cancelled by root"
        assert "cancelled by root (uid 0) at" in nobody("show", str(other)).stdout
        [act] = json.loads(nobody("audit", "--json").stdout)["acts"]
        assert (act["user"], act["verb"], act["job"]) == ("root", "cancel", other)
        assert f"root (uid 0): cancel job {other} of {NOBODY} (at once)" in d.log()


@as_root
def test_without_a_log_path_a_users_log_can_still_be_written(
    tmp_path: Path, client_code: Path
) -> None:
    """Or it says clearly why the job could not start."""
    with Rlqd(tmp_path, shared=True) as d:
        root = d.client()
        done = rlq_as_nobody(d, client_code, "submit", "-q", "--", "echo", "hello")
        assert done.returncode == 0, done
        job = root.wait(int(done.stdout), timeout=60)[0]
        if job.state is JobState.COMPLETED:
            assert Path(job.log_path).read_text() == "hello\n"
        else:
            # nobody's home does not exist and cannot be made.
            assert job.state is JobState.LAUNCH_FAILED
            assert "cannot open the log /nonexistent" in job.reason


@as_root
def test_only_the_operator_stops_drains_or_reserves(tmp_path: Path) -> None:
    """The kernel says who asks, whatever the message says: a raw message, no command between."""
    with Rlqd(tmp_path, shared=True) as d:
        assert d.socket.stat().st_mode & 0o777 == 0o666
        pid = os.fork()
        if pid == 0:
            # No test machinery may run in the child, and no exit handler.
            code = 1
            try:
                os.setgroups([])
                os.setgid(pwd.getpwnam(NOBODY).pw_gid)
                os.setuid(pwd.getpwnam(NOBODY).pw_uid)
                from rlq.client import Client

                client = Client(d.socket, autostart=False)
                refusals = 0
                reserve = Reserve(cores=1, users=(NOBODY,), starts_at=0.0, ends_at=2e9)
                for message in (Stop(), Drain(), reserve):
                    try:
                        client.request(message)
                    except NotPermittedError:
                        refusals += 1
                listed = client.request(List())
                code = 0 if refusals == 3 and getattr(listed, "total", -1) == 0 else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert not d.client().status().draining


@as_root
def test_members_of_the_admin_group_act_on_everybodys_jobs(
    tmp_path: Path, client_code: Path
) -> None:
    group = grp.getgrgid(pwd.getpwnam(NOBODY).pw_gid).gr_name
    config = configured(daemon={"admin_group": group})
    with Rlqd(tmp_path, config=config, shared=True) as d:
        root = d.client()

        def admin(*args: str) -> subprocess.CompletedProcess[str]:
            return rlq_as_nobody(d, client_code, *args)

        job = root.submit(SLEEP, set_env={"SECRET": "roots-secret"})
        d.until_state(root, job, JobState.RUNNING)
        # By pattern an administrator, too, acts on their own.
        assert admin("cancel", "--all", "--yes").returncode != 0
        assert root.get(job).state is JobState.RUNNING
        assert admin("drain").returncode == 0
        assert root.status().draining
        assert admin("drain", "--off").returncode == 0
        # To act on a job takes none of its secrets.
        refused = admin("show", "--env", str(job))
        assert refused.returncode == 5
        assert "roots-secret" not in refused.stdout + refused.stderr
        assert admin("cancel", "--now", "--user", "root", "--yes").returncode == 0
        d.until_state(root, job, JobState.CANCELLED)
        d.kill9()
        d.start()
        acts = reversed(d.client().audit().acts)
        assert [(act.user, act.verb, act.job, act.detail) for act in acts] == [
            (NOBODY, "drain", None, ""),
            (NOBODY, "drain", None, "off"),
            (NOBODY, "cancel", job, "at once"),
        ]


def test_changes_name_each_job(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit(["true"])
        client.wait(job, timeout=30)
        changed: Any = client.request(Cancel(selection=Selection(ids=((job, job), (77, 77)))))
        assert isinstance(changed, Changed)
        assert [(c.id, c.ok, c.kind) for c in changed.changes] == [
            (job, False, "usage"),
            (77, False, "not-found"),
        ]
