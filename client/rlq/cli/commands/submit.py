"""Queue a command.  `submit sac …` is in submit_sac.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rlq import specs
from rlq.cli.app import App, Parsed, note, verb, warn, whole
from rlq.cli.complete import complete_files, complete_folders
from rlq.cli.output import clean, print_json, stdout_is_terminal
from rlq.errors import UsageError
from rlq.protocol import codec, units
from rlq.protocol.messages import Submit, Submitted
from rlq.specs import CORES_MAX, GPUS_MAX, PRIORITY_MAX, check_variable

if TYPE_CHECKING:
    from rlq.client import Client

ARRAY_TASKS_MAX = 100_000
AFTER_MAX = 10_000


class SubmitCommand(click.Command):
    """`rlq submit sac …` is another command, unless `--` says that `sac` is a program."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args[:1] == ["sac"]:
            from rlq.cli.commands.submit_sac import command as sac

            return sac.make_context("submit sac", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        argv: tuple[str, ...] = ctx.params.get("argv", ())
        before = words[: len(words) - len(argv)]
        if argv[:1] == ("sac",) and before[-1:] != ["--"]:
            raise UsageError(
                "options of `submit sac` go after the word sac",
                hint="rlq submit sac [options]; for a program called sac: rlq submit -- sac",
            )
        return rest


def parse_gpus(text: str) -> int | None:
    """`auto` is None: the same as not given."""
    if text.strip().lower() == "auto":
        return None
    return whole("a number of GPUs", 0, GPUS_MAX, hint="0, 1, 2, … or auto")(text)


def parse_variable(text: str) -> tuple[str, str]:
    """`NAME=VALUE`, or `NAME` with the value it has here."""
    name, equals, value = text.partition("=")
    if not equals:
        if name not in os.environ:
            raise UsageError(f"the variable {name} is not set here", hint=f"--env {name}=VALUE")
        value = os.environ[name]
    check_variable(name, value)
    return name, value


def parse_array(text: str) -> tuple[int, ...]:
    ranges = units.parse_ranges(text)
    tasks = sum(high - low + 1 for low, high in ranges)
    if tasks > ARRAY_TASKS_MAX:
        raise UsageError(
            f"an array has at most {ARRAY_TASKS_MAX} tasks, this one {tasks}",
            hint="submit it in parts",
        )
    return tuple(dict.fromkeys(i for low, high in ranges for i in range(low, high + 1)))


def parse_followed(text: str) -> tuple[int, ...]:
    ranges = units.parse_ranges(text)
    if any(low == 0 for low, _ in ranges):
        raise UsageError("there is no job 0", hint="ids start at 1")
    if sum(high - low + 1 for low, high in ranges) > AFTER_MAX:
        raise UsageError(f"a job follows at most {AFTER_MAX} jobs", hint="--after 12,15-17")
    return tuple(dict.fromkeys(i for low, high in ranges for i in range(low, high + 1)))


SIZE = Parsed("size", units.parse_mib)
DURATION = Parsed("duration", units.parse_duration_ms)

#: Options that `submit` and `submit sac` share, in the order of --help.
QUEUE_OPTIONS = (
    click.option("--gpu-mem", metavar="SIZE", type=SIZE, help="Memory on each GPU: 2G."),
    click.option(
        "--sm",
        metavar="SHARE",
        type=Parsed("share", units.parse_pct),
        help="Share of each GPU's multiprocessors: 30%.",
    ),
    click.option(
        "--cores",
        metavar="K",
        type=Parsed("cores", whole("a number of cores", 1, CORES_MAX)),
        help="CPU cores of its own.",
    ),
    click.option("--mem", metavar="SIZE", type=SIZE, help="Host memory: 8G."),
    click.option(
        "--exclusive", is_flag=True, help="No other job beside it on its GPU (or machine)."
    ),
    click.option(
        "--time-limit", metavar="TIME", type=DURATION, help="30 (minutes), 2h30m, 1-12:00:00."
    ),
    click.option(
        "--priority",
        metavar="N",
        type=Parsed("priority", whole("a priority", -PRIORITY_MAX, PRIORITY_MAX)),
        default="0",
        help="Higher goes first; -1000 to 1000, above 0 for administrators.",
    ),
    click.option("--name", metavar="NAME", default="", help="What `rlq list` calls it."),
    click.option(
        "--like", metavar="NAME", help="Charge and pack it like other jobs given this name."
    ),
    click.option(
        "--cwd",
        metavar="DIR",
        shell_complete=complete_folders,
        help="Where it runs; default: here.",
    ),
    click.option(
        "--log",
        metavar="PATH",
        shell_complete=complete_files,
        help="Its output; %j is the job's id, %x its name.",
    ),
    click.option("--log-max", metavar="SIZE", type=SIZE, help="Rotate its log at this size."),
    click.option(
        "--grace", metavar="TIME", type=DURATION, help="From SIGTERM to SIGKILL; default 30s."
    ),
    click.option("--requeue", is_flag=True, help="Queue it again if the machine reboots."),
    click.option(
        "--preemptible",
        is_flag=True,
        help="It resumes: may be stopped, and queued again, for a higher priority.",
    ),
    click.option("--hold", is_flag=True, help="Do not start it before `rlq release`."),
    click.option(
        "--after",
        metavar="IDS",
        type=Parsed("ids", parse_followed),
        help="Start it once these jobs have completed: 12, 3-9.",
    ),
    click.option(
        "--after-any",
        metavar="IDS",
        type=Parsed("ids", parse_followed),
        help="Start it once these jobs have ended, however they end.",
    ),
    click.option("--wait", is_flag=True, help="Wait for it; exit as `rlq wait` does."),
    click.option("-q", "--quiet", is_flag=True, help="Print the id and nothing else."),
)


def queue_options(env_option: str, *, leave_out: Collection[str] = ()) -> Callable[[Any], Any]:
    """`env_option`: what names a variable of the job; `submit sac` has another --env."""
    variables = click.option(
        env_option,
        "variables",
        metavar="NAME[=VALUE]",
        multiple=True,
        type=Parsed("variable", parse_variable),
        help="A variable that rlqd leaves as it is (OMP_NUM_THREADS=4); repeatable.",
    )

    def decorate(function: Any) -> Any:
        #: A verb may have an option of its own by the name of one that is left out.
        its_own = list(getattr(function, "__click_params__", ()))
        for option in reversed((*QUEUE_OPTIONS, variables)):
            function = option(function)
        function.__click_params__ = [
            option
            for option in function.__click_params__
            if option in its_own or option.name not in leave_out
        ]
        return function

    return decorate


gpus_option = click.option(
    "--gpus",
    metavar="N|auto",
    type=Parsed("gpus", parse_gpus),
    help="GPUs; 0: CPU only; auto (default): one if there is any.",
)
argv_argument = click.argument(
    "argv",
    metavar="[--] CMD [ARG]...",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=complete_files,
)


@verb(
    "submit",
    cls=SubmitCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Queue a command.",
    options_metavar="[OPTIONS]",
)
@gpus_option
@queue_options("--env")
@click.option(
    "--array",
    metavar="FROM-TO",
    type=Parsed("array", parse_array),
    help="One job for each number, which it finds in RLQ_ARRAY_TASK_ID.",
)
@click.option(
    "--progress-from",
    metavar="PATH",
    shell_complete=complete_files,
    help="A progress.csv or TensorBoard file it writes, or their folder.",
)
@click.option(
    "--progress-total",
    metavar="N",
    type=Parsed("total", whole("a number of steps", 1, 2**53)),
    help="The steps of the whole run, which such a file does not tell.",
)
@click.option("--no-hooks", is_flag=True, help="Add nothing to its Python: it reports no steps.")
@argv_argument
def command(
    app: App,
    argv: tuple[str, ...],
    array: tuple[int, ...] | None,
    gpus: int | None,
    variables: tuple[tuple[str, str], ...],
    progress_from: str | None,
    progress_total: int | None,
    **options: Any,
) -> None:
    """Queue CMD with its arguments, this environment, this folder and this umask.

    Your own command's options go after it; `--` before it is never wrong.

    \b
    rlq submit -- python train.py --lr 3e-4
    rlq submit --gpus 1 --gpu-mem 4G --name ppo -- python train.py
    rlq submit --array 0-9 -- sh -c 'python train.py --seed $RLQ_ARRAY_TASK_ID'
    rlq submit sac --env Humanoid-v5 --steps 700000 --seeds 0-9   (see its --help)
    """

    variables += progress_variables(progress_from, progress_total, options["no_hooks"])
    remote = app.remote_host is not None
    spec = make_spec(argv, gpus, variables, options, remote=remote)
    if not remote:
        specs.check_program(spec.argv, spec.cwd, spec.env.get("PATH"))
    if array is None:
        jobs = [spec]
    else:
        jobs = [
            msgspec.structs.replace(
                spec,
                name=specs.check_name(f"{spec.name}-{task}"),
                env={**spec.env, "RLQ_ARRAY_TASK_ID": str(task)},
            )
            for task in array
        ]
    send(app, jobs, quiet=options["quiet"], wait=options["wait"])


def make_spec(
    argv: tuple[str, ...],
    gpus: int | None,
    variables: tuple[tuple[str, str], ...],
    options: dict[str, Any],
    *,
    remote: bool = False,
) -> Any:
    from datetime import timedelta

    def span(ms: int | None) -> timedelta | None:
        return None if ms is None else timedelta(milliseconds=ms)

    return specs.make_spec(
        argv,
        resources=specs.make_resources(
            gpus=gpus,
            gpu_mem=options["gpu_mem"],
            sm=options["sm"],
            cores=options["cores"],
            mem=options["mem"],
            exclusive=options["exclusive"],
            time_limit=span(options["time_limit"]),
        ),
        name=options["name"],
        cwd=options["cwd"],
        set_env=dict(variables),
        priority=options["priority"],
        grace=span(options["grace"]),
        requeue=options["requeue"],
        held=options["hold"],
        after=after_of(options),
        after_any=options["after_any"] is not None,
        hooks=not options.get("no_hooks"),
        log=options["log"],
        log_max=options["log_max"],
        like=options["like"],
        preemptible=bool(options["preemptible"]),
        remote=remote,
    )


def after_of(options: dict[str, Any]) -> tuple[int, ...]:
    """Raises UsageError: both ways to follow."""
    completed, ended = options["after"], options["after_any"]
    if completed is not None and ended is not None:
        raise UsageError("--after and --after-any exclude each other", hint="give one of them")
    return completed or ended or ()


def progress_variables(
    path: str | None, total: int | None, no_hooks: bool
) -> tuple[tuple[str, str], ...]:
    """What tells the hooks to read progress from a file (docs/reporting.md).

    Raises:
        UsageError: nobody would read it.
    """
    if path is None:
        if total is not None:
            raise UsageError(
                "--progress-total says nothing without --progress-from",
                hint="--progress-from runs/ --progress-total 700000",
            )
        return ()
    if no_hooks:
        raise UsageError(
            "--progress-from is done by the hooks that --no-hooks leaves out", hint="give one"
        )
    if not path:
        raise UsageError("--progress-from is empty", hint="--progress-from runs/")
    chosen = [("RLQ_PROGRESS_FROM", path)]
    if total is not None:
        chosen.append(("RLQ_PROGRESS_TOTAL", str(total)))
    return tuple(chosen)


def send(app: App, jobs: list[Any], *, quiet: bool, wait: bool) -> None:
    """Submit `jobs` in one request, tell their ids, and wait for them if asked to."""

    env = captured_env({} if app.remote_host is not None else None)
    with app.client() as client:
        done = queued(client, Submit(jobs=tuple(jobs), env=env))
        if app.json and not wait:
            print_json(done)
        elif not app.json:
            tell(app, done, jobs, quiet=quiet or not stdout_is_terminal())
        if wait:
            from rlq.cli.commands.wait import wait_for

            wait_for(app, client, list(done.ids), timeout_s=None, quiet=quiet)


def captured_env(given: dict[str, str] | None = None) -> dict[str, str]:
    """The environment that the jobs get; None: this process's."""
    env, left_out = specs.capture_env(given)
    for name in left_out:
        warn(f"the variable {name} is not valid UTF-8 and is left out")
    return env


def queued(client: Client, request: Submit) -> Submitted:
    """Send it, and pass on what the daemon warns of."""
    check_size(request)
    done = client.request(request)
    assert isinstance(done, Submitted)
    for warning in done.warnings:
        warn(warning)
    return done


def check_size(request: Any) -> None:

    if sum(map(len, codec.encode(b"x", request))) > codec.BODY_BYTES_MAX:
        raise UsageError(
            f"the submission is larger than {codec.BODY_BYTES_MAX // 2**20} MiB",
            hint="submit fewer jobs at a time, or shorter commands",
        )


def tell(app: App, done: Any, jobs: list[Any], *, quiet: bool) -> None:
    if quiet:
        click.echo("\n".join(str(job) for job in done.ids))
        return
    if len(done.ids) == 1:
        click.echo(f"job {done.ids[0]} ({clean(jobs[0].name)}) is queued")
        there = ""
        if (host := app.remote_host) is not None:
            from rlq.remote import parse_host

            there = f"ssh {parse_host(host)[0]} "
        note(f"{there}rlq logs -f {done.ids[0]}   shows what it prints")
        return
    first, last = min(done.ids), max(done.ids)
    span = f"{first}-{last}" if last - first + 1 == len(done.ids) else f"{first} to {last}"
    click.echo(f"jobs {span} ({len(done.ids)}) are queued")
    note(f"rlq wait {span}   waits for them")
