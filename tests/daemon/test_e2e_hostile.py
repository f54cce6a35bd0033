"""Hostile users and hostile jobs against a real daemon for everybody (docs/security.md).

What a hostile client can send is in test_e2e_bad_input.py, what strangers on the network can do
in test_curve.py, log files and folders in test_supervisor.py.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.support.rlqd import Rlqd, configured
from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.protocol import codec
from rlq.protocol import messages as m
from rlq.protocol.states import JobState

NOBODY = "nobody"
SYSTEM_PYTHON = "/usr/bin/python3"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


@pytest.fixture
def d(tmp_path: Path) -> Iterator[Rlqd]:
    with Rlqd(tmp_path, shared=True) as daemon:
        yield daemon


@pytest.fixture
def public_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rlq-") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def as_nobody(act: Callable[[], object]) -> None:
    """In a child that is nobody and has nothing of root's; an assertion in it fails here."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:  # no test machinery may run in the child, and no exit handler
        try:
            account = pwd.getpwnam(NOBODY)
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            act()
            os.write(write_fd, b"ok")
        except BaseException as error:
            os.write(write_fd, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as said:
        answer = said.read().decode()
    os.waitpid(pid, 0)
    assert answer == "ok"


def submit_as_nobody(d: Rlqd, spec: m.JobSpec, env: dict[str, str]) -> int:
    root = d.client()

    def submit() -> None:
        with Client(d.socket, autostart=False) as client:
            client.submit_many([spec], env=env)

    as_nobody(submit)
    job = root.list()[0]
    assert job.user == NOBODY
    return job.id


#: Appends a line to $MARK wherever it is loaded.
MARKER_C = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) {
    char line[200];
    int n = snprintf(line, sizeof line, "%d %d HOW into %s\n", getuid(), geteuid(),
                     program_invocation_short_name);
    int fd = open(PLACE, O_WRONLY | O_APPEND | O_CREAT, 0666);
    if (fd >= 0) { (void)!write(fd, line, n); close(fd); }
}
/* By this the loader knows an auditor (rtld-audit(7)). */
unsigned int la_version(unsigned int version) { return version; }
"""
MARKER_PY = """
import os
with open({place!r}, "a") as mark:
    mark.write(f"{{os.getuid()}} {{os.geteuid()}} imported {name}\\n")
