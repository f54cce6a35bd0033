"""A home folder on a file server that does not answer: only who touches it waits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.rlqd import Rlqd

from rlq.protocol.states import JobState


@pytest.fixture
def dying_server(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """`tmp_path / "home"`, which from the call on opens nothing and refuses nothing: FUSE, with
    nobody to answer the kernel."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    folder = tmp_path / "home"
    folder.mkdir()
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")

    def die() -> None:
        options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0"
        mounted = subprocess.run(
            ["mount", "-i", "-t", "fuse", "-o", options, "rlq-test", str(folder)],
            pass_fds=[fuse],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip(f"cannot mount FUSE here: {mounted.stderr.strip()}")

    try:
        yield die
    finally:
        os.close(fuse)  # whoever still waits gets an error
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


@pytest.mark.parametrize("what", ["log", "cwd"])
def test_a_server_that_does_not_answer_holds_up_its_own_job_alone(
    dying_server: Callable[[], None], tmp_path: Path, what: str
) -> None:
    home = tmp_path / "home"
    with Rlqd(tmp_path) as d:
        client = d.client()
        log, cwd = (home / "log", "/") if what == "log" else (tmp_path / "log", home)
        hangs = client.submit(["true"], log=log, cwd=cwd, held=True)
        dying_server()
        client.release(hangs)
        d.until_state(client, hangs, JobState.CONFIGURING)
        # The daemon goes on answering, and others' jobs come and go.
        other = client.submit(["true"], cwd="/")
        d.until_state(client, other, JobState.COMPLETED)
        assert client.get(hangs).state is JobState.CONFIGURING
        client.cancel(hangs, now=True)
        d.until_state(client, hangs, JobState.CANCELLED)
