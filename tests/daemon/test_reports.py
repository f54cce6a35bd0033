"""The report socket, with real datagrams from friends and strangers."""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import platform
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlq.errors import UnavailableError
from rlqd.adapters.reports import DATAGRAM_BYTES_MAX, METRICS_MAX, Report, ReportSocket

GOOD: dict[str, Any] = {
    "v": 1,
    "job": 7,
    "attempt": 2,
    "step": 500,
    "total": 1000,
    "t": 12.5,
    "metrics": {"reward": 3, "loss": -0.5},
}


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[ReportSocket]:
    with ReportSocket(tmp_path / "r.sock") as made:
        yield made


@pytest.fixture
def sender(reports: ReportSocket) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.setblocking(False)
        made.connect(str(reports.path))
        yield made


def changed(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def test_a_report_comes_with_the_kernels_word(
    reports: ReportSocket, sender: socket.socket
) -> None:
    sender.send(changed())
    assert select.select([reports], [], [], 20)[0]
    assert reports.receive() == [
        Report(
            uid=os.geteuid(),
            pid=os.getpid(),
            job=7,
            attempt=2,
            step=500,
            total=1000,
            t=12.5,
            metrics={"reward": 3.0, "loss": -0.5},
        )
    ]
    assert reports.receive() == []
    assert reports.dropped == 0


def test_what_may_be_absent_and_what_a_newer_job_may_add(
    reports: ReportSocket, sender: socket.socket
) -> None:
    sender.send(json.dumps({"v": 1, "job": 7, "attempt": 1, "step": 0, "t": 0}).encode())
    sender.send(changed(total=None, metrics={"loss": None, "fps": 1}, colour="red"))
    first, second = reports.receive()
    assert (first.total, first.metrics) == (None, {})
    assert (second.total, second.metrics) == (None, {"fps": 1.0})


def test_a_stranger_is_known_as_a_stranger(reports: ReportSocket) -> None:
    number = {"x86_64": 117, "aarch64": 147}.get(platform.machine())
    if os.geteuid() != 0 or number is None:
        pytest.skip("needs root to become somebody else")

    def run() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.connect(str(reports.path))
            # setresuid of this thread alone; the kernel goes by the real user of the sender.
            ctypes.CDLL(None).syscall(number, 12345, 12345, -1)
            client.send(changed())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [report] = reports.receive()
    assert report.uid == 12345


HOSTILE = [
    b"",
    b"\0",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 8000,
    changed(v=2),
    changed(v="1"),
    changed(job=-1),
    changed(job=2**63),
    changed(job=10**400),
    changed(job="7"),
    changed(job=7.5),
    changed(job=True),
    changed(step=-1),
    changed(step=None),
    changed(total=-1),
    changed(t=None),
    changed(t=float("nan")),
    changed(t=float("inf")),
    changed().replace(b"12.5", b"1e999"),
    changed(metrics=None),
    changed(metrics=[1]),
    changed(metrics={"a": "1"}),
    changed(metrics={"a": float("nan")}),
    changed(metrics={"a": {}}),
    changed(metrics={"a" * 101: 1}),
    changed(metrics={str(n): 1 for n in range(METRICS_MAX + 1)}),
    changed().ljust(DATAGRAM_BYTES_MAX + 1),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_datagram_is_dropped_and_counted(
    reports: ReportSocket, sender: socket.socket, number: int
) -> None:
    sender.send(HOSTILE[number])
    sender.send(changed())
    assert [report.job for report in reports.receive()] == [7]
    assert reports.dropped == 1


def test_the_largest_datagram_passes(reports: ReportSocket, sender: socket.socket) -> None:
    sender.send(changed().ljust(DATAGRAM_BYTES_MAX))
    assert len(reports.receive()) == 1


def test_mangled_reports_never_raise(reports: ReportSocket, sender: socket.socket) -> None:
    chance = random.Random(3)
    for _ in range(2000):
        data = bytearray(changed())
        for _ in range(chance.randrange(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        sender.send(data)
        for report in reports.receive():
            assert 0 <= report.step < 2**63
    assert reports.dropped > 1000


def test_descriptors_passed_along_are_not_opened(
    reports: ReportSocket, sender: socket.socket
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        rights = array.array("i", [sender.fileno()] * 50)
        sender.sendmsg([changed()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    assert len(reports.receive()) == 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_round_reads_at_most_the_limit(reports: ReportSocket, sender: socket.socket) -> None:
    for step in range(4):
        sender.send(changed(step=step))
    assert [report.step for report in reports.receive(3)] == [0, 1, 2]
    assert [report.step for report in reports.receive(3)] == [3]


def test_a_full_queue_costs_the_sender_its_datagram_and_no_wait(
    reports: ReportSocket, sender: socket.socket
) -> None:
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 100_000:
            sender.send(changed())
            sent += 1
    assert sent < 100_000
    assert len(reports.receive(100_000)) == sent


@pytest.mark.parametrize("umask", [0, 0o077])
def test_everybody_who_reaches_the_folder_may_send(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with ReportSocket(tmp_path / "r.sock"):
            assert (tmp_path / "r.sock").stat().st_mode & 0o777 == 0o666
            assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert not (tmp_path / "r.sock").exists()


def test_a_dead_socket_is_replaced_and_anything_else_is_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(tmp_path / "r.sock"))
    ReportSocket(tmp_path / "r.sock").close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UnavailableError, match="cannot listen"):
        ReportSocket(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(UnavailableError, match="cannot listen"):
        ReportSocket(tmp_path / "none" / "r.sock")
    with pytest.raises(UnavailableError, match="cannot listen"):
        ReportSocket(tmp_path / ("x" * 120))


def test_a_removed_socket_file_is_put_back(reports: ReportSocket) -> None:
    reports.path.unlink()
    polled = reports.fileno()
    reports.listen_again()
    assert reports.fileno() == polled
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as late:
        late.sendto(changed(step=9), str(reports.path))
    assert select.select([reports], [], [], 20)[0]
    assert [report.step for report in reports.receive()] == [9]
