"""NVIDIA's CUDA Multi-Process Service (MPS), through the program `nvidia-cuda-mps-control`.

What this file relies on (NVIDIA's documentation and field reports; docs/mps.md has the list):

- The program reads commands from stdin and talks to a control daemon over CUDA_MPS_PIPE_DIRECTORY.
  Its exit status is not zero if that daemon cannot be reached.
- The control daemon takes ONE connection at a time and refuses a second one at once.
- A command may hang for ever: `terminate_client` has no time limit of its own.

So one thread of ours asks everything, one command after the other, each with a time limit, and
hands over what it found as values: the event loop never waits for MPS.  A caller who needs an
answer by a certain time keeps that time himself (`Released` may come late, or never).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

log = logging.getLogger(__name__)

PROGRAM = "nvidia-cuda-mps-control"
#: A healthy daemon answers in some 20 ms.
ASK_S = 5.0
#: Starting it initialises the driver, which takes seconds on idle boards.
START_S = 20.0
#: A daemon that was started and does not answer is not started again sooner than this.
RESTART_S = 30.0
#: Somebody else may be talking to the daemon (an administrator's shell): it refuses us meanwhile.
REFUSED = "Cannot send command to MPS control daemon process"
REFUSED_TRIES = 5
REFUSED_PAUSE_S = 0.1
#: A tree deeper than this is not a job's.
_DEPTH_MAX = 200
_SIGTERM_BIT = 1 << (15 - 1)


class ControlError(Exception):
    """The control daemon did not answer.  The message is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsServer:
    pid: int
    #: Whose server it is; None: it has just ended, or cannot be seen.
    uid: int | None
    #: INITIALIZING, ACTIVE or FAULT; "": this version does not tell.
    status: str = ""
    clients: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsReading:
    """`taken_at_ms` on CLOCK_MONOTONIC, just before the control daemon was asked."""

    taken_at_ms: int
    #: "": the control daemon answers.
    problem: str = ""
    servers: tuple[MpsServer, ...] = ()

    @property
    def clients(self) -> frozenset[int]:
        return frozenset[int]().union(*(server.clients for server in self.servers))


class Which(Enum):
    """Which clients of a job are to be terminated."""

    #: Before SIGTERM: those that it would kill on the spot.  Others handle it, perhaps by saving
    #: what they have on the GPU, and end by themselves.
    UNHANDLED = "unhandled"
    #: Before SIGKILL.
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Take a job's processes off the MPS server, so that they can be killed without harm."""

    job: int
    attempt: int
    #: The top of the job's process tree.
    root_pid: int
    which: Which


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    order: Release
    terminated: tuple[int, ...] = ()
    #: "": every client was taken off the server, or there was none.
    problem: str = ""


