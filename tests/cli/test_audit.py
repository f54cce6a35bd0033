"""`rlq audit`, what `rlq show` says of it, and whose jobs a verb is about."""

from __future__ import annotations

import json
import pwd

import pytest
from tests.cli.conftest import Invoke
from tests.support.fake_daemon import ME, FakeDaemon, make_job

from rlq.client import Client
from rlq.protocol import messages as m
from rlq.protocol.messages import Act, Acts, Audit, Cancel, Hold, Jobs, List, Selection
from rlq.protocol.states import JobState

CANCELLED = Act(
    number=7, at=1_000.5, user="root", uid=0, verb="cancel", job=3, owner="alice", detail="at once"
)
DRAINED = Act(number=6, at=900.0, user="bob", uid=1002, verb="drain")


def test_audit_lists_who_did_what_to_whose_job(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.acts = (CANCELLED, DRAINED)
    result = invoke("audit")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "NUMBER\tTIME\tBY\tVERB\tJOB\tOWNER\tDETAIL",
        "7\t1000.500\troot\tcancel\t3\talice\tat once",
        "6\t900.000\tbob\tdrain\t-\t-\t-",
    ]
    document = json.loads(invoke("audit", "--json").stdout)
    assert [act["verb"] for act in document["acts"]] == ["cancel", "drain"]
    assert document["acts"][1]["job"] is None


def test_audit_of_one_job_asks_for_that(daemon: FakeDaemon, invoke: Invoke) -> None:
    result = invoke("audit", "3", "-n", "5")
    assert result.exit_code == 0
    assert daemon.asked(Audit) == [Audit(job=3, limit=5)]


def test_the_client_goes_on_where_a_page_ends(daemon: FakeDaemon, client: Client) -> None:
    pages = {0: Acts(acts=(CANCELLED,), more=True), 7: Acts(acts=(DRAINED,))}
    daemon.answers[Audit] = lambda asked: pages[asked.before] if isinstance(asked, Audit) else None
    assert client.audit(limit=0).acts == (CANCELLED, DRAINED)


def test_show_tells_what_others_did_to_the_job(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(make_job(3, JobState.CANCELLED, reason="cancelled by root"))
    daemon.acts = (CANCELLED,)
    shown = invoke("show", "3").stdout
    assert "cancelled by root (uid 0) at 1970-01-01" in shown
    assert ", at once" in shown
    assert json.loads(invoke("show", "3", "--json").stdout)["acts"][0]["user"] == "root"


def test_show_does_without_where_the_daemon_is_older(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(make_job(3))
    daemon.answers[Audit] = m.Error(kind="protocol", message="cannot read the request")
    assert invoke("show", "3").exit_code == 0


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (["--all"], Selection(all=True)),
        (["--all-users"], Selection(all=True, everybody=True)),
        (["--user", "12345"], Selection(all=True, uid=12345)),
        (["--user", "12345", "--name", "a*"], Selection(name="a*", uid=12345)),
        (["--all-users", "--name", "a*"], Selection(name="a*", everybody=True)),
        (["--user", pwd.getpwuid(ME).pw_name, "--all"], Selection(all=True, uid=ME)),
    ],
)
def test_everybodys_jobs_are_meant_only_where_that_is_said(
    daemon: FakeDaemon, invoke: Invoke, options: list[str], sent: Selection
) -> None:
    daemon.answers[Cancel] = m.Changed(changes=(m.Change(id=1, ok=True),))
    daemon.answers[Hold] = m.Changed(changes=(m.Change(id=1, ok=True),))
    assert invoke("cancel", "--yes", *options).exit_code == 0
    assert invoke("hold", *options).exit_code == 0
    assert [one.selection for one in daemon.asked(Cancel) if isinstance(one, Cancel)] == [sent]
    assert [one.selection for one in daemon.asked(Hold) if isinstance(one, Hold)] == [sent]


@pytest.mark.parametrize("more", [["3"], ["--user", "me"]])
def test_all_users_excludes_ids_and_one_user(
    daemon: FakeDaemon, invoke: Invoke, more: list[str]
) -> None:
    result = invoke("cancel", "--all-users", *more)
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr
    assert not daemon.asked(Cancel)


@pytest.mark.parametrize(
    ("options", "whose"),
    [(["--all-users"], "everybody's"), (["--user", "12345"], "uid 12345's"), (["--all"], "yours")],
)
def test_all_of_somebodys_jobs_needs_yes_where_nobody_can_be_asked(
    daemon: FakeDaemon, invoke: Invoke, options: list[str], whose: str
) -> None:
    result = invoke("cancel", *options)
    assert result.exit_code == 2
    assert f"every job of {whose}" in result.stderr
    assert not daemon.asked(Cancel)


def test_waiting_for_everybodys_jobs(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.answers[List] = Jobs(jobs=(), total=0)
    assert invoke("wait", "--all-users").exit_code == 0
    [asked] = daemon.asked(List)
    assert isinstance(asked, List)
    assert asked.selection.uid is None
