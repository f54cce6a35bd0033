"""Freeze running jobs where they are."""

from __future__ import annotations

from typing import Any

from rlq.cli.acting import act
from rlq.cli.app import App, verb
from rlq.cli.selections import selection_options
from rlq.protocol.messages import Pause


@verb("pause", short_help="Freeze running jobs where they are.")
@selection_options
def command(app: App, **chosen: Any) -> None:
    """Freeze running jobs (SIGSTOP); their time limits stand still.

    A paused job keeps its memory, its GPU and its cores."""
    act(app, lambda selection: Pause(selection=selection), "pause", **chosen)
