"""The command.  `main()` is what `rlq` runs; `rlq` (the group) is what tests invoke.

Rule 1: importing this loads click and no more; each verb loads what it needs when it is called.
Rule 2: one verb, one file (commands/).
Rule 3: data on stdout, talk on stderr; `error:` then `hint:`; never a traceback (RLQ_DEBUG=1
        shows it).
Rule 4: exit codes are rlq.errors', and: 1 some of it failed, 124 timed out, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from rlq import __version__
from rlq.cli.app import App, fail, fail_json, hint_for, lazy_complete_files, message_of, quiet_exit
from rlq.errors import RlqError, UsageError

#: Verb -> what `rlq --help` says of it: showing that must not import every verb.
VERBS: dict[str, str] = {
    "submit": "Queue a command, or a sweep of SAC trainings (submit sac).",
    "run": "A shell or a command in this terminal, with an allocation.",
    "list": "The jobs: waiting, running, just ended.",
    "show": "Everything about one job.",
    "logs": "What a job printed; -f follows it.",
    "wait": "Until jobs have ended.",
    "why": "Why a job waits: what is short, who holds it.",
    "cancel": "Stop jobs, or take them out of the queue.",
    "hold": "Keep waiting jobs from starting.",
    "release": "Let held jobs start again.",
    "update": "Change the priority of jobs.",
    "pause": "Freeze running jobs where they are.",
    "resume": "Let paused jobs go on.",
    "requeue": "Queue jobs again.",
    "gpus": "The GPUs: who uses what, in the queue and outside it.",
    "claim": "Keep a GPU for your own work outside the queue.",
    "reserve": "Book capacity for some users' jobs (administrators).",
    "share": "Fair share: who has had how much, who is next.",
    "profile": "What was learned of programs: memory, speed, how they share.",
    "calibrate": "Measure how many SAC jobs this machine runs best.",
    "status": "The daemon and the machine at a glance.",
    "history": "Jobs that have ended.",
    "drain": "Start nothing more (--off: go on).",
    "audit": "What administrators did.",
    "doctor": "Look for what is wrong, and say what to do.",
    "daemon": "Start, stop or look for the daemon.",
    "key": "Keys, to use the queue from another machine.",
    "report": "In a job: tell how far it is.",
    "completion": "Completion for your shell.",
}
ALIASES = {"ls": "list", "log": "logs", "stop": "cancel", "kill": "cancel", "ps": "list"}


#: Objects made between two looks for garbage; Python's own is 700.
GC_THRESHOLD = 50_000


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = ALIASES.get(cmd_name, cmd_name)
        if verb not in VERBS:
            return None
        command = import_module(f"rlq.cli.commands.{verb}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if self.get_command(ctx, word) is None:
            from difflib import get_close_matches

            harmless = [alias for alias, verb in ALIASES.items() if verb != "cancel"]
            near = get_close_matches(word, [*VERBS, *harmless], n=1)
            error = click.UsageError(f"there is no command {word!r}", ctx)
            error.hint = (  # type: ignore[attr-defined]  # read by hint_for
                f"did you mean `rlq {near[0]}`?" if near else "`rlq --help` lists the commands"
            )
            raise error
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def main(  # type: ignore[override]  # always "standalone": it never returns
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **extra: Any,
    ) -> NoReturn:
        prog_name = prog_name or "rlq"
        if "_RLQ_COMPLETE" in os.environ:
            super().main(args, prog_name, complete_var="_RLQ_COMPLETE")
        extra.pop("standalone_mode", None)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A name that the locale cannot show is shown by its code: no reason to fail.
            sys.stdout.reconfigure(errors="backslashreplace")
        words = list(sys.argv[1:] if args is None else args)
        code = 0
        ctx: click.Context | None = None
        try:
            with self.make_context(prog_name, list(words)) as ctx:
                self.invoke(ctx)
            sys.stdout.flush()
        except click.exceptions.Exit as exit_:
            code = exit_.exit_code
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            code = 2
        except click.ClickException as error:
            if "--json" in words[: words.index("--") if "--" in words else None]:
                fail_json(UsageError.kind, message_of(error), hint_for(error))
            code = fail(message_of(error), hint_for(error), 2)
        except RlqError as error:
            if ctx is not None and isinstance(ctx.obj, App) and ctx.obj.json:
                fail_json(error.kind, error.message, error.hint)
            code = fail(error.message, error.hint, error.exit_code)
        except (KeyboardInterrupt, click.Abort, EOFError):
            click.echo(err=True)
            code = 130
        except BrokenPipeError:
            code = quiet_exit()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                sys.exit(fail(f"cannot write: {error.strerror}", "make room, then try again", 1))
            if os.environ.get("RLQ_DEBUG"):
                raise
            code = fail(
                f"{type(error).__name__}: {error}",
                "this is a bug in rlq: please report it with what RLQ_DEBUG=1 shows",
                70,
            )
        sys.exit(code)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 some of it failed; 2 usage; 3 refused: this machine can never"
    " do it; 4 no such job; 5 not yours; 6 no daemon; 7 not now; 8 versions differ; 70 a bug;"
    " 124 timed out; 130 Ctrl-C.",
)
@click.version_option(__version__, prog_name="rlq", message="%(prog)s %(version)s")
@click.option(
    "--socket",
    metavar="PATH",
    shell_complete=lazy_complete_files,
    help="The daemon's socket (RLQ_SOCKET).",
)
@click.option("--host", metavar="HOST", help="Another machine's daemon (RLQ_HOST).")
@click.option("--no-autostart", is_flag=True, help="Do not start a daemon (RLQ_NO_AUTOSTART=1).")
@click.pass_context
def rlq(ctx: click.Context, socket: str | None, host: str | None, no_autostart: bool) -> None:
    """The job queue that makes a shared lab workstation train faster.

    \b
    rlq submit -- python train.py       queue a command
    rlq submit sac --env Humanoid-v5    queue a sweep of SAC trainings
    rlq list                            what waits and runs
    rlq logs -f 1                       what job 1 prints
    rlq why 2                           why job 2 waits
    """
    if socket == "":
        raise UsageError("--socket is empty", hint="--socket /path/of/rlqd.sock")
    ctx.obj = App(socket=socket, host=host, autostart=not no_autostart)


def main() -> NoReturn:
    # Of a command's 110 ms of CPU time, 20 went into taking the interpreter apart and 10 into
    # looking for garbage among modules that were just loaded.
    gc.set_threshold(GC_THRESHOLD)
    try:
        rlq.main()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
