"""Why a job waits: the sentence, then the numbers, then who holds what is short."""

from __future__ import annotations

import time

import click

from rlq.cli.app import App, verb
from rlq.cli.output import (
    NONE,
    Cell,
    Column,
    Row,
    clean,
    folded,
    print_json,
    print_table,
    print_tsv,
    stdout_is_terminal,
)
from rlq.cli.selections import id_argument
from rlq.cli.tables import clock
from rlq.protocol.messages import Explanation, Holder, Shortage
from rlq.protocol.units import format_duration, format_mib


@verb("why", short_help="Why a job waits: what is short, who holds it.")
@id_argument
def command(app: App, job: int) -> None:
    """Why a job is where it is: what is short, who holds it, when it may come free."""
    with app.client() as client:
        said = client.why(job)
    if app.json:
        print_json(said)
        return
    now = time.time()
    # Several limits may be reached: one a line.
    for part in said.summary.split("; ") if said.limits else [said.summary]:
        for line in folded(clean(part), 0):
            click.echo(line)
    if said.jobs_ahead:
        click.echo(f"jobs before it: {said.jobs_ahead}")
    if said.reserved:
        click.echo("it has the reservation: nothing that would delay it is started")
    if said.starts_at is not None:
        click.echo(start_of(said, now))
    if said.shortages:
        click.echo()
        print_shortages(said, now)


def start_of(said: Explanation, now: float) -> str:
    assert said.starts_at is not None
    span = format_duration(said.starts_at - now)
    if said.after is None:
        return f"may start in {span} or sooner"
    at = clock(said.starts_at, now)
    if said.predicted:
        return f"starts about {at} (in {span}), when job {said.after} is expected to end"
    return f"starts by {at} (in {span}), when job {said.after} ends at the latest"


def print_shortages(said: Explanation, now: float) -> None:
    if not stdout_is_terminal():
        print_tsv(
            ("RESOURCE", "UNIT", "NEED", "FREE", "TOTAL", "GPU", "HOLDERS"),
            [
                (s.resource, s.unit, s.need, s.free, s.total, s.gpu or NONE, held_by(s, now))
                for s in said.shortages
            ],
        )
        return
    columns = [
        Column("SHORT OF"),
        Column("NEEDS", "right"),
        Column("FREE", "right"),
        Column("OF", "right"),
        Column("HELD BY"),
    ]
    rows: list[Row] = []
    for short in said.shortages:
        cells: list[Cell | str] = [
            Cell(resource_of(short), "bold"),
            amount(short.need, short.unit),
            Cell(amount(short.free, short.unit), "red"),
            amount(short.total, short.unit),
        ]
        holders = [holder(who, short.unit, now) for who in short.holders] or [NONE]
        rows.append(Row(cells, rest=Cell(holders[0])))
        rows += [Row([""] * len(cells), rest=Cell(who)) for who in holders[1:]]
    print_table(columns, rows)


def resource_of(short: Shortage) -> str:
    if short.gpu_index is None:
        return short.resource
    return f"{short.resource} on gpu{short.gpu_index}"


def amount(number: int, unit: str) -> str:
    if unit == "MiB":
        return format_mib(number)
    return f"{number}{unit}" if unit == "%" else str(number)


def holder(who: Holder, unit: str, now: float) -> str:
    if who.kept:
        amount_ = f": {amount(who.amount, unit)}" if who.amount else ""
        return f"{clean(who.kept)}{amount_}"
    name = f"job {who.job}" if who.job is not None else "outside the queue"
    if who.user:
        name += f" ({clean(who.user)})"
    ends = f", till {clock(who.ends_at, now)}" if who.ends_at is not None else ""
    return f"{name}: {amount(who.amount, unit)}{ends}"


def held_by(short: Shortage, now: float) -> str:
    return "; ".join(holder(who, short.unit, now) for who in short.holders) or NONE
