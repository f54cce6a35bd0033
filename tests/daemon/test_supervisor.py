"""The supervisor by its contract: an order in, a command run exactly so, its end on disk."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.groups import killable_group, until_gone
from tests.support.waiting import wait_until

import rlqd.supervisor

SUPERVISOR = rlqd.supervisor.__file__
#: A Python that any user may run; the one of the virtual environment may lie in /root.
SYSTEM_PYTHON = "/usr/bin/python3"
MIB = 1024 * 1024
is_root = os.geteuid() == 0
needs_root = pytest.mark.skipif(not is_root, reason="changes users or mounts: needs root")


def alive(pid: int) -> bool:
    try:
        state = rlqd.supervisor.Process(pid).state
    except OSError:
        return False
    return state not in (b"Z", b"X")


def holds(path: Path, text: bytes) -> bool:
    try:
        return text in path.read_bytes()
    except OSError:
        return False


def state_of(pid: int) -> str:
    try:
        return rlqd.supervisor.Process(pid).state.decode()
    except OSError:
        return "gone"


class Attempt:
    """One attempt folder, and the supervisor at work on it."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder = folder
        self.place = place
        self.log = place / "log"
        self.program = SUPERVISOR
        self.process: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1
        folder.mkdir(mode=0o700)

    def order(self, *argv: str, **changes: Any) -> dict[str, Any]:
        order: dict[str, Any] = {
            "job": 7,
            "attempt": 1,
            "dir": str(self.folder),
            "argv": list(argv),
            "env": {"PATH": os.environ["PATH"]},
            "cwd": str(self.place),
            "umask": 0o022,
            "uid": os.getuid(),
            "gid": os.getgid(),
            "groups": None,
            "cpus": [],
            "log_path": str(self.log),
            "log_mib_max": None,
            "rlimits": {},
            "oom_score_adj": None,
            "cgroup": None,
            "ready_fd": None,
        }
        return order | changes

    def spawn(self, text: bytes, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", self.program], stdin=subprocess.PIPE, pass_fds=pass_fds
        )
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.close()
        return self.process

    def start(self, *argv: str, **changes: Any) -> Attempt:
        self._ready_fd, write_fd = os.pipe()
        order = self.order(*argv, **changes) | {"ready_fd": write_fd}
        self.spawn(json.dumps(order).encode(), (write_fd,))
        os.close(write_fd)
        return self

    def ready(self) -> dict[str, Any]:
        with os.fdopen(self._ready_fd, "rb") as pipe:
            line = pipe.read()
        assert line.endswith(b"\n"), line
        news: dict[str, Any] = json.loads(line)
        return news

    def command(self) -> int:
        """Wait for the start; the command's pid."""
        return int(self.ready()["started"]["command_pid"])

    def said(self, word: str) -> str:
        """Wait for a word in the log; the whole log."""
        return wait_until(
            lambda: self.log.read_text() if self.log.exists() else "", lambda text: word in text
        )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def exit_status(self) -> int:
        assert self.process is not None
        return self.process.wait(60)

    def record(self) -> dict[str, Any]:
        """Wait for the end; how it was."""
        assert self.exit_status() == 0
        record: dict[str, Any] = json.loads((self.folder / "exit.json").read_text())
        return record

    def clear(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            self.process.wait(60)


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    place = tmp_path / "place"
    place.mkdir()
    attempt = Attempt(tmp_path / "7.1", place)
    yield attempt
    attempt.clear()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can reach, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="rlq-test."))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    if not is_root or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"x" * 4096)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-u", "-c", code)


# ---- what runs is exactly what was asked -------------------------------------------


def test_the_command_gets_exactly_its_argv_env_cwd_and_umask(attempt: Attempt) -> None:
    look = """
import json, os
print(json.dumps({
    "argv": open("/proc/self/cmdline", "rb").read().decode("latin-1"),
    "env": open("/proc/self/environ", "rb").read().decode("latin-1"),
    "cwd": os.getcwd(), "umask": os.umask(0), "stdin": os.readlink("/proc/self/fd/0"),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "session": os.getsid(0), "pid": os.getpid(),
}))
"""
    words = ("", "two words", "$HOME", "\udcff\udcfe", "é", "a\nb", "😀")
    env = {"PATH": "/nowhere", "EMPTY": "", "RAW": "\udc80", "LINES": "1\n2", "UNI": "😀"}
    attempt.start(*python(look), *words, env=env, umask=0o027)
    assert attempt.record()["code"] == 0
    seen = json.loads(attempt.log.read_text())

    def raw(text: str) -> bytes:
        return text.encode("utf-8", "surrogateescape")

    argv = [*python(look), *words]
    assert seen["argv"].encode("latin-1") == b"".join(raw(word) + b"\0" for word in argv)
    variables = b"".join(raw(f"{name}={value}") + b"\0" for name, value in env.items())
    assert seen["env"].encode("latin-1") == variables
    assert seen["cwd"] == str(attempt.place)
    assert seen["umask"] == 0o027
    assert seen["stdin"] == "/dev/null"
    assert seen["fds"] == [0, 1, 2]
    assert seen["session"] == seen["pid"]


def test_the_command_starts_with_no_signal_ignored_or_blocked(attempt: Attempt) -> None:
    attempt.start("cat", "/proc/self/status")
    assert attempt.record()["code"] == 0
    status = dict(line.split(":\t", 1) for line in attempt.log.read_text().splitlines())
    # Signals 32 and 33 are glibc's own: its posix_spawn ignores them in the child where the parent
    # had handlers for them, and a program that needs them sets its own.
    ours = ~(0b11 << 31)
    assert int(status["SigIgn"], 16) & ours == 0
    assert int(status["SigBlk"], 16) & ours == 0


