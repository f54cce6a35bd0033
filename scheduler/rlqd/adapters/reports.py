"""The report socket: datagrams in which jobs tell their progress (`rlq.job.report`).

A datagram is at most 8 KiB of JSON:

    {"v": 1, "job": 7, "attempt": 1, "step": 5000, "total": 700000, "t": 12.5,
     "metrics": {"reward": 310.5}}

`total` may be null or absent, `metrics` absent; `t` is the sender's monotonic clock in
seconds.  Who sent it is the kernel's word (SO_PASSCRED), to be checked against the job's
owner.  A job never waits for us: its datagram is lost when the queue is full.  Whatever is
not such a datagram is dropped and counted.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from rlq.errors import UnavailableError

DATAGRAM_BYTES_MAX = 8192
METRICS_MAX = 64
_METRIC_NAME_MAX = 100
_INT_MAX = 2**63 - 1
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid

_Count = Annotated[int, msgspec.Meta(ge=0, le=_INT_MAX)]


@dataclass(frozen=True, slots=True)
class Report:
    uid: int
    #: 0: a process of another pid namespace.
    pid: int
    job: int
    attempt: int
    step: int
    total: int | None
    #: The sender's monotonic clock, seconds: only differences mean anything.
    t: float
    #: Finite numbers only.
    metrics: dict[str, float]


class _Payload(msgspec.Struct):
    v: Literal[1]
    job: _Count
    attempt: _Count
    step: _Count
    t: float
    total: _Count | None = None
    metrics: dict[Annotated[str, msgspec.Meta(max_length=_METRIC_NAME_MAX)], float | None] = {}


_decode = msgspec.json.Decoder(_Payload).decode


class ReportSocket:
    """Bound at `path`; everybody who can reach its folder may send.  `fileno` is pollable.

    The caller holds the state folder's lock: a socket left by a dead daemon is replaced.

    Raises:
        UnavailableError: it cannot be bound there.
    """

    def __init__(self, path: Path, *, mode: int = 0o666) -> None:
        self.path = path
        #: Datagrams thrown away since the start.
        self.dropped = 0
        self._mode = mode
        try:
            if stat.S_ISSOCK(path.lstat().st_mode if path.exists() else 0):
                path.unlink()
            self._socket = self._bound()
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {path}: {error.strerror or error}",
                hint="choose another path with --socket or RLQ_SOCKET",
            ) from error

    def _bound(self) -> socket.socket:
        made = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        # Before bind: the kernel notes the sender as the datagram is queued, not as it is read.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        before = os.umask(0o777 & ~self._mode)
        try:
            made.bind(str(self.path))
        except OSError:
            made.close()
            raise
        finally:
            os.umask(before)
        return made

    def listen_again(self) -> None:
        """Put the socket's file back if it was removed, under the same descriptor."""
        if os.path.lexists(self.path):
            return
        with contextlib.suppress(OSError), self._bound() as made:
            os.dup2(made.fileno(), self._socket.fileno(), inheritable=False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, limit: int = 500) -> list[Report]:
        """The reports that are there, without waiting; at most `limit` datagrams are read."""
        reports: list[Report] = []
        for _ in range(limit):
            try:
                # Room for the credentials only, which the kernel puts first: descriptors that
                # somebody passes along are never opened in this process.
                data, extras, flags, _sender = self._socket.recvmsg(
                    DATAGRAM_BYTES_MAX, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                break
            report = None
            if not flags & socket.MSG_TRUNC:
                report = _read(data, extras)
            if report is None:
                self.dropped += 1
            else:
                reports.append(report)
        return reports

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> ReportSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(data: bytes, extras: list[tuple[int, int, bytes]]) -> Report | None:
    for level, kind, content in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, uid, _gid = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
            break
    else:
        return None
    try:
        payload = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    metrics = {name: value for name, value in payload.metrics.items() if value is not None}
    if len(metrics) > METRICS_MAX or not all(map(math.isfinite, (payload.t, *metrics.values()))):
        return None
    return Report(
        uid=uid,
        pid=pid,
        job=payload.job,
        attempt=payload.attempt,
        step=payload.step,
        total=payload.total,
        t=payload.t,
        metrics=metrics,
    )
