"""Each job in a scope of its own: what systemd is told, what the kernel enforces, what is left.

The limits themselves need control groups (version 2) with controllers, which a container is given
by a machine that boots with the unified hierarchy; elsewhere their tests are skipped.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import booted
from tests.support.booted import CONFIG, rlq, systemctl
from tests.support.rlqd import QUIET_CONFIG, configured
from tests.support.waiting import wait_until

from rlq.protocol.states import JobState

CGROUPS = Path("/sys/fs/cgroup")
PYTHON = booted.OLD / "bin" / "python"


def controllers() -> set[str]:
    path = CGROUPS / "cgroup.controllers"
    return set(path.read_text().split()) if path.exists() else set()


has_controllers = pytest.mark.skipif(
    not {"cpuset", "memory", "pids"} <= controllers(),
    reason="this machine's control groups (version 2) have no controllers",
)


def group_of(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line[3:] for line in lines if line.startswith("0::"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def scopes() -> list[str]:
    """Of jobs."""
    listed = systemctl("list-units", "--all", "--plain", "--no-legend", "rlq-*.scope")
    return [line.split()[0] for line in listed.splitlines()]


def no_scope_is_left() -> None:
    wait_until(scopes, lambda left: not left)
    assert not list((CGROUPS / "rlq.slice").glob("rlq-*"))


# ---- what systemd is told ----------------------------------------------------------


def test_a_job_runs_in_a_scope_with_the_limits_that_it_declared(installed: None) -> None:
    number = booted.submit("sleep 600", "alice", "--mem", "100M", "--cores", "1")
    pid = booted.running(number)
    group = group_of(pid)
    assert re.fullmatch(rf"/rlq\.slice/rlq-[0-9a-f]{{8}}-{number}-1\.scope/job", group), group
    assert group_of(parent_of(pid)) == os.path.dirname(group), "its supervisor is beside it"
    wanted = ("AllowedCPUs", "MemoryMax", "MemoryHigh", "MemorySwapMax", "TasksMax", "IOWeight")
    unit = group.split("/")[2]
    lines = systemctl("show", unit, *(f"--property={name}" for name in wanted)).splitlines()
    placement = booted.job(number).placement
    assert placement is not None
    most = (100 + 10 + 16) << 20
    assert dict(line.split("=", 1) for line in lines) == {
        "AllowedCPUs": str(placement.cores[0]),
        "MemoryMax": str(most),
        "MemoryHigh": str(most * 98 // 100),
        "MemorySwapMax": "0",
        "TasksMax": "4096",
        "IOWeight": "100",
    }
    # Owned by root: whoever runs in it can read its limits, and not change them.
    assert (CGROUPS / group.lstrip("/")).stat().st_uid == 0
    booted.cancel(number)
    no_scope_is_left()


@pytest.mark.parametrize("way", ["kill", "restart", "stop", "reexec"])
def test_a_scope_outlives_the_daemon_and_is_found(installed: None, way: str) -> None:
    number = booted.submit("sleep 601 & sleep 600")
    pid = booted.running(number)
    found, daemon = scopes(), booted.main_pid()
    if way == "kill":
        os.kill(daemon, signal.SIGKILL)
    elif way == "stop":
        systemctl("stop", "rlqd")
        systemctl("start", "rlqd")
    else:
        if way == "reexec":
            systemctl("daemon-reexec")
        systemctl("restart", "rlqd")
    booted.another_daemon(daemon)
    assert scopes() == found
    assert booted.running(number) == pid
    assert not booted.job(number).reason
    members = (CGROUPS / group_of(pid).lstrip("/") / "cgroup.procs").read_text().split()
    assert len(members) == 3
    assert booted.cancel(number).state is JobState.CANCELLED
    booted.all_end(members)
    no_scope_is_left()


def test_what_hides_from_a_killed_supervisor_is_killed_with_its_group(installed: None) -> None:
    number = booted.submit("env -i setsid -f sleep 601; sleep 600")
    pid = booted.running(number)
    group = CGROUPS / group_of(pid).lstrip("/")
    members = wait_until(
        lambda: (group / "cgroup.procs").read_text().split(), lambda found: len(found) == 3
    )
    os.kill(parent_of(pid), signal.SIGKILL)
    assert "supervisor was killed" in booted.ended(number).reason
    booted.all_end(members)
    no_scope_is_left()


def test_at_a_shutdown_jobs_are_lost_or_queued_again(installed: None) -> None:
    once = booted.submit("sleep 600")
    again = booted.submit("[ $RLQ_ATTEMPT = 2 ] || exec sleep 600", "alice", "--requeue")
    for number in (once, again):
        booted.running(number)
    systemctl("stop", "rlq.slice")
    assert booted.ended(once).state is JobState.NODE_FAIL
    assert "from outside" in booted.job(once).reason
    done = booted.ended(again)
    assert (done.state, done.attempt) == (JobState.COMPLETED, 2)


def test_at_a_shutdown_the_daemon_goes_before_the_jobs_and_starts_no_others(
    installed: None,
) -> None:
    daemon = booted.main_pid()
    seen = Path("/home/alice/seen")
    look = f"if [ -e /proc/{daemon} ]; then echo lives; else echo gone; fi > {seen}"
    first = booted.submit(
        f"trap '{look}; exit 143' TERM; touch trapped; while :; do sleep 0.05; done",
        "alice",
        "--exclusive",
    )
    second = booted.submit("true", "alice", "--exclusive")
    wait_until(Path("/home/alice/trapped").exists, bool)
    (unit,) = scopes()
    assert "remote-fs.target" in systemctl("show", unit, "--property=After"), "homes go last"
    # As a shutdown does, which stops all at once.
    systemctl("stop", "rlqd.service", "rlq.slice")
    systemctl("start", "rlqd.service")
    assert seen.read_text() == "gone\n"
    assert booted.ended(first).state is JobState.NODE_FAIL
    done = booted.ended(second)
    assert (done.state, done.attempt) == (JobState.COMPLETED, 1)


# ---- where no scope can be made ----------------------------------------------------


@pytest.fixture
def deaf(installed: None) -> Iterator[None]:
    """systemd-run finds no bus."""
    tool = Path("/usr/bin/systemd-run")
    aside = tool.with_name("systemd-run.aside")
    tool.rename(aside)
    tool.write_text("#!/bin/sh\necho Failed to connect to bus: Connection refused >&2\nexit 1\n")
    tool.chmod(0o755)
    yield
    aside.rename(tool)
    systemctl("restart", "rlqd")
    wait_until(booted.answers, bool)


def test_no_job_waits_for_a_bus_that_has_gone(deaf: None) -> None:
    number = booted.submit("sleep 600")
    pid = booted.running(number)
    assert group_of(pid).endswith("/rlqd.service")
    why = "no scope could be made for it: Failed to connect to bus: Connection refused"
    job = booted.job(number)
    assert (job.attempt, job.reason) == (2, f"runs without limits: {why}")
    assert f"jobs start without limits: {why}" in rlq("status").stderr
    second = booted.submit("sleep 600")
    booted.running(second)
    assert booted.job(second).attempt == 1, "the next one does not even try"
    booted.cancel(number)
    booted.cancel(second)


# ---- a user's own daemon -----------------------------------------------------------


@pytest.fixture
def own(machine: None) -> Iterator[dict[str, str]]:
    """The variables of a login of alice's, and of a daemon of her own."""
    uid = pwd.getpwnam("alice").pw_uid
    systemctl("start", f"user@{uid}.service")
    env = {"XDG_RUNTIME_DIR": f"/run/user/{uid}", "RLQ_STATE_DIR": "/home/alice/own"}
    yield env
    rlq("cancel", "--all", "--now", check=False, env=env)
    rlq("daemon", "stop", check=False, env=env)
    shutil.rmtree(env["RLQ_STATE_DIR"])
    systemctl("stop", f"user@{uid}.service")


