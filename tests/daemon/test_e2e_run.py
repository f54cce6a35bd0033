"""`rlq run`: a command in the caller's terminal or pipes, as a job of a real daemon."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.rlqd import Rlqd
from tests.support.waiting import wait_until

from rlq import relay
from rlq.client import Client
from rlq.protocol.messages import Job
from rlq.protocol.states import JobState
from rlq.terminal import Door

SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
LIMIT_S = 30


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """$XDG_RUNTIME_DIR: sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="rlq-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def rlqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rlqd]:
    with Rlqd(tmp_path_factory.mktemp("run")) as daemon:
        yield daemon


@pytest.fixture
def client(rlqd: Rlqd) -> Iterator[Client]:
    with Client(rlqd.socket, autostart=False) as connected:
        yield connected


class Caller:
    """`rlq run` as it is called from a shell."""

    def __init__(self, rlqd: Rlqd, short: Path) -> None:
        self.env = {**rlqd.user_env, "XDG_RUNTIME_DIR": str(short), "TERM": "xterm"}

    def __call__(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.argv(words), env=self.env, input=stdin, capture_output=True, timeout=60
        )

    def argv(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "rlq", "run", *words]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(words),
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )


@pytest.fixture
def run(rlqd: Rlqd, short: Path) -> Caller:
    return Caller(rlqd, short)


class Terminal:
    """`rlq run` on a terminal of its own, which the test types on and looks at."""

    def __init__(self, run: Caller, *words: str, rows: int = 30, columns: int = 80) -> None:
        self.leader, follower = pty.openpty()
        self.shown = b""
        self.resize(rows, columns)
        self.modes = termios.tcgetattr(self.leader)
        # `setsid -c` makes the terminal the session's: closing it is heard of.
        self.process = subprocess.Popen(
            ["setsid", "-c", "-w", *run.argv(words)],
            env={**run.env, "COLUMNS": str(columns)},
            stdin=follower,
            stdout=follower,
            stderr=follower,
        )
        os.close(follower)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.leader, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def see(self, text: str) -> None:
        """Until the terminal has shown it; what comes after it is looked at next time."""

        def look() -> bytes:
            if select.select([self.leader], [], [], 0)[0]:
                self.shown += os.read(self.leader, 65536)
            return self.shown

        wait_until(look, lambda shown: text.encode() in shown, LIMIT_S)
        self.shown = self.shown.split(text.encode(), 1)[1]

    def close(self) -> None:
        os.close(self.leader)

    def ends(self) -> int:
        """Reads on, as a terminal does, until the process has ended; its exit code."""
        while self.process.poll() is None:
            if select.select([self.leader], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.leader, 65536)
                except OSError:
                    return self.process.wait(60)
        return self.process.returncode


def newest(client: Client) -> Job:
    return client.list(limit=1)[0]


# ---- pipes -------------------------------------------------------------------------


