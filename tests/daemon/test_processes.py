"""The daemon's side of its jobs' processes, with real ones: launch, signal, reap, recover."""

from __future__ import annotations

import errno
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.groups import killable_group, until_gone
from tests.support.waiting import wait_until

import rlqd.adapters.processes
import rlqd.supervisor
from rlqd.adapters.processes import (
    Alive,
    End,
    Exited,
    ExitRecord,
    Handle,
    LaunchError,
    LaunchOrder,
    Lost,
    Processes,
    Ready,
    Silent,
    Started,
    Voided,
)
from rlqd.fences import Fence


def ended(pid: int) -> bool:
    try:
        return rlqd.supervisor.Process(pid).state in (b"Z", b"X")
    except OSError:
        return True


def state_of(pid: int) -> str:
    return rlqd.supervisor.Process(pid).state.decode()


class Daemon:
    """What rlqd's event loop does with Processes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.run_dir = place / "run"
        self.log = place / "log"
        self.processes = Processes(self.run_dir, "queue-a")
        self.handles: list[Handle] = []

    def order(self, *argv: str, job: int = 1, attempt: int = 1) -> LaunchOrder:
        return LaunchOrder(
            job=job,
            attempt=attempt,
            argv=argv,
            env={"PATH": os.environ["PATH"]},
            cwd=str(self.place),
            umask=0o022,
            uid=os.getuid(),
            gid=os.getgid(),
            log_path=str(self.log),
        )

    def launch(self, order: LaunchOrder, *, wrapper: tuple[str, ...] = ()) -> Handle:
        order = replace(order, fence=replace(order.fence, wrapper=wrapper))
        handle = self.processes.launch(order)
        assert isinstance(handle, Handle), handle
        self.handles.append(handle)
        return handle

    def ready(self, handle: Handle) -> Ready:
        assert handle.ready_fd is not None
        while True:
            assert select.select([handle.ready_fd], [], [], 60)[0], "no news of the launch"
            if (news := self.processes.read_ready(handle)) is not None:
                return news

    def start(self, *argv: str, job: int = 1, attempt: int = 1) -> tuple[Handle, Started]:
        handle = self.launch(self.order(*argv, job=job, attempt=attempt))
        news = self.ready(handle)
        assert isinstance(news, Started), news
        return handle, news

    def end(self, handle: Handle) -> End:
        assert select.select([handle.pidfd], [], [], 60)[0], "the supervisor does not end"
        if handle in self.handles:
            self.handles.remove(handle)
        return self.processes.reap(handle)

    def restart(self) -> None:
        """As after kill -9: nothing is remembered but what is on disk."""
        self.processes = Processes(self.run_dir, "queue-a")

    def recover_alive(self, job: int = 1, attempt: int = 1) -> Handle:
        found = self.processes.recover(job, attempt)
        assert isinstance(found, Alive), found
        self.handles.append(found.handle)
        return found.handle

    def clear(self) -> None:
        for handle in list(self.handles):
            self.processes.kill(handle)
            self.end(handle)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.clear()


# ---- launch and reap ---------------------------------------------------------------


def test_a_job_starts_and_its_exit_is_told(daemon: Daemon) -> None:
    handle, started = daemon.start("sh", "-c", "exit 3", job=5, attempt=2)
    assert (started.job, started.attempt, started.pid) == (5, 2, handle.pid)
    record = daemon.end(handle)
    assert isinstance(record, ExitRecord)
    assert (record.job, record.attempt, record.code, record.signal) == (5, 2, 3, None)


def test_the_reaped_supervisor_is_no_zombie(daemon: Daemon) -> None:
    handle, _ = daemon.start("true")
    daemon.end(handle)
    with pytest.raises(ChildProcessError):
        os.waitpid(handle.pid, os.WNOHANG)
    for fd in (handle.pidfd, handle.ready_fd):
        assert fd is not None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_command_that_cannot_run_is_a_launch_error_everywhere(daemon: Daemon) -> None:
    error = LaunchError(
        job=1,
        attempt=1,
        stage="exec",
        errno=errno.ENOENT,
        message="command not found: nope",
        passing=False,
    )
    handle = daemon.launch(daemon.order("nope"))
    assert daemon.ready(handle) == error
    daemon.restart()
    assert daemon.processes.recover(1, 1) == error
    assert daemon.end(handle) == error


def test_a_launch_error_that_left_no_record_survives_until_the_reaping(daemon: Daemon) -> None:
    handle = daemon.launch(daemon.order("nope"))
    select.select([handle.pidfd], [], [], 60)
    (daemon.run_dir / "1.1/exit.json").unlink()
    error = daemon.end(handle)
    assert isinstance(error, LaunchError)
    assert error.message == "command not found: nope"


def test_the_command_s_environment_is_as_ordered_plus_the_markers(daemon: Daemon) -> None:
    big = {"PATH": os.environ["PATH"], "RAW": "\udcff"} | {f"V{n}": "x" * 9000 for n in range(40)}
    handle = daemon.launch(replace(daemon.order("cat", "/proc/self/environ"), env=big))
    daemon.end(handle)
    seen = daemon.log.read_bytes().split(b"\0")
    wanted = big | {"RLQ_QUEUE": "queue-a", "RLQ_JOB_ID": "1", "RLQ_ATTEMPT": "1"}
    assert seen[:-1] == [
        f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in wanted.items()
    ]


def open_files(pid: int) -> set[str]:
    """Where a process's descriptors lead; it may close some meanwhile."""
    targets: set[str] = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.add(os.readlink(path))
    return targets


