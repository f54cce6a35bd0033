"""Let held jobs start again."""

from __future__ import annotations

from typing import Any

from rlq.cli.acting import act
from rlq.cli.app import App, verb
from rlq.cli.selections import selection_options
from rlq.protocol.messages import Release


@verb("release", short_help="Let held jobs start again.")
@selection_options
def command(app: App, **chosen: Any) -> None:
    """Let held jobs start again."""
    act(app, lambda selection: Release(selection=selection), "release", **chosen)
