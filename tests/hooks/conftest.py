"""Programs run as a job's are: with the hooks on PYTHONPATH and a report socket to write to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlq import hooks

#: A stand-in with the shape of stable_baselines3, and modules that programs use with it.
PROGRAMS = Path(__file__).parent / "programs"


class Inbox:
    """The daemon's end of the report socket.  It reads all the time, as the daemon does: the
    kernel keeps about ten datagrams."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: list[dict[str, Any]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while data := self._socket.recv(65536):
            self.reports.append(json.loads(data))

    def _finish(self) -> None:
        """What was sent before this has been read after it: the kernel keeps the order."""
        if self._reader.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"", str(self.path))
            self._reader.join()

    def close(self) -> None:
        self._finish()
        self._socket.close()


@dataclass
class Ended:
    code: int
    out: str
    err: str
    reports: list[dict[str, Any]]

    @property
    def steps(self) -> list[tuple[int, int | None]]:
        return [(report["step"], report["total"]) for report in self.reports]


class Jobs:
    """Runs programs as jobs; each with a report socket of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0

    def environment(
        self, path: Sequence[Path | str], extra: Mapping[str, str | None]
    ) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RLQ_", "PYTHON", "OMP_", "COV_"))
        }
        before = ":".join(map(str, path)) or None
        env: dict[str, str | None] = {
            **kept,
            "PYTHONPATH": hooks.pythonpath(before, on=True),
            "OMP_NUM_THREADS": "1",
            "NPROC": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "RLQ_JOB_ID": "7",
            "RLQ_ATTEMPT": "2",
            **extra,
        }
        return {name: value for name, value in env.items() if value is not None}

    def open_inbox(self) -> Inbox:
        self._runs += 1
        return Inbox(self._folder / f"{self._runs}.sock")

    def __call__(
        self,
        program: str,
        *flags: str,
        path: Sequence[Path | str] = (PROGRAMS,),
        env: Mapping[str, str | None] | None = None,
        python: str | Path = sys.executable,
        cwd: Path | None = None,
        file: Path | None = None,
    ) -> Ended:
        """`file`: run from there, as people do (and as spawned workers need it)."""
        words = ["-c", program]
        if file is not None:
            file.write_text(program)
            words = [str(file)]
        inbox = self.open_inbox()
        try:
            extra = {"RLQ_REPORT_SOCKET": str(inbox.path), **(env or {})}
            run = subprocess.run(
                [str(python), *flags, *words],
                env=self.environment(path, extra),
                cwd=cwd or self._folder,
                text=True,
                capture_output=True,
                timeout=240,
            )
        finally:
            inbox.close()
        return Ended(run.returncode, run.stdout, run.stderr, inbox.reports)


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    folder = Path(tempfile.mkdtemp(prefix="rlq-h-", dir="/tmp"))  # short: a socket's path
    yield Jobs(folder)
    shutil.rmtree(folder)
