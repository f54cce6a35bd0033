"""Change jobs that have not ended."""

from __future__ import annotations

from typing import Any

import click

from rlq.cli.acting import act
from rlq.cli.app import App, Parsed, verb, whole
from rlq.cli.selections import selection_options
from rlq.errors import UsageError
from rlq.protocol.messages import Prioritize
from rlq.specs import PRIORITY_MAX


@verb("update", short_help="Change the priority of jobs.")
@selection_options
@click.option(
    "--priority",
    metavar="N",
    type=Parsed("priority", whole("a priority", -PRIORITY_MAX, PRIORITY_MAX)),
    help="Higher goes first; -1000 to 1000, above 0 for administrators.",
)
def command(app: App, priority: int | None, **chosen: Any) -> None:
    """Change jobs that wait or run.

    \b
    rlq update 7 --priority -10
    rlq update --name 'sweep-*' --priority 0
    """
    if priority is None:
        raise UsageError("nothing to change is named", hint="rlq update 7 --priority -10")
    act(app, lambda chosen: Prioritize(selection=chosen, priority=priority), "update", **chosen)