class Control:
    """The program, one command at a time."""

    def __init__(self, pipe_dir: Path, log_dir: Path) -> None:
        self.pipe_dir = pipe_dir
        self.log_dir = log_dir

    @property
    def environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
        # CUDA_VISIBLE_DEVICES above all must not be set: the server would number its GPUs anew.
        return env | {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_dir),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log_dir),
        }

    def ask(self, command: str) -> str:
        """The daemon's answer.

        Raises:
            ControlError: there is none.
        """
        for left in reversed(range(REFUSED_TRIES)):
            done = self._run(command)
            said = f"{done.stdout}{done.stderr}".strip()
            if REFUSED in said and left:
                time.sleep(REFUSED_PAUSE_S)
            elif done.returncode != 0 or REFUSED in said:
                about = _one_line(said) or f"it exited with {done.returncode}"
                raise ControlError(f"the CUDA MPS control daemon cannot be reached: {about}")
            else:
                return done.stdout.strip()
        raise AssertionError("the last try answers or raises")

    def start(self, *, multi_user: bool) -> None:
        """Start the control daemon in the background.  It outlives this process.

        Raises:
            ControlError: it could not be started.
        """
        argv = [PROGRAM, "-d", *(["-multiuser-server"] if multi_user else [])]
        try:
            if not self.pipe_dir.exists():
                self.pipe_dir.mkdir(parents=True)
                if os.geteuid() == 0:
                    # A server runs as its clients' user, and opens its sockets in here.
                    self.pipe_dir.chmod(0o1777)
            self.log_dir.mkdir(parents=True, exist_ok=True)
            # A file, not a pipe: the daemon may keep it open, and a pipe would never end.
            with tempfile.TemporaryFile() as output:
                done = subprocess.run(
                    argv,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    start_new_session=True,
                    timeout=START_S,
                )
                output.seek(0)
                said = output.read(4096).decode(errors="replace")
        except FileNotFoundError as error:
            raise ControlError(f"{PROGRAM} is not on the daemon's PATH") from error
        except subprocess.TimeoutExpired as error:
            raise ControlError(f"`{PROGRAM} -d` did not end within {START_S:.0f} s") from error
        except OSError as error:
            raise ControlError(
                f"the CUDA MPS control daemon cannot be started: {error}"
            ) from error
        if done.returncode != 0:
            about = _one_line(said) or f"it exited with {done.returncode}"
            raise ControlError(f"the CUDA MPS control daemon cannot be started: {about}")

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [PROGRAM],
                input=f"{command}\n",
                env=self.environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ASK_S,
            )
        except FileNotFoundError as error:
            raise ControlError(f"{PROGRAM} is not on the daemon's PATH") from error
        except subprocess.TimeoutExpired as error:
            raise ControlError(
                f"the CUDA MPS control daemon does not answer: `{command}` took over {ASK_S:.0f} s"
            ) from error
        except OSError as error:
            raise ControlError(f"{PROGRAM} cannot be run: {error.strerror}") from error


