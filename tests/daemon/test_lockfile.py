"""One daemon per state folder, with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlq.errors import UnavailableError
from rlqd.adapters import lockfile

HOLDER = """
import pathlib, subprocess, sys
from rlqd.adapters import lockfile
lock = lockfile.acquire(pathlib.Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "1000"], close_fds=False)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rlqd.lock"


def test_a_second_start_is_told_the_pid_of_the_first(path: Path) -> None:
    with (
        lockfile.acquire(path),
        pytest.raises(UnavailableError, match=rf"already runs on .* \(pid {os.getpid()}\)"),
    ):
        lockfile.acquire(path)


def test_after_release_it_is_free(path: Path) -> None:
    first = lockfile.acquire(path)
    first.release()
    first.release()
    with lockfile.acquire(path):
        assert path.read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_kill_9_frees_it_though_a_child_lives_on(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(UnavailableError, match=rf"pid {holder.pid}\)"):
                lockfile.acquire(path)
            holder.kill()
            holder.wait()
            lockfile.acquire(path).release()
        finally:
            os.kill(child, 9)


@pytest.mark.parametrize("left", [b"", b"\xff\xfe\0", b"12"])
def test_whatever_an_earlier_daemon_left_in_the_file(path: Path, left: bytes) -> None:
    path.write_bytes(left)
    with lockfile.acquire(path) as lock:
        path.write_bytes(left)
        with pytest.raises(UnavailableError, match="already runs"):
            lockfile.acquire(lock.path)


def test_the_host_is_named_when_it_is_another(path: Path) -> None:
    with lockfile.acquire(path):
        path.write_text("77 elsewhere\n")
        with pytest.raises(UnavailableError, match=r"\(pid 77 on elsewhere\)"):
            lockfile.acquire(path)


def test_a_removed_file_is_not_the_lock(path: Path) -> None:
    with lockfile.acquire(path):
        path.unlink()
        with lockfile.acquire(path):
            assert path.exists()


def test_a_folder_that_is_not_there_and_a_link_are_refused(path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot open"):
        lockfile.acquire(path.parent / "none" / "rlqd.lock")
    (path.parent / "target").touch()
    path.symlink_to(path.parent / "target")
    with pytest.raises(UnavailableError, match="cannot open"):
        lockfile.acquire(path)
