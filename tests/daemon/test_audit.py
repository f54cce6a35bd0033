"""What administrators do is on record: who sees it, and for how long it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.test_accounts import ADMINS, Directory
from tests.daemon.test_ledger import ledger_of
from tests.daemon.test_sqlite import fill, finish, row

from rlq.protocol.messages import Audit
from rlqd.adapters.sqlite import AuditRow, Store
from rlqd.config import Config
from rlqd.core import model
from rlqd.core.machine import Scheduler
from rlqd.shell.accounts import Accounts, Peer
from rlqd.shell.ledger import in_words
from rlqd.shell.requests import Change, Desk

ADMIN, ALICE, BOB = 54_001, 54_002, 54_003


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "rlq.db") as opened:
        yield opened


def act(job: int | None = None, owner: int | None = None, *, at: float = 100.0) -> AuditRow:
    name = "" if owner is None else f"u{owner}"
    verb = "drain" if job is None else "cancel"
    return AuditRow(
        at=at, uid=ADMIN, user="admin", verb=verb, job=job, owner_uid=owner, owner=name
    )


def record(store: Store, *acts: AuditRow) -> None:
    with store.transaction():
        store.put_audit(acts)


def desk(store: Store) -> Desk:
    people = Directory({ADMIN: {ADMINS}, ALICE: set(), BOB: set()}, {"rlq-admin": ADMINS})
    accounts = Accounts(admin_group="rlq-admin", look_up=people.account, look_up_group=people.gid)
    views = ledger_of(store, Scheduler()).views
    return Desk(
        config=Config(), store=store, views=views, accounts=accounts, logs_dir="/logs", rlimits={}
    )


def seen(store: Store, uid: int, request: Audit | None = None) -> list[int | None]:
    peer = Peer(uid=uid, gid=0, pid=1)
    return [one.job for one in desk(store).audit(request or Audit(), peer).acts]


def test_administrators_see_all_and_users_what_was_done_to_their_jobs(store: Store) -> None:
    record(store, act(1, ALICE), act(2, BOB), act(None))
    assert seen(store, ADMIN) == [None, 2, 1]
    assert seen(store, 0) == [None, 2, 1]
    assert seen(store, ALICE) == [1]
    assert seen(store, ALICE, Audit(job=2)) == [], "bob's"
    assert seen(store, ADMIN, Audit(job=2)) == [2]


def test_pages_go_from_the_newest_to_the_oldest(store: Store) -> None:
    record(store, *(act(n, ALICE) for n in range(1, 6)))
    peer = Peer(uid=ALICE, gid=0, pid=1)
    first = desk(store).audit(Audit(limit=2), peer)
    assert ([one.job for one in first.acts], first.more) == ([5, 4], True)
    rest = desk(store).audit(Audit(limit=3, before=first.acts[-1].number), peer)
    assert ([one.job for one in rest.acts], rest.more) == ([3, 2, 1], False)


def test_it_is_on_disk(tmp_path: Path) -> None:
    with Store(tmp_path / "rlq.db") as opened:
        record(opened, act(1, ALICE))
    with Store(tmp_path / "rlq.db") as again:
        [found] = again.audit(limit=10)
        assert (found.user, found.job, found.owner_uid) == ("admin", 1, ALICE)


def test_it_is_kept_as_long_as_the_history_and_as_the_job(store: Store) -> None:
    fill(store, row(1, uid=ALICE), row(2, uid=ALICE))
    finish(store, 2, at=50.0)
    record(store, act(1, ALICE, at=60.0), act(2, ALICE, at=60.0), act(None, at=60.0))
    record(store, act(None, at=200.0))
    store.prune(100.0)
    assert [(one.job, one.at) for one in store.audit(limit=10)] == [(None, 200.0), (1, 60.0)]


def test_hostile_numbers_find_nothing(store: Store) -> None:
    record(store, act(1, ALICE))
    assert seen(store, 0, Audit(job=2**70)) == []
    assert seen(store, 0, Audit(job=-1)) == []
    assert seen(store, 0, Audit(before=2**70, limit=-5)) == [1]


def test_what_changed_nothing_and_ones_own_jobs_are_not_on_record(store: Store) -> None:
    fill(store, row(1, uid=ALICE), row(2, uid=ALICE), row(3, uid=ADMIN), row(4, uid=ALICE))
    change = Change(
        number=1,
        events=[],
        peer=Peer(uid=ADMIN, gid=0, pid=1),
        user="admin",
        verb="hold",
        others={i: one for i, one in store.brief([1, 2, 4]).items()},
    )
    change.answers += [
        model.Accept(1, model.JobId(1)),
        model.Accept(1, model.JobId(2), "already held"),
        model.Accept(1, model.JobId(3)),
        model.Refuse(1, "it has started already", job_id=model.JobId(4)),
    ]
    [one] = change.acts(at=5.0)
    assert (one.job, one.owner_uid, one.verb, one.at) == (1, ALICE, "hold", 5.0)
    assert in_words(one) == f"admin (uid {ADMIN}): hold job 1 of u{ALICE}"
