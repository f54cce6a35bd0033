"""What the verbs share that change jobs: cancel, hold, release, pause, resume, requeue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from rlq.cli.app import App, fail
from rlq.cli.output import clean, print_json, print_tsv, stdout_is_terminal
from rlq.cli.selections import confirm_all, make_selection
from rlq.cli.tables import SHORT_STATES
from rlq.errors import InternalError, NotFoundError, from_wire
from rlq.protocol.messages import Change, Changed, Request, Selection
from rlq.protocol.states import LIVE_STATES, JobState


def act(
    app: App,
    request: Callable[[Selection], Request],
    what: str,
    *,
    ids: Any,
    name: str | None,
    states: Any,
    all_: bool,
    uid: int | None = None,
    everybody: bool = False,
    yes: bool | None = None,
    acted_on: Iterable[JobState] = LIVE_STATES,
) -> None:
    """Ask for it, tell what became of each job, exit accordingly.

    `yes`: None for what can be taken back; else --all asks first unless it is True.
    `acted_on`: the states of the jobs that --all means.
    """
    selection = make_selection(ids, name, states, all_, uid=uid, everybody=everybody)
    with app.client() as client:
        if yes is not None:
            confirm_all(what, selection, client, yes, acted_on)
        reply = client.request(request(selection))
    if not isinstance(reply, Changed):
        raise InternalError(f"the daemon answered {type(reply).__name__}")
    tell(app, reply.changes)


def tell(app: App, changes: tuple[Change, ...]) -> None:
    """Raises Exit: 1 if some failed; of a single job its own kind's exit code."""
    if not changes:
        raise NotFoundError("no job matches", hint="`rlq list` shows the jobs")
    if app.json:
        print_json(Changed(changes=changes))
    elif stdout_is_terminal():
        for change in changes:
            if change.ok:
                click.echo(line_of(change))
    else:
        print_tsv(
            ("ID", "OK", "STATE", "MESSAGE"),
            [
                (c.id, "yes" if c.ok else "no", c.state.value if c.state else "-", c.message)
                for c in changes
            ],
        )
    failed = [change for change in changes if not change.ok]
    for change in failed:
        error = from_wire(change.kind or "usage", change.message, None)
        shows = len(failed) == 1 and change.kind != "not-found"
        hint = f"`rlq show {change.id}` shows it" if shows else None
        code = fail(f"job {change.id}: {clean(change.message)}", hint, error.exit_code)
        if len(changes) == 1:
            raise click.exceptions.Exit(code)
    if failed:
        raise click.exceptions.Exit(1)


def line_of(change: Change) -> str:
    state = ""
    if change.state is not None:
        state = SHORT_STATES.get(change.state, change.state.value)
    said = " ".join(part for part in (state, clean(change.message)) if part)
    return f"job {change.id}: {said or 'done'}"
