"""The daemon's side of the supervisors: launch one per job, hear of its end, signal it.

rlqd.supervisor describes the attempt folder, `run_dir/<job>.<attempt>/`.  run_dir must be on a
disk that survives a reboot: its claims prove what has run and what has not.

Why an attempt runs once or never: the supervisor locks the folder, then claims the attempt by
making claim.json, exclusively, then runs the command.  A recovering daemon that finds no claim
makes one itself, a void one: a supervisor still on its way finds it and exits.  One that has
claimed holds the lock for as long as it lives.

Nothing here waits for a job, and nothing else in the daemon sends signals.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import py_compile
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import rlqd.supervisor
from rlqd.fences import Fence

#: Where the supervisor finds the write end of the ready pipe.
_READY_FD: Final = 3
_PASSING: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
#: For the left-overs of a lost job to die; they are killed, so only the kernel can delay it.
_LEFTOVERS_DIE_S: Final = 1.0
#: A supervisor that was told to kill has done so by then, if it can.
_LAUNCH_HANGS_S: Final = 3.0
_ENVIRON_BYTES_MAX: Final = 8 * 1024 * 1024
#: In the attempt folder: what the command around a supervisor has to say.
_WRAPPER_SAID: Final = "wrapper.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """Exactly what to run.  Strings may hold undecodable bytes as surrogate escapes."""

    job: int
    attempt: int
    argv: tuple[str, ...]
    #: The whole environment; the queue's markers are added to it.
    env: Mapping[str, str] = field(repr=False)
    cwd: str
    umask: int
    uid: int
    gid: int
    #: Supplementary groups; None: `gid` alone.  Used only by root for somebody else.
    groups: tuple[int, ...] | None = None
    #: Logical CPUs; empty: those of the daemon.
    cpus: tuple[int, ...] = ()
    #: Absolute; opened, and its folders made, as the user.
    log_path: str
    log_mib_max: int | None = None
    #: Such as {"RLIMIT_CORE": (0, 0)}; -1 is no limit.
    rlimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    oom_score_adj: int | None = None
    fence: Fence = field(default_factory=Fence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A supervisor of ours.  Poll both descriptors for reading; Processes closes them."""

    job: int
    attempt: int
    #: The supervisor's.
    pid: int
    #: Readable once the supervisor has gone: call `reap`.
    pidfd: int
    #: Readable once there is news of the launch: call `read_ready`.  None: recovered.
    ready_fd: int | None
    #: Known for a recovered job only; else `Started` tells.
    command_pid: int | None = None
    cgroup: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The command runs: exec has succeeded."""

    job: int
    attempt: int
    pid: int
    command_pid: int
    #: The folder of the command's own control group; None: it has none.
    cgroup: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchError:
    """The command never ran.  `message` is a sentence for the user."""

    job: int
    attempt: int
    #: "state", "log", "fork", "affinity", "rlimits", "user", "cwd", "exec", "setup", "cgroup",
    #: "supervisor", and "fence": the command around the supervisor failed
    stage: str
    errno: int
    message: str
    #: The machine's fault, worth another try.
    passing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How the command ended: one of `code` and `signal`."""

    job: int
    attempt: int
    code: int | None
    signal: int | None
    #: "gpu" or "host" when it ran out of that memory.
    oom: str | None
    #: The limit of the job's own at which the kernel killed; None: the machine's, or not known.
    oom_limit_mib: int | None = None
    #: Before that somebody asked the supervisor to stop it, and it was not the daemon.
    stopped_by_others: bool = False
    #: When the command itself ended, Unix seconds.
    ended_at: float
    utime_s: float
    stime_s: float
    #: The largest process of the tree.
    maxrss_mib: int
    #: Output that found no room on the disk.
    log_lost_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """It ran, nothing of it runs any more, and how it ended nobody knows."""

    job: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """The supervisor has died without news of the launch: `reap` will say what that means."""

    job: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    record: ExitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Voided:
    """It never ran and never will."""

    job: int
    attempt: int


