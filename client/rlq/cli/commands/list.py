"""The jobs: what runs and waits, and the last few that ended."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from rlq.cli.app import App, Parsed, note, verb, whole
from rlq.cli.output import print_json, stdout_is_terminal
from rlq.cli.selections import (
    ids_argument,
    make_selection,
    name_option,
    state_option,
    user_option,
)
from rlq.cli.tables import print_jobs, print_jobs_plain
from rlq.errors import from_wire
from rlq.protocol.messages import Error, Jobs, List
from rlq.protocol.states import FINAL_STATES, LIVE_STATES, JobState

ENDED_SHOWN = 5
PENDING_SHOWN = 50


@verb("list", short_help="The jobs: waiting, running, just ended.")
@ids_argument
@name_option
@state_option
@user_option
@click.option("--all", "all_", is_flag=True, help="Ended ones too, as far back as --limit goes.")
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
    """The jobs of everybody: all that run, those that wait, and the last few that ended."""

    selection = make_selection(ids, name, states, all_, uid=uid, needed=False)
    with app.client() as client:
        if selection.ids or selection.states or all_:
            found = ask(client, selection, PENDING_SHOWN if limit is None else limit)
        else:
            found = ask_recent(client, selection, limit)
    if app.json:
        print_json(found)
    elif not stdout_is_terminal():
        print_jobs_plain(found.jobs, time.time())
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
    assert isinstance(found, Jobs)


def ask(client: Any, selection: Any, limit: int) -> Any:

    return client.pages(List(selection=selection, limit=limit))


def ask_recent(client: Any, selection: Any, limit: int | None) -> Any:
    """What runs, what waits, what ended last: three questions in one go, so that a queue of
    100,000 does not travel.  `total` counts all that wait, and of the ended only those shown."""

    running = LIVE_STATES - {JobState.PENDING}

    def question(states: Any, most: int) -> Any:
        return List(
            selection=msgspec.structs.replace(selection, states=tuple(sorted(states))), limit=most
        )

    questions = [
        question(running, limit or 0),
        question({JobState.PENDING}, PENDING_SHOWN if limit is None else limit),
        question(FINAL_STATES, ENDED_SHOWN if limit is None else limit),
    ]
    replies = list(client.requests(questions))
    for reply in replies:
        if isinstance(reply, Error):
            raise from_wire(reply.kind, reply.message, reply.hint)
    replies = [client.rest_of(q, reply) for q, reply in zip(questions, replies, strict=True)]
    active, pending, ended = replies
    jobs = {job.id: job for reply in replies for job in reply.jobs}  # one may move meanwhile
    newest = sorted(jobs.values(), key=lambda job: -job.id)
    if limit:
        newest = newest[:limit]
    return Jobs(jobs=tuple(newest), total=active.total + pending.total + len(ended.jobs))
