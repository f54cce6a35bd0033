"""A shell or a command in the caller's terminal, with an allocation (Slurm's `srun --pty`)."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from rlq import specs
from rlq.cli.app import App, is_terminal, note, shows_escapes, verb
from rlq.cli.commands.submit import (
    argv_argument,
    captured_env,
    gpus_option,
    make_spec,
    queue_options,
    queued,
)
from rlq.cli.output import clean, folded
from rlq.cli.tables import cores_words, device, ended_reason, pending_reason
from rlq.errors import RlqError, UsageError
from rlq.protocol.messages import Job, Submit
from rlq.protocol.states import JobState
from rlq.protocol.units import format_duration

if TYPE_CHECKING:
    from rlq.client import Client

#: How often a job that waits is asked about.
ASK_S = 1.0
#: For the daemon to learn of an end that the caller saw first.
END_S = 10.0
#: Options of `submit` that say nothing here: its output goes to the caller, who waits for it.
LEFT_OUT = frozenset({"preemptible", "log", "log_max", "requeue", "hold", "wait", "quiet"})
DID_NOT_RUN = 1


@verb(
    "run",
    json=False,
    context_settings={"allow_interspersed_args": False},
    short_help="A shell or a command in this terminal, with an allocation.",
    options_metavar="[OPTIONS]",
)
@click.option("-t", "--tty", is_flag=True, help="With a terminal: for shells, debuggers, top.")
@click.option(
    "-i", "--interactive", is_flag=True, help="With this stdin, which it has anyway: for -it."
)
@gpus_option
@queue_options("--env", leave_out=LEFT_OUT)
@click.option("-q", "--quiet", is_flag=True, help="Nothing but what the command says.")
@argv_argument
def command(
    app: App,
    argv: tuple[str, ...],
    tty: bool,
    interactive: bool,
    gpus: int | None,
    variables: tuple[tuple[str, str], ...],
    quiet: bool,
    **options: Any,
) -> None:
    """Run CMD here, as a job: it waits for its turn, has cores and a GPU of its own, and is
    listed, charged and stopped like all jobs.

    \b
    rlq run -it --gpus 1 -- bash                  a shell with a GPU
    rlq run --cores 4 -- make -j4 < in > out      pipes are passed through
    rlq run -it --time-limit 2h -- python -i model.py

    Ctrl-C while it waits takes it out of the queue; afterwards it is the command's.  When this
    terminal is closed, the job is hung up.

    Exit code: the command's; 128 and the signal that ended it; 1: it did not run.
    """
    why = "`rlq run` joins a job to a terminal of its own machine,"
    app.require_here(why, "rlq run -it …", flags="-t ")
    if tty and not is_terminal(sys.stdin):
        raise UsageError("-t needs a terminal, and stdin is none", hint="leave out -t")
    if not argv:
        raise UsageError("there is no command to run", hint="rlq run -it -- bash")
    from msgspec.structs import replace

    from rlq import relay
    from rlq.terminal import CallerEndedError, Door, Line, ending_by_signal

    spec = make_spec(argv, gpus, variables, dict.fromkeys(LEFT_OUT) | options)
    specs.check_program(spec.argv, spec.cwd, spec.env.get("PATH"), verb="run")
    env = captured_env()
    talk = Talk(quiet=quiet)
    # One of its own for a question while the terminal waits: a daemon that restarts is not it.
    asking = app.client(autostart=False, timeout_s=2)
    with app.client() as client, asking, Door() as door:
        mode = "tty" if tty else "pipes"
        via = (sys.executable, "-I", "-S", relay.__file__, os.fspath(door.path), mode)
        request = Submit(jobs=(replace(spec, via=via, requeue=False, held=False),), env=env)
        (id_,) = queued(client, request).ids
        try:
            with ending_by_signal():
                while (connection := door.wait(ASK_S)) is None:
                    job = client.get(id_)
                    if job.state.is_final and (connection := door.accept()) is None:
                        talk.clear()
                        note(f"job {id_} did not run: {ending_of(job)}")
                        raise click.exceptions.Exit(DID_NOT_RUN)
                    if connection is not None:
                        break
                    talk.waits(job)
        except (KeyboardInterrupt, CallerEndedError) as stopped:
            number = stopped.number if isinstance(stopped, CallerEndedError) else signal.SIGINT
            talk.clear()
            client.cancel(id_)
            note(f"job {id_} is cancelled")
            raise click.exceptions.Exit(128 + number) from None
        talk.starts(job_now(asking, id_) if talk.is_heard else None)

        class Told(Line):
            def told_to_stop(self) -> None:
                talk.is_stopped(id_, job_now(asking, id_))

        try:
            ended = Told(connection, is_terminal=tty).run()
        except CallerEndedError as stopped:
            raise click.exceptions.Exit(128 + stopped.number) from None
        code = ended.code
        if code is None:
            code = how_it_ended(client.wait(id_, END_S)[0], talk)
        raise click.exceptions.Exit(code if code >= 0 else 128 - code)


def job_now(client: Client, id_: int) -> Job | None:
    """None: the daemon does not say."""
    try:
        return client.get(id_)
    except RlqError:
        return None


def how_it_ended(job: Job, talk: Talk) -> int:
    """Of a job that was killed together with what relays it."""
    talk.say(f"job {job.id} has ended: {ending_of(job)}")
    if job.exit_code is not None:
        return job.exit_code
    return -job.signal if job.signal is not None else DID_NOT_RUN


def ending_of(job: Job) -> str:
    reason = ended_reason(job) if job.state.is_final else job.reason
    return f"{job.state.value}: {clean(reason)}" if reason else job.state.value


class Talk:
    """What is said beside the command: to people, on a terminal, unless --quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self.is_heard = is_terminal(sys.stderr) and not quiet
        self._is_quiet = quiet
        self._rewrites = self.is_heard and shows_escapes(sys.stderr)
        self._shown = ""

    def say(self, text: str) -> None:
        if self.is_heard:
            # A terminal in raw mode does not go back to its left edge by itself.
            click.echo(f"\r{text}\r", err=True)
        elif not self._is_quiet:
            note(text)

    def waits(self, job: Job) -> None:
        if self._is_quiet or job.state is not JobState.PENDING:
            return
        text = f"job {job.id} waits: {clean(pending_reason(job)) or 'its turn has not come'}"
        if self._rewrites:
            line = folded(text, 1)[0]
            if line != self._shown:
                click.echo(f"\r\x1b[K{line}", err=True, nl=False)
                self._shown = line
        elif not self._shown:
            note(text)
            self._shown = text

    def clear(self) -> None:
        if self._rewrites and self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)
        self._shown = ""

    def starts(self, job: Job | None) -> None:
        self.clear()
        if job is None:
            return
        parts = [f"job {job.id} runs"]
        if job.placement is not None:
            on = [device(job.placement)] if job.placement.gpus else []
            parts.append(f"on {', '.join([*on, cores_words(job.placement)])}")
        if job.resources.time_limit_ms is not None:
            parts.append(f"for at most {format_duration(job.resources.time_limit_ms / 1000)}")
        note(" ".join(parts))

    def is_stopped(self, id_: int, job: Job | None) -> None:
        self.say(f"job {id_}: {clean(job.reason) if job else 'it is being stopped'}")
