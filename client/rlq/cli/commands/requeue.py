"""Queue jobs again."""

from __future__ import annotations

from typing import Any

from rlq.cli.acting import act
from rlq.cli.app import App, verb
from rlq.cli.selections import selection_options, yes_option
from rlq.protocol.messages import Requeue
from rlq.protocol.states import FINAL_STATES, JobState

#: What --all, --name and --state mean: what went wrong (rlqd.shell.requests).
BY_PATTERN = FINAL_STATES - {JobState.COMPLETED, JobState.CANCELLED}


@verb("requeue", short_help="Queue jobs again.")
@selection_options
@yes_option
def command(app: App, yes: bool, **chosen: Any) -> None:
    """Queue jobs again under the same id: running ones are stopped first, ended ones run again.

    --all, --name and --state mean your jobs that failed; running, cancelled and completed ones
    are named by id."""
    act(
        app,
        lambda selection: Requeue(selection=selection),
        "requeue",
        yes=yes,
        acted_on=BY_PATTERN,
        **chosen,
    )
