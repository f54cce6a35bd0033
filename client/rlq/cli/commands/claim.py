"""Book a GPU at once, for work outside the queue."""

from __future__ import annotations

import click

from rlq.cli.app import App, Parsed, verb, whole
from rlq.cli.commands.reserve import tell_booked
from rlq.cli.output import clean, print_json
from rlq.errors import UsageError
from rlq.protocol import units
from rlq.specs import GPUS_MAX


@verb("claim", short_help="Keep a GPU for your own work outside the queue.")
@click.option(
    "--gpu",
    metavar="N",
    type=Parsed("number", whole("the number of a GPU", 0, GPUS_MAX)),
    help="Which: `rlq gpus` numbers them.",
)
@click.option(
    "--for",
    "lasts",
    metavar="TIME",
    type=Parsed("duration", units.parse_duration_ms),
    help="How long from now: 2h, 90 (minutes). Again: from now anew.",
)
@click.option("--release", is_flag=True, help="Give it back.")
def command(app: App, gpu: int | None, lasts: int | None, release: bool) -> None:
    """Keep a GPU for your own work outside the queue: no job starts on it until then. Jobs that
    run on it run on, and are named.

    \b
    rlq claim --gpu 0 --for 2h
    rlq claim --release
    """
    if release:
        if lasts is not None:
            raise UsageError("--release ends a claim: --for has no place beside it")
        with app.client() as client:
            said = client.release_claim(gpu)
        if app.json:
            print_json({"released": True})
        else:
            click.echo(clean(said))
        return
    if gpu is None or lasts is None:
        raise UsageError("which GPU, and for how long?", hint="rlq claim --gpu 0 --for 2h")
    with app.client() as client:
        booked = client.claim(gpu, for_ms=lasts)
    tell_booked(app, booked)
