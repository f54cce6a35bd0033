"""A private rlqd in a temporary folder, ended by pid whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rlq.client import Client
from rlq.protocol.messages import Selection
from rlq.protocol.states import LIVE_STATES, JobState

#: The machine that benchmarks run on is never quite quiet; how rlq shares it with outsiders is
#: not what they measure.  sac_packing leaves everything at its default.
QUIET = """
[cpu]
outside = "ignore"
[memory]
reserve = "64M"
[defaults]
mem = "16M"
"""
#: One job at a time, whatever the machine has.
ONE_CORE = QUIET.replace("[cpu]\n", f'[cpu]\ninclude = "{min(os.sched_getaffinity(0))}"\n')


def rlq_command() -> list[str]:
    """`rlq` as a person types it: the installed script of this Python, if it is there."""
    script = Path(sys.executable).with_name("rlq")
    return [str(script)] if script.exists() else [sys.executable, "-m", "rlq"]


class PrivateRlqd:
    """`with PrivateRlqd() as rlqd`.

    Args:
        config: TOML.
        program: what to run instead of `python -m rlqd`.
    """

    def __init__(self, config: str = QUIET, program: Sequence[str] = ("-m", "rlqd")) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rlq-bench-"))
        self.socket = self.folder / "rlqd.sock"
        self.config_path = self.folder / "rlqd.toml"
        self.config_path.write_text(config)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("RLQ_")} | {
            "RLQ_SOCKET": str(self.socket),
            "RLQ_STATE_DIR": str(self.folder / "state"),
            "RLQ_NO_AUTOSTART": "1",
        }
        self._program = tuple(program)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def client(self) -> Client:
        return Client(self.socket, autostart=False, timeout_s=300)

    def __enter__(self) -> PrivateRlqd:
        read_fd, write_fd = os.pipe()
        log_path = self.folder / "rlqd.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *self._program),
                    *("--config", str(self.config_path), "--ready-fd", str(write_fd)),
                ],
                env=self.env,
                pass_fds=[write_fd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as ready:
            answer = ready.readline().decode()
        if answer != "ready\n":
            said = log_path.read_text(errors="replace")
            self._remove()
            raise RuntimeError(f"rlqd did not start: {answer}\n{said}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end_jobs()
        finally:
            self._remove()

    def _end_jobs(self) -> None:
        """Jobs outlive their daemon by design, so they are ended before it."""
        started = tuple(sorted(LIVE_STATES - {JobState.PENDING}))
        with self.client() as client:
            client.drain()
            ids = [job.id for job in client.list(Selection(states=started))]
            if ids:
                client.cancel(ids, now=True)
                client.wait(ids, timeout=60)

    def _remove(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