"""


@as_root
def test_nothing_a_user_submits_is_loaded_into_roots_code(d: Rlqd, public_folder: Path) -> None:
    """The loader's, Python's and the shell's ways to run code at start: they reach the job, after
    it has become its user, and neither the supervisor nor the daemon, which are root."""
    place = public_folder / "marks"
    place.touch()
    place.chmod(0o666)
    for how in ("preloaded", "audited"):
        source = public_folder / f"{how}.c"
        source.write_text(MARKER_C.replace("PLACE", f'"{place}"').replace("HOW", how))
        library = source.with_suffix(".so")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    modules = public_folder / "modules"
    modules.mkdir()
    for name in ("sitecustomize", "usercustomize", "json", "signal", "select", "rlq", "rlqd"):
        code = MARKER_PY.format(place=str(place), name=name)
        if name in ("json", "signal", "select"):
            code += "raise SystemExit(0)\n"
        (modules / f"{name}.py").write_text(code)
    script = public_folder / "start.sh"
    script.write_text(f'echo "$(id -ru) $(id -u) sourced" >> {place}\n')
    env = {
        "PATH": f"{modules}:/usr/bin:/bin",
        "LD_PRELOAD": str(public_folder / "preloaded.so"),
        "LD_AUDIT": str(public_folder / "audited.so"),
        "LD_LIBRARY_PATH": str(modules),
        "PYTHONPATH": str(modules),
        "PYTHONSTARTUP": str(modules / "sitecustomize.py"),
        "PYTHONINSPECT": "1",
        "PYTHONUSERBASE": str(modules),
        "BASH_ENV": str(script),
        "ENV": str(script),
        "RLQ_STATE_DIR": str(public_folder),
        "NOTIFY_SOCKET": str(public_folder / "notify"),
    }
    spec = m.JobSpec(
        argv=("bash", "-c", f"{SYSTEM_PYTHON} -c pass < /dev/null; exit 0"),
        cwd=str(modules),
        log_path=str(public_folder / "log"),
        resources=m.Resources(gpus=0),
    )
    job = submit_as_nobody(d, spec, env)
    d.until(d.client(), [job], lambda jobs: jobs[0].state.is_final)
    assert d.client().get(job).state is JobState.COMPLETED, (public_folder / "log").read_text()
    uid = pwd.getpwnam(NOBODY).pw_uid
    marks = place.read_text().splitlines()
    assert {mark.split()[2] for mark in marks} == {"preloaded", "audited", "imported", "sourced"}
    assert {mark.rsplit(" ", 1)[1] for mark in marks if "preloaded" in mark} >= {"bash"}
    assert [mark for mark in marks if not mark.startswith(f"{uid} {uid} ")] == []


@as_root
def test_who_a_message_says_it_is_from_is_not_read(d: Rlqd, public_folder: Path) -> None:
    """A client of one's own making may add what it likes: the kernel says who it is."""
    roots = d.client().submit(["sleep", "600"], gpus=0, held=True)
    spec = {
        "argv": ["sh", "-c", "id -u"],
        "cwd": "/",
        "log_path": str(public_folder / "log"),
        "resources": {"gpus": 0},
        "uid": 0,
        "user": "root",
        "gid": 0,
        "groups": [0],
    }
    claims = {"uid": 0, "user": "root", "peer": {"uid": 0}, "Peer-Address": "localhost:0:0:1"}

    def talk() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{d.socket}")

        def ask(body: dict[str, object]) -> m.Reply:
            frames = [codec.HEADER, b"1", msgspec.msgpack.encode({**claims, **body})]
            dealer.send_multipart(frames)
            assert dealer.poll(30_000)
            return codec.decode_reply(dealer.recv_multipart())[1]

        stop = ask({"type": "Stop"})
        assert isinstance(stop, m.Error), stop
        assert stop.kind == "not-permitted"
        cancelled = ask({"type": "Cancel", "selection": {"ids": [[roots, roots]]}})
        assert isinstance(cancelled, m.Changed), cancelled
        assert cancelled.changes[0].kind == "not-permitted"
        looked = ask({"type": "Environment", "id": roots})
        assert isinstance(looked, m.Error), looked
        submitted = ask({"type": "Submit", "jobs": [spec], "env": {"PATH": "/usr/bin:/bin"}})
        assert isinstance(submitted, m.Submitted), submitted

    as_nobody(talk)
    job = d.client().list()[0]
    d.until_state(d.client(), job.id, JobState.COMPLETED)
    assert job.user == NOBODY
    assert (public_folder / "log").read_text() == f"{pwd.getpwnam(NOBODY).pw_uid}\n"
    assert d.client().get(roots).state is JobState.PENDING


#: ZMTP 3.0, by hand.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BODY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY


def by_hand(connection: socket.socket, request: m.Request) -> bytes:
    """What comes back on a connection that somebody else has made."""
    connection.settimeout(30)
    connection.sendall(GREETING)
    answer = b""
    while b"READY" not in answer:
        answer += connection.recv(4096)
    *first, body = codec.encode(b"1", request)
    frames = [b"\x01" + bytes([len(frame)]) + frame for frame in first]
    connection.sendall(READY + b"".join(frames) + b"\x02" + struct.pack(">Q", len(body)) + body)
    while b"type" not in answer:
        answer += connection.recv(4096)
    return answer