def test_cores_are_set_before_the_program_runs(attempt: Attempt) -> None:
    core = max(os.sched_getaffinity(0))
    attempt.start("cat", "/proc/self/status", cpus=[core])
    assert attempt.record()["code"] == 0
    status = dict(line.split(":\t", 1) for line in attempt.log.read_text().splitlines())
    assert status["Cpus_allowed_list"] == str(core)


def test_every_thread_inherits_the_cores(attempt: Attempt) -> None:
    core = max(os.sched_getaffinity(0))
    threads = """
import threading, time
for _ in range(3): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("up"); time.sleep(600)
"""
    attempt.start(*python(threads), cpus=[core])
    pid = attempt.command()
    attempt.said("up\n")
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    assert len(tasks) == 4
    for task in tasks:
        assert f"Cpus_allowed_list:\t{core}\n" in (task / "status").read_text()


def test_limits_and_oom_score_are_set(attempt: Attempt) -> None:
    attempt.start(
        "sh",
        "-c",
        "ulimit -n; ulimit -c; cat /proc/self/oom_score_adj",
        rlimits={"RLIMIT_NOFILE": [123, 456], "RLIMIT_CORE": [0, 0]},
        oom_score_adj=321,
    )
    assert attempt.record()["code"] == 0
    assert attempt.log.read_text().split() == ["123", "0", "321"]


def test_a_script_without_shebang_runs_under_sh(attempt: Attempt) -> None:
    script = attempt.place / "run"
    script.write_text('echo "$0 $1"\n')
    script.chmod(0o755)
    attempt.start("./run", "word")
    assert attempt.record()["code"] == 0
    assert attempt.log.read_text() == "./run word\n"


def test_a_program_is_found_by_the_path_of_the_job(attempt: Attempt) -> None:
    folder = attempt.place / "bin"
    folder.mkdir()
    (folder / "mine").write_text("#!/bin/sh\necho found\n")
    (folder / "mine").chmod(0o755)
    attempt.start("mine", env={"PATH": f"/nowhere:{folder}"})
    assert attempt.record()["code"] == 0
    assert attempt.log.read_text() == "found\n"


@pytest.mark.parametrize(
    ("status", "code", "number"), [("exit 3", 3, None), ("kill -6 $$", None, 6)]
)
def test_the_exit_is_recorded(
    attempt: Attempt, status: str, code: int | None, number: int | None
) -> None:
    attempt.start("sh", "-c", status)
    assert attempt.command() > 0
    record = attempt.record()
    assert (record["code"], record["signal"], record["oom"]) == (code, number, None)
    assert record["log_lost_bytes"] == 0
    assert record["ended_at"] > 1_700_000_000


def test_the_record_counts_the_whole_tree_s_cpu_time_and_largest_process(
    attempt: Attempt,
) -> None:
    work = "x = bytearray(64 * 1024 * 1024)\nimport os\nwhile os.times().user < 0.2: pass"
    attempt.start("sh", "-c", '"$@" & wait', "sh", *python(work))
    record = attempt.record()
    assert record["utime_s"] >= 0.2
    assert record["maxrss_mib"] >= 64


# ---- what cannot run says why ------------------------------------------------------


def _folder_as_command(attempt: Attempt) -> dict[str, Any]:
    return {"argv": [str(attempt.place)]}


def _without_execute_bit(attempt: Attempt) -> dict[str, Any]:
    (attempt.place / "data").write_text("x")
    return {"argv": ["./data"]}


def _without_interpreter(attempt: Attempt) -> dict[str, Any]:
    (attempt.place / "script").write_text("#!/no/such/python\n")
    (attempt.place / "script").chmod(0o755)
    return {"argv": ["./script"]}


def _foreign_binary(attempt: Attempt) -> dict[str, Any]:
    (attempt.place / "binary").write_bytes(b"\x7fELF\x02\x01\x01\0 of another machine")
    (attempt.place / "binary").chmod(0o755)
    return {"argv": ["./binary"]}


def _log_in_a_file(attempt: Attempt) -> dict[str, Any]:
    (attempt.place / "file").write_text("x")
    return {"log_path": str(attempt.place / "file/log")}


def _log_is_a_fifo(attempt: Attempt) -> dict[str, Any]:
    os.mkfifo(attempt.place / "fifo")
    return {"log_path": str(attempt.place / "fifo")}


@pytest.mark.parametrize(
    ("changes", "stage", "number", "message"),
    [
        ({"argv": ["nope"]}, "exec", errno.ENOENT, "command not found: nope"),
        ({"argv": ["/no/such"]}, "exec", errno.ENOENT, "command not found: /no/such"),
        ({"argv": [""]}, "exec", errno.ENOENT, "the command is an empty word"),
        (_folder_as_command, "exec", errno.EACCES, "it is a folder"),
        (_without_execute_bit, "exec", errno.EACCES, "is it executable?"),
        (_without_interpreter, "exec", errno.ENOENT, "interpreter of ./script does not exist"),
        (_foreign_binary, "exec", errno.ENOEXEC, "./binary is not a program for this machine"),
        ({"argv": ["true", "x" * 140_000]}, "exec", errno.E2BIG, "environment are too long ("),
        ({"argv": ["true", "a\0b"]}, "exec", errno.EINVAL, "null byte"),
        ({"env": {"A=B": "1"}}, "exec", errno.EINVAL, "cannot run true"),
        ({"cwd": "/no/such"}, "cwd", errno.ENOENT, "directory /no/such does not exist"),
        ({"cwd": "/etc/passwd"}, "cwd", errno.ENOTDIR, "/etc/passwd: Not a directory"),
        ({"cpus": [4095]}, "affinity", errno.EINVAL, "cannot use the cores [4095]"),
        ({"cpus": ["x"]}, "affinity", errno.EINVAL, "cannot use the cores"),
        ({"rlimits": {"RLIMIT_NOPE": [1, 1]}}, "rlimits", errno.EINVAL, "cannot set RLIMIT_NOPE"),
        ({"log_path": "/etc"}, "log", errno.EISDIR, "cannot open the log /etc: Is a directory"),
        (_log_in_a_file, "log", errno.ENOTDIR, "Not a directory"),
        (_log_is_a_fifo, "log", errno.EINVAL, "it is not a regular file"),
        ({"log_path": "/proc/self/comm"}, "log", errno.EINVAL, "it is not a regular file"),
    ],
)
def test_a_launch_that_fails_says_why(
    attempt: Attempt,
    changes: dict[str, Any] | Callable[[Attempt], dict[str, Any]],
    stage: str,
    number: int,
    message: str,
) -> None:
    changes = changes(attempt) if callable(changes) else changes
    attempt.start(*changes.pop("argv", ["true"]), **changes)
    failed = attempt.ready()["failed"]
    assert (failed["stage"], failed["errno"]) == (stage, number)
    assert message in failed["message"]
    assert not failed["passing"]
    assert attempt.record() == {"failed": failed}, "a recovering daemon must find it too"


