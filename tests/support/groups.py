"""A real control group of version 2, where this machine lets one be made."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.waiting import wait_until


def killable_group() -> Path:
    """Where a group may be made that has cgroup.kill; it is not there yet.  Skips the test."""
    for root in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        path = Path(root) / f"rlq-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        can_kill = (path / "cgroup.kill").exists()
        path.rmdir()
        if can_kill:
            return path
    pytest.skip("cannot make a control group with cgroup.kill here")


def until_gone(path: Path) -> None:
    """Remove a group, which is busy for an instant after its last process."""

    def gone() -> bool:
        with suppress(OSError):
            path.rmdir()
        return not path.exists()

    wait_until(gone, bool)
