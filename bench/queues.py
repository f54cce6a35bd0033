"""The queues that rlq is measured beside, each private, on loopback or Unix sockets only.

Each runs one job at a time: rlq with one core, task-spooler with one slot, nq as it always
does, gflow with every job depending on the one before (it knows no CPU slots), Slurm with
`--exclusive` on its one node.  None is given special options but those; Slurm's scheduler is
set to act at once (bench/slurm.py).

What an accepted job survives differs: rlq's is on disk before the answer; gflow, nq and Slurm
write files without waiting for the disk; task-spooler keeps its queue in memory.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from bench.daemon import ONE_CORE, PrivateRlqd, rlq_command
from bench.slurm import Slurm, free_port
from bench.stamps import wait_for


class Queue(Protocol):
    """Started by `with`; gone afterwards."""

    name: str
    env: Mapping[str, str]

    def submit_argv(self, job: Sequence[str]) -> list[str]:
        """The command line by which a person submits `job`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Rlq:
    name = "rlq"

    def __init__(self) -> None:
        self._rlqd = PrivateRlqd(ONE_CORE)
        self.env: Mapping[str, str] = self._rlqd.env

    def submit_argv(self, job: Sequence[str]) -> list[str]:
        return [*rlq_command(), "submit", "--", *job]

    def __enter__(self) -> Self:
        self._rlqd.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rlqd.__exit__(kind, error, trace)


class _InFolder:
    """What the small ones share: a private folder and an environment that names it."""

    def __init__(self, **env: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rlq-rival-"))
        named = {key: value.format(self.folder) for key, value in env.items()}
        self.env: Mapping[str, str] = dict(os.environ) | named

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None: ...


class TaskSpooler(_InFolder):
    name = "task-spooler"
    program = "tsp"

    def __init__(self, slots: int = 1) -> None:
        super().__init__(TS_SOCKET="{}/socket", TMPDIR="{}", TS_SLOTS=str(slots))
        self._tsp = _program(self.program)

    def submit_argv(self, job: Sequence[str]) -> list[str]:
        return [self._tsp, *job]

    def stop(self) -> None:
        subprocess.run([self._tsp, "-K"], env=self.env, check=False)  # its server, by its socket


class Nq(_InFolder):
    name = "nq"

    def __init__(self) -> None:
        super().__init__(NQDIR="{}")
        self._nq = _program("nq")

    def submit_argv(self, job: Sequence[str]) -> list[str]:
        return [self._nq, *job]


class Gflow(_InFolder):
    """From PyPI, as runqd; GFLOW_BIN names the folder of its programs if not on PATH."""

    name = "gflow"

    def __init__(self) -> None:
        bin_dir = os.environ.get("GFLOW_BIN") or str(Path(_program("gflowd")).parent)
        self._bin = Path(bin_dir)
        if not (self._bin / "gflowd").exists() or shutil.which("tmux") is None:
            raise FileNotFoundError("gflowd or tmux")
        super().__init__(
            HOME="{}",
            XDG_CONFIG_HOME="{}/config",
            XDG_DATA_HOME="{}/data",
            XDG_STATE_HOME="{}/state",
            XDG_RUNTIME_DIR="{}",
            TMUX_TMPDIR="{}",
            PATH=f"{bin_dir}:{os.environ['PATH']}",
        )
        # tmux starts login shells, which reset PATH; a job ends by calling gflow's own program.
        (self.folder / ".bash_profile").write_text(f'export PATH="{bin_dir}:$PATH"\n')
        self._submitted = False

    def submit_argv(self, job: Sequence[str]) -> list[str]:
        after = ["-d", "@"] if self._submitted else []
        self._submitted = True
        return [str(self._bin / "gbatch"), *after, *job]

    def __enter__(self) -> Self:
        self._run("gflowd", "init", "--yes", "--host", "127.0.0.1", "--port", str(free_port()))
        self._run("gflowd", "start")
        return self

    def stop(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self._run("gflowd", "stop")
        # The tmux server of our own TMUX_TMPDIR, which gflow started.
        asked = subprocess.run(
            ["tmux", "display-message", "-p", "#{pid}"],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.stdout.strip().isdigit():
            os.kill(int(asked.stdout), 15)

    def _run(self, program: str, *args: str) -> None:
        subprocess.run(
            [str(self._bin / program), *args],
            env=self.env,
            check=True,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )


class SlurmQueue:
    name = "Slurm"

    def __init__(self) -> None:
        self._slurm = Slurm(cpus=16)
        self.env: Mapping[str, str] = self._slurm.env

    def submit_argv(self, job: Sequence[str]) -> list[str]:
        return ["sbatch", "--exclusive", "--output=/dev/null", f"--wrap={shlex.join(job)}"]

    def __enter__(self) -> Self:
        self._slurm.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._slurm.stop()


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(name)
    return found


#: Name -> what makes it, and how it is installed.
RIVALS: dict[str, tuple[Callable[[], Queue], str]] = {
    "task-spooler": (TaskSpooler, "apt-get install task-spooler"),
    "nq": (Nq, "apt-get install nq"),
    "gflow": (
        Gflow,
        "apt-get install tmux; python -m venv /tmp/gflow && /tmp/gflow/bin/pip install runqd;"
        " export GFLOW_BIN=/tmp/gflow/bin",
    ),
    "Slurm": (SlurmQueue, "apt-get install slurmctld slurmd slurm-client munge; run as root"),
}


class Gate:
    """A job that keeps a one-job queue busy until `open()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started = path.with_suffix(".started")
        # It also ends when its folder is removed: no job of a broken run stays behind.
        self.argv = [
            "sh",
            "-c",
            f"touch {self.started}; while [ -d {path.parent} ] && [ ! -e {path} ];"
            " do sleep 0.05; done",
        ]

    def wait_until_started(self, limit_s: float = 60) -> None:
        wait_for(self.started.exists, bool, limit_s)

    def open(self) -> None:
        self.path.touch()


def submit_ms(queue: Queue, job: Sequence[str]) -> float:
    """The whole process, from exec to exit."""
    argv = queue.submit_argv(job)
    began = time.perf_counter()
    subprocess.run(
        argv, env=queue.env, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    return (time.perf_counter() - began) * 1e3


def submit_loop_s(queue: Queue, job: Sequence[str], jobs: int) -> float:
    """How long a shell loop of `jobs` submissions takes."""
    line = shlex.join(queue.submit_argv(job))
    began = time.perf_counter()
    subprocess.run(
        ["sh", "-e", "-c", f"for i in $(seq {jobs}); do {line}; done"],
        env=queue.env,
        check=True,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    return time.perf_counter() - began