def test_a_launch_that_fails_for_want_of_processes_may_pass(attempt: Attempt) -> None:
    assert [rlqd.supervisor.Failure("fork", n, "").as_record()["passing"] for n in (
        errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOSPC
    )] == [True, True, True, True, False, False]  # fmt: skip


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_truncated_order_runs_nothing(attempt: Attempt, cut: int) -> None:
    text = json.dumps(attempt.order("touch", "ran")).encode()
    attempt.spawn(text[:cut])
    assert attempt.exit_status() == rlqd.supervisor.BAD_ORDER
    assert not list(attempt.place.iterdir())
    assert not list(attempt.folder.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"argv": []},
        {"argv": [1]},
        {"argv": "true"},
        {"env": {"A": 1}},
        {"dir": None},
        {"uid": "0"},
    ],
)
def test_an_invalid_order_runs_nothing(attempt: Attempt, change: dict[str, Any]) -> None:
    attempt.spawn(json.dumps(attempt.order("touch", "ran") | change).encode())
    assert attempt.exit_status() == rlqd.supervisor.BAD_ORDER
    assert not list(attempt.folder.iterdir())


def test_an_order_with_something_behind_it_runs_nothing(attempt: Attempt) -> None:
    attempt.spawn(json.dumps(attempt.order("touch", "ran")).encode() + b"{}")
    assert attempt.exit_status() == rlqd.supervisor.BAD_ORDER
    assert not list(attempt.folder.iterdir())


# ---- once or never -----------------------------------------------------------------


def test_the_claim_names_the_supervisor(attempt: Attempt) -> None:
    attempt.start("sleep", "600").command()
    assert attempt.process is not None
    process = rlqd.supervisor.Process(attempt.process.pid)
    assert json.loads((attempt.folder / "claim.json").read_text()) == {
        "pid": process.pid,
        "start_time": process.start_time,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "cgroup": None,
    }


def test_a_voided_attempt_does_not_run(attempt: Attempt) -> None:
    (attempt.folder / "claim.json").write_text('{"void": true}')
    attempt.start("touch", "ran")
    assert attempt.exit_status() == rlqd.supervisor.VOIDED
    assert not (attempt.place / "ran").exists()
    assert not (attempt.folder / "exit.json").exists()


def test_an_attempt_that_ran_does_not_run_again(attempt: Attempt) -> None:
    for status in (0, rlqd.supervisor.VOIDED):
        attempt.start("sh", "-c", "echo once")
        assert attempt.exit_status() == status
    assert attempt.log.read_text() == "once\n"


def test_a_daemon_that_died_before_the_news_changes_nothing(attempt: Attempt) -> None:
    read_fd, write_fd = os.pipe()
    order = attempt.order("sh", "-c", "exit 5", ready_fd=write_fd)
    os.close(read_fd)
    attempt.spawn(json.dumps(order).encode(), (write_fd,))
    os.close(write_fd)
    assert attempt.record()["code"] == 5


def test_hangup_and_interrupt_do_not_reach_a_job(attempt: Attempt) -> None:
    attempt.start("sh", "-c", "read x < gate; exit 6")
    os.mkfifo(attempt.place / "gate")
    attempt.command()
    attempt.signal(signal.SIGHUP)
    attempt.signal(signal.SIGINT)
    (attempt.place / "gate").write_text("go\n")
    assert attempt.record()["code"] == 6


def test_secrets_are_in_no_argument_and_on_no_disk(attempt: Attempt) -> None:
    secret = "hunter2-hunter2"
    attempt.start("sleep", "600", env={"PATH": os.environ["PATH"], "TOKEN": secret})
    command = attempt.command()
    assert attempt.process is not None
    assert secret in Path(f"/proc/{command}/environ").read_text()
    for name in ("cmdline", "environ"):
        assert secret not in Path(f"/proc/{attempt.process.pid}/{name}").read_text()
    assert os.readlink(f"/proc/{attempt.process.pid}/fd/0") == "/dev/null"
    files = [path for path in attempt.folder.iterdir() if path.is_file()]
    assert len(files) >= 4
    for path in files:
        assert secret.encode() not in path.read_bytes()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


# ---- terminate, kill, freeze, thaw -------------------------------------------------

#: A trainer that needs its workers' help to save its state when it is told to stop.
TRAINER = """
import os, signal, sys, time
ask, workers = [], []
for _ in range(2):
    down, up = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(down[1]); os.close(up[0])
        while os.read(down[0], 1): os.write(up[1], b"s")
        os._exit(0)
    os.close(down[0]); os.close(up[1])
    ask.append(down[1]); workers.append(up[0])
def stop(*_):
    print("asked", flush=True)
    for fd in ask: os.write(fd, b"?")
    states = [os.read(fd, 1) for fd in workers]
    print("saved" if states == [b"s", b"s"] else f"lost workers {states}", flush=True)
    for fd in ask: os.close(fd)
    sys.exit(9)
signal.signal(signal.SIGTERM, stop)
print("training", flush=True)
while True: time.sleep(600)
"""


