"""What the tests of a booted systemd need; outside of one they are skipped.

They share one machine and run one after the other: each leaves it as `installed` gives it, or
without rlq.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import booted
from tests.support.rlqd import QUIET_CONFIG


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "RLQ_TEST_BOOTED" in os.environ:
        return
    for item in items:
        if "tests/system/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="needs a booted systemd: make test-system"))


@pytest.fixture(scope="session")
def machine() -> None:
    """Two users, and a configuration to which the load of other tests is nothing."""
    for user in booted.USERS:
        booted.run("useradd", "--create-home", "--shell", "/bin/sh", user)
    booted.CONFIG.parent.mkdir()
    booted.CONFIG.write_text(QUIET_CONFIG)
    own = Path("/home/alice/.config/rlq/rlqd.toml")
    own.parent.mkdir(parents=True)
    own.write_text(QUIET_CONFIG)
    booted.run("chown", "-R", "alice:alice", "/home/alice/.config")


@pytest.fixture
def installed(machine: None) -> Iterator[None]:
    """The old version runs as the system's daemon; afterwards no job is left."""
    if not (booted.UNIT.exists() and f"{booted.OLD}/" in booted.UNIT.read_text()):
        booted.rlqd("install")
    elif not booted.answers():
        booted.systemctl("start", "rlqd")
    yield
    if booted.answers():
        with booted.client() as client:
            live = [job.id for job in client.list() if not job.state.is_final]
            if live:
                client.cancel(live, now=True)
                client.wait(live, timeout=30)