def test_output_and_errors_stay_apart_and_the_exit_code_is_the_commands(run: Caller) -> None:
    done = run("--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 3)


def test_all_bytes_pass_both_ways_and_the_end_of_stdin_arrives(run: Caller) -> None:
    data = bytes(range(256)) * 8192
    done = run("--", "cat", stdin=data)
    assert done.stdout == data
    assert done.returncode == 0


def test_a_command_that_does_not_read_its_stdin_is_not_waited_for(run: Caller) -> None:
    done = run("--", "head", "-c", "3", stdin=b"abc" * 1_000_000)
    assert (done.stdout, done.returncode) == (b"abc", 0)


def test_a_signal_that_ends_the_command_is_passed_through(run: Caller, client: Client) -> None:
    assert run("--", "sh", "-c", "kill -USR1 $$").returncode == 128 + signal.SIGUSR1
    job = client.wait(newest(client).id)[0]
    assert (job.state, job.signal, job.exit_code) == (JobState.FAILED, signal.SIGUSR1, None)


def test_ctrl_c_goes_to_the_command(run: Caller) -> None:
    caller = run.start("--", "sh", "-c", "trap 'echo caught; exit 7' INT; echo ready; read x")
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"ready\n"
    caller.send_signal(signal.SIGINT)
    out, _ = caller.communicate(timeout=60)
    assert (out, caller.returncode) == (b"caught\n", 7)


def test_what_is_left_in_the_background_does_not_keep_the_caller(
    run: Caller, client: Client
) -> None:
    done = run("--", "sh", "-c", "sleep 1000 & echo done")
    assert (done.stdout, done.returncode) == (b"done\n", 0)
    assert client.wait(newest(client).id)[0].state is JobState.COMPLETED


def test_when_nobody_reads_its_output_the_job_is_hung_up(run: Caller, client: Client) -> None:
    caller = run.start("--", "yes")
    assert caller.stdout is not None
    assert caller.stdout.read(2) == b"y\n"
    caller.stdout.close()
    assert caller.wait(60) == 141
    assert client.wait(newest(client).id)[0].state is JobState.FAILED
    for stream in (caller.stdin, caller.stderr):
        assert stream is not None
        stream.close()


def test_the_job_is_listed_and_known_by_its_command_and_runs_in_its_place(
    run: Caller, client: Client
) -> None:
    done = run(
        *("--cores", "1", "--name", "here", "--cwd", "/", "--env", "COLOUR=blue"),
        *("--", "sh", "-c", "pwd; nproc; echo $COLOUR $RLQ_JOB_ID"),
    )
    job = newest(client)
    assert done.stdout.decode().split() == ["/", "1", "blue", str(job.id)]
    assert (job.name, job.argv[:2]) == ("here", ("sh", "-c"))
    assert job.placement is not None
    assert len(job.placement.cores) == 1


# ---- a terminal --------------------------------------------------------------------


def test_a_shell_on_a_terminal(run: Caller) -> None:
    here = Terminal(run, "-it", "--", "sh", rows=33, columns=77)
    here.see("runs on core")
    here.type("tty; stty size\n")
    here.see("/dev/pts/")
    here.see("33 77")
    # Broken words, so that what is typed does not look like the answer.
    here.type("""sh -c "trap 'exit 9' INT; echo rea''dy; while :; do sleep 0.1; done"\n""")
    here.see("ready")
    here.type("\x03")
    here.see("^C")
    here.type("echo co''de=$?; exit 5\n")
    here.see("code=9")
    assert here.ends() == 5
    assert termios.tcgetattr(here.leader) == here.modes
    here.close()


def test_a_resized_window_is_told(run: Caller) -> None:
    script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.1; done"
    here = Terminal(run, "-t", "--", "sh", "-c", script)
    here.see("ready")
    here.resize(41, 101)
    here.see("41 101")
    assert here.ends() == 0
    here.close()


def test_nothing_of_a_terminals_last_output_is_lost(run: Caller) -> None:
    here = Terminal(run, "-t", "--", "seq", "50000")
    assert here.ends() == 0
    here.close()
    assert here.shown.split()[-1] == b"50000"


def test_a_time_limit_is_told_and_ends_a_shell_that_ignores_sigterm(
    run: Caller, client: Client
) -> None:
    here = Terminal(run, "-it", "--time-limit", "1s", "--grace", "1h", "--", "bash", "--norc")
    here.see("at most 1s")
    here.see("its time limit is reached")
    assert here.ends() == 128 + signal.SIGHUP
    here.close()
    assert client.wait(newest(client).id)[0].state is JobState.TIMEOUT


def test_a_training_in_a_shell_is_asked_before_the_shell_is_hung_up(
    run: Caller, client: Client
) -> None:
    here = Terminal(run, "-it", "--grace", "1h", "--", "bash", "--norc")
    here.see("runs on core")
    training = (
        "trap 'sleep 0.5; echo sa''ved; exit' TERM; echo rea''dy; while :; do sleep 0.1; done"
    )
    here.type(f'sh -c "{training}"\n')
    here.see("ready")
    client.cancel(newest(client).id)
    here.see("saved")
    here.ends()
    here.close()
    assert client.wait(newest(client).id)[0].state is JobState.CANCELLED


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_when_the_caller_goes_nothing_lingers(
    rlqd: Rlqd, run: Caller, client: Client, how: str
) -> None:
    here = Terminal(run, "-it", "--", "bash", "--norc")
    here.see("runs on core")
    here.type("sleep 1000 & echo rea''dy\n")
    here.see("ready")
    if how == "killed":
        here.process.kill()
    here.close()
    here.process.wait(60)
    assert client.wait(newest(client).id)[0].state is JobState.FAILED
    wait_until(rlqd.marked_processes, lambda left: not left)


# ---- the queue ---------------------------------------------------------------------


def test_it_waits_for_its_turn_says_why_and_then_runs(run: Caller, client: Client) -> None:
    blocker = client.submit(["sleep", "1000"], gpus=0, exclusive=True)
    here = Terminal(run, "-t", "--", "echo", "at last")
    here.see("waits: ")
    client.cancel(blocker)
    here.see("at last")
    assert here.ends() == 0
    here.close()


def test_ctrl_c_while_it_waits_takes_it_out_of_the_queue(run: Caller, client: Client) -> None:
    blocker = client.submit(["sleep", "1000"], gpus=0, exclusive=True)
    here = Terminal(run, "-t", "--", "echo", "never")
    here.see("waits: ")
    here.type("\x03")
    here.see("is cancelled")
    assert here.ends() == 130
    here.close()
    assert newest(client).state is JobState.CANCELLED
    client.cancel(blocker)
    client.wait(blocker)


def test_one_that_is_cancelled_while_it_waits_tells_its_caller(
    run: Caller, client: Client
) -> None:
    blocker = client.submit(["sleep", "1000"], gpus=0, exclusive=True)
    caller = run.start("--", "echo", "never")
    assert caller.stderr is not None
    assert b"waits: " in caller.stderr.readline()
    client.cancel(newest(client).id)
    out, err = caller.communicate(timeout=60)
    assert (out, caller.returncode) == (b"", 1)
    assert b"did not run: CANCELLED" in err
    client.cancel(blocker)
    client.wait(blocker)


def test_one_whose_caller_was_killed_in_the_queue_ends_as_it_starts(
    run: Caller, client: Client
) -> None:
    blocker = client.submit(["sleep", "1000"], gpus=0, exclusive=True)
    caller = run.start("--", "sleep", "1000")
    assert caller.stderr is not None
    assert b"waits: " in caller.stderr.readline()
    caller.kill()
    caller.communicate(timeout=60)
    client.cancel(blocker)
    job = client.wait(newest(client).id)[0]
    assert (job.state, job.exit_code) == (JobState.FAILED, relay.HUNG_UP)
    assert "not there any more" in Path(job.log_path).read_text()


def test_a_terminal_is_needed_for_one(run: Caller) -> None:
    done = run("-it", "--", "bash")
    assert done.returncode == 2
    assert b"-t needs a terminal" in done.stderr


# ---- the two ends ------------------------------------------------------------------


def test_frames_are_found_however_the_stream_is_cut() -> None:
    sent = [(b"I", b"abc"), (b"C", b""), (b"O", bytes(300))]
    stream = b"".join(relay.frame(kind, content) for kind, content in sent)
    for cut in range(len(stream)):
        frames = relay.Frames()
        assert frames.feed(stream[:cut]) + frames.feed(stream[cut:]) == sent


def test_an_endless_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        relay.Frames().feed(b"I\xff\xff\xff\xff")


def test_the_program_beside_the_command_is_light() -> None:
    look = "print(*sorted({'socket', 'enum', 'typing', 'subprocess', 're'} & set(sys.modules)))"
    script = f"import sys; exec(open(sys.argv[1]).read(), {{'__name__': 'x'}}); {look}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, relay.__file__],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_other_users_are_not_let_in(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    with Door() as door:
        for folder in (short, door.path.parent):
            folder.chmod(0o755)
        door.path.chmod(0o777)
        call = "import socket, sys; s = socket.socket(1); s.connect(sys.argv[1]); print(s.recv(1))"
        stranger = subprocess.Popen(
            [SYSTEM_PYTHON, "-I", "-c", call, str(door.path)],
            user=NOBODY,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert door.wait(60) is None
        assert stranger.communicate(timeout=60)[0] == b"b''\n"
    assert not door.path.exists()


def test_sockets_of_callers_that_were_killed_are_swept_out(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    with Door() as door:
        gone = subprocess.Popen(["true"])
        gone.wait()
        left = door.path.with_name(f"run-{gone.pid}-0.sock")
        left.touch()
        with Door():
            assert not left.exists()
            assert door.path.exists()
