"""Book capacity for some users, or the machine for maintenance; look at it, end it."""

from __future__ import annotations

import time

import click

from rlq.cli.app import App, Parsed, note, verb, whole
from rlq.cli.moments import parse_moment
from rlq.cli.output import (
    Cell,
    Column,
    Row,
    clean,
    print_json,
    print_table,
    print_tsv,
    stdout_is_terminal,
)
from rlq.errors import UsageError
from rlq.protocol import units
from rlq.protocol.bookings import (
    booked_words,
    format_clock,
    quiet_words,
    running_words,
    what_words,
)
from rlq.protocol.messages import Booking, Calendar
from rlq.specs import CORES_MAX, GPUS_MAX


def parse_indices(text: str) -> tuple[int, ...]:
    found = units.parse_ranges(text)
    if any(high >= GPUS_MAX for _, high in found):
        raise UsageError(f"{text!r} are not numbers of GPUs", hint="`rlq gpus` shows them")
    return tuple(n for low, high in found for n in range(low, high + 1))


def parse_when(text: str) -> float:
    return parse_moment(text, time.time())


@verb(
    "reserve",
    cls=click.Group,
    invoke_without_command=True,
    short_help="Book capacity for some users' jobs (administrators).",
)
@click.option("--users", metavar="A,B", default="", help="Whose jobs it is for.")
@click.option(
    "--gpus",
    metavar="N",
    type=Parsed("number", whole("a number of GPUs", 0, GPUS_MAX)),
    default="0",
    help="So many GPUs, the daemon's choice.",
)
@click.option(
    "--gpu",
    metavar="0,1",
    type=Parsed("numbers", parse_indices),
    default=None,
    help="These GPUs.",
)
@click.option(
    "--cores",
    metavar="N",
    type=Parsed("number", whole("a number of cores", 0, CORES_MAX)),
    help="Cores. [default: for each GPU those of a job that declares none]",
)
@click.option(
    "--mem",
    metavar="SIZE",
    type=Parsed("size", units.parse_mib),
    help="Host memory. [default: likewise]",
)
@click.option(
    "--from",
    "starts",
    metavar="TIME",
    type=Parsed("time", parse_when),
    default="now",
    help="2026-12-01T09:00, 09:00, 'tomorrow 09:00'; local time. [default: now]",
)
@click.option(
    "--to", "ends", metavar="TIME", type=Parsed("time", parse_when), help="When it ends."
)
@click.option(
    "--for",
    "lasts",
    metavar="TIME",
    type=Parsed("duration", units.parse_duration_ms),
    help="How long it lasts, in place of --to: 2h, 90 (minutes).",
)
@click.option("--name", metavar="NAME", default="", help="[default: made up: alice_1]")
@click.option("--maintenance", is_flag=True, help="All of the machine, for nobody's jobs.")
@click.pass_context
def command(
    ctx: click.Context,
    app: App,
    users: str,
    gpus: int,
    gpu: tuple[int, ...] | None,
    cores: int | None,
    mem: int | None,
    starts: float,
    ends: float | None,
    lasts: int | None,
    name: str,
    maintenance: bool,
) -> None:
    """Book capacity for some users' jobs, or all of the machine for nobody's (--maintenance).

    From its start only their jobs start on it. Before its start a job of somebody else starts
    there only with a time limit that ends in time. Nobody's job is stopped for it.

    \b
    rlq reserve --gpus 1 --users alice,bob --from 'tomorrow 09:00' --for 8h
    rlq reserve --maintenance --from 2026-12-01T18:00 --to 2026-12-01T20:00
    rlq reserve list
    rlq reserve cancel alice_1
    """
    if ctx.invoked_subcommand is not None:
        return
    if (ends is None) == (lasts is None):
        raise UsageError(
            "when it ends is --to or --for, one of them",
            hint="rlq reserve --gpus 1 --users alice --for 2h",
        )
    with app.client() as client:
        booked = client.reserve(
            users=[part for part in users.split(",") if part],
            gpus=gpus,
            gpu_indices=gpu or (),
            cores=cores,
            mem_mib=mem,
            starts_at=starts,
            ends_at=starts + lasts / 1000 if lasts is not None else ends or starts,
            name=name,
            maintenance=maintenance,
        )
    tell_booked(app, booked)


def tell_booked(app: App, booked: Booking) -> None:
    if app.json:
        print_json(booked)
        return
    now = time.time()
    click.echo(f"{clean(what_words(booked))}: {clean(booked_words(booked, now))}")
    if words := running_words(booked, now):
        note(words)


@verb("list", short_help="What is booked, and quiet hours.")
def list_(app: App) -> None:
    """What is booked and not over: reservations, maintenance, claims; and quiet hours."""
    with app.client() as client:
        found = client.bookings()
    if app.json:
        print_json(found)
    elif not stdout_is_terminal():
        print_plain(found)
    else:
        print_bookings(found, time.time())


@verb("cancel", short_help="End a reservation, maintenance or a claim.")
@click.argument("name", metavar="NAME")
def cancel(app: App, name: str) -> None:
    """End what is booked by this name, now. Running jobs run on."""
    with app.client() as client:
        said = client.unbook(name)
    if app.json:
        print_json({"ended": name})
    else:
        click.echo(clean(said))


assert isinstance(command, click.Group)
command.add_command(list_)
command.add_command(cancel)


def print_bookings(found: Calendar, now: float) -> None:
    if found.bookings:
        print_table(
            [
                *(Column("NAME", least=8), Column("FROM"), Column("TO")),
                *(Column("FOR", least=6), Column("WHAT", least=8)),
            ],
            [row for one in found.bookings for row in rows_of(one, now)],
        )
    else:
        click.echo("nothing is booked")
    if found.quiet is not None:
        click.echo(quiet_words(found.quiet, now))


def rows_of(one: Booking, now: float) -> list[Row]:
    whom = one.by if one.kind == "claim" else ",".join(one.users) or "nobody"
    cells: list[Cell | str] = [
        Cell(one.name, "bold"),
        "now" if one.starts_at <= now else format_clock(one.starts_at, now),
        format_clock(one.ends_at, now),
        whom,
        what_words(one),
    ]
    running = running_words(one, now)
    return [Row(cells), *([Row([""], rest=Cell(running, "yellow"))] if running else [])]


def print_plain(found: Calendar) -> None:
    print_tsv(
        ("NAME", "KIND", "FROM", "TO", "BY", "USERS", "GPUS", "CORES", "MEM_MIB", "JOBS"),
        [
            (
                *(one.name, one.kind, f"{one.starts_at:.0f}", f"{one.ends_at:.0f}", one.by),
                *(",".join(one.users) or "-", ",".join(map(str, one.gpu_indices)) or "-"),
                *(one.cores, one.mem_mib, ",".join(map(str, one.jobs)) or "-"),
            )
            for one in found.bookings
        ],
    )