@as_root
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_process_that_is_gone_is_not_one_without_limits(d: Rlqd, has_ended: bool) -> None:
    """A job has the resource limits of the process that connected.  Who could have that end, and
    submit over its connection all the same, would have the daemon's limits in place of theirs."""
    submit = m.Submit(jobs=(m.JobSpec(argv=("true",), cwd="/", held=True),))

    def talk() -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                dialled.connect(str(d.socket))
                socket.send_fds(theirs, [b"x"], [dialled.fileno()])
                if not has_ended:
                    theirs.recv(1)
            finally:
                os._exit(0)
        _, [descriptor], _, _ = socket.recv_fds(ours, 1, 1)
        if has_ended:
            os.waitpid(pid, 0)
        with socket.socket(fileno=descriptor) as connection:
            answer = by_hand(connection, submit)
        ours.close()
        expected = b"its resource limits" if has_ended else b"Submitted"
        assert expected in answer, answer

    as_nobody(talk)
    assert len(d.client().list()) == (0 if has_ended else 1)


@as_root
def test_hidden_commands_are_nowhere_to_be_seen(tmp_path: Path) -> None:
    """Nor in the words for why a job could not be started."""
    config = configured(daemon={"hide_commands": True})
    with Rlqd(tmp_path, config=config, shared=True) as d:
        root = d.client()
        running = root.submit(["sh", "-c", "sleep 600 # secret"], gpus=0, cwd=tmp_path)
        spec = m.JobSpec(
            argv=("/opt/secret-program",), cwd="/", name="x", resources=m.Resources(gpus=0)
        )
        [failed] = root.submit_many([spec])
        d.until_state(root, failed, JobState.LAUNCH_FAILED)
        assert "secret-program" in root.get(failed).reason

        def look() -> None:
            with Client(d.socket, autostart=False) as client:
                seen: list[object] = [*client.list()]
                seen += [client.why(one) for one in (running, failed)]
                seen += client.wait(failed, timeout=30)
                assert len(seen) == 5
                assert "secret" not in repr(seen), seen
                assert str(tmp_path) not in repr(seen), seen

        as_nobody(look)


#: Forks until the tokens in the pipe are used up; each in a session of its own, deaf to SIGTERM.
BOMB = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
reading, writing = os.pipe()
os.write(writing, b"x" * int(sys.argv[1]))
os.close(writing)
while os.read(reading, 1):
    with open(sys.argv[2], "a") as out: out.write("x")
    if os.fork() == 0 or os.fork() == 0: os.setsid()
while True: signal.pause()
"""
PROCESSES = 250


def test_a_job_that_forks_and_forks_is_ended_whole_and_the_daemon_answers(
    tmp_path: Path,
) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        count = tmp_path / "count"
        argv = [sys.executable, "-S", "-c", BOMB, str(PROCESSES // 2), str(count)]
        job = client.submit(argv, gpus=0, hooks=False, log=tmp_path / "log")
        wait_until(
            lambda: count.stat().st_size if count.exists() else 0,
            lambda size: size >= PROCESSES // 2,
        )
        assert client.get(job).state is JobState.RUNNING
        assert len(d.marked_processes()) > PROCESSES // 2
        other = client.submit(["true"], gpus=0)
        client.cancel(job, now=True)
        d.until_state(client, job, JobState.CANCELLED)
        d.until_state(client, other, JobState.COMPLETED)
        assert d.marked_processes() == []


#: Takes memory until it is refused; the limit stands in for the machine's end.
HOG = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
held = []
while True: held.append(bytearray(2**24))
"""


def test_a_job_that_eats_memory_ends_as_out_of_memory_and_the_daemon_answers(
    tmp_path: Path,
) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit([sys.executable, "-c", HOG], gpus=0, hooks=False)
        ended = client.wait(job, timeout=60)[0]
        assert ended.state is JobState.OUT_OF_MEMORY
        assert d.process is not None
        status = Path(f"/proc/{d.process.pid}/oom_score_adj").read_text()
        assert int(status) < 300, "the kernel takes the jobs first"
