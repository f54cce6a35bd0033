"""`rlq` as people run it: whole processes, real terminals, and a daemon that starts by itself."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_daemon import ME, FakeDaemon, make_job
from tests.support.waiting import wait_until

from rlq.protocol import messages as m
from rlq.protocol.states import JobState

RLQ = [sys.executable, "-m", "rlq"]
ROOT = Path(__file__).parents[2]
WIDTH = 80


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RLQ, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def run_on_terminal(*args: str, typed: str = "", **env: str) -> tuple[int, str]:
    """Exit code and what a terminal of 80 columns was sent."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*RLQ, *args],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH), **env},
        start_new_session=True,
    )
    os.close(follower)
    if typed:
        os.write(leader, typed.encode())
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and select.select([leader], [], [], 60)[0]:
        try:
            block = os.read(leader, 65536)
        except OSError:  # EIO: the process has closed the terminal
            break
        if not block:
            break
        shown += block
    os.close(leader)
    return process.wait(60), shown.decode()


# ---- cost --------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["rlq", "rlq.cli"])
def test_importing_the_command_loads_nothing_heavy(module: str) -> None:
    script = (
        f"import sys, {module}\n"
        "print(*sorted({'zmq', 'rich', 'msgspec', 'asyncio', 'rlqd', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "\n"


def test_a_full_disk_is_told_as_such(daemon: FakeDaemon) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RLQ, "list"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: cannot write: No space left on device\nhint: make room, then try again\n"
    )


def test_submitting_loads_neither_rich_nor_the_daemon(daemon: FakeDaemon) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rlq", "submit", "--", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "zmq" in loaded
    assert not loaded & {"rich", "asyncio", "logging", "subprocess", "rlqd", "psutil"}


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("rlq 0.")
    shown = run("--help")
    assert shown.returncode == 0
    assert "submit" in shown.stdout


# ---- terminals ---------------------------------------------------------------------


def full_house(daemon: FakeDaemon) -> None:
    now = time.time()
    long = "a-name-that-is-much-too-long-for-any-table-of-eighty-columns-to-show-whole"
    daemon.add(
        make_job(
            1_234_567,
            JobState.RUNNING,
            name=long,
            attempt=1,
            started_at=now - 100_000,
            placement=m.Placement(
                gpus=("a", "b"), gpu_indices=(0, 1), cores=tuple(range(0, 64, 2))
            ),
            progress=m.Progress(step=1, total=10**9, steps_per_s=12345.6, eta_s=1e6),
        ),
        make_job(
            2, name="日本語" * 20, user="a-user-with-a-long-name", uid=ME + 1, reason=long * 3
        ),
        make_job(3, JobState.OUT_OF_MEMORY, reason=long, started_at=now - 9, ended_at=now),
        make_job(4, JobState.CONFIGURING, placement=m.Placement(cores=(1,))),
        make_job(5, JobState.COMPLETED, exit_code=0, started_at=now - 9, ended_at=now),
    )


@pytest.mark.parametrize("verb", [["list"], ["history"], ["list", "--all"]])
def test_tables_fit_80_columns(daemon: FakeDaemon, verb: list[str]) -> None:
    from rich.text import Text

    full_house(daemon)
    code, shown = run_on_terminal(*verb)
    assert code == 0
    lines = [Text.from_ansi(line.rstrip("\r")) for line in shown.splitlines()]
    assert len(lines) >= 3
    assert max(line.cell_len for line in lines) <= WIDTH


def test_what_never_ran_is_listed_without_the_time_it_took(daemon: FakeDaemon) -> None:
    now = time.time()
    why = "cancelled before it started"
    daemon.add(
        make_job(1, JobState.CANCELLED, reason=why),
        make_job(2, JobState.FAILED, reason="exit code 2", started_at=now - 9, ended_at=now),
    )
    shown = run_on_terminal("list", NO_COLOR="1")[1]
    assert f"{why}\r\n" in shown
    assert "exit code 2 (9s)" in shown


