"""The system's daemon under systemd: whatever happens to it, jobs run on and are found again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import booted
from tests.support.booted import CONFIG, rlq, systemctl
from tests.support.rlqd import QUIET_CONFIG
from tests.support.waiting import wait_until

from rlq.protocol.states import JobState

#: Ends with 7 once the file is there, so that an end after the daemon's is told apart.
UNTIL = "until [ -e /home/{user}/go ]; do sleep 0.05; done; exit 7"


def test_jobs_run_as_who_submitted_them(installed: None) -> None:
    for user in booted.USERS:
        done = booted.ended(booted.submit("id -un; id -Gn; pwd; touch made", user))
        assert done.state is JobState.COMPLETED, done
        made = Path(f"/home/{user}/made")
        assert made.owner() == user
        said = rlq("logs", done.id, user=user).stdout.split()
        assert said == [user, user, f"/home/{user}"]


def test_a_job_cannot_tell_that_it_was_not_started_from_a_shell(installed: None) -> None:
    """The rule of the unit's hardening: what is done to the daemon reaches no job."""
    look = (
        "grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status; umask; stat -Lc %i /proc/self/ns/mnt"
    )
    done = booted.ended(booted.submit(look))
    said = rlq("logs", done.id).stdout.split()
    ours = booted.run("sh", "-c", look).stdout.split()
    assert said == ours
    assert said[:2] == ["NoNewPrivs:", "0"]
    # Helpers that become root work: nvidia-modprobe is one.
    copy = Path("/usr/local/bin/whoever")
    copy.write_bytes(Path("/usr/bin/id").read_bytes())
    copy.chmod(0o4755)
    done = booted.ended(booted.submit("whoever -u"))
    assert rlq("logs", done.id).stdout.strip() == "0"


def crash() -> None:
    os.kill(booted.main_pid(), signal.SIGKILL)


def hang() -> None:
    """SIGSTOP: the watchdog, of a few seconds here, must end it and start another."""
    folder = Path("/run/systemd/system/rlqd.service.d")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "watchdog.conf").write_text("[Service]\nWatchdogSec=2\n")
    systemctl("daemon-reload")
    systemctl("restart", "rlqd")
    os.kill(pid := booted.main_pid(), signal.SIGSTOP)
    booted.another_daemon(pid)
    (folder / "watchdog.conf").unlink()
    systemctl("daemon-reload")
    assert "watchdog" in systemctl("show", "-p", "Result", "rlqd") or "atchdog" in booted.journal()


def restart() -> None:
    systemctl("restart", "rlqd")


def stop_and_start() -> None:
    systemctl("stop", "rlqd")
    assert not booted.answers()
    systemctl("start", "rlqd")


@pytest.mark.parametrize("trouble", [crash, hang, restart, stop_and_start])
def test_jobs_outlive_the_daemon(installed: None, trouble: Callable[[], None]) -> None:
    jobs = {user: booted.submit(UNTIL.format(user=user), user) for user in booted.USERS}
    pids = {user: booted.running(number) for user, number in jobs.items()}
    waits = booted.submit("true", "alice", "--hold")
    daemon = booted.main_pid()

    trouble()
    booted.another_daemon(daemon)
    assert {user: booted.running(number) for user, number in jobs.items()} == pids
    assert booted.job(waits).held

    for user, number in jobs.items():
        Path(f"/home/{user}/go").touch()
        assert booted.ended(number).exit_code == 7
        Path(f"/home/{user}/go").unlink()
    booted.all_end(pids.values())


def test_a_job_that_ends_while_no_daemon_runs_is_recorded(installed: None) -> None:
    number = booted.submit(UNTIL.format(user="alice"))
    pid = booted.running(number)
    systemctl("stop", "rlqd")
    Path("/home/alice/go").touch()
    booted.all_end([pid])
    Path("/home/alice/go").unlink()
    systemctl("start", "rlqd")
    assert booted.ended(number).exit_code == 7


def test_a_reload_reads_the_configuration_again(installed: None) -> None:
    pid = booted.main_pid()
    CONFIG.write_text("[cpu]\nreserve = 'many'\n")
    systemctl("reload", "rlqd")
    wait_until(booted.journal, lambda told: "the configuration is left as it was" in told)
    CONFIG.write_text(QUIET_CONFIG)
    systemctl("reload", "rlqd")
    wait_until(booted.journal, lambda told: "the configuration was read again" in told)
    assert booted.main_pid() == pid
