from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

#: Small enough to learn hundreds of steps per second; of the real thing nothing is replaced.
SMALL = [
    *("--device", "cpu", "--eval-freq", "0", "--eval-episodes", "1"),
    *("--set", "learning_starts=20", "--set", "batch_size=16", "--set", "buffer_size=5000"),
    *("--set", "policy_kwargs.net_arch=[16]"),
]
DEADLINE_S = 120.0


class Run:
    """One `python -m rlq_sac train`, with this test as the daemon that hears its reports."""

    def __init__(self, tmp_path: Path, options: list[str], number: int) -> None:
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = tmp_path / f"report-{number}.sock"
        self._inbox.bind(str(path))
        self.reports: list[dict[str, Any]] = []
        self.log = tmp_path / f"log-{number}"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "RLQ_REPORT_SOCKET": str(path),
            "RLQ_JOB_ID": "7",
            "RLQ_ATTEMPT": str(number),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlq_sac", "train", *SMALL, *options],
                env=env,
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_step(self, step: int) -> None:
        """Until it reports that it has got there."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.reports or self.reports[-1]["step"] < step:
            self._inbox.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                self.reports.append(json.loads(self._inbox.recv(65536)))
            except TimeoutError:
                self._fail(f"step {step} was not reported")

    def finish(self) -> int:
        """Hear its reports to the end; the exit code."""
        deadline = time.monotonic() + DEADLINE_S
        self._inbox.settimeout(0.05)
        while True:
            has_ended = self.process.poll() is not None
            try:
                self.reports.append(json.loads(self._inbox.recv(65536)))
            except TimeoutError:
                if has_ended:
                    return self.process.returncode
                if time.monotonic() > deadline:
                    self._fail("it did not end")

    def _fail(self, message: str) -> NoReturn:
        self.process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
        self.process.wait(DEADLINE_S)
        pytest.fail(f"{message}; last report: {self.reports[-1:]}\n{self.text}")

    @property
    def text(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._inbox.close()


StartRun = Callable[..., Run]


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    runs: list[Run] = []

    def start(*options: str) -> Run:
        runs.append(Run(tmp_path, list(options), len(runs) + 1))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
