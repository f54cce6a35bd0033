"""Keep waiting jobs from starting."""

from __future__ import annotations

from typing import Any

from rlq.cli.acting import act
from rlq.cli.app import App, verb
from rlq.cli.selections import selection_options
from rlq.protocol.messages import Hold


@verb("hold", short_help="Keep waiting jobs from starting.")
@selection_options
def command(app: App, **chosen: Any) -> None:
    """Keep waiting jobs from starting until `rlq release`."""
    act(app, lambda selection: Hold(selection=selection), "hold", **chosen)
