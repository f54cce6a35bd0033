"""A fake daemon on a socket of its own, and `rlq` run against it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.support.fake_daemon import FakeDaemon

from rlq.cli import rlq
from rlq.client import Client

Invoke = Callable[..., Result]


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A Unix socket's path has at most 107 bytes; pytest's own folders may not leave room."""
    folder = Path(tempfile.mkdtemp(prefix="rlq-t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def daemon(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    path = short_tmp / "rlqd.sock"
    monkeypatch.setenv("RLQ_SOCKET", str(path))
    with FakeDaemon(path) as fake:
        yield fake


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(timeout_s=10) as connected:
        yield connected


@pytest.fixture
def invoke(daemon: FakeDaemon) -> Invoke:
    def run(*args: str, input: str | None = None) -> Result:
        return CliRunner().invoke(rlq, list(args), prog_name="rlq", input=input)

    return run
