"""Many jobs, and large ones: no everyday verb keeps the loop busy with all of them at once."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.rlqd import Rlqd

from rlq.client import Client, select
from rlq.errors import UsageError
from rlq.protocol import messages as m
from rlq.protocol.messages import Hold, Job, JobSpec, List, Resources, Selection, Wait, Waited
from rlq.protocol.states import JobState
from rlq.transport import Connection
from rlqd.shell import launching, requests, waiters


@pytest.fixture
def d(tmp_path: Path) -> Iterator[Rlqd]:
    with Rlqd(tmp_path) as daemon:
        yield daemon


def held(n: int, argument: str = "") -> list[JobSpec]:
    spec = JobSpec(argv=("true", argument), cwd="/", held=True, resources=Resources(gpus=0))
    return [spec] * n


def page(client: Client, asked: List) -> m.Jobs:
    found = client.request(asked)
    assert isinstance(found, m.Jobs)
    return found


def waited(client: Client, selection: Selection, timeout_ms: int = 0) -> Waited:
    found = client.request(Wait(selection=selection, timeout_ms=timeout_ms))
    assert isinstance(found, Waited)
    return found


def test_a_page_of_large_jobs_ends_by_its_bytes_and_the_client_goes_on(d: Rlqd) -> None:
    client = d.client()
    big = "x" * 120_000
    spec = JobSpec(argv=("true", *[big] * 10), cwd="/", held=True, resources=Resources(gpus=0))
    ids = [i for _ in range(5) for i in client.submit_many([spec] * 4, env={})]
    first = page(client, List())
    assert 0 < len(first.jobs) < len(ids) == first.total
    assert sum(len(word) for job in first.jobs for word in job.argv) < requests.LIST_BYTES_MAX
    assert [job.id for job in client.list()] == sorted(ids, reverse=True)
    assert [job.id for job in client.list(limit=9)] == sorted(ids, reverse=True)[:9]
    assert [job.id for job in client.list(before=ids[3])] == ids[2::-1]
    assert len(d.rlq("list", "--limit", "0").stdout.splitlines()) == 1 + len(ids)


def test_a_page_holds_only_so_many_jobs_and_all_that_are_missing_are_told(d: Rlqd) -> None:
    client = d.client()
    ids = client.submit_many(held(requests.LIST_MAX + 10), env={})
    named = Selection(ids=((ids[0], ids[-1]), (ids[-1] + 7, ids[-1] + 7)))
    assert len(page(client, List(selection=named)).jobs) == requests.LIST_MAX
    found = client.pages(List(selection=named))
    assert (len(found.jobs), found.total) == (len(ids), len(ids))
    assert found.missing == (ids[-1] + 7,)


def test_waiting_for_many_is_answered_with_those_that_run(d: Rlqd) -> None:
    client = d.client()
    running = client.submit(["sleep", "600"], gpus=0)
    d.until_state(client, running, JobState.RUNNING)
    ids = [running, *client.submit_many(held(500), env={})]
    for selection in (Selection(all=True), select(ids)):
        found = waited(client, selection)
        assert (found.done, found.partial, found.ended) == (False, True, 0)
        assert [job.id for job in found.jobs] == [running]
    client.cancel(ids[:2])
    d.until_state(client, running, JobState.CANCELLED)
    found = waited(client, select(ids))
    assert (found.jobs, found.ended) == ((), 2)


def test_the_client_waits_for_many_and_is_given_all_of_them(d: Rlqd) -> None:
    client = d.client()
    ids = client.submit_many(held(300), env={})
    said: list[Waited] = []
    jobs: list[Job] = client.wait(ids, timeout=0, on_update=said.append)
    assert [job.id for job in jobs] == ids
    assert not said[-1].done
    client.cancel(ids)
    done = client.wait(ids, on_update=said.append)
    assert {job.state for job in done} == {JobState.CANCELLED}
    assert (said[-1].done, said[-1].ended) == (True, 300)


def test_one_peer_may_leave_only_so_many_requests_waiting(d: Rlqd) -> None:
    client = d.client()
    [job] = client.submit_many(held(1), env={})
    wait = Wait(selection=select(job), timeout_ms=30_000)
    greedy = Connection(d.socket)
    try:
        for number in range(waiters.PER_ROUTE_MAX + 1):
            greedy.send(b"%d" % number, wait)
        answered = greedy.receive(time.monotonic() + 30)
        assert answered is not None
        request_id, refusal = answered
        assert int(request_id) == waiters.PER_ROUTE_MAX
        assert isinstance(refusal, m.Error)
        assert refusal.kind == "unavailable"
        assert not waited(client, select(job)).done, "others may wait still"
    finally:
        greedy.close()


def test_one_request_changes_only_so_many_jobs(d: Rlqd) -> None:
    client = d.client()
    for _ in range(3):
        client.submit_many(held(requests.CHANGES_MAX // 2), env={})
    with pytest.raises(UsageError, match="at most 20000") as refused:
        client.request(Hold(selection=Selection(all=True)))
    assert refused.value.hint == "do it in parts, such as `1-20000`"
    changes = client.cancel(Selection(ids=((1, 20_000),)))
    assert len(changes) == 20_000
    assert all(change.ok for change in changes)


def test_a_log_stays_where_the_submitter_was_told_when_the_state_is_moved(d: Rlqd) -> None:
    client = d.client()
    ended = client.submit(["echo", "first"], gpus=0)
    d.until_state(client, ended, JobState.COMPLETED)
    later = client.submit(["echo", "second"], gpus=0, held=True)
    told = {job.id: job.log_path for job in client.list()}
    client.close()
    assert d.stop() == 0
    moved = d.folder / "moved"
    shutil.copytree(d.state_dir, moved)
    d.state_dir = moved
    d.start()
    client = d.client()
    client.release(later)
    d.until_state(client, later, JobState.COMPLETED)
    assert {job.id: job.log_path for job in client.list()} == told
    assert [Path(told[job]).read_text() for job in (ended, later)] == ["first\n", "second\n"]


def test_a_user_is_looked_up_once_for_any_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = pwd.getpwuid

    def getpwuid(uid: int) -> pwd.struct_passwd:
        looked.append(uid)
        return real(uid)

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    [spec] = held(1)
    for uid in (0, 54_322):  # of which the second does not exist
        for job_id in range(100):
            launching.log_path(spec, job_id, uid, "/logs")
    assert looked == [0, 54_322]
