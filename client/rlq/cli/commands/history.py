"""Jobs that have ended, the last to end first."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from rlq.cli.app import App, Parsed, note, verb, whole
from rlq.cli.output import print_json, stdout_is_terminal
from rlq.cli.selections import make_selection, name_option, parse_id, state_option, user_option
from rlq.cli.tables import print_history, print_jobs_plain
from rlq.errors import UsageError
from rlq.protocol.messages import List
from rlq.protocol.states import FINAL_STATES

#: The daemon lists by id, people look by end: a job that was queued again ended later than its
#: id tells.  Of the newest so many ids those that ended last are shown.
WINDOW = 1000


@verb("history", short_help="Jobs that have ended.")
@name_option
@state_option
@user_option
@click.option(
    "-n",
    "--limit",
    metavar="N",
    default="20",
    show_default=True,
    type=Parsed("limit", whole("a number of jobs", 0, 10**9)),
    help="At most N, the last to end; 0: no limit.",
)
@click.option(
    "--before", metavar="ID", type=Parsed("id", parse_id), help="Only jobs with a lower id."
)
def command(
    app: App, name: str | None, states: Any, uid: int | None, limit: int, before: int | None
) -> None:
    """Jobs that have ended, the last to end first: how, when, how long they took."""

    selection = make_selection((), name, states, False, uid=uid, needed=False)
    chosen = tuple(state for state in selection.states if state in FINAL_STATES)
    if selection.states and not chosen:
        raise UsageError(
            "a job in that state has not ended", hint="`rlq list --state` shows live jobs"
        )
    selection = msgspec.structs.replace(selection, states=chosen or tuple(sorted(FINAL_STATES)))
    window = max(limit, WINDOW) if limit else 0
    with app.client() as client:
        found = client.pages(List(selection=selection, limit=window, before=before or 0))
    by_end = sorted(found.jobs, key=lambda job: (-(job.ended_at or 0), -job.id))
    found = msgspec.structs.replace(found, jobs=tuple(by_end[: limit or None]))
    if app.json:
        print_json(found)
    elif not stdout_is_terminal():
        print_jobs_plain(found.jobs, time.time())
    elif found.jobs:
        print_history(found.jobs, time.time())
        if found.total > len(found.jobs):
            note(f"… {found.total - len(found.jobs)} more: -n {2 * len(found.jobs)}")
    else:
        note("no job has ended yet; `rlq list` shows the others")
