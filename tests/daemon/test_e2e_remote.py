"""The queue from another machine: a real daemon on loopback, and the real command."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.rlqd import Rlqd, configured
from tests.support.waiting import wait_until

from rlq import remote
from rlq.client import Client, select
from rlq.errors import NotFoundError, NotPermittedError, RefusedError, UnreachableError, UsageError
from rlq.protocol import keys
from rlq.protocol import messages as m
from rlq.protocol.states import JobState
from rlq.transport import Connection

#: As whom a key is let in here: of a daemon for everybody, somebody who is not root.
USER = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
UID = pwd.getpwnam(USER).pw_uid
#: On the machine itself they are an administrator, which counts for nothing from another one.
ADMINS = grp.getgrgid(pwd.getpwnam(USER).pw_gid).gr_name
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


RUN = ["run", "--", "true"]
SAC = ["submit", "sac", "--env=Pendulum-v1", "--steps=1"]


class Laptop:
    """Another machine: a configuration folder of its own, and nothing of the daemon's."""

    def __init__(self, d: Rlqd, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
        for name in [name for name in os.environ if name.startswith("RLQ_")]:
            monkeypatch.delenv(name)
        self.d = d
        found = self.ask(m.ListKeys())
        assert isinstance(found, m.Keys)
        self.server_key = found.server_key
        self.host = found.endpoint.removeprefix("tcp://")
        self.key = keys.show_key(remote.public_of(remote.make_secret()))
        remote.trust(self.host, keys.parse_key(self.server_key))

    def ask(self, request: m.Request) -> m.Reply:
        """On the lab machine, as its administrator."""
        return self.d.client().request(request)

    def enrol(self) -> None:
        self.ask(m.EnrolKey(user=USER, key=self.key))

    def client(self, timeout_s: float = 30) -> Client:
        return Client(host=self.host, timeout_s=timeout_s)

    def rlq(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlq", *args],
            env={**os.environ, "RLQ_HOST": self.host, "LAPTOP": "its own"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def d(tmp_path: Path) -> Iterator[Rlqd]:
    config = configured(
        remote={"listen": "tcp://127.0.0.1:0"},
        daemon={"admin_group": ADMINS, "hide_commands": True},
    )
    with Rlqd(tmp_path, config=config, shared=os.geteuid() == 0) as daemon:
        yield daemon


@pytest.fixture
def laptop(d: Rlqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laptop:
    return Laptop(d, tmp_path / "laptop", monkeypatch)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rlq-") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def test_without_configuration_nothing_listens_for_other_machines(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        found = d.client().request(m.ListKeys())
        assert found == m.Keys()
        assert not (d.state_dir / "server.key").exists()
        told = d.rlq("key", "server", check=False)
        assert told.returncode == 4
        assert "hint: [remote] listen" in told.stderr
        assert d.process is not None
        sockets = {
            link[len("socket:[") : -1]
            for fd in Path(f"/proc/{d.process.pid}/fd").iterdir()
            if (link := os.readlink(fd)).startswith("socket:[")
        }
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                assert line.split()[9] not in sockets, line


def test_from_no_key_to_a_job(d: Rlqd, laptop: Laptop, public_folder: Path) -> None:
    silent = laptop.rlq("list")
    assert silent.returncode == 6
    for cause in ("not enrolled", "its own key is another", "is not rlqd"):
        assert cause in silent.stderr
    laptop.enrol()
    log = public_folder / "%j.log"
    script = "id -un; pwd; env"
    done = laptop.rlq("submit", "--cwd", "/tmp", "--log", str(log), "--", "sh", "-c", script)
    assert done.returncode == 0, done
    job = int(done.stdout)
    waited = laptop.rlq("wait", str(job))
    assert waited.returncode == 0, waited
    who, where, *variables = (public_folder / f"{job}.log").read_text().splitlines()
    assert (who, where) == (USER, "/tmp")
    env = dict(line.split("=", 1) for line in variables if "=" in line)
    assert "LAPTOP" not in env, "the laptop's environment means nothing there"
    assert (env["USER"], env["HOME"]) == (USER, pwd.getpwnam(USER).pw_dir)
    assert env["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    with laptop.client() as client:
        assert client.get(job).user == USER
        assert client.environment(job)["USER"] == USER
        [kept] = client.submit_many([spec_in_home()], env={"MINE": "1"})
        assert client.get(kept).cwd == os.path.join(pwd.getpwnam(USER).pw_dir, "runs")
        assert client.environment(kept)["MINE"] == "1"


def spec_in_home() -> m.JobSpec:
    return m.JobSpec(argv=("true",), cwd="~/runs", held=True)


def test_what_administrators_do_is_not_done_from_another_machine(d: Rlqd, laptop: Laptop) -> None:
    laptop.enrol()
    with laptop.client() as client:
        for request in (
            m.Stop(),
            m.Drain(),
            m.Reserve(maintenance=True, starts_at=0.0, ends_at=2e9),
            m.Forget(signature="x"),
            m.EnrolKey(user=USER, key=laptop.key),
            m.RevokeKey(user=USER),
        ):
            with pytest.raises(NotPermittedError, match="on the machine itself"):
                client.request(request)
    for verb in (["logs", "1"], ["daemon", "stop"], ["calibrate"], SAC, RUN):
        refused = laptop.rlq(*verb)
        assert refused.returncode == 2
        flags = "-t " if verb == RUN else ""
        assert f"hint: ssh {flags}127.0.0.1 rlq {verb[0]}" in refused.stderr


@as_root
def test_a_key_acts_on_its_users_jobs_alone(d: Rlqd, laptop: Laptop) -> None:
    laptop.enrol()
    roots = d.client().submit(["sleep", "600"], gpus=0, held=True, set_env={"SECRET": "x"})
    with laptop.client() as client:
        [theirs] = client.submit_many([spec_in_home()])
        for change in (client.cancel(roots), client.release(roots)):
            assert [(c.ok, c.kind) for c in change] == [(False, "not-permitted")]
        with pytest.raises(NotPermittedError):
            client.environment(roots)
        assert client.get(roots).argv == ("<hidden>",)
        [waited] = client.wait([roots], timeout=0)
        assert waited.argv == ("<hidden>",)
        with pytest.raises(NotPermittedError, match="above 0"):
            client.submit_many([msgspec.structs.replace(spec_in_home(), priority=1)])
        assert [c.id for c in client.cancel(m.Selection(all=True))] == [theirs]
    assert d.client().get(roots).state is JobState.PENDING


def test_a_key_that_is_revoked_is_worth_nothing_at_once(d: Rlqd, laptop: Laptop) -> None:
    laptop.enrol()
    held = d.client().submit(["true"], gpus=0, held=True)
    connection = Connection(remote.find(laptop.host))
    try:
        connection.send(b"1", m.Wait(selection=select(held), timeout_ms=30_000))
        connection.send(b"2", m.Ping())
        answered = connection.receive(float("inf"))
        assert answered is not None
        assert answered[0] == b"2"
        laptop.ask(m.RevokeKey(key=laptop.key))
        # The answer that was due, and the one to what is asked now: neither comes.
        connection.send(b"3", m.Submit(jobs=(spec_in_home(),)))
        d.client().cancel(held)
        d.until_state(d.client(), held, JobState.CANCELLED)
        wait_until(lambda: d.client().status().stats["remote_dropped"], lambda n: n == 1)
        assert d.client().list() == [d.client().get(held)]
        # Replies come in order, and the next that comes is to what is asked from now on.
        laptop.enrol()
        connection.send(b"4", m.Ping())
        answered = connection.receive(float("inf"))
        assert answered is not None
        assert answered[0] == b"4"
        laptop.ask(m.RevokeKey(user=USER))
    finally:
        connection.close()
    with pytest.raises(UnreachableError, match="does not let you in"), laptop.client() as client:
        client.ping()


def test_keys_and_the_servers_own_outlive_a_restart(d: Rlqd, laptop: Laptop) -> None:
    laptop.enrol()
    before = laptop.ask(m.ListKeys())
    assert isinstance(before, m.Keys)
    for client in d._clients:
        client.close()
    d.kill9()
    d.config_path.write_text(configured(remote={"listen": before.endpoint}))
    d.start()
    assert laptop.ask(m.ListKeys()) == before
    with laptop.client() as client:
        assert client.ping().pid == d.client().ping().pid


def test_who_enrols_what(d: Rlqd, laptop: Laptop) -> None:
    with pytest.raises(RefusedError, match="for root"):
        laptop.ask(m.EnrolKey(user="root", key=laptop.key))
    with pytest.raises(NotFoundError, match="no user 'who'"):
        laptop.ask(m.EnrolKey(user="who", key=laptop.key))
    with pytest.raises(UsageError, match="not a public key"):
        laptop.ask(m.EnrolKey(user=USER, key="../../etc/passwd"))
    with pytest.raises(NotFoundError, match="is not enrolled"):
        laptop.ask(m.RevokeKey(key=laptop.key))
    with pytest.raises(UsageError, match="name a key, or a user"):
        laptop.ask(m.RevokeKey())
    laptop.enrol()
    laptop.enrol()
    listed = laptop.ask(m.ListKeys())
    assert isinstance(listed, m.Keys)
    [one] = listed.keys
    by = pwd.getpwuid(os.geteuid()).pw_name
    assert (one.user, one.key, one.enrolled_by) == (USER, laptop.key, by)
    if os.geteuid() == 0:
        with pytest.raises(RefusedError, match=f"that key is {USER}'s"):
            laptop.ask(m.EnrolKey(user="daemon", key=laptop.key))
        assert laptop.ask(m.RevokeKey(user=USER)) == m.Ok(message=f"revoked a key of {USER}")
        acts = laptop.ask(m.Audit())
        assert isinstance(acts, m.Acts)
        done = {(act.user, act.verb, act.detail) for act in acts.acts}
        said = f"a key of {USER}"
        assert done == {(by, "enrol", said), (by, "revoke", said)}


def test_strangers_fill_no_place_of_those_on_the_machine(d: Rlqd, laptop: Laptop) -> None:
    """A flood of connections from the network, and the socket on the machine answers."""
    import socket

    address = ("127.0.0.1", int(laptop.host.rpartition(":")[2]))
    strangers = [socket.socket() for _ in range(400)]
    try:
        for stranger in strangers:
            stranger.setblocking(False)
            stranger.connect_ex(address)
        assert d.process is not None
        fds = Path(f"/proc/{d.process.pid}/fd")
        wait_until(lambda: len(list(fds.iterdir())), lambda n: n > 128)
        client = d.client()
        job = client.submit(["true"], gpus=0)
        d.until_state(client, job, JobState.COMPLETED)
    finally:
        for stranger in strangers:
            stranger.close()
    laptop.enrol()
    with laptop.client() as client:
        assert client.ping().pid == d.client().ping().pid
