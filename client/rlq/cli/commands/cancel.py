"""Stop jobs, or take them out of the queue."""

from __future__ import annotations

from typing import Any

import click

from rlq.cli.acting import act
from rlq.cli.app import App, verb
from rlq.cli.selections import selection_options, yes_option
from rlq.protocol.messages import Cancel


@verb("cancel", short_help="Stop jobs, or take them out of the queue.")
@selection_options
@yes_option
@click.option("--now", is_flag=True, help="SIGKILL at once, without a grace period.")
def command(app: App, yes: bool, now: bool, **chosen: Any) -> None:
    """Stop jobs: SIGTERM to each, SIGKILL after its grace period; waiting jobs leave the queue.

    Without --all this is about the jobs you name; with --name or --state, of your own."""
    act(app, lambda selection: Cancel(selection=selection, now=now), "cancel", yes=yes, **chosen)
