"""Everything about one job."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rlq.cli.app import App, verb
from rlq.cli.masking import mask_argv, mask_env
from rlq.cli.output import clean, plain, print_fields, print_json
from rlq.cli.selections import id_argument
from rlq.cli.tables import (
    WARMING_UP,
    act_in_words,
    compress,
    cores_words,
    device,
    done_pct,
    ended_reason,
    exit_word,
    is_warming_up,
    pending_reason,
    rate,
    spent,
)
from rlq.errors import ProtocolError, UsageError
from rlq.protocol.messages import Act, Attempt, Job
from rlq.protocol.states import JobState
from rlq.protocol.units import format_duration, format_mib

if TYPE_CHECKING:
    from rlq.client import Client


@verb("show", short_help="Everything about one job.")
@id_argument
@click.option("--env", "with_env", is_flag=True, help="Its variables, secrets masked (your own).")
@click.option("--reveal", is_flag=True, help="Do not mask what looks like a secret.")
def command(app: App, job: int, with_env: bool, reveal: bool) -> None:
    """Everything about one job.

    Values that look like secrets (tokens, passwords, keys) are masked, in the command too.
    """

    with app.client() as client:
        found = client.get(job)
        if reveal and found.uid != os.getuid():
            raise UsageError(f"job {job} is {found.user}'s", hint="--reveal is for your own jobs")
        env = client.environment(job) if with_env else None
        acts = acts_on(job, client)
        attempts = client.attempts(job) if found.attempt > 0 and not is_first(found) else ()
    if env is not None and not reveal:
        env = mask_env(env)
    if app.json:
        document = plain(found, reveal=reveal)
        document["acts"] = plain(acts)
        document["attempts"] = [plain(one) for one in attempts]
        if env is not None:
            document["env"] = env
        print_json(document)
        return
    print_job(found, time.time(), reveal=reveal, acts=acts, attempts=attempts)
    if env is not None:
        click.echo()
        for name in sorted(env):
            click.echo(f"{clean(name)}={clean(env[name])}")


def acts_on(job: int, client: Client) -> tuple[Act, ...]:
    try:
        return client.audit(job).acts
    except ProtocolError:
        return ()  # a daemon that was not restarted since the upgrade keeps no such record


def is_first(job: Job) -> bool:
    """It has had no attempt before the one that is shown."""
    return job.attempt == (0 if job.state is JobState.PENDING else 1)


def print_job(
    job: Job,
    now: float,
    *,
    reveal: bool,
    acts: Sequence[Act] = (),
    attempts: Sequence[Attempt] = (),
) -> None:
    argv = job.argv if reveal else mask_argv(job.argv)
    # The daemon's word for what it does not tell is no program's name.
    command = "<hidden>" if job.argv == ("<hidden>",) else shlex.join(argv)
    state = job.state.value + (" (held)" if job.held and not job.state.is_final else "")
    ended = exit_word(job)
    if job.state.is_final and ended != "-":
        state += f", exit code {ended}" if job.exit_code is not None else f", signal {job.signal}"
    print_fields(
        [
            ("job", f"{job.id}  {clean(job.name)}"),
            ("state", state),
            ("reason", clean((ended_reason if job.state.is_final else pending_reason)(job))),
            # The oldest first: what happened to it, in that order.
            ("by others", "\n".join(clean(act_in_words(act)) for act in reversed(acts))),
            ("user", clean(job.user)),
            ("command", clean(command)),
            ("folder", clean(job.cwd)),
            ("log", clean(job.log_path)),
            ("submitted", moment(job.submitted_at or None, now)),
            ("started", moment(job.started_at, now)),
            ("ended", moment(job.ended_at, now)),
            ("time", spent(job, now) if job.started_at is not None else ""),
            ("attempt", str(job.attempt) if job.attempt > 1 else ""),
            ("preempted", f"by job {job.preempted_by}" if job.preempted_by is not None else ""),
            ("earlier", "\n".join(attempt_line(one, now) for one in attempts)),
            ("priority", str(job.priority) if job.priority else ""),
            ("asked for", asked_for(job)),
            ("waits for", compress(job.after)),
            ("device", device(job.placement) if job.placement else ""),
            ("cores", cores_words(job.placement) if job.placement else ""),
            ("signature", clean(job.signature)),
            ("uses", uses(job)),
            ("pid", str(job.pid) if job.pid is not None else ""),
            ("progress", progress_line(job)),
            (
                "metrics",
                "\n".join(f"{clean(k)} = {v:g}" for k, v in job.progress.metrics.items())
                if job.progress
                else "",
            ),
            (
                "reported",
                f"{format_duration(now - job.progress.reported_at)} ago"
                if job.progress and job.progress.reported_at and not job.state.is_final
                else "",
            ),
        ]
    )


def attempt_line(one: Attempt, now: float) -> str:
    """ "1  PREEMPTED after 2h05m, 3h10m ago"."""
    ran = (
        ""
        if one.started_at is None
        else f" after {format_duration(one.ended_at - one.started_at)}"
    )
    line = f"{one.number}  {one.state}{ran}, {format_duration(now - one.ended_at)} ago"
    return f"{line}: {clean(one.reason)}" if one.reason else line


def moment(at: float | None, now: float) -> str:

    if at is None:
        return ""
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"{shown} ({format_duration(now - at)} ago)"


def asked_for(job: Job) -> str:

    wants = job.resources
    parts = ["a GPU if there is any" if wants.gpus is None else plural(wants.gpus, "GPU")]
    if wants.gpu_mem_mib is not None:
        parts.append(f"{format_mib(wants.gpu_mem_mib)} GPU memory")
    if wants.sm_pct is not None:
        parts.append(f"{wants.sm_pct}% SM")
    if wants.cores is not None:
        parts.append(plural(wants.cores, "core"))
    if wants.mem_mib is not None:
        parts.append(f"{format_mib(wants.mem_mib)} memory")
    if wants.exclusive:
        parts.append("exclusive")
    if wants.time_limit_ms is not None:
        parts.append(f"at most {format_duration(wants.time_limit_ms / 1000)}")
    return ", ".join(parts)


def uses(job: Job) -> str:

    if job.usage is None or job.state.is_final:
        return ""
    usage = job.usage
    parts = []
    if usage.cpu_cores is not None:
        parts.append(f"{usage.cpu_cores:.1f} cores")
    if usage.mem_mib is not None:
        parts.append(f"{format_mib(usage.mem_mib)} memory")
    if usage.gpu_mem_mib is not None:
        parts.append(f"{format_mib(usage.gpu_mem_mib)} GPU memory")
    if usage.sm_pct is not None:
        parts.append(f"{usage.sm_pct}% SM")
    if parts and not usage.settled:
        parts.append("not settled yet")
    return ", ".join(parts)


def progress_line(job: Job) -> str:

    progress = job.progress
    if progress is None:
        return ""
    parts = [f"{progress.step:,}" + (f" of {progress.total:,} steps" if progress.total else "")]
    if (pct := done_pct(progress)) is not None:
        parts.append(f"{pct}%")
    if is_warming_up(progress) and not job.state.is_final:
        return ", ".join([*parts, WARMING_UP])
    if progress.steps_per_s is not None:
        parts.append(f"{rate(progress.steps_per_s)} steps/s")
    if progress.eta_s is not None and not job.state.is_final:
        parts.append(f"{format_duration(progress.eta_s)} left")
    return ", ".join(parts)


def plural(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