def test_descriptors_that_leak_from_the_daemon_reach_neither_supervisor_nor_job(
    daemon: Daemon,
) -> None:
    leak_fd = os.open(daemon.place, os.O_RDONLY)
    os.set_inheritable(leak_fd, True)
    try:
        handle, started = daemon.start("sleep", "600")
    finally:
        os.close(leak_fd)
    for pid in (handle.pid, started.command_pid):
        assert str(daemon.place) not in open_files(pid)
    # The dynamic loader opens libraries for a moment: what stays open is what was inherited.
    wait_until(
        lambda: sorted(os.listdir(f"/proc/{started.command_pid}/fd")),
        lambda open_fds: open_fds == ["0", "1", "2"],
    )


def test_an_order_does_not_print_its_environment(daemon: Daemon) -> None:
    order = replace(daemon.order("true"), env={"TOKEN": "hunter2"})
    assert "hunter2" not in repr(order)


def test_no_attempt_is_launched_twice(daemon: Daemon) -> None:
    handle, _ = daemon.start("sleep", "600")
    again = daemon.processes.launch(daemon.order("sleep", "600"))
    assert isinstance(again, LaunchError)
    assert (again.errno, again.passing) == (errno.EEXIST, False)
    assert not ended(handle.pid)


def test_a_supervisor_that_cannot_be_started_is_a_launch_error(daemon: Daemon) -> None:
    processes = Processes(daemon.run_dir, "queue-a", python="/no/such/python")
    open_before = os.listdir("/proc/self/fd")
    error = processes.launch(daemon.order("true"))
    assert isinstance(error, LaunchError)
    assert error.message == "cannot start the job's supervisor: No such file or directory"
    assert os.listdir("/proc/self/fd") == open_before


def test_a_supervisor_can_be_started_under_a_wrapper(daemon: Daemon) -> None:
    handle = daemon.launch(daemon.order("sh", "-c", "exit 3"), wrapper=("env", "A=1"))
    record = daemon.end(handle)
    assert isinstance(record, ExitRecord)
    assert record.code == 3


def test_a_wrapper_that_fails_has_run_nothing_and_may_pass(daemon: Daemon) -> None:
    complaint = "echo Failed to connect to bus >&2; exit 9"
    handle = daemon.launch(daemon.order("touch", "ran"), wrapper=("sh", "-c", complaint))
    assert daemon.ready(handle) == Silent(job=1, attempt=1)
    error = daemon.end(handle)
    assert isinstance(error, LaunchError)
    assert (error.stage, error.passing) == ("fence", True)
    assert error.message == "no scope could be made for it: Failed to connect to bus"
    assert not (daemon.place / "ran").exists()
    assert daemon.processes.recover(1, 1) == Voided(job=1, attempt=1)