LINGERS = Path("/var/lib/systemd/linger/alice")
OWN_SOCKET = Path("/home/alice/own/rlqd.sock")


def test_of_a_manager_that_lingers_a_user_s_own_daemon_makes_scopes(own: dict[str, str]) -> None:
    LINGERS.parent.mkdir(exist_ok=True)
    LINGERS.touch()
    number = booted.submit("sleep 600", env=own)
    pid = booted.running(number, OWN_SOCKET)
    assert re.search(r"/user@\d+\.service/rlq\.slice/rlq-\w+-1-1\.scope/job$", group_of(pid))
    rlq("daemon", "stop", env=own)
    rlq("list", env=own)  # starts another
    assert booted.running(number, OWN_SOCKET) == pid
    assert booted.cancel(number, OWN_SOCKET).state is JobState.CANCELLED
    LINGERS.unlink()


def test_without_lingering_no_job_is_put_where_it_would_end_with_the_login(
    own: dict[str, str],
) -> None:
    number = booted.submit("sleep 600", env=own)
    pid = booted.running(number, OWN_SOCKET)
    assert "rlq.slice" not in group_of(pid)
    assert not booted.job(number, OWN_SOCKET).reason
    told = rlq("doctor", check=False, env=own).stdout
    assert "loginctl enable-linger" in told
    assert rlq("status", env=own).stderr == ""


