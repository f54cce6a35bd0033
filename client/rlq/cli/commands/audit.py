"""What administrators did."""

from __future__ import annotations

import time

import click

from rlq.cli.app import App, Parsed, note, verb, whole
from rlq.cli.complete import complete_ids
from rlq.cli.output import (
    NONE,
    Column,
    Row,
    clean,
    print_json,
    print_table,
    print_tsv,
    stdout_is_terminal,
)
from rlq.cli.selections import parse_id
from rlq.cli.tables import clock
from rlq.protocol.messages import Acts


@verb("audit", short_help="What administrators did.")
@click.argument(
    "job",
    metavar="[ID]",
    required=False,
    type=Parsed("id", parse_id),
    shell_complete=complete_ids,
)
@click.option(
    "-n",
    "--limit",
    metavar="N",
    default="50",
    show_default=True,
    type=Parsed("limit", whole("a number of acts", 0, 10**9)),
    help="At most N, the latest first; 0: no limit.",
)
def command(app: App, job: int | None, limit: int) -> None:
    """What administrators did to other users' jobs and to the daemon, the latest first.

    Administrators see all of it; others see what was done to their own jobs."""
    with app.client() as client:
        found = client.audit(job, limit=limit)
    if app.json:
        print_json(found)
    elif not stdout_is_terminal():
        print_tsv(
            ("NUMBER", "TIME", "BY", "VERB", "JOB", "OWNER", "DETAIL"),
            [
                (
                    act.number,
                    f"{act.at:.3f}",
                    act.user,
                    act.verb,
                    NONE if act.job is None else act.job,
                    act.owner or NONE,
                    act.detail or NONE,
                )
                for act in found.acts
            ],
        )
    elif found.acts:
        print_acts(found, time.time(), limit)
    else:
        note("administrators have done nothing to it" if job else "nothing has been done")


def print_acts(found: Acts, now: float, limit: int) -> None:
    columns = [
        Column("WHEN"),
        Column("WHO", least=8),
        Column("DID"),
        Column("JOB", "right"),
        Column("OF", least=8),
        Column("DETAIL", least=8),
    ]
    rows = [
        Row(
            [
                clock(act.at, now),
                clean(act.user),
                act.verb,
                NONE if act.job is None else str(act.job),
                clean(act.owner) or NONE,
                clean(act.detail),
            ]
        )
        for act in found.acts
    ]
    print_table(columns, rows)
    if found.more:
        note(f"… and older ones: -n {2 * limit}")
