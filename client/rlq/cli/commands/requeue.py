"""Queue jobs again."""

from __future__ import annotations

from typing import Any

from rlq.cli.acting import act
from rlq.cli.app import App, verb
from rlq.cli.selections import selection_options, yes_option
from rlq.protocol.messages import Requeue


@verb("requeue", short_help="Queue jobs again.")
@selection_options
@yes_option
def command(app: App, yes: bool, **chosen: Any) -> None:
    """Queue jobs again under the same id: running ones are stopped first, ended ones run again."""
    act(app, lambda selection: Requeue(selection=selection), "requeue", yes=yes, **chosen)
