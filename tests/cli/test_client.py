"""The Python client, through the real codec and a real socket."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.fake_daemon import FakeDaemon, make_job
from tests.support.waiting import wait_until

from rlq import specs
from rlq.client import Client, select
from rlq.errors import (
    NotFoundError,
    ProtocolError,
    RefusedError,
    UnavailableError,
    UnreachableError,
    UsageError,
)
from rlq.protocol import messages as m
from rlq.protocol.states import JobState
from rlq.transport import Connection, ConnectionLostError, is_answering


def test_a_submission_carries_command_environment_folder_and_umask(
    daemon: FakeDaemon, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEEN", "yes")
    before = os.umask(0o027)
    try:
        job = client.submit(["echo", "a b", ""], cores=2, mem="1G", time_limit="90s", sm="30%")
    finally:
        os.umask(before)
    [(spec, env)] = daemon.submitted
    assert job == 1
    assert spec.argv == ("echo", "a b", "")
    assert spec.cwd == str(tmp_path)
    assert spec.umask == 0o027
    assert env == dict(os.environ)
    assert spec.resources == m.Resources(cores=2, mem_mib=1024, time_limit_ms=90_000, sm_pct=30)


def test_an_environment_that_is_given_replaces_ones_own(
    daemon: FakeDaemon, client: Client
) -> None:
    client.submit(["true"], env={"A": "1"}, set_env={"OMP_NUM_THREADS": "4"})
    [(spec, env)] = daemon.submitted
    assert env == {"A": "1"}
    assert spec.env == {"OMP_NUM_THREADS": "4"}
    assert spec.env_given == ("OMP_NUM_THREADS",)


def test_a_variable_that_is_not_utf8_is_left_out_with_a_warning(
    daemon: FakeDaemon,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(os.environb, b"BROKEN", b"\xff")
    client.submit(["true"])
    [(_, env)] = daemon.submitted
    assert "BROKEN" not in env
    assert "BROKEN" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        {"argv": []},
        {"argv": "python train.py"},
        {"argv": ["a\0b"]},
        {"argv": [os.fsdecode(b"\xff")]},
        {"argv": ["true"], "cores": 0},
        {"argv": ["true"], "cores": True},
        {"argv": ["true"], "gpus": -1},
        {"argv": ["true"], "gpus": 0, "gpu_mem": "1G"},
        {"argv": ["true"], "mem": "lots"},
        {"argv": ["true"], "mem": 0},
        {"argv": ["true"], "sm": 101},
        {"argv": ["true"], "priority": 1001},
        {"argv": ["true"], "time_limit": 5},
        {"argv": ["true"], "grace": "0s"},
        {"argv": ["true"], "name": "a\nb"},
        {"argv": ["true"], "name": "x" * 201},
        {"argv": ["true"], "set_env": {"A=B": "1"}},
        {"argv": ["true"], "cwd": "/no/such/folder"},
        {"argv": ["true"], "log": "/no/such/folder/log"},
        {"argv": ["true"], "log": "/tmp"},
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(
    daemon: FakeDaemon, client: Client, bad: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        client.submit(**bad)  # type: ignore[arg-type]
    assert daemon.requests == []


def test_many_jobs_are_one_request(daemon: FakeDaemon, client: Client) -> None:
    spec = specs.make_spec(["true"], resources=m.Resources())
    assert client.submit_many([spec] * 100) == list(range(1, 101))
    assert len(daemon.asked(m.Submit)) == 1
    assert client.submit_many([]) == []


def test_pipelined_submissions_give_their_ids_in_order(client: Client) -> None:
    spec = specs.make_spec(["true"], resources=m.Resources())
    assert list(client.submit_pipelined([spec] * 500, env={}, window=64)) == list(range(1, 501))
    assert client.ping().pid == os.getpid()  # and the client goes on working


def test_no_more_requests_than_the_window_are_under_way(
    daemon: FakeDaemon, client: Client
) -> None:
    handed_out = 0

    def messages() -> object:
        nonlocal handed_out
        for _ in range(50):
            handed_out += 1
            yield m.Ping()

    replies = client.requests(messages(), window=4)  # type: ignore[arg-type]
    next(replies)
    assert handed_out == 4
    assert len(list(replies)) == 49


def test_a_refusal_in_the_middle_of_a_pipeline_loses_no_reply(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.add(make_job(1))
    replies = list(client.requests([m.Why(id=1), m.Why(id=2), m.Why(id=1)]))
    assert [type(reply) for reply in replies] == [m.Explanation, m.Error, m.Explanation]


def test_an_abandoned_pipeline_does_not_answer_later_requests(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.add(make_job(1))
    replies = client.requests([m.Ping()] * 10, window=10)
    next(replies)
    replies.close()  # type: ignore[attr-defined]
    assert client.get(1).id == 1


def test_the_daemons_refusal_is_raised_by_its_kind(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[m.Submit] = m.Error(kind="refused", message="too big", hint="buy more")
    with pytest.raises(RefusedError, match="too big") as caught:
        client.submit(["true"])
    assert caught.value.hint == "buy more"
    daemon.answers[m.Submit] = m.Error(kind="unavailable", message="disk full")
    with pytest.raises(UnavailableError):
        client.submit(["true"])


def test_a_daemon_that_does_not_know_a_request_is_to_be_restarted(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.answers[m.Share] = m.Error(kind="protocol", message="cannot read the request")
    with pytest.raises(ProtocolError, match="cannot read the request") as caught:
        client.share()
    assert "restart rlqd" in (caught.value.hint or "")


def test_an_answer_of_another_type_is_a_protocol_error(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[m.Status] = m.Ok()
    with pytest.raises(ProtocolError, match="answered Ok where DaemonStatus"):
        client.status()


def test_get_list_and_the_verbs_give_typed_results(daemon: FakeDaemon, client: Client) -> None:
    daemon.add(make_job(1), make_job(2, JobState.COMPLETED), make_job(3))
    assert client.get(2).state is JobState.COMPLETED
    assert [job.id for job in client.list()] == [3, 2, 1]
    assert [job.id for job in client.list(states=[JobState.PENDING], limit=1)] == [3]
    [held, late] = client.hold([1, 2])
    assert (held.ok, held.id) == (True, 1)
    assert (late.ok, late.kind) == (False, "usage")
    assert [c.id for c in client.cancel(m.Selection(name="job-3"), now=True)] == [3]
    assert daemon.asked(m.Cancel) == [m.Cancel(selection=m.Selection(name="job-3"), now=True)]
    with pytest.raises(NotFoundError):
        client.get(9)


def test_wait_ends_when_all_have_ended(daemon: FakeDaemon, client: Client) -> None:
    daemon.add(make_job(1, JobState.RUNNING), make_job(2, JobState.COMPLETED))
    seen = []

    def end_it(now: m.Waited) -> None:
        seen.append(now)
        daemon.set(1, state=JobState.FAILED, exit_code=3)

    done = client.wait([2, 1, 2], on_update=end_it, step_ms=20)
    assert [(job.id, job.state) for job in done] == [
        (2, JobState.COMPLETED),
        (1, JobState.FAILED),
        (2, JobState.COMPLETED),
    ]
    assert len(seen) >= 2


def test_wait_gives_the_jobs_as_they_are_when_time_is_over(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.add(make_job(1, JobState.RUNNING))
    [job] = client.wait(1, timeout=0.05)
    assert not job.state.is_final


@pytest.mark.parametrize("ids", [[1, 7], [7], [1, 2]])
def test_waiting_for_a_job_that_does_not_exist_is_an_error(
    daemon: FakeDaemon, client: Client, ids: list[int]
) -> None:
    daemon.add(make_job(1, JobState.COMPLETED))
    with pytest.raises(NotFoundError):
        client.wait(ids)


def test_neighbouring_ids_travel_as_one_range() -> None:
    assert select([5, 1, 2, 3, 3, 9]).ids == ((1, 3), (5, 5), (9, 9))
    with pytest.raises(UsageError):
        select([])


# ---- a daemon that is not there ----------------------------------------------------


def test_a_socket_file_without_a_daemon_is_told_at_once(short_tmp: Path) -> None:
    path = short_tmp / "rlqd.sock"
    with FakeDaemon(path) as fake:
        fake.stop()
        assert path.exists()
        assert not is_answering(path)
        with pytest.raises(UnreachableError) as caught, Client(path, timeout_s=60) as client:
            client.ping()
    assert "left over" in (caught.value.hint or "")


def test_a_daemon_that_goes_before_the_connection_is_made_is_noticed(short_tmp: Path) -> None:
    """ZeroMQ itself would try to connect for ever, and tell nobody."""
    with closing(Connection(short_tmp / "nobody.sock")) as connection:
        connection.send(b"1", m.Ping())
        with pytest.raises(ConnectionLostError):
            connection.receive(time.monotonic() + 60)


@pytest.mark.parametrize("name", ["nothing", "x" * 120, "folder/inside"])
def test_a_path_that_is_no_socket_is_an_error_with_a_hint(short_tmp: Path, name: str) -> None:
    with (
        pytest.raises((UnreachableError, UsageError)) as caught,
        Client(short_tmp / name) as client,
    ):
        client.ping()
    assert caught.value.hint


def test_a_daemon_that_dies_before_it_answers_a_submission_is_told_at_once(
    short_tmp: Path,
) -> None:
    """Whether the job was queued nobody knows: sending it again could run it twice."""
    path = short_tmp / "rlqd.sock"
    with FakeDaemon(path) as fake, Client(path, timeout_s=60) as client:
        client.ping()

        def die(_: m.Request) -> None:
            fake.stopping.set()

        fake.answers[m.Submit] = die
        with pytest.raises(ConnectionLostError):
            client.submit(["true"])


def test_waiting_outlives_a_restart_of_the_daemon(short_tmp: Path) -> None:
    path = short_tmp / "rlqd.sock"
    results: list[m.Job] = []

    def wait() -> None:
        with Client(path, timeout_s=60) as client:
            results.extend(client.wait(1))

    with FakeDaemon(path) as first:
        first.add(make_job(1, JobState.RUNNING))
        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: first.asked(m.Wait), bool)
        first.stop()
    with FakeDaemon(path) as second:
        second.add(make_job(1, JobState.COMPLETED))
        waiter.join(30)
    assert [job.state for job in results] == [JobState.COMPLETED]


def test_a_daemon_that_does_not_answer_in_time_is_an_error(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.answers[m.Ping] = lambda _: None
    with Client(timeout_s=0.1) as hasty, pytest.raises(UnreachableError, match="in time"):
        hasty.ping()


def test_a_late_answer_is_not_taken_for_the_answer_to_something_else(
    daemon: FakeDaemon,
) -> None:
    daemon.add(make_job(1))
    daemon.answers[m.Ping] = lambda _: None
    with Client(timeout_s=0.1) as hasty:
        with pytest.raises(UnreachableError):
            hasty.ping()
        assert hasty.get(1).id == 1


def test_nobody_is_started_where_that_is_forbidden(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLQ_SOCKET", raising=False)
    monkeypatch.setenv("RLQ_STATE_DIR", str(short_tmp))
    with pytest.raises(UnreachableError) as caught, Client(autostart=False) as client:
        client.ping()
    assert "rlq daemon start" in (caught.value.hint or "")
    monkeypatch.setenv("RLQ_NO_AUTOSTART", "1")
    with pytest.raises(UnreachableError), Client() as client:
        client.ping()
    assert list(short_tmp.iterdir()) == []


def test_a_client_does_not_cross_a_fork(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.ping()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)  # what a forked child sees: another pid
        with pytest.raises(UsageError, match="fork"):
            client.ping()
    assert client.ping().pid == os.getpid()


def test_each_thread_with_a_client_of_its_own(daemon: FakeDaemon) -> None:
    ids: list[int] = []

    def submit() -> None:
        with Client() as own:
            ids.extend(own.submit(["true"], env={}) for _ in range(20))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(1, 81))


def test_a_program_that_is_not_there_is_refused_unless_told_otherwise(
    daemon: FakeDaemon, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="there is no program 'nope' on PATH"):
        client.submit(["nope"])
    with pytest.raises(UsageError, match="there is no program 'true' on PATH"):
        client.submit(["true"], env={"PATH": str(tmp_path)})
    assert daemon.requests == []
    assert client.submit(["nope"], check=False) == 1


def test_where_a_job_prints_to_is_known(
    daemon: FakeDaemon, client: Client, tmp_path: Path
) -> None:
    job = client.submit(["true"], log=tmp_path / "a.log")
    assert client.logs_path(job) == tmp_path / "a.log"
    with pytest.raises(NotFoundError):
        client.logs_path(99)


def test_a_client_can_be_closed_twice_and_used_again(daemon: FakeDaemon) -> None:
    client = Client()
    client.ping()
    client.close()
    client.close()
    assert client.ping().pid == os.getpid()
    client.close()


def test_an_environment_never_shows_in_a_repr() -> None:
    spec = specs.make_spec(["true"], resources=m.Resources(), set_env={"HF_TOKEN": "s3cret"})
    assert "s3cret" not in repr(m.Submit(jobs=(spec,), env={"X": "s3cret"}))


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["python", "train.py", "--lr", "3"], "train.py"),
        (["/usr/bin/python3.11", "-u", "-W", "error", "a/b.py"], "b.py"),
        (["python", "-m", "gym.train"], "gym.train"),
        (["python", "-c", "print()"], "python"),
        (["./run.sh"], "run.sh"),
        (["sh", "train.sh", "-c"], "train.sh"),
        (["/bin/bash", "-eu", "a/train.sh"], "train.sh"),
        (["bash", "-ec", "echo hello"], "bash"),
        (["sh"], "sh"),
        (["echo\nx"], "echo?x"),
    ],
)
def test_a_job_without_a_name_is_called_after_its_program(argv: list[str], name: str) -> None:
    assert specs.default_name(argv) == name


def test_the_working_folder_keeps_the_name_the_shell_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.chdir(link)
    monkeypatch.setenv("PWD", str(link))
    assert specs.working_folder() == str(link)
    monkeypatch.setenv("PWD", "/tmp")  # a lie
    assert specs.working_folder() == str(real)


def test_a_working_folder_that_was_removed_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="does not exist any more"):
        specs.working_folder()
