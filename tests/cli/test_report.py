"""`rlq report`, for jobs that are no Python programs; and the options that go with it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Invoke
from tests.support.fake_daemon import FakeDaemon

import rlq.job


@pytest.fixture
def inbox(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setenv("RLQ_REPORT_SOCKET", str(short_tmp / "report"))
    monkeypatch.setenv("RLQ_JOB_ID", "7")
    monkeypatch.setattr(rlq.job, "_sent_at", float("-inf"))
    monkeypatch.setattr(rlq.job, "_waiting", None)
    monkeypatch.setattr(rlq.job, "_has_reported", False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as bound:
        bound.bind(str(short_tmp / "report"))
        yield bound


def test_a_job_tells_how_far_it_is(invoke: Invoke, inbox: socket.socket) -> None:
    result = invoke("report", "5000", "700000", "--metric", "reward=1.5", "--metric", "x=-2")
    assert (result.exit_code, result.output) == (0, "")
    told = json.loads(inbox.recv(9999))
    assert (told["step"], told["total"]) == (5000, 700000)
    assert told["metrics"] == {"reward": 1.5, "x": -2.0}


def test_the_total_may_be_left_out(invoke: Invoke, inbox: socket.socket) -> None:
    assert invoke("report", "5").exit_code == 0
    assert json.loads(inbox.recv(9999))["total"] is None


@pytest.mark.parametrize(
    "words", [("x",), ("5", "y"), ("1.5",), ("5", "--metric", "x"), ("5", "--metric", "x=y")]
)
def test_bad_words_do_not_end_a_job(
    invoke: Invoke, inbox: socket.socket, words: tuple[str, ...]
) -> None:
    result = invoke("report", *words)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: nothing is reported: ")
    with pytest.raises(BlockingIOError):
        inbox.recv(9999)


def test_outside_a_job_bad_words_are_an_error_and_good_ones_do_nothing(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLQ_JOB_ID", raising=False)
    assert invoke("report", "5").exit_code == 0
    bad = invoke("report", "x")
    assert bad.exit_code == 2


def test_submit_tells_the_hooks_where_to_look(daemon: FakeDaemon, invoke: Invoke) -> None:
    words = ("--progress-from", "runs", "--progress-total", "700000")
    assert invoke("submit", *words, "--", "true").exit_code == 0
    [(spec, _env)] = daemon.submitted
    assert spec.hooks
    assert spec.env == {"RLQ_PROGRESS_FROM": "runs", "RLQ_PROGRESS_TOTAL": "700000"}


def test_submit_without_hooks(daemon: FakeDaemon, invoke: Invoke) -> None:
    assert invoke("submit", "--no-hooks", "--", "true").exit_code == 0
    [(spec, _env)] = daemon.submitted
    assert not spec.hooks


@pytest.mark.parametrize(
    "words",
    [
        ("--progress-total", "5"),
        ("--progress-from", ""),
        ("--progress-from", "x", "--no-hooks"),
        ("--progress-from", "x", "--progress-total", "0"),
    ],
)
def test_what_nobody_would_read_is_refused(
    daemon: FakeDaemon, invoke: Invoke, words: tuple[str, ...]
) -> None:
    assert invoke("submit", *words, "--", "true").exit_code == 2
    assert daemon.submitted == []