Ready = Started | LaunchError | Silent
End = ExitRecord | LaunchError | Lost
Recovered = Alive | Exited | LaunchError | Lost | Voided


class Processes:
    """All supervisors of one daemon.  Not for several threads."""

    def __init__(self, run_dir: Path, queue_id: str, *, python: str = sys.executable) -> None:
        """`queue_id` tells this state folder's jobs from those of other daemons.

        Raises:
            OSError: run_dir cannot be made, or this kernel is older than Linux 5.4.
        """
        if not hasattr(os, "pidfd_open"):
            raise OSError(errno.ENOSYS, "this Python has no os.pidfd_open; rlqd needs it")
        try:
            pidfd = os.pidfd_open(os.getpid())
        except OSError as error:
            raise OSError(error.errno, "rlqd needs pidfds: Linux 5.4 or later") from error
        os.close(pidfd)
        self._run_dir = run_dir.absolute()
        self._queue_id = queue_id
        self._python = python
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._program = self._compile()
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        #: What has come through each open ready pipe, by attempt and not by descriptor: its
        #: number is another launch's as soon as it is closed.
        self._news: dict[tuple[int, int], bytearray] = {}
        #: When each was first asked to kill; CLOCK_MONOTONIC seconds.
        self._kills: dict[tuple[int, int], float] = {}
        self._failures: dict[tuple[int, int], LaunchError] = {}

    def folder(self, job: int, attempt: int) -> Path:
        return self._run_dir / f"{job}.{attempt}"

    def markers(self, job: int, attempt: int) -> dict[str, str]:
        """Variables by which a job's processes are known when its supervisor has been killed."""
        return {
            "RLQ_QUEUE": self._queue_id,
            "RLQ_JOB_ID": str(job),
            "RLQ_ATTEMPT": str(attempt),
        }

    def launch(self, order: LaunchOrder) -> Handle | LaunchError:
        """Start a supervisor and return at once; news comes through the handle."""
        key = (order.job, order.attempt)
        folder = self.folder(*key)
        with contextlib.ExitStack() as until_spawned:
            try:
                folder.mkdir(mode=0o700)
                # Unlinked by nature: the environment's secrets are never on a disk.
                order_fd = os.memfd_create("rlq-order")
                until_spawned.callback(os.close, order_fd)
                data = memoryview(self._encode(order, folder))
                while data:
                    data = data[os.write(order_fd, data) :]
                os.lseek(order_fd, 0, os.SEEK_SET)
                ready_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                until_spawned.callback(os.close, write_fd)
                failing = until_spawned.enter_context(contextlib.ExitStack())
                failing.callback(os.close, ready_fd)
                pid = self._spawn(order_fd, write_fd, order.fence, folder)
                # The child is ours and not waited for: its pid cannot be another's.
                pidfd = os.pidfd_open(pid)
                failing.pop_all()
            except OSError as error:
                number = error.errno or 0
                if order.fence.wrapper and error.filename == order.fence.wrapper[0]:
                    message = f"cannot run {error.filename}: {os.strerror(number)}"
                    return self._launch_error(key, "fence", number, message, True)
                return self._launch_error(
                    key,
                    "supervisor",
                    number,
                    f"cannot start the job's supervisor: {os.strerror(number)}",
                    number in _PASSING,
                )
        self._news[key] = bytearray()
        return Handle(
            job=order.job, attempt=order.attempt, pid=pid, pidfd=pidfd, ready_fd=ready_fd
        )

    def read_ready(self, handle: Handle) -> Ready | None:
        """Call it when `ready_fd` is readable.

        Anything but None is the last word; the descriptor is closed then: stop polling it
        before anything else is opened.
        """
        fd = handle.ready_fd
        key = (handle.job, handle.attempt)
        if fd is None or key not in self._news:
            return None
        buffer = self._news[key]
        try:
            while part := os.read(fd, 65536):
                buffer += part
        except BlockingIOError:
            return None
        self._close_ready(handle)
        try:
            news = json.loads(buffer)
        except ValueError:
            return Silent(job=handle.job, attempt=handle.attempt)
        if "started" in news:
            return Started(job=handle.job, attempt=handle.attempt, **news["started"])
        error = self._launch_error_of(key, news["failed"])
        self._failures[key] = error
        return error

    def reap(self, handle: Handle) -> End:
        """Call it once, when `pidfd` is readable; it closes the handle's descriptors.

        Where the supervisor was killed, what it leaves of the job is killed here.
        """
        key = (handle.job, handle.attempt)
        self.read_ready(handle)  # news of a failed launch may still lie there
        self._close_ready(handle)
        status, was_killed = None, False
        with contextlib.suppress(ChildProcessError):  # recovered: somebody else's child
            if result := os.waitid(os.P_PIDFD, handle.pidfd, os.WEXITED | os.WNOHANG):
                status, was_killed = result.si_status, result.si_code != os.CLD_EXITED
        os.close(handle.pidfd)
        self._kills.pop(key, None)
        failure = self._failures.pop(key, None)
        if (record := self._read_record(key)) is not None:
            return record
        if failure is not None:
            return failure
        if self._claim_or_void(key) is None or self._is_void(key):
            bad_order = status == rlqd.supervisor.BAD_ORDER
            ours = (rlqd.supervisor.BAD_ORDER, rlqd.supervisor.VOIDED)
            # A supervisor that the kernel killed, for its job's own limit of memory perhaps, is no
            # word on whether scopes can be made: on that hang the limits of all jobs.
            said = None if status in ours or was_killed else self._wrapper_said(key)
            if said is not None:
                message = f"no scope could be made for it: {said or f'status {status}'}"
                return self._launch_error(key, "fence", 0, message, True)
            return self._launch_error(
                key,
                "supervisor",
                0,
                "the job's supervisor could not read its order"
                if bad_order
                else f"the job's supervisor ended before it ran anything (status {status})",
                not bad_order,
            )
        return self._lost(key)

    def recover(self, job: int, attempt: int) -> Recovered:
        """What became of an attempt that a former daemon has launched, or was about to.

        Race-free against a supervisor still on its way.  Any answer but Alive is final;
        `discard` the attempt once it is committed.

        Raises:
            OSError: nothing is known yet: the disk is full, or cannot be read.
        """
        key = (job, attempt)
        self.folder(job, attempt).mkdir(mode=0o700, exist_ok=True)
        if (end := self._read_record(key)) is not None:
            return Exited(record=end) if isinstance(end, ExitRecord) else end
        claim = self._claim_or_void(key)
        if claim is None or claim.get("void"):
            return Voided(job=job, attempt=attempt)
        if "boot_id" not in claim:
            return self._lost(key, "its claim file is damaged")
        if claim["boot_id"] != self._boot_id:
            return Lost(job=job, attempt=attempt, reason="the machine was rebooted")
        handle = self._handle_of(key, claim)
        if handle is not None:
            return Alive(handle=handle)
        # It may have ended between the two looks.
        if (end := self._read_record(key)) is not None:
            return Exited(record=end) if isinstance(end, ExitRecord) else end
        return self._lost(key)

    def terminate(self, handle: Handle) -> None:
        """SIGTERM to the command, then to what it leaves behind."""
        # First: that the SIGTERM is ours.  Supervisors of older versions ignore it.
        self._send(handle, signal.SIGUSR2)
        self._send(handle, signal.SIGTERM)

    def kill(self, handle: Handle) -> None:
        """SIGKILL to the whole tree.

        A supervisor that still has not told of the launch some seconds after it was first asked
        hangs in it, in an open(2) on a dead network disk, say: then it is killed itself, and
        `reap` sees to what it leaves.
        """
        key = (handle.job, handle.attempt)
        asked_at = self._kills.setdefault(key, time.monotonic())
        is_hanging = key in self._news and time.monotonic() - asked_at >= _LAUNCH_HANGS_S
        self._send(handle, signal.SIGKILL if is_hanging else signal.SIGUSR1)

    def freeze(self, handle: Handle) -> None:
        """SIGSTOP to the whole tree."""
        self._send(handle, signal.SIGTSTP)

    def thaw(self, handle: Handle) -> None:
        """SIGCONT to the whole tree."""
        self._send(handle, signal.SIGCONT)

    def release(self, handle: Handle) -> None:
        """Close a handle's descriptors and forget it; `recover` finds the job again."""
        self._close_ready(handle)
        self._failures.pop((handle.job, handle.attempt), None)
        os.close(handle.pidfd)

    def attempts(self) -> list[tuple[int, int]]:
        """(job, attempt) of every attempt folder there is."""
        return _attempts(self._run_dir)

    def discard(self, job: int, attempt: int) -> None:
        """Forget an attempt whose end is committed."""
        with contextlib.suppress(OSError):
            if cgroup := _read_claim(self.folder(job, attempt) / "claim.json").get("cgroup"):
                os.rmdir(cgroup)  # its supervisor has done so, unless it was killed
        shutil.rmtree(self.folder(job, attempt), ignore_errors=True)

    # ---- launching -----------------------------------------------------------------

    def _compile(self) -> Path:
        """A script is compiled anew at every start, its .pyc is not: 20 ms a job.

        A copy of our own also keeps a running daemon and its supervisors at one version
        while the package is upgraded beneath it.
        """
        source = Path(rlqd.supervisor.__file__)
        compiled = self._run_dir / "supervisor.pyc"
        try:
            py_compile.compile(
                str(source),
                cfile=str(compiled),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
        except (OSError, py_compile.PyCompileError):
            return source
        return compiled

    def _encode(self, order: LaunchOrder, folder: Path) -> bytes:
        text = json.dumps(
            {
                "job": order.job,
                "attempt": order.attempt,
                "dir": str(folder),
                "argv": list(order.argv),
                "env": {**order.env, **self.markers(order.job, order.attempt)},
                "cwd": order.cwd,
                "umask": order.umask,
                "uid": order.uid,
                "gid": order.gid,
                "groups": None if order.groups is None else list(order.groups),
                "cpus": list(order.cpus),
                "log_path": order.log_path,
                "log_mib_max": order.log_mib_max,
                "rlimits": {name: list(limit) for name, limit in order.rlimits.items()},
                "oom_score_adj": order.oom_score_adj,
                "cgroup": {
                    "path": order.fence.cgroup,
                    "limits": order.fence.limits,
                    "files": dict(order.fence.files),
                },
                "ready_fd": _READY_FD,
            }
        )
        return text.encode()

    def _spawn(self, order_fd: int, ready_fd: int, fence: Fence, folder: Path) -> int:
        """The pid.  posix_spawn shares the daemon's memory until exec: no copy, no page faults.

        Raises:
            OSError: no process, or no such program.
        """
        argv = [*fence.wrapper, self._python, "-I", "-S", str(self._program)]
        errors = str(folder / _WRAPPER_SAID) if fence.wrapper else "/dev/null"
        return os.posix_spawnp(
            argv[0],
            argv,
            {
                "PATH": os.environ.get("PATH", os.defpath),
                "LC_ALL": "C.UTF-8",
                **fence.wrapper_env,
            },
            file_actions=[
                (os.POSIX_SPAWN_DUP2, order_fd, 0),
                (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, errors, os.O_WRONLY | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, ready_fd, _READY_FD),
            ],
            setsid=True,
            # Blocked until it has handlers: a signal that comes early waits.
            setsigmask=list(rlqd.supervisor.CONTROLS),
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT],
        )

    def _close_ready(self, handle: Handle) -> None:
        key = (handle.job, handle.attempt)
        if handle.ready_fd is not None and self._news.pop(key, None) is not None:
            os.close(handle.ready_fd)

    def _wrapper_said(self, key: tuple[int, int]) -> str | None:
        """The last line of the command around a supervisor, "" included; None: there is none."""
        try:
            text = (self.folder(*key) / _WRAPPER_SAID).read_text(errors="replace")
        except OSError:
            return None
        return (text.splitlines() or [""])[-1].strip()

    # ---- the attempt folder --------------------------------------------------------

    def _claim_or_void(self, key: tuple[int, int]) -> dict[str, Any] | None:
        """The claim that there is; None: there was none, and now there is our void one."""
        folder = self.folder(*key)
        claim = folder / "claim.json"
        with contextlib.suppress(FileNotFoundError):
            return _read_claim(claim)
        fd, temporary = tempfile.mkstemp(prefix="void.", dir=folder)
        try:
            os.write(fd, b'{"void": true}')
            os.fsync(fd)
            os.link(temporary, claim)
        except FileExistsError:
            return _read_claim(claim)
        finally:
            os.close(fd)
            os.unlink(temporary)
        for path in (folder, self._run_dir):
            _fsync_folder(path)
        return None

    def _is_void(self, key: tuple[int, int]) -> bool:
        return bool(_read_claim(self.folder(*key) / "claim.json").get("void"))

    def _read_record(self, key: tuple[int, int]) -> ExitRecord | LaunchError | None:
        try:
            record = _read_object(self.folder(*key) / "exit.json")
        except (FileNotFoundError, ValueError):  # damaged is as good as none
            return None
        if "failed" in record:
            return self._launch_error_of(key, record["failed"])
        # One by one: a supervisor started by another version may write more or less.
        return ExitRecord(
            job=key[0],
            attempt=key[1],
            code=record.get("code"),
            signal=record.get("signal"),
            oom=record.get("oom"),
            oom_limit_mib=record.get("oom_limit_mib"),
            stopped_by_others=record.get("stopped_by_others") is True,
            ended_at=float(record.get("ended_at", 0.0)),
            utime_s=float(record.get("utime_s", 0.0)),
            stime_s=float(record.get("stime_s", 0.0)),
            maxrss_mib=int(record.get("maxrss_mib", 0)),
            log_lost_bytes=int(record.get("log_lost_bytes", 0)),
        )

    def _handle_of(self, key: tuple[int, int], claim: Mapping[str, Any]) -> Handle | None:
        """None: the supervisor that made this claim has gone."""
        pid = int(claim["pid"])
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EINVAL):
                raise
            return None
        # The lock is taken before the claim is made and held for life.  So if it is held now,
        # its holder lived when the pidfd was opened, and the pid was its own.
        if not self._is_locked(key) or _start_time(pid) != claim["start_time"]:
            os.close(pidfd)
            return None
        command_pid = None
        with contextlib.suppress(FileNotFoundError):
            started = _read_object(self.folder(*key) / "started.json")
            command_pid = int(started["command_pid"])
        return Handle(
            job=key[0],
            attempt=key[1],
            pid=pid,
            pidfd=pidfd,
            ready_fd=None,
            command_pid=command_pid,
            cgroup=claim.get("cgroup"),
        )

    def _is_locked(self, key: tuple[int, int]) -> bool:
        return _is_held(self.folder(*key) / "lock")

    # ---- ends ----------------------------------------------------------------------

    def _lost(self, key: tuple[int, int], reason: str = "the job's supervisor was killed") -> Lost:
        with contextlib.suppress(OSError):
            crash = (self.folder(*key) / "crash.txt").read_text(errors="replace").strip()
            reason = f"the job's supervisor failed ({crash})"
        killed, left = self._kill_leftovers(key)
        if killed:
            reason += f"; {killed} left-over process{'es were' if killed > 1 else ' was'} killed"
        if left:
            pids = ", ".join(map(str, sorted(left)))
            reason += f"; {len(left)} could not be killed yet ({pids})"
        return Lost(job=key[0], attempt=key[1], reason=reason)

    def _kill_leftovers(self, key: tuple[int, int]) -> tuple[int, set[int]]:
        """How many were killed, and those that have not gone yet.

        Repeated until a look finds none: they may fork meanwhile.
        """
        cgroup = None
        with contextlib.suppress(OSError):
            cgroup = _read_claim(self.folder(*key) / "claim.json").get("cgroup")
        wanted = {f"{name}={value}".encode() for name, value in self.markers(*key).items()}
        killed: set[tuple[int, int]] = set()
        deadline = time.monotonic() + _LEFTOVERS_DIE_S
        while True:
            found = [*_marked_processes(wanted), *_members(cgroup)]
            try:
                if cgroup is not None:  # all at once, where the kernel can
                    with contextlib.suppress(OSError):
                        Path(cgroup, "cgroup.kill").write_text("1")
                for pid, start_time, pidfd in found:
                    killed.add((pid, start_time))
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                left = {pid for pid, _, pidfd in found if not _has_ended(pidfd, deadline)}
            finally:
                for _, _, pidfd in found:
                    os.close(pidfd)
            if not found or time.monotonic() >= deadline:
                return len(killed), left

    def _send(self, handle: Handle, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # its end is about to be reaped
            signal.pidfd_send_signal(handle.pidfd, number)

    def _launch_error_of(self, key: tuple[int, int], failed: Mapping[str, Any]) -> LaunchError:
        return self._launch_error(
            key, failed["stage"], failed["errno"], failed["message"], failed["passing"]
        )

    @staticmethod
    def _launch_error(
        key: tuple[int, int], stage: str, number: int, message: str, passing: bool
    ) -> LaunchError:
        return LaunchError(
            job=key[0],
            attempt=key[1],
            stage=stage,
            errno=number,
            message=message,
            passing=passing,
        )


def running_attempts(run_dir: Path) -> list[tuple[int, int]]:
    """(job, attempt) of each that runs now.  Only while no daemon runs, which may be launching:
    a supervisor that finds its lock taken gives up."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(FileNotFoundError):
        for job, attempt in _attempts(run_dir):
            with contextlib.suppress(FileNotFoundError):  # it never came to take its lock
                if _is_held(run_dir / f"{job}.{attempt}" / "lock"):
                    found.append((job, attempt))
    return found


def _attempts(run_dir: Path) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for name in os.listdir(run_dir):
        job, _, attempt = name.partition(".")
        if job.isdigit() and attempt.isdigit():
            found.append((int(job), int(attempt)))
    return sorted(found)


def _is_held(lock: Path) -> bool:
    """Whether a supervisor lives that has taken this lock."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)  # which NFS wants of a lock
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # A failing disk has turned read-only under a job that must be found to be stopped.
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _read_object(path: Path) -> dict[str, Any]:
    """Raises: OSError; ValueError (damaged)."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged")
    return value


def _read_claim(path: Path) -> dict[str, Any]:
    """{}: damaged, by whatever damages files; somebody has claimed the attempt all the same."""
    try:
        return _read_object(path)
    except ValueError:
        return {}


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _start_time(pid: int) -> int | None:
    try:
        return rlqd.supervisor.Process(pid).start_time
    except OSError:
        return None


def _marked_processes(wanted: set[bytes]) -> list[tuple[int, int, int]]:
    """Pid, start time and an open pidfd of each process that has these in its environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        pid = int(name)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        # Read after the pidfd is there: if it then still lives, this is its environment.
        if _has_markers(pid, wanted) and not _has_ended(pidfd, 0.0):
            start_time = _start_time(pid)
            if start_time is not None:
                found.append((pid, start_time, pidfd))
                continue
        os.close(pidfd)
    return found


def _members(cgroup: str | None) -> list[tuple[int, int, int]]:
    """As `_marked_processes`, by their control group: for those that have changed their
    environment.  Its name is this attempt's alone, so nobody else's can be in it."""
    found: list[tuple[int, int, int]] = []
    with contextlib.suppress(OSError, ValueError):
        for word in Path(cgroup or "", "cgroup.procs").read_text().split():
            pidfd = os.pidfd_open(int(word))
            start_time = None if _has_ended(pidfd, 0.0) else _start_time(int(word))
            if start_time is None:
                os.close(pidfd)
            else:
                found.append((int(word), start_time, pidfd))
    return found


def _has_markers(pid: int, wanted: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return wanted <= set(environ.read(_ENVIRON_BYTES_MAX).split(b"\0"))
    except OSError:
        return False


def _has_ended(pidfd: int, deadline: float) -> bool:
    """Waits until `deadline` (CLOCK_MONOTONIC seconds) for it."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
