"""`rlqd install` and `uninstall`, on a machine that systemd has booted."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import booted
from tests.support.booted import CONFIG, NEW, OLD, STATE, UNIT, rlqd, systemctl
from tests.support.rlqd import QUIET_CONFIG

from rlq.protocol.states import JobState

DROP_IN = UNIT.with_name("rlqd.service.d") / "override.conf"


@pytest.fixture
def bare(machine: None) -> Iterator[None]:
    """Nothing is installed, before and after."""

    def clear() -> None:
        rlqd("uninstall", "--force", check=False)
        UNIT.unlink(missing_ok=True)
        shutil.rmtree(STATE, ignore_errors=True)
        systemctl("daemon-reload")

    clear()
    yield
    clear()


def test_only_root_installs_for_everybody(bare: None) -> None:
    refused = rlqd("install", user="alice", check=False)
    assert refused.returncode == 5
    assert f"sudo {OLD}/bin/rlqd install" in refused.stderr
    assert not UNIT.exists()


def test_what_others_cannot_run_is_refused(bare: None) -> None:
    OLD.chmod(0o700)
    refused = rlqd("install", check=False)
    OLD.chmod(0o755)
    assert refused.returncode == 3
    assert f"{OLD} is closed to other users" in refused.stderr
    assert "hint: install it where all can read" in refused.stderr
    assert not UNIT.exists()


def test_what_others_could_replace_is_refused(bare: None) -> None:
    script = OLD / "bin" / "rlqd"
    os.chown(script, pwd.getpwnam("alice").pw_uid, 0)
    refused = rlqd("install", check=False)
    os.chown(script, 0, 0)
    assert refused.returncode == 3
    assert "belongs to alice, who could replace what root runs" in refused.stderr
    assert not UNIT.exists()


def test_a_dry_run_changes_nothing(bare: None) -> None:
    shown = rlqd("install", "--dry-run").stdout
    assert f"would write {UNIT}" in shown
    assert f"ExecStart={OLD}/bin/rlqd" in shown
    assert not UNIT.exists()


def test_installed_it_runs_now_and_at_each_boot(installed: None) -> None:
    assert f"ExecStart={OLD}/bin/rlqd" in UNIT.read_text()
    assert systemctl("is-active", "rlqd") == "active"
    assert systemctl("is-enabled", "rlqd") == "enabled"
    assert booted.run("stat", "-c", "%a %U", STATE).stdout.split() == ["711", "root"]
    assert booted.run("stat", "-c", "%a", STATE / "rlq.db").stdout.strip() == "600"


def test_installed_again_it_touches_nothing(installed: None) -> None:
    pid = booted.main_pid()
    again = rlqd("install").stdout
    assert "unchanged" in again
    assert booted.main_pid() == pid


def test_the_journal_can_be_read(installed: None) -> None:
    told = booted.journal()
    assert "serves /run/rlq/rlqd.sock from /var/lib/rlq" in told
    assert "Traceback" not in told


def test_an_upgrade_says_what_changed_and_stops_no_job(installed: None) -> None:
    number = booted.submit("sleep 600")
    pid = booted.running(number)
    daemon = booted.main_pid()
    told = rlqd("install", of=NEW).stdout
    assert f"-ExecStart={OLD}/bin/rlqd" in told
    assert f"+ExecStart={NEW}/bin/rlqd" in told
    assert "0.0.9 before, 99.1.0 now" in told
    assert "1 job runs meanwhile" in told
    assert booted.main_pid() != daemon
    assert booted.running(number) == pid
    # A job of the new version, and the end of the old one's.
    assert booted.ended(booted.submit("exit 3")).exit_code == 3
    assert booted.cancel(number).state is JobState.CANCELLED


def test_what_a_person_has_edited_is_kept(installed: None) -> None:
    edited = UNIT.read_text().replace("RestartSec=1", "RestartSec=2")
    UNIT.write_text(edited)
    told = rlqd("install", of=NEW).stdout
    assert f"kept       {UNIT}: it was edited" in told
    assert f"NOTE: it starts {OLD}/bin/rlqd" in told
    assert UNIT.read_text() == edited
    UNIT.unlink()


def test_drop_ins_are_kept_and_told(installed: None) -> None:
    DROP_IN.parent.mkdir(exist_ok=True)
    DROP_IN.write_text("[Service]\nEnvironment=EDITED=1\n")
    told = rlqd("install").stdout
    assert f"kept       {DROP_IN}" in told
    environ = Path(f"/proc/{booted.main_pid()}/environ").read_bytes().split(b"\0")
    assert b"EDITED=1" in environ
    shutil.rmtree(DROP_IN.parent)


def test_a_daemon_that_does_not_start_says_why(installed: None) -> None:
    CONFIG.write_text("[cpu]\nreserve = 'many'\n")
    systemctl("stop", "rlqd")
    refused = rlqd("install", check=False)
    CONFIG.write_text(QUIET_CONFIG)
    assert refused.returncode == 7
    assert "its journal ends" in refused.stderr
    assert "reserve" in refused.stderr


def test_uninstalled_it_is_gone_and_the_queue_is_kept(installed: None) -> None:
    number = booted.submit("sleep 600")
    pid = booted.running(number)
    refused = rlqd("uninstall", check=False)
    assert refused.returncode == 3
    assert "1 job runs" in refused.stderr
    assert booted.answers()

    told = rlqd("uninstall", "--force").stdout
    assert not UNIT.exists()
    assert f"kept       {STATE}" in told
    assert not booted.SOCKET.exists()
    assert booted.is_alive(pid)
    # The lock of its supervisor tells, though no daemon runs.
    assert rlqd("uninstall", "--purge", "--force", check=False).returncode == 3

    rlqd("install")
    assert booted.running(number) == pid
    booted.cancel(number)
    rlqd("uninstall", "--purge")
    assert not STATE.exists()
    assert "nothing" in rlqd("uninstall").stdout


def test_one_person_without_root(machine: None) -> None:
    """--user: alice's own systemd starts her own daemon."""
    uid = pwd.getpwnam("alice").pw_uid
    systemctl("start", f"user@{uid}.service")
    session = {"XDG_RUNTIME_DIR": f"/run/user/{uid}"}
    socket = Path(session["XDG_RUNTIME_DIR"]) / "rlq" / "rlqd.sock"
    # The daemon that her first command has started hands over, and its job runs on.
    number = booted.submit("sleep 600", env=session)
    pid = booted.running(number, socket)
    told = rlqd("install", "--user", user="alice", env=session).stdout
    assert "took over" in told
    assert "verified" in told
    assert "loginctl enable-linger" in told
    assert booted.running(number, socket) == pid
    assert "unchanged" in rlqd("install", "--user", user="alice", env=session).stdout

    booted.cancel(number, socket)
    rlqd("uninstall", "--user", "--purge", user="alice", env=session)
    assert not Path("/home/alice/.config/systemd/user/rlqd.service").exists()
    assert not Path("/home/alice/.local/state/rlq").exists()
    systemctl("stop", f"user@{uid}.service")
