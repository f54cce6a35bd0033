"""The jobs: what runs and waits, and the last few that ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rlq.cli.app import App, Parsed, note, verb, whole
from rlq.cli.output import print_json, stdout_is_terminal
from rlq.cli.selections import (
    ids_argument,
    listed_state_option,
    make_selection,
    name_option,
    user_option,
)
from rlq.cli.tables import HELD, print_jobs, print_jobs_plain
from rlq.errors import from_wire
from rlq.protocol.messages import Error, Jobs, List, Selection
from rlq.protocol.states import FINAL_STATES, LIVE_STATES, JobState

if TYPE_CHECKING:
    from rlq.client import Client

PENDING = JobState.PENDING
ENDED_SHOWN = 5
PENDING_SHOWN = 50


@verb("list", short_help="The jobs: waiting, running, just ended.")
@ids_argument
@name_option
@listed_state_option
@user_option
@click.option("--all", "all_", is_flag=True, help="Ended ones too, however long ago.")
@click.option(
    "-n",
    "--limit",
    metavar="N",
    type=Parsed("limit", whole("a number of jobs", 0, 10**9)),
    help="At most N, the newest; 0: no limit.",
)
def command(
    app: App,
    ids: Any,
    name: str | None,
    states: Any,
    uid: int | None,
    all_: bool,
    limit: int | None,
) -> None:
    """The jobs of everybody: all that run, those that wait, and the last few that ended.

    A terminal is shown the first of many that wait; a pipe and --json get all of them."""

    asked = {state for group in states for state in group}
    chosen = tuple(tuple(PENDING if state == HELD else state for state in g) for g in states)
    selection = make_selection(ids, name, chosen, all_, uid=uid, needed=False)
    is_shown = stdout_is_terminal() and not app.json
    most = limit if limit is not None else PENDING_SHOWN if is_shown and not all_ else 0
    with app.client() as client:
        if HELD in asked:
            found = of_held(client, selection, most, PENDING in asked)
        elif selection.ids or selection.states or all_:
            found = client.pages(List(selection=selection, limit=most))
        else:
            found = ask_recent(client, selection, limit, most)
    if app.json:
        print_json(found)
    elif not is_shown:
        print_jobs_plain(sorted(found.jobs, key=lambda job: job.id), time.time())
    elif found.jobs:
        print_jobs(found.jobs, time.time())
        if found.total > len(found.jobs):
            note(f"… {found.total - len(found.jobs)} more: --limit 0 shows all, --all ended ones")
    elif name or uid is not None or states:
        note("no job matches; `rlq list` shows all")
    elif not ids:
        note("no jobs; `rlq submit -- python train.py` queues one")
    for job in found.missing:
        note(f"there is no job {job}")
    if found.missing:
        raise click.exceptions.Exit(1 if found.jobs else 4)


def of_held(client: Client, selection: Selection, most: int, with_pending: bool) -> Jobs:
    """As asked for, of the waiting ones only those that are held: the protocol cannot say that."""
    found = client.pages(List(selection=selection))
    jobs = [
        job for job in found.jobs if with_pending or job.held or job.state is not JobState.PENDING
    ]
    return msgspec.structs.replace(found, jobs=tuple(jobs[: most or None]), total=len(jobs))


def ask_recent(client: Client, selection: Selection, limit: int | None, most: int) -> Jobs:
    """What runs, what waits, what ended last: three questions in one go, so that a queue of
    100,000 does not travel.  `total` counts all that wait, and of the ended only those shown."""

    def question(states: Iterable[JobState], most: int) -> List:
        return List(
            selection=msgspec.structs.replace(selection, states=tuple(sorted(states))), limit=most
        )

    questions = [
        question(LIVE_STATES - {PENDING}, limit or 0),
        question({PENDING}, most),
        question(FINAL_STATES, ENDED_SHOWN if limit is None else limit),
    ]
    replies: list[Jobs] = []
    for asked, reply in zip(questions, list(client.requests(questions)), strict=True):
        if isinstance(reply, Error):
            raise from_wire(reply.kind, reply.message, reply.hint)
        assert isinstance(reply, Jobs)
        replies.append(client.rest_of(asked, reply))
    active, pending, ended = replies
    if limit is None and pending.total > len(pending.jobs):
        pending = head_of(client, questions[1], pending)
    jobs = {job.id: job for reply in (active, pending, ended) for job in reply.jobs}
    newest = sorted(jobs.values(), key=lambda job: -job.id)
    if limit:
        newest = newest[:limit]
    return Jobs(jobs=tuple(newest), total=active.total + pending.total + len(ended.jobs))


def head_of(client: Client, asked: List, newest: Jobs) -> Jobs:
    """The oldest `asked.limit` jobs, where `newest` answered with the newest.

    The daemon lists from the newest on, and counts what a range of ids holds: the range that
    holds just enough is found by halving.
    """

    def up_to(job: int, limit: int) -> List:
        ranges = replace(asked.selection, ids=((1, job),))
        return replace(asked, selection=ranges, limit=limit)

    replace = msgspec.structs.replace
    low, high = 0, newest.jobs[0].id
    while high - low > 1:
        middle = (low + high) // 2
        found = client.request(up_to(middle, 1))
        assert isinstance(found, Jobs)
        if found.total < asked.limit:
            low = middle
        else:
            high = middle
            if found.total <= 2 * asked.limit:
                break
    oldest = client.pages(up_to(high, 0)).jobs[-asked.limit :]
    return replace(newest, jobs=oldest)