def test_colours_are_for_terminals_and_no_color_is_honoured(daemon: FakeDaemon) -> None:
    full_house(daemon)
    assert "\x1b[" in run_on_terminal("list")[1]
    assert "\x1b[" not in run_on_terminal("list", NO_COLOR="1")[1]
    assert "\x1b[" not in run("list").stdout
    assert "\x1b[" in run_on_terminal("list", "--state", "x")[1]
    assert "\x1b[" not in run_on_terminal("list", "--state", "x", NO_COLOR="1")[1]


def test_an_empty_queue_says_how_to_fill_it(daemon: FakeDaemon) -> None:
    assert "rlq submit -- python train.py" in run_on_terminal("list")[1]
    assert len(run("list").stdout.splitlines()) == 1  # the header: a pipe is no person


def test_a_terminal_gets_a_sentence_and_a_pipe_gets_the_id(daemon: FakeDaemon) -> None:
    assert "job 1 (true) is queued" in run_on_terminal("submit", "--", "true")[1]
    assert run_on_terminal("submit", "-q", "--", "true")[1].strip() == "2"
    assert run("submit", "--", "true").stdout == "3\n"


def test_cancelling_all_asks_first(daemon: FakeDaemon) -> None:
    daemon.add(make_job(1), make_job(2))
    code, shown = run_on_terminal("cancel", "--all", typed="n\n")
    assert code == 1
    assert "cancel 2 jobs?" in shown
    assert "nothing was done" in shown
    assert daemon.asked(m.Cancel) == []
    code, _ = run_on_terminal("cancel", "--all", typed="y\n")
    assert code == 0
    assert len(daemon.asked(m.Cancel)) == 1


def test_requeueing_all_asks_about_those_that_failed(daemon: FakeDaemon) -> None:
    daemon.add(*(make_job(i, JobState.FAILED) for i in (1, 2)), make_job(3, JobState.COMPLETED))
    code, shown = run_on_terminal("requeue", "--all", typed="n\n")
    assert code == 1
    assert "requeue 2 jobs?" in shown
    assert daemon.asked(m.Requeue) == []


def test_a_terminal_is_shown_the_head_of_a_long_queue_and_a_pipe_all_of_it(
    daemon: FakeDaemon,
) -> None:
    daemon.add(*(make_job(i) for i in range(101, 901)), make_job(901, JobState.RUNNING))
    _, shown = run_on_terminal("list", NO_COLOR="1")
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [
        *(str(i) for i in range(101, 151)),
        "901",
    ]
    assert lines[-1].startswith("… 750 more")
    piped = run("list").stdout.splitlines()
    assert [line.split("\t")[0] for line in piped[1:]] == [str(i) for i in range(101, 902)]


def test_waiting_draws_nothing_under_no_color(daemon: FakeDaemon) -> None:
    daemon.add(make_job(1, JobState.COMPLETED))
    code, shown = run_on_terminal("wait", "1", NO_COLOR="1")
    assert code == 0
    assert "\x1b" not in shown


def test_a_progress_bar_moves_under_the_log(daemon: FakeDaemon) -> None:
    log = daemon.path.parent / "1.log"
    log.write_text("first line\n")
    progress = m.Progress(step=250, total=1000, steps_per_s=10.0, eta_s=75.0)
    daemon.add(
        make_job(1, JobState.RUNNING, log_path=str(log), attempt=1, progress=progress, name="run")
    )
    rounds = 0

    def go_on(_: m.Request) -> m.Reply:
        nonlocal rounds
        rounds += 1
        with log.open("a") as more:
            more.write(f"line {rounds}\n")
        if rounds == 3:
            daemon.set(1, state=JobState.COMPLETED, exit_code=0)
        return m.Waited(done=rounds == 3, jobs=(daemon.jobs[1],))

    daemon.answers[m.Wait] = go_on
    code, shown = run_on_terminal("logs", "-f", "1")
    assert code == 0
    for text in ("first line", "line 1", "line 3", "25%", "COMPLETED"):
        assert text in shown