class Mps:
    """Watches the control daemon from a thread.  `fileno` becomes readable when there is news.

    `manage`: start the control daemon if none answers in `pipe_dir`.  It is never stopped: it
    serves jobs that outlive this process.
    """

    def __init__(
        self,
        pipe_dir: Path,
        log_dir: Path,
        *,
        manage: bool = False,
        multi_user: bool = False,
        period_s: float = 5.0,
    ) -> None:
        self.pipe_dir = pipe_dir
        self.log_dir = log_dir
        self._manage = manage
        self._multi_user = multi_user
        self._period_s = period_s
        self._control = Control(pipe_dir, log_dir)
        self._read_fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        #: None: something is to be read soon, or `stop` was called.
        self._orders: queue.SimpleQueue[Release | None] = queue.SimpleQueue()
        self._released: deque[Released] = deque()
        self._reading: MpsReading | None = None
        self._started_at = -RESTART_S
        self._asked = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._read_fd

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="mps", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for a command that hangs: the thread is a daemon thread."""
        self._stopping = True
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(timeout=0.5)

    def ask(self) -> None:
        """Read soon, not only when the period is over."""
        if not self._asked:
            self._asked = True
            self._orders.put(None)

    def release(self, order: Release) -> None:
        """Its `Released` comes from `drain`."""
        self._orders.put(order)

    def reading(self) -> MpsReading | None:
        """The latest; None: not read yet."""
        return self._reading

    def drain(self) -> list[Released]:
        """Take the wake-ups off the pipe, and what was released since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_fd, 4096):
                pass
        found: list[Released] = []
        while self._released:
            found.append(self._released.popleft())
        return found

    # ---- the thread ----------------------------------------------------------------

    def _serve(self) -> None:
        due = 0.0
        while not self._stopping:
            try:
                order = self._orders.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                order = None
            if self._stopping:
                return
            # Whoever waits to be killed goes first; the reading after it shows the result.
            if order is not None:
                self._released.append(self._release_safely(order))
                due = 0.0
            else:
                self._asked = False  # first: who asks from here on means a reading after this one
                self._reading = self._read_safely()
                due = time.monotonic() + self._period_s
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_fd, b".")

    def _read_safely(self) -> MpsReading:
        try:
            return self._read()
        except Exception as error:  # a bug of ours: shown, and the thread lives on
            log.exception("reading CUDA MPS failed")
            return MpsReading(taken_at_ms=_now_ms(), problem=f"a bug in rlqd: {error!r}")

    def _release_safely(self, order: Release) -> Released:
        try:
            return self._release(order)
        except Exception as error:
            log.exception("terminating MPS clients failed")
            return Released(order=order, problem=f"a bug in rlqd: {error!r}")

    # ---- asking --------------------------------------------------------------------

    def _read(self) -> MpsReading:
        taken_at_ms = _now_ms()
        try:
            try:
                servers = self._servers()
            except ControlError:
                if not self._manage or time.monotonic() - self._started_at < RESTART_S:
                    raise
                self._started_at = time.monotonic()
                self._control.start(multi_user=self._multi_user)
                log.info("started the CUDA MPS control daemon in %s", self.pipe_dir)
                taken_at_ms = _now_ms()
                servers = self._servers()
        except ControlError as error:
            return MpsReading(taken_at_ms=taken_at_ms, problem=str(error))
        return MpsReading(taken_at_ms=taken_at_ms, servers=tuple(servers))

    def _servers(self) -> list[MpsServer]:
        return [
            MpsServer(
                pid=pid,
                uid=_uid_of(pid),
                status=_status_in(self._control.ask(f"get_server_status {pid}")),
                clients=frozenset(_pids_in(self._control.ask(f"get_client_list {pid}"))),
            )
            for pid in _pids_in(self._control.ask("get_server_list"))
        ]

    def _release(self, order: Release) -> Released:
        """Asks anew who is a client: what the last reading knew may have changed since."""
        terminated: list[int] = []
        problems: list[str] = []
        try:
            for server in _pids_in(self._control.ask("get_server_list")):
                for pid in _pids_in(self._control.ask(f"get_client_list {server}")):
                    if not _is_below(pid, order.root_pid):
                        continue
                    if order.which is Which.UNHANDLED and _handles_sigterm(pid):
                        continue
                    _wake(pid)
                    said = self._control.ask(f"terminate_client {server} {pid}")
                    # The result is a bare CUresult or its name; only 0 is success.
                    if said in ("0", "CUDA_SUCCESS"):
                        terminated.append(pid)
                    elif _uid_of(pid) is not None:  # else it has ended meanwhile, by itself
                        problems.append(f"process {pid}: {_one_line(said) or 'no answer'}")
        except ControlError as error:
            problems.append(str(error))
        return Released(order=order, terminated=tuple(terminated), problem="; ".join(problems))


def _pids_in(answer: str) -> list[int]:
    """One a line.  Anything else the program says ("Server 12 not found") is no pid."""
    return [int(line) for line in map(str.strip, answer.splitlines()) if line.isdecimal()]


def _status_in(answer: str) -> str:
    """Older versions do not know the command, and say so."""
    found = re.search(r"\b(INITIALIZING|ACTIVE|FAULT)\b", answer)
    return found[1] if found else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _uid_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _is_below(pid: int, root_pid: int) -> bool:
    """Whether a process descends from another.  A job's supervisor is its tree's subreaper, so
    that nothing of a job leaves the tree."""
    for _ in range(_DEPTH_MAX):
        if pid == root_pid:
            return True
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        # The command in brackets may hold anything, brackets and blanks included.
        pid = int(stat.rpartition(")")[2].split()[1])
        if pid <= 1:
            return False
    return False


def _wake(pid: int) -> None:
    """A client that is stopped (`rlq pause`) does not do its part in being terminated."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            os.kill(pid, signal.SIGCONT)


def _handles_sigterm(pid: int) -> bool:
    """Whether SIGTERM does something else than kill the process on the spot."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = re.findall(r"^Sig(?:Cgt|Ign|Blk):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(mask, 16) & _SIGTERM_BIT for mask in masks)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