def test_a_wrapper_that_ends_in_silence_is_known_by_its_status(daemon: Daemon) -> None:
    handle = daemon.launch(daemon.order("true"), wrapper=("sh", "-c", "exit 9"))
    error = daemon.end(handle)
    assert isinstance(error, LaunchError)
    assert (error.stage, error.passing) == ("fence", True)
    assert "status 9" in error.message


def test_a_supervisor_that_is_killed_early_speaks_against_no_wrapper(daemon: Daemon) -> None:
    """A job whose own limit is too small for what it is sent must not end everybody's limits."""
    handle = daemon.launch(daemon.order("true"), wrapper=("sh", "-c", "kill -9 $$"))
    error = daemon.end(handle)
    assert isinstance(error, LaunchError)
    assert (error.stage, error.passing) == ("supervisor", True)


def test_a_wrapper_that_is_not_there_may_come_back(daemon: Daemon) -> None:
    order = replace(daemon.order("true"), fence=Fence(wrapper=("no-such-wrapper",)))
    error = daemon.processes.launch(order)
    assert isinstance(error, LaunchError)
    assert (error.stage, error.passing) == ("fence", True)
    assert error.message == "cannot run no-such-wrapper: No such file or directory"


def test_without_its_compiled_form_the_supervisor_runs_from_source(tmp_path: Path) -> None:
    (tmp_path / "run/supervisor.pyc").mkdir(parents=True)
    daemon = Daemon(tmp_path)
    handle, _ = daemon.start("true")
    assert isinstance(daemon.end(handle), ExitRecord)


# ---- signals -----------------------------------------------------------------------


def test_terminate_and_kill_are_safe_to_repeat_at_any_time(daemon: Daemon) -> None:
    # Never waits for the start: a signal that comes early must neither kill the supervisor
    # nor be forgotten.
    chance = random.Random(1)
    for job in range(1, 41):
        handle = daemon.launch(daemon.order("sleep", "600", job=job))
        select.select([], [], [], chance.uniform(0, 0.03))
        order = [daemon.processes.terminate, daemon.processes.kill]
        for send in order[job % 2 :] if job % 4 else order:
            send(handle)
            send(handle)
        record = daemon.end(handle)
        assert isinstance(record, ExitRecord), (job, record)
        assert record.signal in (signal.SIGTERM, signal.SIGKILL)
    for send in (daemon.processes.terminate, daemon.processes.kill):
        handle, _ = daemon.start("true", job=99 if send == daemon.processes.kill else 98)
        select.select([handle.pidfd], [], [], 60)
        send(handle)  # it has gone already
        assert isinstance(daemon.end(handle), ExitRecord)


def test_whether_the_daemon_or_somebody_else_stopped_it_is_told(daemon: Daemon) -> None:
    ours, _ = daemon.start("sleep", "600", job=1)
    theirs, _ = daemon.start("sleep", "600", job=2)
    daemon.processes.terminate(ours)
    os.kill(theirs.pid, signal.SIGTERM)
    ends = [daemon.end(ours), daemon.end(theirs)]
    assert [isinstance(e, ExitRecord) and e.stopped_by_others for e in ends] == [False, True]


def test_freeze_and_thaw(daemon: Daemon) -> None:
    handle, started = daemon.start("sleep", "600")
    daemon.processes.freeze(handle)
    wait_until(lambda: state_of(started.command_pid), lambda state: state == "T")
    daemon.processes.thaw(handle)
    wait_until(lambda: state_of(started.command_pid), lambda state: state == "S")


# ---- recover -----------------------------------------------------------------------


