"""What the shell offers after TAB.  Never starts a daemon, never waits long, never complains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from rlq.errors import RlqError
from rlq.protocol.states import JobState

if TYPE_CHECKING:
    from rlq.protocol.messages import Job

TIMEOUT_S = 0.5
JOBS_MAX = 200


def complete_ids(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [
        CompletionItem(str(job.id), help=f"{job.name} ({job.state})")
        for job in _jobs(ctx)
        if str(job.id).startswith(incomplete)
    ]


def complete_states(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    words = [*JobState, "HELD", "STARTING", "STOPPING", "live", "ended"]
    return [CompletionItem(w) for w in words if w.lower().startswith(incomplete.lower())]


def complete_files(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def complete_folders(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def complete_users(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    users = {"me", *(job.user for job in _jobs(ctx))}
    return [CompletionItem(user) for user in sorted(users) if user.startswith(incomplete)]


def _jobs(ctx: click.Context) -> list[Job]:
    from rlq.client import Client

    # The callbacks of --socket and --host do not run while completing: read what was typed so far.
    socket = next((c.params["socket"] for c in _chain(ctx) if c.params.get("socket")), None)
    host = next((c.params["host"] for c in _chain(ctx) if c.params.get("host")), None)
    try:
        with Client(socket, host=host, autostart=False, timeout_s=TIMEOUT_S) as client:
            return client.list(limit=JOBS_MAX)
    except RlqError:
        return []


def _chain(ctx: click.Context) -> list[click.Context]:
    chain = [ctx]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    return chain
