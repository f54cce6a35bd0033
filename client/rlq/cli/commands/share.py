"""Fair share: how the users stand, and how a waiting job's rank is made up."""

from __future__ import annotations

import click

from rlq.cli.app import App, verb
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
from rlq.protocol.messages import JobRank, Shares
from rlq.protocol.units import format_duration

HEADER = ("USER", "SHARES", "PART", "GPU-H", "CORE-H", "MACHINE-H", "HOLDS", "COUNTS", "FACTOR")


@verb("share", short_help="Fair share: who has had how much, who is next.")
@click.argument("job", metavar="[ID]", type=click.IntRange(min=1), required=False)
def command(app: App, job: int | None) -> None:
    """How the users stand by fair share, who goes first on top. With ID: how that waiting job's
    rank is made up.

    \b
    part       the user's part of the machine, by shares
    gpu-h ...  use, decayed: hours of a GPU, of a core, of the whole machine
    holds      share of the machine held now
    counts     machine-hours, and what is held as if for an hour
    factor     1.0 has had nothing, 0.5 a fair part, then towards 0
    """
    with app.client() as client:
        found = client.share(job)
    if app.json:
        print_json(found)
        return
    if found.job is not None:
        print_rank(found.job, found)
        return
    rows = [
        (
            clean(one.user),
            str(one.shares),
            f"{100 * one.part:.0f}%",
            f"{one.gpu_hours:.1f}",
            f"{one.core_hours:.1f}",
            f"{one.machine_hours:.1f}",
            f"{100 * one.held:.0f}%",
            f"{one.counted_hours:.1f}",
            f"{one.factor:.3f}",
        )
        for one in found.users
    ]
    if not stdout_is_terminal():
        print_tsv(HEADER, rows)
        return
    columns = [Column("USER", least=8), *(Column(title, "right") for title in HEADER[1:])]
    print_table(columns, [Row([Cell(row[0], "bold"), *row[1:]]) for row in rows])
    click.echo(f"use halves every {format_duration(found.half_life_s)}")


def print_rank(rank: JobRank, found: Shares) -> None:
    click.echo(
        f"job {rank.id} ({clean(rank.user)}), priority {rank.priority}, which decides first"
    )
    click.echo(f"score       {rank.age + rank.share:>7}")
    waited = format_duration(rank.waited_s)
    full = format_duration(found.age_max_s)
    click.echo(
        f"  age       {rank.age:>7}  of {found.age_weight}, full after {full}: waits {waited}"
    )
    click.echo(
        f"  fair share{rank.share:>7}  of {found.share_weight}: `rlq share` shows everybody's"
    )
    click.echo(f"jobs before it: {rank.jobs_ahead}")
    if rank.reserved:
        click.echo("it has the reservation: of its priority it goes first")
