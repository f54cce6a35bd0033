"""The state folder of a daemon that runs is removed, moved, or turns read-only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.rlqd import Rlqd
from tests.support.waiting import wait_until

from rlq.errors import UnavailableError
from rlq.protocol.states import JobState


def is_alive(pid: int | None) -> bool:
    assert pid is not None
    return Path(f"/proc/{pid}").exists()


def test_a_removed_state_folder_is_told_loudly_and_takes_no_change(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        runs = client.submit(["sleep", "600"], log=tmp_path / "log")
        pid = d.until_state(client, runs, JobState.RUNNING).pid
        shutil.rmtree(d.state_dir)

        # It was acknowledged only if it can be found again: so it is not.
        with pytest.raises(UnavailableError, match=r"rlq\.db was removed"):
            client.submit(["true"])
        assert "was removed while rlqd runs" in d.rlq("status").stderr
        assert "was removed while rlqd runs" in " ".join(
            d.rlq("doctor", check=False).stdout.split()
        )
        # What it knew is still told, and nothing is stopped.
        assert client.get(runs).state is JobState.RUNNING
        assert is_alive(pid)

        assert d.stop() == 0
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # nobody else knows of it any more
        d.start()
        assert d.client().list() == []


def test_a_removed_database_is_noticed_though_nothing_is_written(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        (d.state_dir / "rlq.db").unlink()
        wait_until(d.log, lambda text: "was removed while rlqd runs" in text)
        assert d.stop() == 0


def test_a_replaced_database_takes_no_change(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        database = d.state_dir / "rlq.db"
        database.rename(tmp_path / "old")
        shutil.copy(tmp_path / "old", database)
        with pytest.raises(UnavailableError, match="was replaced"):
            d.client().submit(["true"])


def test_a_state_folder_that_comes_back_is_used_again(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        runs = client.submit(["sleep", "600"], log=tmp_path / "log")
        d.until_state(client, runs, JobState.RUNNING)
        d.state_dir.rename(tmp_path / "elsewhere")
        with pytest.raises(UnavailableError):
            client.submit(["true"])
        (tmp_path / "elsewhere").rename(d.state_dir)
        wait_until(lambda: client.status().problems, lambda problems: problems == ())
        assert client.get(runs).state is JobState.RUNNING
        done = client.submit(["true"])
        d.until_state(client, done, JobState.COMPLETED)


def test_with_its_socket_gone_too_the_daemon_ends(tmp_path: Path) -> None:
    """Nobody can reach it, and the next `rlq` starts another on the same machine."""
    with Rlqd(tmp_path) as d:
        shutil.rmtree(d.state_dir)
        d.socket.unlink()
        assert d.process is not None
        assert d.process.wait(30) == UnavailableError.exit_code
        assert "was removed while rlqd runs" in d.log()


def test_with_its_socket_gone_alone_the_daemon_is_found_again(tmp_path: Path) -> None:
    """$XDG_RUNTIME_DIR is removed at the end of a user's last session."""
    with Rlqd(tmp_path) as d:
        d.socket.unlink()
        wait_until(d.socket.exists, bool)
        assert d.rlq("submit", "--", "true").stdout == "1\n"
        assert d.client().status().problems == ()


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """`tmp_path / "disk"`, which turns read-only as a failing disk does: by the kernel's own will,
    open files or not."""
    if os.geteuid() != 0 or not Path("/sys/fs/ext4/features").exists():
        pytest.skip("needs root and ext4")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    for command in (
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a disk of our own here: {done.stderr.strip()}")
    device = os.stat(folder).st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name

    def fail() -> None:
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")

    try:
        yield fail
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_turns_read_only_refuses_changes_and_tells(
    failing_disk: Callable[[], None], tmp_path: Path
) -> None:
    d = Rlqd(tmp_path)
    d.state_dir = tmp_path / "disk" / "state"
    d.start()
    client = d.client()
    runs = client.submit(["sleep", "600"], log=tmp_path / "log")
    pid = d.until_state(client, runs, JobState.RUNNING).pid
    failing_disk()
    with pytest.raises(UnavailableError):
        client.submit(["true"])
    assert "nothing can be changed" in d.rlq("status").stderr
    assert client.get(runs).state is JobState.RUNNING
    assert is_alive(pid)
    # What is recorded nowhere can be stopped all the same.
    assert d.rlq("cancel", "--now", str(runs), check=False).returncode == 7
    wait_until(lambda: is_alive(pid), lambda alive: not alive)
    assert d.stop() == 0, d.log()

    with pytest.raises(AssertionError, match="Read-only file system"):
        d.start()
