"""Is what lies in the folder this very run?  Light: it answers before torch is imported."""

from __future__ import annotations

import json
from typing import Any

from rlq.errors import UsageError
from rlq_sac import checkpoints, results
from rlq_sac.settings import Settings


def finished(settings: Settings) -> dict[str, Any] | None:
    """The result of this very run, if it has got as far as is asked for.

    Raises:
        UsageError: it is the result of another run.
    """
    result = results.read_result(settings.out / "result.json")
    if result is None:
        return None
    check_same_run(settings, result["identity"], f"result {settings.out / 'result.json'}")
    return result if result["steps"] >= settings.steps else None


def check_folder(settings: Settings) -> None:
    """Could a run with these settings go on in its folder?  Reads no checkpoint's contents.

    Raises:
        UsageError: what lies there is of another run.
    """
    if not settings.resume:
        return
    finished(settings)
    for path in checkpoints.paths(settings.out / "checkpoints"):
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))["state"]
            theirs = dict(state["identity"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: the training steps over it
        check_same_run(settings, theirs, f"checkpoint {path}")
        return


def check_same_run(settings: Settings, theirs: dict[str, Any], what: str) -> None:
    """
    Raises:
        UsageError: `theirs`, a `Settings.identity()`, is another one; `what` names its place.
    """
    ours = settings.identity()
    ours, theirs = ({**run, **run["set"]} for run in (ours, theirs))
    for name in sorted((ours.keys() | theirs.keys()) - {"set"}):
        if theirs.get(name) != ours.get(name):
            was, now = (run.get(name, "not set") for run in (theirs, ours))
            raise UsageError(
                f"{what} is of another run: {name} was {was}, now {now}",
                hint="give another --out, or --no-resume to start over in this one",
            )
