"""Start, stop or look for the daemon."""

from __future__ import annotations

import time

import click

from rlq.cli.app import App, fail, verb
from rlq.cli.output import print_json
from rlq.client import Client
from rlq.errors import UnavailableError, UnreachableError
from rlq.transport import is_answering

STOP_TIMEOUT_S = 15.0


@click.group("daemon", short_help="Start, stop or look for the daemon.")
def command() -> None:
    """Start, stop or look for the daemon that your jobs go to."""


def describe(client: Client) -> dict[str, object]:
    pong = client.ping()
    return {
        "running": True,
        "pid": pong.pid,
        "version": pong.version,
        "protocol": pong.protocol,
        "socket": client.address,
    }


@verb("start", short_help="Start your own daemon, unless one answers.")
def start(app: App) -> None:
    """Start your own daemon, unless one (yours or the system's) answers already.

    A daemon started so ends with `rlq daemon stop`; jobs outlive it either way.
    """
    app.require_here("a daemon is started on its own machine, here that is", "rlq daemon start")
    with app.client(autostart=False) as client:
        try:
            found = describe(client)
            started = False
        except UnreachableError:
            started = True
    if started:
        with Client(app.socket, autostart=True) as client:
            found = describe(client)
    if app.json:
        print_json({**found, "started": started})
    else:
        verb_ = "started" if started else "already runs"
        click.echo(f"rlqd {found['version']} {verb_}: pid {found['pid']}, {found['socket']}")


@verb("stop", short_help="Stop the daemon; running jobs run on.")
def stop(app: App) -> None:
    """Stop the daemon. Running jobs run on, and the next daemon finds them again; waiting jobs
    stay queued. (`rlq cancel --all` is what stops jobs.)"""
    app.require_here("a daemon is stopped on its own machine, here that is", "rlq daemon stop")
    with app.client(autostart=False) as client:
        found = describe(client)
        client.stop_daemon()
        path = client.socket
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while is_answering(path):
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"the daemon (pid {found['pid']}) has not stopped in {STOP_TIMEOUT_S:.0f} s",
                hint="`rlq daemon status` shows whether it still runs",
            )
        time.sleep(0.02)
    if app.json:
        print_json({**found, "running": False})
    else:
        click.echo(f"rlqd (pid {found['pid']}) has stopped; running jobs run on")


@verb("status", short_help="Whether a daemon runs, and where.")
def status(app: App) -> None:
    """Whether a daemon runs, and where. Exit code 6 if none does."""
    with app.client(autostart=False) as client:
        try:
            found = describe(client)
        except UnreachableError as error:
            if not app.json:
                raise
            print_json({"running": False})
            raise click.exceptions.Exit(fail(error.message, error.hint, error.exit_code)) from None
    if app.json:
        print_json(found)
    else:
        click.echo(f"rlqd {found['version']} runs: pid {found['pid']}, {found['socket']}")


command.add_command(start)
command.add_command(stop)
command.add_command(status)
