"""Inside a job that is not Python, or has no rlq: tell the queue how far it is."""

from __future__ import annotations

import click

from rlq import job
from rlq.cli.app import App, note, verb, warn, whole
from rlq.cli.output import print_json
from rlq.errors import RlqError, UsageError

NUMBER = whole("a number of steps", 0, job.STEP_MAX, hint="rlq report 5000 700000")


def parse_metric(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = None
    if not name or not equals or number is None:
        raise UsageError(f"{text!r} is not a metric", hint="--metric ep_rew_mean=312.5")
    return name, number


@verb("report", short_help="In a job: tell how far it is.")
@click.option(
    "--metric",
    "metrics",
    metavar="NAME=VALUE",
    multiple=True,
    help="A number to show beside it; repeatable.",
)
@click.argument("step", metavar="STEP")
@click.argument("total", metavar="[TOTAL]", required=False)
def command(app: App, step: str, total: str | None, metrics: tuple[str, ...]) -> None:
    """Tell the queue that STEP steps of TOTAL are done.

    For jobs that are no Python programs; a Python program calls rlq.job.report, and one that
    trains with Stable-Baselines3 or SBX need do nothing.

    Inside a job this always exits with 0: progress that cannot be told must not end the run of
    a script under `set -e`.
    """
    done: int | None
    try:
        done = NUMBER(step)
        goal = None if total is None else NUMBER(total)
        named = dict(map(parse_metric, metrics))
    except RlqError as error:
        if not job.is_queued():
            raise
        warn(f"nothing is reported: {error.message}")
        done = None
    else:
        if not job.is_queued():
            note("this is no job of the queue: nothing is reported")
            done = None
    if done is not None:
        job.report(done, goal or None, **named)
    if app.json:
        print_json({"reported": done is not None})
