"""The unit file that `rlqd install` writes, and where it refuses to install.

What it does on a machine with systemd is proved in tests/system.
"""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlq.errors import RefusedError
from rlqd.__main__ import main
from rlqd.setup import reach, unit

PROGRAM = ("/opt/rlq/bin/rlqd",)


def rendered(version: str = "1.0", program: tuple[str, ...] = PROGRAM, user: bool = False) -> str:
    shipped = unit.template(user=user)
    return unit.render(shipped, program, version=version, edit="systemctl edit rlqd")


@pytest.mark.parametrize("user", [False, True])
def test_the_unit_starts_this_installation(user: bool) -> None:
    text = rendered(program=("/a/bin/python", "-P", "-m", "rlqd"), user=user)
    assert unit.exec_start(text) == "/a/bin/python -P -m rlqd"
    assert text.count("ExecStart=") == 1


def test_what_was_written_is_known_again_until_it_is_edited() -> None:
    text = rendered()
    assert unit.is_ours(text)
    assert not unit.is_ours(text.replace("RestartSec=1", "RestartSec=2"))
    assert not unit.is_ours(text + "# mine\n")
    assert not unit.is_ours(unit.template(user=False))
    assert not unit.is_ours("")


def test_only_settings_count_as_changes() -> None:
    assert unit.changes(rendered(), rendered("2.0")) == []
    moved = rendered(program=("/opt/new/bin/rlqd",))
    assert unit.changes(rendered(), moved) == [
        "-ExecStart=/opt/rlq/bin/rlqd",
        "+ExecStart=/opt/new/bin/rlqd",
    ]


@pytest.mark.parametrize("path", ["/o p/rlqd", "/o%h/rlqd", "/o$x/rlqd", '/o"/rlqd', "/ö/rlqd"])
def test_a_path_that_means_something_else_to_systemd_is_refused(path: str) -> None:
    with pytest.raises(RefusedError, match="mean something else"):
        rendered(program=(path,))


def status(mode: int, uid: int = 0, gid: int = 0) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


FOLDER, FILE = 0o040000, 0o100000
#: A group that has a member, on every machine.
SOMEBODYS = pwd.getpwnam("nobody").pw_gid


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (status(FOLDER | 0o755), None),
        (status(FOLDER | 0o711), None),
        (status(FOLDER | 0o1777), None),  # /tmp: what is root's there stays root's
        (status(FILE | 0o755), None),
        (status(FOLDER | 0o700), "closed to other users"),
        (status(FILE | 0o750), "closed to other users"),
        (status(FOLDER | 0o777), "everybody may write"),
        (status(FILE | 0o666), "everybody may write"),
        (status(FOLDER | 0o775), None),
        (status(FOLDER | 0o2775, gid=SOMEBODYS), "may write to /x"),
        (status(FOLDER | 0o755, gid=SOMEBODYS), None),
        (status(FILE | 0o664, gid=4_000_000), "the group 4000000 may write"),
        (status(FOLDER | 0o755, uid=4_000_000), "belongs to uid 4000000"),
    ],
)
def test_what_everybody_runs_is_open_to_all_and_roots(
    found: os.stat_result, problem: str | None
) -> None:
    said = reach.trouble(Path("/x"), found)
    assert said is None if problem is None else said is not None and problem in said


def test_a_link_is_followed_through_both_its_folders(tmp_path: Path) -> None:
    """A venv in /opt whose Python is in root's home is closed to others."""
    (tmp_path / "home").mkdir()
    (tmp_path / "opt").mkdir()
    (tmp_path / "home" / "python").touch()
    link = tmp_path / "opt" / "python"
    link.symlink_to(tmp_path / "home" / "python")
    assert {tmp_path / "home", tmp_path / "opt"} <= set(reach.ways(link))


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes nobody: needs root")
def test_the_last_word_is_that_somebody_else_can_run_it() -> None:
    with tempfile.TemporaryDirectory(prefix="rlq-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        broken = Path(folder) / "python"
        broken.write_text("#!/bin/sh\necho cannot import zmq >&2\nexit 1\n")
        broken.chmod(0o755)
        with pytest.raises(RefusedError, match="cannot import zmq"):
            reach.require_shared([], str(broken))


def test_an_option_of_the_daemon_is_none_of_a_command() -> None:
    done = CliRunner().invoke(main, ["--state-dir", "/x", "install", "--dry-run"])
    assert done.exit_code == 2
    assert "--state-dir is for the daemon" in done.output


@pytest.mark.skipif(os.path.isdir("/run/systemd/system"), reason="systemd runs here")
def test_without_systemd_the_dry_run_shows_all_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach, "require_shared", lambda files, python: None)
    done = CliRunner().invoke(main, ["install", "--dry-run"])
    assert done.exit_code == 3
    assert "# would write /etc/systemd/system/rlqd.service" in done.output
    assert f"ExecStart={Path(sys.executable).parent}" in done.output
    assert "not booted with systemd" in done.output