def test_a_running_job_is_found_alive_and_obeys_the_new_daemon(daemon: Daemon) -> None:
    old, started = daemon.start("sleep", "600")
    daemon.restart()
    handle = daemon.recover_alive()
    assert (handle.pid, handle.command_pid) == (old.pid, started.command_pid)
    assert handle.ready_fd is None
    daemon.processes.terminate(handle)
    record = daemon.end(handle)
    assert isinstance(record, ExitRecord)
    assert record.signal == signal.SIGTERM
    daemon.handles.clear()
    os.close(old.pidfd)


DAEMON = """
import os, signal, sys
from pathlib import Path
from rlqd.adapters.processes import LaunchOrder, Processes
place = Path(sys.argv[1])
processes = Processes(place / "run", "queue-a")
processes.launch(LaunchOrder(job=1, attempt=1, argv=("sh", "-c", "read x < gate; exit 7"),
    env={"PATH": os.environ["PATH"]}, cwd=str(place), umask=0o022, uid=os.getuid(),
    gid=os.getgid(), log_path=str(place / "log")))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_outlives_its_killed_daemon_and_its_exit_code_too(daemon: Daemon) -> None:
    os.mkfifo(daemon.place / "gate")
    killed = subprocess.run([sys.executable, "-c", DAEMON, daemon.place], check=False)
    assert killed.returncode == -signal.SIGKILL
    # The supervisor may still be on its way to the claim: then it never runs, for sure.
    wait_until(lambda: (daemon.run_dir / "1.1/started.json").exists(), bool)
    handle = daemon.recover_alive()
    (daemon.place / "gate").write_text("go\n")
    record = daemon.end(handle)
    assert isinstance(record, ExitRecord)
    assert record.code == 7


def test_an_end_that_nobody_saw_is_found(daemon: Daemon) -> None:
    handle, _ = daemon.start("sh", "-c", "exit 4")
    select.select([handle.pidfd], [], [], 60)
    daemon.restart()
    found = daemon.processes.recover(1, 1)
    assert isinstance(found, Exited)
    assert found.record.code == 4


@pytest.mark.parametrize("made", [False, True])
def test_an_attempt_never_launched_is_voided_for_good(daemon: Daemon, made: bool) -> None:
    if made:
        (daemon.run_dir / "1.1").mkdir()
    for _ in range(2):
        assert daemon.processes.recover(1, 1) == Voided(job=1, attempt=1)
        daemon.restart()
    late = daemon.order("touch", "ran")
    (daemon.run_dir / "1.1").rename(daemon.run_dir / "aside")
    handle = daemon.launch(late, wrapper=("sh", "-c", VOID_FIRST, "sh", str(daemon.run_dir)))
    assert daemon.ready(handle) == Silent(job=1, attempt=1)
    assert isinstance(daemon.end(handle), LaunchError)
    assert not (daemon.place / "ran").exists()


#: Puts the void claim in place after launch has made its folder, then becomes the supervisor.
VOID_FIRST = 'cp "$1/aside/claim.json" "$1/1.1/"; shift; exec "$@"'


def test_whoever_claims_first_decides_and_the_other_agrees(daemon: Daemon) -> None:
    chance = random.Random(2)
    seen = {"ran": 0, "voided": 0}
    for job in range(1, 201):
        handle = daemon.launch(daemon.order("touch", f"ran.{job}", job=job))
        select.select([], [], [], chance.uniform(0, 0.02))
        found = Processes(daemon.run_dir, "queue-a").recover(job, 1)
        end = daemon.end(handle)
        ran = (daemon.place / f"ran.{job}").exists()
        match found:
            case Voided():
                assert not ran
                assert isinstance(end, LaunchError)
                seen["voided"] += 1
            case Alive(handle=recovered):
                os.close(recovered.pidfd)
                assert ran
                assert isinstance(end, ExitRecord)
                assert end.code == 0
                seen["ran"] += 1
            case Exited(record=record):
                assert ran
                assert record == end
                seen["ran"] += 1
            case _:
                pytest.fail(f"{found} of a launch that nothing disturbed")
    assert min(seen.values()) >= 5, f"one side always won: {seen}"


def test_after_a_reboot_a_job_is_lost(daemon: Daemon) -> None:
    handle, _ = daemon.start("sleep", "600")
    claim = daemon.run_dir / "1.1/claim.json"
    before = claim.read_text()
    claim.write_text(json.dumps(json.loads(before) | {"boot_id": "another"}))
    daemon.restart()
    assert daemon.processes.recover(1, 1) == Lost(
        job=1, attempt=1, reason="the machine was rebooted"
    )
    assert not ended(handle.pid), "the pids in an old claim are strangers' now"


LEAVES_A_DAEMON = 'setsid sh -c "echo daemon \\$\\$; exec sleep 600" & wait'


@pytest.mark.parametrize("restarted", [False, True])
def test_a_killed_supervisor_loses_the_job_and_leaves_nothing_running(
    daemon: Daemon, restarted: bool
) -> None:
    other, other_started = daemon.start("sleep", "600", job=2)
    handle, started = daemon.start("sh", "-c", LEAVES_A_DAEMON)
    text = wait_until(daemon.log.read_text, lambda text: text.endswith("\n"))
    left_over = int(text.split()[1])
    os.kill(handle.pid, signal.SIGKILL)
    wait_until(lambda: ended(started.command_pid), bool)  # goes with its supervisor
    assert not ended(left_over)
    if restarted:
        daemon.restart()
        lost: object = daemon.processes.recover(1, 1)
        daemon.end(handle)
    else:
        lost = daemon.end(handle)
    assert lost == Lost(
        job=1,
        attempt=1,
        reason="the job's supervisor was killed; 1 left-over process was killed",
    )
    assert ended(left_over)
    assert not ended(other.pid)
    assert not ended(other_started.command_pid)


def test_left_overs_that_hide_are_found_by_their_control_group(daemon: Daemon) -> None:
    group = killable_group()
    fence = Fence(cgroup=str(group), limits=str(group))
    hidden = "env -i setsid sleep 600 & echo left $!; wait"
    handle = daemon.launch(replace(daemon.order("sh", "-c", hidden), fence=fence))
    started = daemon.ready(handle)
    assert isinstance(started, Started)
    assert started.cgroup == str(group)
    left_over = int(wait_until(daemon.log.read_text, bool).split()[1])
    wait_until(lambda: markers_of(left_over), lambda found: not found)
    os.kill(handle.pid, signal.SIGKILL)
    wait_until(lambda: ended(started.command_pid), bool)  # goes with its supervisor
    lost = daemon.end(handle)
    assert isinstance(lost, Lost)
    assert "killed; 1 left-over process was killed" in lost.reason
    assert ended(left_over)
    daemon.processes.discard(1, 1)
    until_gone(group)


def markers_of(pid: int) -> bool:
    return b"RLQ_JOB_ID" in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_recovered_job_is_known_by_its_control_group(daemon: Daemon) -> None:
    group = killable_group()
    order = replace(daemon.order("sleep", "600"), fence=Fence(cgroup=str(group)))
    handle = daemon.launch(order)
    assert isinstance(daemon.ready(handle), Started)
    daemon.restart()
    found = daemon.recover_alive()
    assert found.cgroup == str(group)
    daemon.processes.kill(found)
    assert isinstance(daemon.end(found), ExitRecord)
    until_gone(group)


def test_left_overs_of_another_queue_or_attempt_are_let_be(daemon: Daemon) -> None:
    mine = daemon.processes.markers(1, 1)
    strangers = [
        subprocess.Popen(["sleep", "600"], env=mine | change)
        for change in ({"RLQ_QUEUE": "queue-b"}, {"RLQ_ATTEMPT": "2"}, {"RLQ_JOB_ID": "11"})
    ]
    try:
        handle, _ = daemon.start("sleep", "600")
        os.kill(handle.pid, signal.SIGKILL)
        lost = daemon.end(handle)
        assert isinstance(lost, Lost)
        assert [stranger.poll() for stranger in strangers] == [None, None, None]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_a_pid_that_is_somebody_else_s_now_is_not_taken_for_the_supervisor(
    daemon: Daemon,
) -> None:
    handle, _ = daemon.start("sleep", "600")
    os.kill(handle.pid, signal.SIGKILL)
    daemon.end(handle)
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        claim = daemon.run_dir / "1.1/claim.json"
        claim.write_text(json.dumps(json.loads(claim.read_text()) | {"pid": stranger.pid}))
        daemon.restart()
        found = daemon.processes.recover(1, 1)
        assert found == Lost(job=1, attempt=1, reason="the job's supervisor was killed")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_bug_in_the_supervisor_is_told(daemon: Daemon) -> None:
    handle, _ = daemon.start("sleep", "600")
    folder = daemon.run_dir / "1.1"
    (folder / "exit.json").mkdir()  # its record finds no place
    (folder / "exit.json/x").touch()
    daemon.processes.kill(handle)
    select.select([handle.pidfd], [], [], 60)
    (folder / "exit.json/x").unlink()
    (folder / "exit.json").rmdir()
    lost = daemon.end(handle)
    assert isinstance(lost, Lost)
    assert lost.reason.startswith("the job's supervisor failed (line ")
    assert "IsADirectoryError" in lost.reason or "exit.json" in lost.reason


@pytest.mark.parametrize("text", ["", "\0\0\0", "[]", '{"pid'])
def test_damaged_files_lose_one_job_and_crash_nothing(daemon: Daemon, text: str) -> None:
    handle, _ = daemon.start("true")
    daemon.end(handle)
    folder = daemon.run_dir / "1.1"
    (folder / "exit.json").write_text(text)
    reason = "the job's supervisor was killed"
    assert daemon.processes.recover(1, 1) == Lost(job=1, attempt=1, reason=reason)
    (folder / "claim.json").write_text(text)
    reason = "its claim file is damaged"
    assert daemon.processes.recover(1, 1) == Lost(job=1, attempt=1, reason=reason)


def test_a_record_of_another_version_is_read(daemon: Daemon) -> None:
    handle, _ = daemon.start("true")
    daemon.end(handle)
    (daemon.run_dir / "1.1/exit.json").write_text('{"code": 3, "signal": null, "new": [1]}')
    found = daemon.processes.recover(1, 1)
    assert isinstance(found, Exited)
    assert (found.record.code, found.record.oom, found.record.maxrss_mib) == (3, None, 0)
    assert not found.record.stopped_by_others


def test_what_is_discarded_is_gone(daemon: Daemon) -> None:
    handle, _ = daemon.start("true")
    daemon.end(handle)
    daemon.processes.discard(1, 1)
    daemon.processes.discard(1, 1)
    assert sorted(path.name for path in daemon.run_dir.iterdir()) == ["supervisor.pyc"]


def test_nothing_is_left_open_after_many_jobs(daemon: Daemon) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    handles = [daemon.launch(daemon.order("true", job=job)) for job in range(1, 31)]
    for handle in handles:
        assert isinstance(daemon.ready(handle), Started)
        assert isinstance(daemon.end(handle), ExitRecord)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_launch_does_not_wait_for_the_supervisor(daemon: Daemon) -> None:
    # The wrapper never gets as far as the supervisor: launch must return nevertheless.
    handle = daemon.launch(daemon.order("true"), wrapper=("sh", "-c", "exec sleep 600"))
    assert daemon.processes.read_ready(handle) is None
    os.kill(handle.pid, signal.SIGKILL)
    error = daemon.end(handle)
    assert isinstance(error, LaunchError)
    assert error.passing


def test_a_launch_that_hangs_is_killed_with_its_supervisor(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An open(2) on a dead network disk answers no signal but SIGKILL, as a stopped process does.
    monkeypatch.setattr(rlqd.adapters.processes, "_LAUNCH_HANGS_S", 0.0)
    handle = daemon.launch(daemon.order("sleep", "600"))
    os.kill(handle.pid, signal.SIGSTOP)
    daemon.processes.kill(handle)
    assert isinstance(daemon.end(handle), LaunchError | Lost)
