"""`rlq share`: how the users stand, and how a job's rank is made up."""

from __future__ import annotations

import json

import pytest
from tests.cli.conftest import Invoke

from rlq.cli.commands import share
from rlq.client import Client


@pytest.mark.parametrize("arguments", [(), ("7",)])
def test_what_people_see_fits_80_columns(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(share, "stdout_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    done = invoke("share", *arguments)
    assert done.exit_code == 0, done.output
    print(done.stdout)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_who_goes_first_is_on_top(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "stdout_is_terminal", lambda: True)
    lines = invoke("share").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["USER", "bob", "ada", "use"]


def test_the_rank_of_a_job_adds_up(invoke: Invoke) -> None:
    said = invoke("share", "7").stdout
    assert "2642" in said
    assert "142" in said
    assert "2500" in said
    assert "jobs before it: 12" in said


def test_a_pipe_gets_one_line_for_each_user(invoke: Invoke) -> None:
    lines = [line.split("\t") for line in invoke("share").stdout.splitlines()]
    assert lines[0][0] == "USER"
    assert [line[0] for line in lines[1:]] == ["bob", "ada"]
    assert {len(line) for line in lines} == {9}


def test_json_has_all_of_it(invoke: Invoke) -> None:
    found = json.loads(invoke("share", "7", "--json").stdout)
    assert found["job"]["jobs_ahead"] == 12
    assert found["users"][1]["machine_hours"] == 120.5


def test_from_python(client: Client) -> None:
    found = client.share()
    assert (found.job, [one.user for one in found.users]) == (None, ["bob", "ada"])
