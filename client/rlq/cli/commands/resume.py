"""Let paused jobs go on."""

from __future__ import annotations

from typing import Any

from rlq.cli.acting import act
from rlq.cli.app import App, verb
from rlq.cli.selections import selection_options
from rlq.protocol.messages import Resume


@verb("resume", short_help="Let paused jobs go on.")
@selection_options
def command(app: App, **chosen: Any) -> None:
    """Let paused jobs go on."""
    act(app, lambda selection: Resume(selection=selection), "resume", **chosen)