def test_sigterm_goes_to_the_trainer_while_its_workers_live(attempt: Attempt) -> None:
    attempt.start(*python(TRAINER)).command()
    attempt.said("training\n")
    for _ in range(3):  # safe to repeat
        attempt.signal(signal.SIGTERM)
    assert attempt.record()["code"] == 9
    assert attempt.log.read_text().split() == ["training", "asked", "saved"]


@pytest.mark.parametrize("depth", [1, 2])
def test_sigterm_reaches_a_trainer_behind_bash(attempt: Attempt, depth: int) -> None:
    command: tuple[str, ...] = python(TRAINER)
    for _ in range(depth):
        command = ("bash", "-c", '"$@"; echo after', "bash", *command)
    attempt.start(*command).command()
    attempt.said("training\n")
    attempt.signal(signal.SIGTERM)
    record = attempt.record()
    assert (record["code"], record["signal"]) == (None, signal.SIGTERM)
    assert attempt.log.read_text().split() == ["training", "asked", "saved"]


def test_sigterm_wakes_a_stopped_tree(attempt: Attempt) -> None:
    attempt.start(*python(TRAINER))
    pid = attempt.command()
    attempt.said("training\n")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid), lambda state: state == "T")
    attempt.signal(signal.SIGTERM)
    assert attempt.record()["code"] == 9
    assert "saved" in attempt.log.read_text()


def test_a_sigterm_without_the_daemon_s_word_is_recorded_as_somebody_else_s(
    attempt: Attempt,
) -> None:
    attempt.start("sleep", "600").command()
    attempt.signal(signal.SIGTERM)
    record = attempt.record()
    assert (record["signal"], record["stopped_by_others"]) == (signal.SIGTERM, True)


def test_the_daemon_s_own_is_not(attempt: Attempt) -> None:
    attempt.start("sleep", "600").command()
    attempt.signal(signal.SIGUSR2)
    attempt.signal(signal.SIGTERM)
    record = attempt.record()
    assert (record["signal"], record["stopped_by_others"]) == (signal.SIGTERM, False)


def test_the_daemon_s_word_alone_stops_nothing(attempt: Attempt) -> None:
    os.mkfifo(attempt.place / "go")
    attempt.start("sh", "-c", "read _ < go; exit 5").command()
    attempt.signal(signal.SIGUSR2)
    (attempt.place / "go").write_text("now\n")
    record = attempt.record()
    assert (record["code"], record["stopped_by_others"]) == (5, False)


def test_who_stops_both_may_meet_the_command_first(attempt: Attempt) -> None:
    # By chance; the supervisor waits a moment for its own.  Here a moment is long.
    patient = attempt.place / "supervisor.py"
    source = Path(SUPERVISOR).read_text()
    assert "\nSAME_SIGTERM_S = 0.5\n" in source
    patient.write_text(source.replace("SAME_SIGTERM_S = 0.5", "SAME_SIGTERM_S = 60.0"))
    attempt.program = str(patient)
    pid = attempt.start("sleep", "600").command()
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: state_of(pid), lambda state: state == "gone")
    attempt.signal(signal.SIGTERM)
    assert attempt.record()["stopped_by_others"]


def test_a_command_that_is_killed_alone_was_not_stopped_by_a_shutdown(attempt: Attempt) -> None:
    pid = attempt.start("sleep", "600").command()
    os.kill(pid, signal.SIGTERM)
    record = attempt.record()
    assert (record["signal"], record["stopped_by_others"]) == (signal.SIGTERM, False)


#: Two generations away, in a session of its own, deaf to SIGTERM.
DAEMONISED = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(2): os.fork()
        print(f"daemon {os.getpid()} ", flush=True)
        while True: time.sleep(600)
    os._exit(0)
os.wait()
"""


def daemons(attempt: Attempt, count: int = 4) -> list[int]:
    attempt.said("daemon ")
    text = wait_until(attempt.log.read_text, lambda text: text.count("daemon ") == count)
    return [int(word) for word in text.split() if word.isdigit()]


def test_kill_takes_daemonised_grandchildren(attempt: Attempt) -> None:
    attempt.start(*python(DAEMONISED + "\ntime.sleep(600)"))
    pids = [attempt.command(), *daemons(attempt)]
    assert all(map(alive, pids))
    attempt.signal(signal.SIGUSR1)
    attempt.signal(signal.SIGUSR1)
    record = attempt.record()
    assert record["signal"] == signal.SIGKILL
    assert [pid for pid in pids if alive(pid)] == []


def test_kill_takes_a_tree_that_keeps_forking(attempt: Attempt) -> None:
    forking = """
import os, time
print("up", flush=True)
while True:
    if os.fork(): time.sleep(0.002); os._exit(0)
    os.setsid()
"""
    env = {"PATH": os.environ["PATH"], "MARK": str(attempt.folder)}
    command = ("sh", "-c", '"$@" & exec sleep 600', "sh", *python(forking))
    attempt.start(*command, env=env).command()
    attempt.said("up\n")
    attempt.signal(signal.SIGUSR1)
    assert attempt.record()["signal"] == signal.SIGKILL
    mark = f"MARK={attempt.folder}\0".encode()
    marked = [path for path in Path("/proc").glob("[0-9]*/environ") if holds(path, mark)]
    assert marked == []


def test_kill_takes_a_frozen_tree(attempt: Attempt) -> None:
    attempt.start("sleep", "600")
    pid = attempt.command()
    attempt.signal(signal.SIGTSTP)
    wait_until(lambda: state_of(pid), lambda state: state == "T")
    attempt.signal(signal.SIGUSR1)
    assert attempt.record()["signal"] == signal.SIGKILL


def test_freeze_stops_the_whole_tree_and_thaw_lets_it_go_on(attempt: Attempt) -> None:
    attempt.start(*python(DAEMONISED + "\ntime.sleep(600)"))
    pids = [attempt.command(), *daemons(attempt)]
    for _ in range(2):
        attempt.signal(signal.SIGTSTP)
        wait_until(lambda: set(map(state_of, pids)), lambda states: states == {"T"})
        attempt.signal(signal.SIGCONT)
        wait_until(lambda: set(map(state_of, pids)), lambda states: states == {"S"})


def test_what_a_command_leaves_behind_is_asked_to_end_before_the_record(
    attempt: Attempt,
) -> None:
    polite = """
