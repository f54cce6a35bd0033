"""What `rlq.job.report` promises the training code that calls it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlq.job


class Inbox:
    """The daemon's end of the report socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))

    def take(self) -> list[dict[str, Any]]:
        """Every report that has arrived since the last call."""
        reports = []
        while True:
            try:
                reports.append(json.loads(self._socket.recv(65536)))
            except BlockingIOError:
                return reports

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The reporter's clock, in seconds, and its memory as in a fresh process."""
    now = [100.0]
    monkeypatch.setattr("rlq.job.time.monotonic", lambda: now[0])
    for name, value in (
        ("_waiting", None),
        ("_sent_at", -math.inf),
        ("_sent_final", False),
        ("_has_warned", False),
    ):
        monkeypatch.setattr(rlq.job, name, value)
    return now


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> Iterator[Inbox]:
    box = Inbox(tmp_path / "report.sock")
    monkeypatch.setenv("RLQ_REPORT_SOCKET", str(box.path))
    monkeypatch.setenv("RLQ_JOB_ID", "7")
    monkeypatch.setenv("RLQ_ATTEMPT", "2")
    yield box
    box.close()


def test_a_report_carries_who_and_how_far(inbox: Inbox) -> None:
    rlq.job.report(10, 100, loss=0.5)
    assert inbox.take() == [
        {
            "v": 1,
            "job": 7,
            "attempt": 2,
            "step": 10,
            "total": 100,
            "t": 100.0,
            "metrics": {"loss": 0.5},
        }
    ]


def test_the_total_may_be_unknown(inbox: Inbox) -> None:
    rlq.job.report(10)
    assert inbox.take()[0]["total"] is None


def test_at_most_two_reports_a_second_and_the_newest(inbox: Inbox, clock: list[float]) -> None:
    for step in range(1, 1001):
        clock[0] = 100.0 + step / 1000
        rlq.job.report(step, 10_000)
    assert [(r["step"], r["t"]) for r in inbox.take()] == [(1, 100.001), (501, 100.501)]


def test_the_last_step_is_sent_at_once_and_once(inbox: Inbox, clock: list[float]) -> None:
    rlq.job.report(99, 100)
    for _ in range(5):
        clock[0] += 0.001
        rlq.job.report(100, 100)
    assert [r["step"] for r in inbox.take()] == [99, 100]


def test_flush_sends_what_was_held_back_and_only_once(inbox: Inbox) -> None:
    rlq.job.report(1, 100)
    rlq.job.report(2, 100, mean_reward=3.0)
    assert [r["step"] for r in inbox.take()] == [1]
    rlq.job.flush()
    rlq.job.flush()
    assert [(r["step"], r["metrics"]) for r in inbox.take()] == [(2, {"mean_reward": 3.0})]


def test_numbers_of_other_libraries_are_numbers(inbox: Inbox) -> None:
    rlq.job.report(np.int64(5), 7e5, loss=np.float32(0.25), on=True, one=np.array([2.0]).sum())  # type: ignore[arg-type]
    (sent,) = inbox.take()
    assert (sent["step"], sent["total"]) == (5, 700_000)
    assert sent["metrics"] == {"loss": 0.25, "on": 1.0, "one": 2.0}


