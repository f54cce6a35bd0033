"""Until jobs have ended."""

from __future__ import annotations

import sys
from typing import Any

import click

from rlq.cli.app import App, Parsed, fail, is_terminal, note, shows_escapes, verb
from rlq.cli.output import clean, plain, print_json
from rlq.cli.selections import make_selection, resolve, selection_options
from rlq.cli.tables import compress, ended_reason, exit_word
from rlq.client import WAIT_STEP_MS, Client
from rlq.errors import NotFoundError
from rlq.protocol.messages import Job
from rlq.protocol.states import JobState
from rlq.protocol.units import parse_duration_ms

#: With a bar to move, ask more often.
BAR_STEP_MS = 500
TIMED_OUT = 124


@verb("wait", short_help="Until jobs have ended.")
@selection_options
@click.option(
    "--timeout",
    metavar="TIME",
    type=Parsed("duration", parse_duration_ms),
    help="Wait no longer: 30 (minutes), 45s, 2h.",
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing; the exit code tells.")
def command(
    app: App,
    ids: Any,
    name: str | None,
    states: Any,
    all_: bool,
    uid: int | None,
    everybody: bool,
    timeout: int | None,
    quiet: bool,
) -> None:
    """Wait until jobs have ended; Ctrl-C ends the waiting, not the jobs.

    --name, --state and --all mean your jobs as they are now; with --all, those still alive.

    Exit codes: 0 all COMPLETED; 1 some did not; 124 timed out.
    """
    whose: Any = {"uid": uid, "everybody": everybody}
    selection = make_selection(ids, name, states, all_, **whose)
    all_ = selection.all
    with app.client() as client:
        if all_ and not states:
            selection = make_selection(ids, name, (LIVE,), all_, **whose)
        try:
            jobs = resolve(client, selection)
        except NotFoundError:
            if not all_:
                raise
            if app.json:
                print_json({"done": True, "jobs": [], "missing": []})
            elif not quiet:
                note("nothing to wait for")
            return
        wait_for(
            app,
            client,
            jobs,
            timeout_s=None if timeout is None else timeout / 1000,
            quiet=quiet,
        )


LIVE = tuple(state for state in JobState if not state.is_final)


def wait_for(
    app: App, client: Client, ids: list[int], *, timeout_s: float | None, quiet: bool
) -> None:
    """Wait for `ids`, tell how they ended, and raise Exit unless all COMPLETED."""
    try:
        if not app.json and not quiet and shows_escapes(sys.stderr):
            from rlq.cli.live import Bars

            with Bars(total=len(ids)) as bars:
                jobs = client.wait(ids, timeout_s, on_update=bars.follow, step_ms=BAR_STEP_MS)
        else:
            jobs = client.wait(ids, timeout_s, step_ms=WAIT_STEP_MS)
    except KeyboardInterrupt:
        if is_terminal(sys.stderr):
            note("")  # after the ^C
        named = f"job {ids[0]} runs on" if len(ids) == 1 else f"jobs {compress(ids)} run on"
        note(f"{named}; `rlq cancel` would stop {'it' if len(ids) == 1 else 'them'}")
        raise click.exceptions.Exit(130) from None
    done = all(job.state.is_final for job in jobs)
    good = all(job.state is JobState.COMPLETED for job in jobs)
    if app.json:
        print_json({"done": done, "jobs": plain(jobs), "missing": []})
    elif not quiet:
        for job in jobs:
            note(f"job {job.id} ({clean(job.name)}): {ending(job)}")
    if not done:
        left = sum(not job.state.is_final for job in jobs)
        raise click.exceptions.Exit(
            fail(
                f"{left} of {len(jobs)} jobs had not ended in time"
                if len(jobs) > 1
                else f"job {jobs[0].id} had not ended in time",
                "they run on; `rlq wait` again, or `rlq why ID` for those that wait"
                if len(jobs) > 1
                else f"it runs on; `rlq wait {jobs[0].id}` again",
                TIMED_OUT,
            )
        )
    if not good:
        raise click.exceptions.Exit(1)


def ending(job: Job) -> str:
    word = job.state.value
    if job.state.is_final and job.state is not JobState.COMPLETED and exit_word(job) != "-":
        word += f", exit code {job.exit_code}" if job.exit_code is not None else ""
        word += f", signal {job.signal}" if job.exit_code is None else ""
    reason = ended_reason(job) if job.state.is_final else job.reason
    return f"{word}: {clean(reason)}" if reason else word
