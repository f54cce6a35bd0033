"""Jobs in systemd scopes, tried on a booted machine: run it there as root, see `main`.

It makes a service of its own for a daemon of this very source tree, so that it needs nothing
installed but the Python that runs it.  Each step prints what it has shown; the first that fails
ends it with a traceback and exit code 1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
UNIT = "rlqd-scopes.service"
CGROUPS = Path("/sys/fs/cgroup")
SLICE = CGROUPS / "rlq.slice"
ENV = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}/scheduler:{ROOT}/client",
    "RLQ_SOCKET": "/run/rlq-scopes/rlqd.sock",
    "PYTHONDONTWRITEBYTECODE": "1",
}
SERVICE = f"""
[Service]
Type=notify
NotifyAccess=main
ExecStart={sys.executable} -m rlqd
Environment=PYTHONPATH={ENV["PYTHONPATH"]}
KillMode=process
OOMPolicy=continue
Restart=on-failure
RestartSec=0
RuntimeDirectory=rlq-scopes
StateDirectory=rlq-scopes
"""


def run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


def rlq(*args: str, check: bool = True) -> str:
    return run(sys.executable, "-m", "rlq", *args, check=check)


def show(job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rlq("show", "--json", job))
    return found


def until(what: str, read: Callable[[], Any], wanted: Callable[[Any], bool] = bool) -> Any:
    end = time.monotonic() + 30
    while not wanted(last := read()):
        assert time.monotonic() < end, f"{what}: last seen: {last}\n{journal()}"
        time.sleep(0.05)
    return last


def step(words: str) -> None:
    print(f"ok  {words}", flush=True)


def journal() -> str:
    return run("journalctl", "--no-pager", "-n", "30", "-u", UNIT, check=False)


def main_pid() -> int:
    return int(run("systemctl", "show", "-P", "MainPID", UNIT))


def answers(other_than: int = 0) -> bool:
    pid = main_pid()
    return pid not in (0, other_than) and '"running": true' in rlq(
        "daemon", "status", "--json", check=False
    )


def submit(*argv: str, options: tuple[str, ...] = ()) -> str:
    return rlq("submit", *options, "--", *argv).split()[0]


def running(job: str) -> dict[str, Any]:
    until(f"job {job} runs", lambda: show(job), lambda it: it["pid"] is not None)
    return show(job)


def ended(job: str) -> dict[str, Any]:
    rlq("wait", job, check=False)
    return show(job)


def cgroup_of(pid: int) -> str:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    raise AssertionError("not in a group of version 2")


def scopes() -> list[str]:
    """Of jobs."""
    listed = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "rlq-*.scope")
    return [line.split()[0] for line in listed.splitlines()]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def a_job_has_a_scope() -> None:
    job = submit("sleep", "600", options=("--mem", "100M", "--cores", "1"))
    pid = running(job)["pid"]
    group = cgroup_of(pid)
    unit = group.split("/")[2]
    assert group == f"/rlq.slice/{unit}/job", group
    assert re.fullmatch(rf"rlq-[0-9a-f]{{8}}-{job}-1\.scope", unit), unit
    assert cgroup_of(parent(pid)) == f"/rlq.slice/{unit}", "the supervisor is beside its command"
    names = ("AllowedCPUs", "MemoryMax", "MemoryHigh", "MemorySwapMax", "TasksMax", "IOWeight")
    lines = run("systemctl", "show", unit, *(f"--property={name}" for name in names))
    told = dict(line.split("=", 1) for line in lines.splitlines())
    most = (110 + 16) << 20
    assert told == {
        "AllowedCPUs": str(show(job)["placement"]["cores"][0]),
        "MemoryMax": str(most),
        "MemoryHigh": str(most * 98 // 100),
        "MemorySwapMax": "0",
        "TasksMax": "4096",
        "IOWeight": "100",
    }
    step("a job runs in a scope of its own, with the limits it declared")
    rlq("cancel", job)
    ended(job)
    until("no scope is left", scopes, lambda left: not left)
    assert not list(SLICE.glob("rlq-*")), "no folder is left"
    step("its scope goes with it")


def jobs_outlive_the_daemon() -> None:
    job = submit("sh", "-c", "sleep 5 & sleep 600")
    pid = running(job)["pid"]
    unit = cgroup_of(pid).split("/")[2]
    ways: dict[str, Callable[[], object]] = {
        "kill -9": lambda: run("kill", "-9", str(main_pid())),
        "restart": lambda: run("systemctl", "restart", UNIT),
        "stop and start": lambda: [run("systemctl", act, UNIT) for act in ("stop", "start")],
        "daemon-reexec and restart": lambda: [
            run("systemctl", *args) for args in (("daemon-reexec",), ("restart", UNIT))
        ],
    }
    for way, act in ways.items():
        before = main_pid()
        act()
        until(f"the daemon is back after {way}", lambda: answers(before))  # noqa: B023
        assert (alive(pid), scopes()) == (True, [unit]), (way, scopes())
        assert show(job)["state"] == "RUNNING", (way, show(job))
        assert not show(job)["reason"], (way, show(job))
        step(f"after {way} the job runs on in its scope, and is found")
    rlq("cancel", "--now", job)
    assert ended(job)["state"] == "CANCELLED"
    until("no scope is left", scopes, lambda left: not left)
    step("and can be stopped, with all that it started")


def a_kill_takes_all() -> None:
    # In a session, with an environment and under a user of its own: only its group tells.
    hide = "env -i setsid -f setpriv --reuid 65534 --clear-groups sleep 987; sleep 600"
    job = submit("sh", "-c", hide)
    group = CGROUPS / cgroup_of(running(job)["pid"]).lstrip("/")

    def members() -> list[str]:
        return (group / "cgroup.procs").read_text().split()

    pids = [int(word) for word in until("a shell, two sleeps", members, lambda it: len(it) == 3)]
    os.kill(parent(running(job)["pid"]), signal.SIGKILL)  # the supervisor: hidden ones are orphans
    found = ended(job)
    assert not any(map(alive, pids)), found
    until("no scope is left", scopes, lambda left: not left)
    step(f"the group of a killed supervisor is killed as one ({found['reason']})")


def a_deaf_systemd_starts_jobs_all_the_same() -> None:
    tool = Path("/usr/bin/systemd-run")
    aside = tool.with_name("systemd-run.aside")
    tool.rename(aside)
    try:
        tool.write_text(
            "#!/bin/sh\necho Failed to connect to bus: Connection refused >&2\nexit 1\n"
        )
        tool.chmod(0o755)
        job = submit("sleep", "600")
        found = running(job)
        assert "rlqd-scopes.service" in cgroup_of(found["pid"]), cgroup_of(found["pid"])
        assert found["attempt"] == 2, found
        assert "without limits" in found["reason"], found
        status = json.loads(rlq("status", "--json"))
        assert "Connection refused" in json.dumps(status), status
        step(f"without a bus a job starts all the same: {found['reason']}")
        step(f"and the daemon says so: {status['problems']}")
    finally:
        aside.rename(tool)
    rlq("cancel", job)
    ended(job)


def main() -> None:
    """`PYTHON scopes.py`, as root, on a machine that systemd has booted; nothing is left behind
    but a folder in /var/lib."""
    assert os.geteuid() == 0
    assert Path("/run/systemd/system").is_dir()
    path = Path("/run/systemd/system") / UNIT
    path.write_text(SERVICE)
    run("systemctl", "daemon-reload")
    run("systemctl", "start", UNIT)
    try:
        print(journal())
        a_job_has_a_scope()
        jobs_outlive_the_daemon()
        a_kill_takes_all()
        a_deaf_systemd_starts_jobs_all_the_same()
    except BaseException:
        print(journal(), flush=True)
        raise
    finally:
        run("systemctl", "stop", UNIT, check=False)
        path.unlink()
        run("systemctl", "daemon-reload", check=False)


if __name__ == "__main__":
    main()