class Spiteful:
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_what_is_no_finite_number_is_left_out_with_one_warning(
    inbox: Inbox, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    for _ in range(3):
        clock[0] += 1
        rlq.job.report(
            1,
            good=1,
            nan=math.nan,
            inf=math.inf,
            word="abc",  # type: ignore[arg-type]
            several=np.zeros(3),  # type: ignore[arg-type]
            spite=Spiteful(),  # type: ignore[arg-type]
            none=None,  # type: ignore[arg-type]
            huge=10**400,
        )
    assert [r["metrics"] for r in inbox.take()] == [{"good": 1.0}] * 3
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("step", ["5", None, -1, 1.5, math.nan, math.inf, 2**63, [], Spiteful()])
def test_a_step_that_is_none_sends_nothing(
    inbox: Inbox, step: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rlq.job.report(step, 10)
    assert inbox.take() == []
    assert "step=" in capsys.readouterr().err


@pytest.mark.parametrize("total", ["9", -1, 0, math.nan, Spiteful()])
def test_a_bad_total_is_an_unknown_one(inbox: Inbox, total: Any) -> None:
    rlq.job.report(5, total)
    assert [(r["step"], r["total"]) for r in inbox.take()] == [(5, None)]


@pytest.mark.parametrize("letter", ["x", "é", "\U0001d54f"])
def test_a_report_is_bounded(inbox: Inbox, letter: str) -> None:
    metrics = {f"{i:04}" + letter * 100: -1.2345678901234567e-300 for i in range(50)}
    rlq.job.report(1, None, **metrics)
    (sent,) = inbox.take()
    assert len(json.dumps(sent, ensure_ascii=False, separators=(",", ":")).encode()) < 8192
    assert len(sent["metrics"]) == 32 if letter != "\U0001d54f" else len(sent["metrics"]) > 20
    assert {len(name) for name in sent["metrics"]} == {64}


def test_a_name_that_is_no_unicode_is_sent_in_question_marks(inbox: Inbox) -> None:
    rlq.job.report(1, None, **{"\udc80": 1.0})
    assert inbox.take()[0]["metrics"] == {"?": 1.0}


def test_without_a_queue_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RLQ_REPORT_SOCKET", "RLQ_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    rlq.job.report(1, 2, loss="nonsense")  # type: ignore[arg-type]
    rlq.job.flush()
    assert rlq.job.id() is None
    assert not rlq.job.is_queued()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", ["/nonexistent/report.sock", "/tmp/" + "x" * 200, "/dev/null"])
def test_a_daemon_that_is_away_is_no_error(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLQ_REPORT_SOCKET", path)
    rlq.job.report(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RLQ_REPORT_SOCKET", str(inbox.path))
    rlq.job.flush()
    assert [r["step"] for r in inbox.take()] == [1], "sent once the daemon is back"


def test_a_daemon_that_does_not_read_does_not_block_the_job(
    inbox: Inbox, clock: list[float]
) -> None:
    for step in range(1, 5000):
        clock[0] += 1
        rlq.job.report(step, 5000)
    rlq.job.report(5000, 5000)
    received = [r["step"] for r in inbox.take()]
    assert received[0] == 1
    assert len(received) < 4999, "the socket's queue was never full: the test shows nothing"
    rlq.job.flush()
    assert [r["step"] for r in inbox.take()] == [5000]


def test_a_flush_waits_for_a_daemon_that_is_busy_but_not_for_long(inbox: Inbox) -> None:
    for step in range(1, 2000):
        rlq.job._sent_at = -math.inf
        rlq.job.report(step)
    assert rlq.job._waiting is not None, (
        "the socket's queue was never full: the test shows nothing"
    )
    rlq.job.flush()  # nobody reads: it gives up and keeps the report
    reader = threading.Timer(0.02, inbox.take)
    reader.start()
    rlq.job.flush()
    reader.join()
    assert rlq.job._waiting is None


@pytest.mark.parametrize(("value", "expected"), [("7", 7), ("", None), ("x", None), ("-3", None)])
def test_the_id_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: int | None
) -> None:
    monkeypatch.setenv("RLQ_JOB_ID", value)
    assert rlq.job.id() == expected
    assert rlq.job.is_queued() == (expected is not None)


def run_job(inbox: Inbox, program: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "RLQ_REPORT_SOCKET": str(inbox.path),
        "RLQ_JOB_ID": "7",
        "RLQ_ATTEMPT": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", program], env=env, text=True, capture_output=True, timeout=60
    )


def test_the_last_state_arrives_when_the_job_exits(inbox: Inbox) -> None:
    run = run_job(
        inbox,
        "from rlq.job import report\nfor i in range(50): report(i, 100)\nraise SystemExit(3)",
    )
    assert (run.returncode, run.stderr) == (3, "")
    assert inbox.take()[-1]["step"] == 49


def test_a_forked_child_reports_its_own_and_not_its_parents(inbox: Inbox) -> None:
    run = run_job(
        inbox,
        """
import os, sys
import rlq.job
rlq.job.report(1, 100)
rlq.job.report(2, 100)  # held back
child = os.fork()
if child == 0:
    sys.exit(0)  # the exit hooks run here too
assert os.waitpid(child, 0)[1] == 0
child = os.fork()
if child == 0:
    os.closerange(0, 256)  # as a daemoniser does
    rlq.job.report(50, 100)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert [r["step"] for r in inbox.take()] == [1, 50, 2]


def test_importing_the_reporter_is_light() -> None:
    program = (
        "import sys, rlq.job\n"
        "print([m for m in ('click', 'msgspec', 'zmq', 'rich', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert run.stdout == "[]\n"