import signal, sys, time
def stop(*_): print("stopped", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True: time.sleep(600)
"""
    command = 'nohup "$@" & until grep -q up log; do :; done; exit 4'
    attempt.start("bash", "-c", command, "bash", *python(polite))
    assert attempt.record()["code"] == 4
    assert "stopped" in attempt.log.read_text()


def test_what_a_command_leaves_behind_is_killed_when_deaf(attempt: Attempt) -> None:
    attempt.start(*python(DAEMONISED + "\nwhile open('log').read().count('daemon ') < 4: pass"))
    pids = daemons(attempt)
    record = attempt.record()
    assert (record["code"], record["oom"]) == (0, None)
    assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="knows the number of poll(2) there only"
)
def test_an_idle_supervisor_waits_without_a_timer(attempt: Attempt) -> None:
    attempt.start("sleep", "600").command()
    assert attempt.process is not None
    path = Path(f"/proc/{attempt.process.pid}/syscall")
    try:
        path.read_text()
    except OSError:
        pytest.skip("/proc/PID/syscall is not readable here")
    # poll(2) is call 7; its third argument, the timeout, is -1: for ever.
    wait_until(lambda: path.read_text().split()[:4], lambda words: words[0] == "7")
    assert int(path.read_text().split()[3], 16) & 0xFFFFFFFF == 0xFFFFFFFF


# ---- the log -----------------------------------------------------------------------


def test_the_log_is_appended_to_and_its_folders_are_made(attempt: Attempt) -> None:
    path = attempt.place / "a/b/out.log"
    attempt.start("sh", "-c", "echo out; echo err >&2", log_path=str(path), umask=0o077)
    assert attempt.record()["code"] == 0
    assert path.read_text() == "out\nerr\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_capped_log_keeps_one_older_part(attempt: Attempt) -> None:
    lines = "".join(f"{number:09d}\n" for number in range(350_000))  # 3.3 MiB
    code = f"for n in range({350_000}): print(f'{{n:09d}}')"
    attempt.start(sys.executable, "-I", "-S", "-c", code, log_mib_max=1)
    record = attempt.record()
    assert (record["code"], record["log_lost_bytes"]) == (0, 0)
    older = attempt.log.with_name("log.1")
    kept = older.read_text() + attempt.log.read_text()
    assert lines.endswith(kept)
    assert MIB - 65536 <= older.stat().st_size <= MIB
    assert attempt.log.stat().st_size <= MIB


def test_a_capped_log_lost_to_a_full_device_does_not_end_the_job(attempt: Attempt) -> None:
    code = "print('x' * 99999)\nprint('y' * 99999)\nraise SystemExit(3)"
    attempt.start(*python(code), log_path="/dev/full", log_mib_max=1)
    record = attempt.record()
    assert (record["code"], record["log_lost_bytes"]) == (3, 200_000)


@needs_root
def test_a_device_is_not_rotated(attempt: Attempt) -> None:
    null = attempt.place / "null"
    os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    try:
        null.write_text("")
    except OSError:
        pytest.skip("device files do not work on this file system")
    code = "for _ in range(3000): print('x' * 1023)"
    attempt.start(*python(code), log_path=str(null), log_mib_max=1)
    assert attempt.record()["code"] == 0
    assert stat.S_ISCHR(null.stat().st_mode)
    assert not (attempt.place / "null.1").exists()


def test_without_a_cap_the_job_itself_meets_the_full_device(attempt: Attempt) -> None:
    attempt.start(*python("print('x')"), log_path="/dev/full")
    assert attempt.record()["code"] == 1


def test_output_lost_to_a_full_disk_is_counted(attempt: Attempt, small_disk: Path) -> None:
    code = "for _ in range(100): print('x' * 1023)\nraise SystemExit(3)"
    log = small_disk / "log"
    attempt.start(*python(code), log_path=str(log), log_mib_max=1)
    record = attempt.record()
    assert record["code"] == 3
    assert log.stat().st_size + record["log_lost_bytes"] == 100 * 1024
    assert record["log_lost_bytes"] > 30_000


# ---- the record --------------------------------------------------------------------


def test_a_full_disk_does_not_lose_the_record(tmp_path: Path, small_disk: Path) -> None:
    attempt = Attempt(small_disk / "7.1", tmp_path)
    try:
        os.mkfifo(tmp_path / "gate")
        attempt.start("sh", "-c", "read x < gate; exit 7")
        attempt.command()
        fill(small_disk)
        (tmp_path / "gate").write_text("go\n")
        record = attempt.record()
        with pytest.raises(OSError, match="No space"):
            (small_disk / "more").write_text("x")
        assert record["code"] == 7
    finally:
        attempt.clear()


def test_a_disk_full_from_the_start_runs_nothing(tmp_path: Path, small_disk: Path) -> None:
    attempt = Attempt(small_disk / "7.1", tmp_path)
    fill(small_disk)
    attempt.start("touch", "ran")
    failed = attempt.ready()["failed"]
    assert (failed["stage"], failed["errno"]) == ("state", errno.ENOSPC)
    assert "No space left" in failed["message"]
    assert attempt.exit_status() == 0
    assert not (tmp_path / "ran").exists()
    assert not (attempt.folder / "claim.json").exists(), "never claimed: it can be voided"


def test_the_record_is_written_even_when_its_reserve_was_removed(attempt: Attempt) -> None:
    attempt.start("sh", "-c", "read x < gate; exit 7")
    os.mkfifo(attempt.place / "gate")
    attempt.command()
    (attempt.folder / "exit.reserve").unlink()
    (attempt.place / "gate").write_text("go\n")
    assert attempt.record()["code"] == 7


TORCH = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
XLA = "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"
NUMPY = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 6.00 GiB for an array"
TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\n'
ON_CPU = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
ON_GPU = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "GPU-1"}


@pytest.mark.parametrize(
    ("output", "env", "code", "oom"),
    [
        (TRACEBACK + TORCH, ON_GPU, 1, "gpu"),
        (TRACEBACK + XLA, ON_GPU, 1, "gpu"),
        (TRACEBACK + XLA, ON_CPU, 1, "host"),
        ("E0000 CUDA_ERROR_OUT_OF_MEMORY: out of memory\n" + "x\n" * 20_000, ON_GPU, 134, "gpu"),
        (TRACEBACK + "MemoryError", ON_GPU, 1, "host"),
        (TRACEBACK + NUMPY + "\nlast words", ON_GPU, 1, "host"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: tried", ON_GPU, 1, "host"),
        (TORCH + "\n" + TRACEBACK + "MemoryError", ON_GPU, 1, "host"),
        # Not out of memory:
        (TRACEBACK + TORCH, ON_GPU, 0, None),
        ("retrying after MemoryError: fine\n" + TRACEBACK + "ValueError: x", ON_GPU, 1, None),
        (TRACEBACK + "MemoryError\n" + TRACEBACK + "KeyError: 'MemoryError'", ON_GPU, 1, None),
        (TORCH + "\n" + "x" * 70_000, ON_GPU, 1, None),
        ("", ON_GPU, 1, None),
    ],
)
def test_out_of_memory_is_told_from_a_failing_job_s_last_words(
    attempt: Attempt, output: str, env: dict[str, str], code: int, oom: str | None
) -> None:
    (attempt.place / "output").write_text(output + "\n")
    attempt.start("sh", "-c", f"cat output; exit {code}", env=env)
    record = attempt.record()
    assert (record["code"], record["oom"]) == (code, oom)


def test_an_older_job_s_words_in_the_same_log_are_not_this_one_s(attempt: Attempt) -> None:
    attempt.log.write_text(TRACEBACK + TORCH + "\n")
    attempt.start("sh", "-c", "echo mine; exit 1")
    assert attempt.record()["oom"] is None


def test_last_words_are_found_across_a_rotation(attempt: Attempt) -> None:
    (attempt.place / "output").write_text("x" * (MIB - 100) + TORCH[:-9] + "\n")
    attempt.start("sh", "-c", "cat output; cat output | tail -c 40; exit 1", log_mib_max=1)
    assert attempt.record()["oom"] == "gpu"


def test_sigkill_from_outside_alone_is_not_out_of_memory(attempt: Attempt) -> None:
    attempt.start("sleep", "600")
    os.kill(attempt.command(), signal.SIGKILL)
    record = attempt.record()
    assert (record["signal"], record["oom"]) == (signal.SIGKILL, None)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 32 MiB that processes may join."""
    for root, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        path = Path(root) / f"rlq-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            (path / limit).write_text(str(32 * MIB))
        except OSError:
            path.rmdir()
            continue
        yield path
        until_gone(path)
        return
    pytest.skip("cannot make a memory control group here")


@pytest.mark.parametrize("wrapper", ["exec", ""])
def test_the_kernel_s_oom_killer_is_recognised(
    attempt: Attempt, memory_group: Path, wrapper: str
) -> None:
    hog = f"open('{memory_group}/cgroup.procs', 'w').write('0')\nx = b'x' * (256 << 20)"
    attempt.start("bash", "-c", f'{wrapper} "$@"; exit $?', "bash", *python(hog))
    record = attempt.record()
    assert (record["code"], record["signal"]) == ((None, 9) if wrapper else (137, None))
    assert record["oom"] == "host"


#: What the kernel counts for a group, before and after it has killed in it.
CALM = "low 0\nhigh 3\nmax 9\noom 1\noom_kill 1\n"
KILLED = CALM.replace("oom 1", "oom 2").replace("oom_kill 1", "oom_kill 2")
#: The machine ran out, not the group.
CAUGHT = CALM.replace("oom_kill 1", "oom_kill 2")


@pytest.fixture
def limited(tmp_path: Path) -> Path:
    """A made-up control group with a limit of 300 MiB."""
    folder = tmp_path / "limited"
    folder.mkdir()
    (folder / "memory.max").write_text(f"{300 * MIB}\n")
    (folder / "memory.events").write_text(CALM)
    return folder


def ends_after(attempt: Attempt, limited: Path, events: str, code: int) -> dict[str, Any]:
    """The record of a command in whose group the kernel counts `events`."""
    (attempt.place / "events").write_text(events)
    cgroup = {"path": "", "limits": str(limited), "files": {}}
    script = f'cp events "$1/memory.events"; exit {code}'
    attempt.start("sh", "-c", script, "sh", str(limited), cgroup=cgroup)
    return attempt.record()


def test_a_kill_at_the_job_s_own_limit_names_the_limit(attempt: Attempt, limited: Path) -> None:
    # A worker was killed, and the command ends with words and a code of its own.
    record = ends_after(attempt, limited, KILLED, 1)
    assert (record["code"], record["oom"], record["oom_limit_mib"]) == (1, "host", 300)


def test_a_kill_that_the_command_survived_is_no_failure(attempt: Attempt, limited: Path) -> None:
    record = ends_after(attempt, limited, KILLED, 0)
    assert (record["code"], record["oom"], record["oom_limit_mib"]) == (0, None, None)


@pytest.mark.parametrize("events", [CALM, CAUGHT, "", "oom two\n"])
def test_a_limit_that_was_not_reached_is_not_blamed(
    attempt: Attempt, limited: Path, events: str
) -> None:
    record = ends_after(attempt, limited, events, 1)
    assert (record["oom"], record["oom_limit_mib"]) == (None, None)


# ---- a control group of its own ----------------------------------------------------


@pytest.fixture
def group_path(attempt: Attempt) -> Iterator[Path]:
    path = killable_group()
    yield path
    attempt.clear()
    until_gone(path)


def in_group(path: Path) -> dict[str, Any]:
    return {"path": str(path), "limits": str(path), "files": {}}


def test_the_command_runs_in_its_group_and_the_supervisor_outside(
    attempt: Attempt, group_path: Path
) -> None:
    attempt.start("sh", "-c", "cat /proc/self/cgroup; sleep 600", cgroup=in_group(group_path))
    started = attempt.ready()["started"]
    assert started["cgroup"] == str(group_path)
    assert json.loads((attempt.folder / "claim.json").read_text())["cgroup"] == str(group_path)
    attempt.said(f"0::/{group_path.name}\n")
    members = (group_path / "cgroup.procs").read_text().split()
    assert str(started["command_pid"]) in members
    assert str(started["pid"]) not in members


def test_the_group_goes_when_the_job_has_gone(attempt: Attempt, group_path: Path) -> None:
    attempt.start("true", cgroup=in_group(group_path))
    assert attempt.record()["code"] == 0
    assert not group_path.exists()


def test_the_group_goes_when_the_command_cannot_start(attempt: Attempt, group_path: Path) -> None:
    attempt.start("no-such-command", cgroup=in_group(group_path))
    assert attempt.ready()["failed"]["stage"] == "exec"
    assert attempt.exit_status() == 0
    assert not group_path.exists()


def test_a_kill_takes_the_whole_group_and_leaves_the_record(
    attempt: Attempt, group_path: Path
) -> None:
    many = "for i in {1..50}; do setsid sleep 600 & done; wait"
    attempt.start("bash", "-c", many, cgroup=in_group(group_path))
    assert attempt.command()
    wait_until(lambda: (group_path / "cgroup.procs").read_text().split(), lambda m: len(m) == 51)
    pids = [int(word) for word in (group_path / "cgroup.procs").read_text().split()]
    attempt.signal(signal.SIGUSR1)
    assert attempt.record()["signal"] == signal.SIGKILL
    assert not any(map(alive, pids))
    assert not group_path.exists()


def test_a_group_that_cannot_be_made_does_not_keep_the_job_from_running(
    attempt: Attempt, tmp_path: Path
) -> None:
    attempt.start("true", cgroup=in_group(tmp_path / "no/such/place"))
    assert attempt.ready()["started"]["cgroup"] is None
    assert attempt.record()["code"] == 0
    assert json.loads((attempt.folder / "claim.json").read_text())["cgroup"] is None


def test_limits_are_written_into_the_group_before_the_command_is_there(
    attempt: Attempt, group_path: Path
) -> None:
    # The one limit that every group has, controllers or not.
    cgroup = in_group(group_path) | {"files": {"cgroup.max.descendants": "7"}}
    attempt.start("cat", str(group_path / "cgroup.max.descendants"), cgroup=cgroup)
    assert attempt.record()["code"] == 0
    assert attempt.log.read_text() == "7\n"


def test_a_group_whose_limits_cannot_be_set_is_not_used(
    attempt: Attempt, group_path: Path
) -> None:
    cgroup = in_group(group_path) | {"files": {"no.such.limit": "7"}}
    attempt.start("true", cgroup=cgroup)
    assert attempt.ready()["started"]["cgroup"] is None
    assert attempt.record()["code"] == 0
    assert not group_path.exists()


# ---- several users -----------------------------------------------------------------


@needs_root
def test_a_job_of_another_user_runs_as_that_user_only(
    attempt: Attempt, public_folder: Path
) -> None:
    home = public_folder / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    look = "import os; print(os.getresuid(), os.getresgid(), os.getgroups(), os.getcwd())"
    attempt.start(
        SYSTEM_PYTHON,
        "-c",
        look,
        uid=65534,
        gid=65534,
        groups=[65534, 1234],
        cwd=str(home),
        log_path=str(home / "logs/out"),
        umask=0o027,
    )
    assert attempt.record()["code"] == 0
    log = home / "logs/out"
    ids = "(65534, 65534, 65534)"
    assert log.read_text() == f"{ids} {ids} [1234, 65534] {home}\n"
    assert (log.stat().st_uid, log.stat().st_gid) == (65534, 65534)
    assert stat.S_IMODE(log.stat().st_mode) == 0o640
    assert log.parent.stat().st_uid == 65534


@needs_root
@pytest.mark.parametrize("link", [False, True])
def test_a_user_cannot_have_root_write_a_log_for_him(
    attempt: Attempt, public_folder: Path, link: bool
) -> None:
    precious = public_folder / "precious"
    precious.write_text("precious")
    precious.chmod(0o644)
    home = public_folder / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    (home / "log").symlink_to(precious)
    path = home / "log" if link else precious
    attempt.start("echo", "x", uid=65534, gid=65534, cwd="/", log_path=str(path))
    failed = attempt.ready()["failed"]
    assert (failed["stage"], failed["errno"]) == ("log", errno.EACCES)
    assert "Permission denied" in failed["message"]
    assert precious.read_text() == "precious"


@needs_root
@pytest.mark.parametrize("cap", [None, 1])
def test_a_user_cannot_have_root_write_through_a_hard_link(
    attempt: Attempt, public_folder: Path, cap: int | None
) -> None:
    precious = public_folder / "precious"
    precious.write_text("precious")
    precious.chmod(0o644)
    home = public_folder / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    os.link(precious, home / "log")
    user = {"uid": 65534, "gid": 65534, "cwd": "/", "log_mib_max": cap}
    attempt.start("echo", "x", log_path=str(home / "log"), **user)
    failed = attempt.ready()["failed"]
    assert (failed["stage"], failed["errno"]) == ("log", errno.EACCES)
    assert precious.read_text() == "precious"


@needs_root
@pytest.mark.parametrize("target", ["/proc/self/attr/current", "/proc/self/mem"])
def test_a_log_that_leads_into_proc_is_refused(
    attempt: Attempt, public_folder: Path, target: str
) -> None:
    os.chown(public_folder, 65534, 65534)
    (public_folder / "log").symlink_to(target)
    user = {"uid": 65534, "gid": 65534, "cwd": "/", "log_mib_max": 1}
    attempt.start("echo", "x", log_path=str(public_folder / "log"), **user)
    failed = attempt.ready()["failed"]
    assert failed["stage"] == "log"
    assert failed["errno"] in (errno.EACCES, errno.EINVAL)


@needs_root
def test_a_capped_log_is_written_as_the_user(attempt: Attempt, public_folder: Path) -> None:
    """Root may write what a user may not into a file that the user may open: what keeps their
    process from the OOM killer, under a path that does not begin with /proc."""
    if subprocess.run(
        ["mount", "-t", "proc", "proc", public_folder], capture_output=True
    ).returncode:
        pytest.skip("cannot mount here")
    with ExitStack() as stack:
        stack.callback(lambda: subprocess.run(["umount", "-l", public_folder], check=True))
        theirs = stack.enter_context(
            subprocess.Popen(["sleep", "600"], user=65534, group=65534, extra_groups=[])
        )
        stack.callback(theirs.kill)
        log = public_folder / str(theirs.pid) / "oom_score_adj"
        before = log.read_text()
        user = {"uid": 65534, "gid": 65534, "cwd": "/", "log_mib_max": 1, "log_path": str(log)}
        attempt.start("echo", "-500", **user)
        assert attempt.record()["log_lost_bytes"] == len("-500\n")
        assert log.read_text() == before


@needs_root
def test_the_kernel_takes_a_capped_logs_writer_for_the_user(
    attempt: Attempt, public_folder: Path
) -> None:
    """Known by the set-user-ID bit, which stays on a file that root writes to."""
    log = public_folder / "log"
    log.touch()
    os.chown(log, 65534, 65534)
    log.chmod(0o4755)
    user = {"uid": 65534, "gid": 65534, "cwd": "/", "log_mib_max": 1, "log_path": str(log)}
    attempt.start("echo", "x", **user)
    assert attempt.record()["code"] == 0
    assert (log.read_text(), log.stat().st_mode & 0o7777) == ("x\n", 0o755)


@needs_root
def test_a_capped_log_rotates_as_the_user(attempt: Attempt, public_folder: Path) -> None:
    os.chown(public_folder, 65534, 65534)
    log = public_folder / "log"
    code = "for _ in range(1500): print('x' * 1023)"
    command = (SYSTEM_PYTHON, "-c", code)
    user = {"uid": 65534, "gid": 65534, "cwd": "/", "log_path": str(log), "log_mib_max": 1}
    attempt.start(*command, **user)
    assert attempt.record()["code"] == 0
    assert {path.stat().st_uid for path in (log, public_folder / "log.1")} == {65534}


@needs_root
def test_the_working_directory_is_entered_as_the_user(
    attempt: Attempt, public_folder: Path
) -> None:
    os.chown(public_folder, 65534, 65534)
    log = str(public_folder / "log")
    attempt.place.chmod(0o700)
    attempt.start("true", uid=65534, gid=65534, log_path=log)
    failed = attempt.ready()["failed"]
    assert (failed["stage"], failed["errno"]) == ("cwd", errno.EACCES)


@needs_root
def test_kill_takes_another_user_s_tree(attempt: Attempt, public_folder: Path) -> None:
    os.chown(public_folder, 65534, 65534)
    attempt.log = public_folder / "log"
    user = {"uid": 65534, "gid": 65534, "cwd": "/", "log_path": str(attempt.log)}
    command = (SYSTEM_PYTHON, "-c", DAEMONISED + "\ntime.sleep(600)")
    attempt.start(*command, **user)
    pids = [attempt.command(), *daemons(attempt)]
    attempt.signal(signal.SIGUSR1)
    assert attempt.record()["signal"] == signal.SIGKILL
    assert [pid for pid in pids if alive(pid)] == []


def test_only_root_runs_jobs_as_somebody_else(attempt: Attempt) -> None:
    with ExitStack() as stack:
        if is_root:
            place = Path(tempfile.mkdtemp(prefix="rlq-test."))
            stack.callback(shutil.rmtree, place)
            folder = place / "7.1"
            folder.mkdir()
            for path in (place, folder):
                os.chown(path, 65534, 65534)
            program = shutil.copy(SUPERVISOR, place)
            order = attempt.order("true", uid=1, gid=1, dir=str(folder), log_path=f"{place}/log")
            subprocess.run(
                [SYSTEM_PYTHON, "-I", "-S", program],
                input=json.dumps(order).encode(),
                user=65534,
                group=65534,
                extra_groups=[],
                cwd="/",
                check=True,
            )
        else:
            folder = attempt.folder
            attempt.start("true", uid=os.getuid() + 1).exit_status()
        failed = json.loads((folder / "exit.json").read_text())["failed"]
    assert (failed["stage"], failed["errno"]) == ("user", errno.EPERM)


# ---- its own JSON ------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -5, 1.5, 1e300, "", 'q"b\\', "\n\t\x7f\0", "é😀", "\udc80", {"a": {}}],
)
def test_the_supervisor_s_json_is_json(value: object) -> None:
    text = rlqd.supervisor.write_json({"value": value})
    assert json.loads(text) == {"value": value}
    assert rlqd.supervisor.read_json(json.dumps({"value": value})) == {"value": value}