# ---- what the kernel enforces ------------------------------------------------------


@pytest.fixture
def few_tasks(installed: None) -> Iterator[None]:
    CONFIG.write_text(configured(enforce={"tasks_max": 40}))
    systemctl("restart", "rlqd")
    wait_until(booted.answers, bool)
    yield
    CONFIG.write_text(QUIET_CONFIG)
    systemctl("restart", "rlqd")
    wait_until(booted.answers, bool)


def python(code: str, *options: str) -> int:
    return booted.submit(f"exec {PYTHON} -S -c '{code}'", "bob", *options)


def log_of(number: int) -> str:
    return rlq("logs", number, user="bob").stdout.strip()


#: 400 MiB.
HOG = "x = bytearray(400 << 20); print(len(x))"


@has_controllers
def test_a_job_that_takes_all_cores_has_those_that_it_was_given(installed: None) -> None:
    widen = (
        "import os; was = os.sched_getaffinity(0);"
        " os.sched_setaffinity(0, range(os.cpu_count()));"
        " print(was == os.sched_getaffinity(0), os.cpu_count() > len(was))"
    )
    number = python(widen, "--cores", "1")
    assert booted.ended(number).state is JobState.COMPLETED
    assert log_of(number).split()[0] == "True"


@has_controllers
def test_a_job_beyond_its_declared_memory_is_out_of_memory(installed: None) -> None:
    done = booted.ended(python(HOG, "--mem", "100M"))
    assert done.state is JobState.OUT_OF_MEMORY
    assert done.reason == "ran out of host memory: it reached its limit of 126 MiB"


@has_controllers
def test_so_is_one_whose_worker_was_killed(installed: None) -> None:
    worker = (
        f'import subprocess, sys; subprocess.run([sys.executable, "-c", "{HOG}"]); sys.exit(3)'
    )
    done = booted.ended(python(worker, "--mem", "100M"))
    assert (done.state, done.exit_code) == (JobState.OUT_OF_MEMORY, 3)


@has_controllers
def test_memory_that_was_not_declared_is_no_limit(installed: None) -> None:
    assert booted.ended(python(HOG)).state is JobState.COMPLETED


@has_controllers
def test_a_fork_bomb_is_held_and_killed(few_tasks: None) -> None:
    number = booted.submit("bomb() { bomb | bomb & }; bomb; sleep 600", "bob")
    group = CGROUPS / group_of(booted.running(number)).lstrip("/")
    wait_until(
        lambda: (group.parent / "pids.events").read_text(), lambda text: "max 0\n" not in text
    )
    assert booted.cancel(number).state is JobState.CANCELLED
    no_scope_is_left()
