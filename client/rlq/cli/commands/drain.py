"""Start nothing more, or go on starting."""

from __future__ import annotations

import click

from rlq.cli.app import App, verb
from rlq.cli.output import clean, print_json
from rlq.protocol.messages import Ok


@verb("drain", short_help="Start nothing more (--off: go on).")
@click.option("--off", is_flag=True, help="Go on starting jobs.")
def command(app: App, off: bool) -> None:
    """Start nothing more: running jobs run on, new ones are queued. --off ends it."""
    with app.client() as client:
        said = client.drain(not off)
    if app.json:
        print_json(Ok(message=said))
    else:
        click.echo(
            clean(said)
            or ("jobs are started again" if off else "nothing new starts; rlq drain --off ends it")
        )
