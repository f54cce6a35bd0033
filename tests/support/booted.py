"""The booted machine that the tests in tests/system find themselves on: root, users, systemd."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.protocol.messages import Job
from rlq.protocol.states import JobState
from rlq.transport import is_answering

OLD, NEW = Path("/opt/rlq-old"), Path("/opt/rlq-new")
UNIT = Path("/etc/systemd/system/rlqd.service")
STATE = Path("/var/lib/rlq")
CONFIG = Path("/etc/rlq/rlqd.toml")
SOCKET = Path("/run/rlq/rlqd.sock")
USERS = ("alice", "bob")
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

Done = subprocess.CompletedProcess[str]


Variables = Mapping[str, str]


def run(
    *argv: object, user: str = "root", check: bool = True, env: Variables | None = None
) -> Done:
    """A command of this user's, in their home, with nothing of ours in its environment."""
    account = pwd.getpwnam(user)
    done = subprocess.run(
        [str(word) for word in argv],
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=os.getgrouplist(user, account.pw_gid),
        cwd=account.pw_dir,
        env={"PATH": PATH, "HOME": account.pw_dir, "USER": user, "LANG": "C.UTF-8", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not check or done.returncode == 0, f"{argv} by {user}: {done}\n{journal()}"
    return done


def rlqd(
    *argv: str,
    of: Path = OLD,
    check: bool = True,
    user: str = "root",
    env: Variables | None = None,
) -> Done:
    return run(of / "bin" / "rlqd", *argv, user=user, check=check, env=env)


def rlq(
    *argv: object, user: str = "alice", check: bool = True, env: Variables | None = None
) -> Done:
    return run(OLD / "bin" / "rlq", *argv, user=user, check=check, env=env)


def submit(script: str, user: str = "alice", *options: str, env: Variables | None = None) -> int:
    done = rlq("submit", "--json", *options, "--", "sh", "-c", script, user=user, env=env)
    return int(json.loads(done.stdout)["ids"][0])


def client(socket: Path = SOCKET) -> Client:
    return Client(socket, autostart=False)


def job(number: int, socket: Path = SOCKET) -> Job:
    with client(socket) as asked:
        return asked.get(number)


def running(number: int, socket: Path = SOCKET) -> int:
    """The pid of the job's command, once it runs."""
    with client(socket) as asked:
        seen = wait_until(
            lambda: asked.get(number), lambda j: j.state is JobState.RUNNING and bool(j.pid)
        )
    assert seen.pid is not None
    return seen.pid


def ended(number: int, socket: Path = SOCKET) -> Job:
    with client(socket) as asked:
        asked.wait([number], timeout=30)
        return asked.get(number)


def cancel(number: int, socket: Path = SOCKET) -> Job:
    """At once; as it ended."""
    with client(socket) as asked:
        asked.cancel([number], now=True)
    return ended(number, socket)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def all_end(pids: Iterable[int | str]) -> None:
    """Until each is gone; the dead of a killed parent are for systemd to collect."""
    wait_until(lambda: [pid for pid in pids if is_alive(int(pid))], lambda left: not left)


def systemctl(*argv: str, check: bool = True) -> str:
    return run("systemctl", "--no-pager", *argv, check=check).stdout.strip()


def main_pid() -> int:
    return int(systemctl("show", "-p", "MainPID", "--value", "rlqd"))


def answers() -> bool:
    return is_answering(SOCKET)


def another_daemon(former_pid: int) -> int:
    """The pid of the daemon that systemd has started in place of that one, once it answers."""
    pid = wait_until(main_pid, lambda pid: pid not in (0, former_pid))
    wait_until(answers, bool)
    return pid


def journal() -> str:
    done = subprocess.run(
        ["journalctl", "-u", "rlqd", "-o", "cat", "--no-pager"], capture_output=True, text=True
    )
    return done.stdout
