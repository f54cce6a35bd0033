"""Where things are, by the environment alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlq import paths
from rlq.errors import UsageError
from rlqd.adapters import lockfile

VARIABLES = (
    "RLQ_SOCKET",
    "RLQ_STATE_DIR",
    "RUNTIME_DIRECTORY",
    "STATE_DIRECTORY",
    "CONFIGURATION_DIRECTORY",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
    "XDG_CONFIG_HOME",
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "xdg"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def test_user_socket_lies_in_a_private_folder_that_is_made(runtime: Path) -> None:
    assert paths.user_socket() == runtime / "rlq/rlqd.sock"
    assert (runtime / "rlq").stat().st_mode & 0o777 == 0o700


def test_looking_for_a_daemon_makes_nothing(runtime: Path) -> None:
    assert paths.candidate_sockets() == [paths.system_socket(), runtime / "rlq/rlqd.sock"]
    assert not (runtime / "rlq").exists()


@pytest.mark.parametrize("value", [None, "relative/dir", "/nonexistent/of/another/user"])
def test_without_a_usable_runtime_dir_the_socket_is_in_tmp_by_uid(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert paths.user_socket(make=False) == Path(f"/tmp/rlq-{os.geteuid()}/rlqd.sock")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_runtime_dir_of_another_user_is_not_used(runtime: Path) -> None:
    os.chown(runtime, 12345, 12345)
    assert paths.user_socket(make=False).parent == Path(f"/tmp/rlq-{os.geteuid()}")


def test_a_link_in_place_of_the_folder_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (runtime / "rlq").symlink_to(tmp_path / "elsewhere")
    for make in (True, False):
        with pytest.raises(UsageError, match="is not a folder"):
            paths.user_socket(make=make)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_another_user_is_refused(runtime: Path) -> None:
    (runtime / "rlq").mkdir()
    os.chown(runtime / "rlq", 12345, 12345)
    with pytest.raises(UsageError, match="another user"):
        paths.user_socket()


def test_a_folder_others_can_write_to_is_refused(runtime: Path) -> None:
    (runtime / "rlq").mkdir()
    (runtime / "rlq").chmod(0o777)
    with pytest.raises(UsageError, match="other users can write"):
        paths.user_socket()


def test_a_folder_others_can_read_is_tightened(runtime: Path) -> None:
    (runtime / "rlq").mkdir()
    (runtime / "rlq").chmod(0o755)
    paths.user_socket()
    assert (runtime / "rlq").stat().st_mode & 0o777 == 0o700


def test_an_unsafe_user_folder_does_not_hide_the_system_daemon(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (runtime / "rlq").symlink_to(tmp_path)
    monkeypatch.setattr(paths, "system_socket", lambda: tmp_path / "sys.sock")
    with pytest.raises(UsageError):
        paths.candidate_sockets()
    (tmp_path / "sys.sock").touch()
    assert paths.candidate_sockets() == [tmp_path / "sys.sock"]


def note(tmp_path: Path, text: str) -> None:
    lock = tmp_path / "home/.local/state/rlq/rlqd.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(text)


def test_a_daemon_started_with_another_runtime_dir_is_found_by_its_state_folder(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """cron and su have no XDG_RUNTIME_DIR."""
    served = paths.user_socket()
    where = paths.daemon_paths()
    where.make()
    with lockfile.acquire(where.lock, serves=served):
        assert paths.candidate_sockets() == [paths.system_socket(), served]
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        elsewhere = paths.user_socket(make=False)
        assert paths.candidate_sockets() == [paths.system_socket(), elsewhere, served]


def test_a_lock_is_not_believed_that_tells_of_another_machine_or_an_open_folder(
    runtime: Path, tmp_path: Path
) -> None:
    host = os.uname().nodename
    usual = [paths.system_socket(), paths.user_socket()]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for text in (
        "",
        f"12 {host}\n",
        f"12 elsewhere\n{tmp_path}/rlqd.sock\n",
        f"12 {host}\nrlqd.sock\n",
        f"12 {host}\n{tmp_path}/open/rlqd.sock\n",
        f"12 {host}\n{tmp_path}/{'x' * 200}/rlqd.sock\n",
        "\0\n\0\n",
    ):
        note(tmp_path, text)
        assert paths.candidate_sockets() == usual
    note(tmp_path, f"12 {host}\n{tmp_path}/rlqd.sock\n")
    assert paths.candidate_sockets() == [*usual, tmp_path / "rlqd.sock"]


def test_rlq_socket_is_the_only_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLQ_SOCKET", "/x/y.sock")
    monkeypatch.setenv("RLQ_STATE_DIR", "/x")
    assert paths.candidate_sockets() == [Path("/x/y.sock")]


def test_client_and_daemon_agree_for_every_choice(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert paths.daemon_paths().socket in paths.candidate_sockets()
    monkeypatch.setenv("RLQ_STATE_DIR", str(tmp_path / "s"))
    assert [paths.daemon_paths().socket] == paths.candidate_sockets()
    monkeypatch.setenv("RLQ_SOCKET", str(tmp_path / "q.sock"))
    assert [paths.daemon_paths().socket] == paths.candidate_sockets()


def test_a_state_folder_chosen_by_hand_has_its_own_socket(tmp_path: Path) -> None:
    found = paths.daemon_paths(state_dir=tmp_path / "s")
    assert found == paths.DaemonPaths(
        socket=tmp_path / "s/rlqd.sock",
        state_dir=tmp_path / "s",
        report_socket=tmp_path / "s/rlqd-report.sock",
        database=tmp_path / "s/rlq.db",
        run_dir=tmp_path / "s/run",
        lock=tmp_path / "s/rlqd.lock",
        logs_dir=tmp_path / "s/logs",
    )


def test_systemd_folders_win_over_xdg_and_the_first_of_a_list_counts(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/rlq:/run/other")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/rlq:/var/lib/other")
    found = paths.daemon_paths()
    assert found.socket == paths.system_socket()
    assert found.state_dir == Path("/var/lib/rlq")


def test_rlq_variables_win_over_systemd_and_arguments_over_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/rlq")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/rlq")
    monkeypatch.setenv("RLQ_SOCKET", "/e/e.sock")
    monkeypatch.setenv("RLQ_STATE_DIR", "/e/state")
    assert paths.daemon_paths()[:2] == (Path("/e/e.sock"), Path("/e/state"))
    assert paths.daemon_paths("/a/state", "/a/a.sock")[:2] == (
        Path("/a/a.sock"),
        Path("/a/state"),
    )


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.daemon_paths("s").state_dir == tmp_path / "s"


def test_state_and_config_follow_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert paths.user_state_dir() == home / ".local/state/rlq"
    assert paths.user_config() == home / ".config/rlq/rlqd.toml"
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative: ignored")
    assert paths.user_state_dir() == Path("/s/rlq")
    assert paths.user_config() == home / ".config/rlq/rlqd.toml"


def test_config_is_found_where_it_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "system_config", lambda: tmp_path / "none.toml")
    assert paths.daemon_config() is None
    paths.user_config().parent.mkdir(parents=True)
    paths.user_config().touch()
    assert paths.daemon_config() == paths.user_config()
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(tmp_path / "etc"))
    assert paths.daemon_config() is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/rlqd.toml").touch()
    assert paths.daemon_config() == tmp_path / "etc/rlqd.toml"


def test_a_socket_path_of_107_bytes_is_allowed_and_of_108_refused() -> None:
    assert paths.check_socket_path(Path("/" + "a" * 106))
    with pytest.raises(UsageError, match="108 bytes") as caught:
        paths.check_socket_path(Path("/" + "a" * 107))
    assert caught.value.hint is not None
    assert "RLQ_SOCKET" in caught.value.hint


def test_daemon_paths_counts_bytes_of_the_report_socket_too() -> None:
    # The socket fits exactly; its report socket, 7 bytes longer, does not.
    with pytest.raises(UsageError, match="bytes"):
        paths.daemon_paths("/s", "/" + "ü" * 50 + ".sock")


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o711)])
def test_make_makes_the_folders_whatever_the_umask(
    tmp_path: Path, shared: bool, mode: int
) -> None:
    found = paths.daemon_paths(tmp_path / "deep/state")
    old = os.umask(0o077)
    try:
        found.make(shared=shared)
        found.make(shared=shared)
    finally:
        os.umask(old)
    for folder in (found.state_dir, found.run_dir, found.logs_dir):
        assert folder.stat().st_mode & 0o777 == mode


def test_make_says_which_folder_it_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/state"):
        paths.daemon_paths(tmp_path / "file/state").make()


def test_importing_paths_pulls_in_nothing_heavy() -> None:
    heavy = {"msgspec", "click", "rich", "zmq", "dataclasses", "inspect", "asyncio", "socket"}
    code = f"import sys, rlq.paths; print(*sorted({heavy!r} & set(sys.modules)))"
    base = "import sys; print(*sorted(%r & set(sys.modules)))" % heavy  # noqa: UP031
    run = [
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True)
        for c in (base, code)
    ]
    assert run[1].stdout == run[0].stdout