def test_a_locale_that_cannot_show_a_name_is_no_error(daemon: FakeDaemon) -> None:
    daemon.add(make_job(1, name="日本語"))
    done = run("list", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert "\\u65e5" in done.stdout


# ---- how it ends -------------------------------------------------------------------


def test_ctrl_c_after_submitting_leaves_the_job_and_says_so(daemon: FakeDaemon) -> None:
    process = subprocess.Popen(
        [*RLQ, "submit", "--wait", "--", "true"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: daemon.asked(m.Wait), bool)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("1\n", "job 1 runs on; `rlq cancel` would stop it\n")


def test_ctrl_c_ends_the_waiting_with_130_and_no_traceback(daemon: FakeDaemon) -> None:
    daemon.add(make_job(1, JobState.RUNNING))
    process = subprocess.Popen(
        [*RLQ, "wait", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: daemon.asked(m.Wait), bool)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "job 1 runs on; `rlq cancel` would stop it\n")


def test_a_reader_that_goes_away_is_no_error(daemon: FakeDaemon) -> None:
    log = daemon.path.parent / "1.log"
    log.write_bytes(b"x" * 10_000_000)
    daemon.add(make_job(1, log_path=str(log), attempt=1))
    process = subprocess.Popen([*RLQ, "logs", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141
    process.stderr.close()


def test_the_shell_completes_ids_and_states_without_starting_anything(
    daemon: FakeDaemon, short_tmp: Path
) -> None:
    daemon.add(make_job(12), make_job(13), make_job(2))

    def complete(words: str, **env: str) -> list[str]:
        last = str(len(words.split(" ")) - 1)
        done = run(_RLQ_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=last, **env)
        assert done.stderr == ""
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert complete("rlq show 1") == ["13", "12"]
    assert complete("rlq list --state run") == ["RUNNING"]
    assert "submit" in complete("rlq sub")
    assert complete("rlq list --state hel") == ["HELD"]
    nobody = complete("rlq show 1", RLQ_SOCKET="", RLQ_STATE_DIR=str(short_tmp / "none"))
    assert [word for word in nobody if word] == []
    assert not (short_tmp / "none").exists()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("rlq submit -- python sle", "file"),
        ("rlq submit --cores 2 pyt", "file"),
        ("rlq submit --log sle", "file"),
        ("rlq submit --cwd sle", "dir"),
        ("rlq submit --progress-from sle", "file"),
        ("rlq submit sac --out sle", "dir"),
        ("rlq --socket sle", "file"),
        ("rlq list --socket sle", "file"),
    ],
)
def test_the_shell_completes_files_where_paths_go(words: str, kind: str) -> None:
    last = str(len(words.split(" ")) - 1)
    done = run(_RLQ_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=last)
    assert (done.stderr, done.stdout.splitlines()) == ("", [f"{kind},{words.split(' ')[-1]}"])


# ---- starting a daemon -------------------------------------------------------------

STAND_IN = f"""
import os, pathlib, sys, time, fcntl
sys.path.insert(0, {str(ROOT)!r})
from rlq import paths
where = paths.daemon_paths()
ready = int(sys.argv[sys.argv.index("--ready-fd") + 1])
behaviour = os.environ["STAND_IN"]
with open(where.state_dir / "starts", "a") as starts:
    starts.write(f"{{os.getpid()}}\\n")
if behaviour == "refuses":
    os.write(ready, b"the configuration is wrong\\n")
    sys.exit(1)
if behaviour == "is short of disk":
    print("rlqd: error: the disk is full\\nhint: make room", file=sys.stderr)
    sys.exit(7)
if behaviour == "crashes":
    raise RuntimeError("cannot go on")
if behaviour == "dies":
    sys.exit("rlqd: something is very wrong")
from tests.support.fake_daemon import FakeDaemon
assert os.getsid(0) == os.getpid() and os.getcwd() == "/"
assert os.read(0, 1) == b""
with FakeDaemon(where.socket) as daemon:
    os.write(ready, b"ready\\n")
    os.close(ready)
    daemon.stopping.wait(60)
"""


@pytest.fixture
def own_daemon(short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of its own, and a stand-in for `python -m rlqd`."""
    package = tmp_path / "rlqd"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("RLQ_SOCKET", raising=False)
    monkeypatch.setenv("RLQ_STATE_DIR", str(short_tmp))
    monkeypatch.setenv("STAND_IN", "serves")
    yield short_tmp
    run("daemon", "stop")


def test_submitting_starts_a_daemon_where_none_runs(own_daemon: Path) -> None:
    done = run("submit", "--", "true")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    status = json.loads(run("daemon", "status", "--json").stdout)
    assert status["running"] is True
    assert (own_daemon / "starts").read_text().split() == [str(status["pid"])]


def test_stopping_it_is_told_once(own_daemon: Path) -> None:
    assert run("daemon", "start").returncode == 0
    done = run("daemon", "stop")
    assert (done.returncode, done.stderr) == (0, "")
    assert "has stopped; running jobs run on" in done.stdout


def test_many_at_once_start_one_daemon(own_daemon: Path) -> None:
    together = [
        subprocess.Popen([*RLQ, "submit", "--", "true"], stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    ids = [process.communicate(timeout=60)[0].strip() for process in together]
    assert sorted(ids) == ["1", "2", "3", "4", "5"]
    assert len((own_daemon / "starts").read_text().split()) == 1


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [("refuses", "the configuration is wrong"), ("dies", "something is very wrong")],
)
def test_a_daemon_that_does_not_start_says_why(
    own_daemon: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, said: str
) -> None:
    monkeypatch.setenv("STAND_IN", behaviour)
    done = run("list")
    assert done.returncode == 6
    assert said in done.stderr
    assert f"hint: its log is {own_daemon}/rlqd.log" in done.stderr


def test_a_daemon_that_cannot_just_now_is_told_apart_with_its_own_words(
    own_daemon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "is short of disk")
    done = run("list")
    assert done.returncode == 7
    assert done.stderr == (
        "error: the daemon did not start: the disk is full\n"
        f"hint: make room; its log is {own_daemon}/rlqd.log\n"
    )


def test_of_a_traceback_only_the_sentence_is_shown(
    own_daemon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "crashes")
    done = run("list")
    assert done.returncode == 6
    first, *_ = done.stderr.splitlines()
    assert first == "error: the daemon did not start: RuntimeError: cannot go on"


def test_a_state_folder_named_from_here_is_the_daemons_too(
    own_daemon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_daemon)
    monkeypatch.setenv("RLQ_STATE_DIR", "state")
    done = run("submit", "--", "true")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert (own_daemon / "state" / "starts").exists()
    assert run("daemon", "stop").returncode == 0


@pytest.mark.parametrize("how", [["--no-autostart", "list"], ["list", "--no-autostart"], ["list"]])
def test_it_is_not_started_where_that_is_forbidden(
    own_daemon: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    if how == ["list"]:
        monkeypatch.setenv("RLQ_NO_AUTOSTART", "1")
    done = run(*how)
    assert done.returncode == 6
    assert "hint: start one with `rlq daemon start`" in done.stderr
    assert not (own_daemon / "starts").exists()


def test_a_daemon_that_was_killed_is_replaced(own_daemon: Path) -> None:
    first = json.loads(run("daemon", "start", "--json").stdout)
    os.kill(first["pid"], signal.SIGKILL)
    assert (own_daemon / "rlqd.sock").exists()
    second = json.loads(run("daemon", "start", "--json").stdout)
    assert second["started"] is True
    assert second["pid"] != first["pid"]
    assert json.loads(run("daemon", "start", "--json").stdout)["started"] is False


def test_a_socket_named_by_hand_is_not_replaced_by_a_daemon_of_ones_own(
    own_daemon: Path,
) -> None:
    done = run("list", "--socket", str(own_daemon / "rlqd.sock"))
    assert done.returncode == 6
    assert not (own_daemon / "starts").exists()


def test_an_error_keeps_within_the_terminal_and_is_one_line_elsewhere(daemon: FakeDaemon) -> None:
    words = ["list", "--state", "NONSENSE"]
    whole = run(*words).stderr.splitlines()
    assert max(map(len, whole)) > WIDTH, "or it shows nothing"
    code, shown = run_on_terminal(*words, NO_COLOR="1")
    assert code == 2
    lines = shown.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert " ".join(lines) == " ".join(whole)
