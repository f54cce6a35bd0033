"""A real daemon in a folder of its own, with GPUs made of files, and a real client to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.nvml_stub import StubNvml
from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.protocol.messages import Job
from rlq.protocol.states import JobState

#: The machine that runs the tests is busy with them; what outsiders' load does is tested by
#: tests that turn this back on.
QUIET_CONFIG = """
[cpu]
outside = "ignore"
[memory]
reserve = "64M"
[defaults]
mem = "64M"
grace = "5s"
[monitor]
period = "200ms"
[scheduling]
settle = "1s"
[guard]
first_report = "0s"
"""

#: A fake training run: puts itself on the stub GPU, says so, and works until told otherwise.
#: argv: seconds [gpu memory in MiB, SM share]
GPU_JOB = """
import os, sys, time, pathlib
folder = pathlib.Path(os.environ["RLQ_NVML_STUB"])
uuids = [u for u in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if u]
mem, sm = (sys.argv[2:] + ["1000", "10"])[:2]
lines = "".join(f"{int(u[-12:])} {mem} {sm} C\\n" for u in uuids)
part = folder / f".{os.getpid()}"
part.write_text(lines)
part.replace(folder / "procs" / str(os.getpid()))
print("on", uuids, flush=True)
time.sleep(float(sys.argv[1]))
"""


def configured(**sections: Mapping[str, object]) -> str:
    """QUIET_CONFIG with other values: `configured(scheduling={"reserve_after": "1s"})`."""
    values: dict[str, dict[str, Any]] = tomllib.loads(QUIET_CONFIG)
    for section, keys in sections.items():
        values.setdefault(section, {}).update(keys)
    return "".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(v)}\n" for key, v in keys.items())
        for section, keys in values.items()
    )


class Rlqd:
    """Started by `with`; ended by pid.  `kill9` and `start` may be called again and again.

    `shared`: the system's daemon as systemd starts it: root, a socket that everybody may use.
    """

    #: What is run in place of `-m rlqd`, by a kind of daemon of its own.
    program: tuple[str, ...] = ("-m", "rlqd")

    def __init__(
        self,
        folder: Path,
        *,
        config: str = QUIET_CONFIG,
        gpus: Sequence[Any] = (),
        shared: bool = False,
    ) -> None:
        self.folder = folder
        self.shared = shared
        # A Unix socket's path may have 107 bytes, and pytest's folders are long.
        self._short = tempfile.TemporaryDirectory(prefix="rlq-")
        self.socket = Path(self._short.name) / "s"
        self.state_dir = folder / "state"
        if shared:
            # pytest's folders are closed to others, whose jobs' logs lie in the state folder.
            os.chmod(self._short.name, 0o755)
            self.socket = Path(self._short.name) / "run" / "rlqd.sock"
            self.state_dir = Path(self._short.name) / "state"
            self.socket.parent.mkdir(mode=0o755)
            self.state_dir.mkdir(mode=0o711)
        self.log_path = folder / "rlqd.log"
        self.config_path = folder / "rlqd.toml"
        self.config_path.write_text(config)
        self.nvml = StubNvml(folder / "nvml")
        if gpus:
            self.nvml.set_gpus(gpus)
        self.has_gpus = bool(gpus)
        self.process: subprocess.Popen[bytes] | None = None
        self._clients: list[Client] = []
        self._postmark = 30

    @property
    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RLQ_", "CUDA_"))}
        env = {**kept, "RLQ_SOCKET": str(self.socket), "RLQ_STATE_DIR": str(self.state_dir)}
        if self.shared:
            env["RUNTIME_DIRECTORY"] = str(self.socket.parent)
            env["STATE_DIRECTORY"] = str(self.state_dir)
            env["HOME"] = self._short.name
            del env["RLQ_STATE_DIR"], env["RLQ_SOCKET"]
        return {**env, **self.nvml.env} if self.has_gpus else env

    @property
    def user_env(self) -> dict[str, str]:
        """Of a user's shell: where the daemon is, and nothing that only the daemon is told."""
        env = {**self.env, "RLQ_SOCKET": str(self.socket)}
        return {k: v for k, v in env.items() if not k.endswith("_DIRECTORY")}

    def start(self) -> Self:
        """Until it answers."""
        read_fd = self.spawn()
        with os.fdopen(read_fd, "rb") as ready:
            answer = ready.readline().decode()
        if answer != "ready\n":
            self._bury()
            raise AssertionError(f"{answer}\n{self.log()}")
        return self

    def _bury(self) -> None:
        for client in self._clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.kill9()
        self._short.cleanup()

    def spawn(self) -> int:
        """Start it and do not wait; the descriptor tells "ready", or the error."""
        read_fd, write_fd = os.pipe()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, *self.program, "--config", str(self.config_path)),
                    *("--ready-fd", str(write_fd)),
                ],
                env=self.env,
                pass_fds=[write_fd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(write_fd)
        return read_fd

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def client(self) -> Client:
        client = Client(self.socket, autostart=False)
        self._clients.append(client)
        return client

    def rlq(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """The real command, as a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "rlq", *args],
            env=self.user_env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{args}: {done}\n{self.log()}"
        return done

    def submit_gpu_job(
        self, client: Client, seconds: float, mem: int = 1000, sm: int = 10, **options: Any
    ) -> int:
        argv = [sys.executable, "-c", GPU_JOB, str(seconds), str(mem), str(sm)]
        return client.submit(argv, env=self.user_env, **options)

    def marked_processes(self) -> list[int]:
        """Every process of this daemon's jobs, supervisors included: none may be left."""
        ours = [str(self.state_dir / "run").encode(), f"RLQ_SOCKET={self.socket}".encode()]
        daemon = self.process.pid if self.process is not None else 0
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in (daemon, os.getpid()):
                continue
            try:
                about = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if any(mark in about for mark in ours):
                found.append(int(entry.name))
        return found

    def read_anew(self, client: Client, index: int = 0) -> None:
        """Until the daemon has decided on a GPU reading that was taken after this call.

        The temperature is the postmark.  Two readings: once the second is seen, the first has
        been through the core.
        """
        for _ in range(2):
            self._postmark = 30 + (self._postmark - 29) % 50
            self.nvml.update(index, temperature=self._postmark)
            wait_until(
                lambda: {g.index: g.temperature_c for g in client.devices().gpus},
                lambda seen: seen.get(index) == self._postmark,
            )

    def until(
        self,
        client: Client,
        ids: Sequence[int],
        wanted: Callable[[list[Job]], bool],
        limit_s: float = 30,
    ) -> list[Job]:
        """Wait until these jobs are as `wanted`; they are given in the order of `ids`."""
        return wait_until(lambda: [client.get(i) for i in ids], wanted, limit_s)

    def until_state(
        self, client: Client, job_id: int, *states: JobState, limit_s: float = 30
    ) -> Job:
        return wait_until(lambda: client.get(job_id), lambda job: job.state in states, limit_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end_jobs()
        finally:
            self._bury()
            if error is not None:
                print(self.log())

    def _end_jobs(self) -> None:
        """No job of a test outlives it, whatever the test has done to its daemon."""
        if self.process is None:
            return
        if self.process.poll() is not None:
            self.start()
        with Client(self.socket, autostart=False) as client:
            live = [job.id for job in client.list() if not job.state.is_final]
            if live:
                client.cancel(live, now=True)
                client.wait(live, timeout=30)
