"""How many SAC jobs this machine runs best: measured in minutes, drawn, and remembered."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import msgspec

from rlq import specs
from rlq.cli import calibration
from rlq.cli.app import App, Parsed, note, verb, warn, whole
from rlq.cli.calibration import Calibration, Curve
from rlq.cli.commands.submit_sac import (
    N_ENVS_MAX,
    algo_option,
    ask_plan,
    choice,
    parse_set,
    setting_words,
    workload_argv,
)
from rlq.cli.output import clean, print_json
from rlq.client import Client
from rlq.errors import RlqError, UnavailableError, UsageError
from rlq.protocol.messages import JobSpec, Machine
from rlq.protocol.states import LIVE_STATES

JOBS_MAX = 1024
#: No run gets as far: it is stopped when it has been measured.
STEPS = 10_000_000
#: As many steps as one may get through: what its replay buffer will hold, for the host memory
#: it declares.
STEPS_LIKELY = 100_000
FIRST_UPDATE = 100
#: Work outside the queue from which on rlqd takes the CPU for a shared one (core/crowd.py).
BUSY_CORES = 1.0
#: Nothing of ours outlives a client that was killed by much longer than this for each job.
LIMIT_PER_JOB_S = 120.0


@verb("calibrate", short_help="Measure how many SAC jobs this machine runs best.")
@algo_option
@click.option(
    "--env",
    "env_id",
    metavar="ID",
    default="Humanoid-v5",
    show_default=True,
    help="The gymnasium environment.",
)
@click.option(
    "--device",
    metavar="cpu|cuda|both",
    type=Parsed("device", choice("auto", "cpu", "cuda", "both")),
    default="auto",
    help="Default: a GPU if there is any, else the CPU.",
)
@click.option(
    "--jobs-max",
    metavar="N",
    default="32",
    show_default=True,
    type=Parsed("jobs", whole("a number of jobs", 1, JOBS_MAX)),
    help="No more than this at a time.",
)
@click.option(
    "--seconds",
    metavar="S",
    default="30",
    show_default=True,
    type=Parsed("seconds", whole("a number of seconds", 1, 3600)),
    help="How long each number of jobs is measured.",
)
@click.option(
    "--n-envs",
    metavar="N",
    type=Parsed("n-envs", whole("a number of environments", 1, N_ENVS_MAX)),
    help="As of `submit sac`.",
)
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    type=Parsed("setting", parse_set),
    help="A hyperparameter of SAC, as of `submit sac`; repeatable.",
)
@click.option(
    "--out",
    metavar="DIR",
    default="calibration",
    show_default=True,
    help="Where the drawing and the figures go.",
)
@click.option("--force", is_flag=True, help="Although other jobs run or wait.")
def command(
    app: App,
    algo: str,
    env_id: str,
    device: str,
    jobs_max: int,
    seconds: int,
    n_envs: int | None,
    settings: tuple[str, ...],
    out: str,
    force: bool,
) -> None:
    """Run 1, 2, 3, … SAC trainings at a time and measure what they achieve together, until one
    more adds nothing (twice) or cores or memory run out. On an idle machine, in minutes.

    The queue remembers what is measured, and packs later `rlq submit sac` jobs of the same
    algorithm, environment and settings by it (`rlq profile`, docs/throughput.md).
    """
    app.require_here("`rlq calibrate` looks for its Python and folders on", "rlq calibrate …")
    specs.text("--env", env_id)
    training = ["--algo", algo, "--env", env_id]
    training += setting_words(n_envs, settings)
    with app.client() as client, tempfile.TemporaryDirectory(prefix="rlq-calibrate-") as runs:
        machine = client.devices()
        devices = devices_of(device, machine)
        if not force:
            refuse_if_busy(client)
        folder = make_folder(out)
        if machine.host.cores_outside >= BUSY_CORES:
            warn(
                f"processes outside the queue keep {machine.host.cores_outside:.1f} cores busy:"
                " what is measured holds for a machine shared like that"
            )
        makers = [
            (Curve(name_of(one, machine)), spec_maker(training, algo, env_id, one, Path(runs)))
            for one in devices
        ]
        with stopping_at_sigterm():
            for (curve, make), one in zip(makers, devices, strict=True):
                job = Calibration(client, seconds, say=lambda text: note(clean(text)))
                try:
                    if one == "cuda":
                        hold_others(job, machine, make)
                    limit_s = (seconds * 4 + LIMIT_PER_JOB_S) * (jobs_max + 1)
                    job.measure(curve, limited(make, limit_s), jobs_max)
                finally:
                    stop(job)
        if strangers := busy_jobs(client):
            warn(f"other jobs came meanwhile ({strangers[0]}): the figures may be off")
    curves = [curve for curve, _ in makers]
    about = {
        "schema": 1,
        "at": round(time.time(), 3),
        "algo": algo,
        "env": env_id,
        "n_envs": n_envs or 1,
        "settings": list(settings),
        "seconds": seconds,
        "cores": machine.host.cores,
        "gpus": [gpu.name for gpu in machine.gpus],
        "curves": [calibration.document(curve) for curve in curves],
    }
    write(folder, about, curves, f"{algo} SAC on {env_id}")
    if app.json:
        print_json(about)
        return
    for curve in curves:
        if curve.points:
            click.echo(f"\n{algo} SAC on {clean(env_id)}, {clean(curve.device)}\n")
            click.echo(calibration.plot(curve))
            click.echo()
            click.echo(calibration.table(curve))
            click.echo()
        click.echo(clean(calibration.verdict(curve)))
        if unsteady := [str(p.jobs) for p in curve.points if not p.learned]:
            note(
                f"the queue has not taken in {', '.join(unsteady)}: its readings were not steady"
                " (--seconds 60 measures longer)"
            )


def make_folder(out: str) -> Path:
    """Before the minutes, not after them.

    Raises:
        UsageError: nothing can be written there.
    """
    folder = Path(specs.text("--out", out)).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}", hint="--out names a folder"
        ) from None
    return folder


def devices_of(device: str, machine: Machine) -> list[str]:
    if device == "auto":
        return ["cuda" if machine.gpus else "cpu"]
    if device != "cpu" and not machine.gpus:
        why = "" if machine.nvml_absent else f": {machine.nvml_problem}"
        raise UnavailableError(f"there is no GPU that can be used{why}", hint="--device cpu")
    return ["cuda", "cpu"] if device == "both" else [device]


def name_of(device: str, machine: Machine) -> str:
    if device == "cpu":
        return f"CPU ({machine.host.cores} cores)"
    return machine.gpus[0].name


def busy_jobs(client: Client) -> list[str]:
    """Jobs, of anybody, that run or are about to."""
    live = [job for job in client.list(states=sorted(LIVE_STATES)) if not job.held]
    return [f"job {job.id} of {job.user} is {job.state}" for job in live]


def refuse_if_busy(client: Client) -> None:
    if busy := busy_jobs(client):
        more = f", and {len(busy) - 1} more" if len(busy) > 1 else ""
        raise UnavailableError(
            f"the machine is not idle: {busy[0]}{more}",
            hint="wait for them (`rlq wait`), or --force to measure all the same",
        )


def spec_maker(
    training: list[str], algo: str, env_id: str, device: str, runs: Path
) -> Callable[[int], JobSpec]:
    """The n-th job for `device`: as `rlq submit sac` makes it, but without a word from the
    throughput guard, and without evaluations or checkpoints."""
    words = [*training, "--device", device]
    plan = ask_plan(
        workload_argv("plan", [*words, "--steps", str(STEPS_LIKELY)], 0, str(runs)), str(runs)
    )
    words += ["--steps", str(STEPS), "--set", f"learning_starts={FIRST_UPDATE}"]
    words += ["--eval-freq", "0", "--checkpoint-freq", "0", "--no-save-buffer", "--no-resume"]

    def make(number: int) -> JobSpec:
        spec = specs.make_spec(
            workload_argv("train", words, number, str(runs / f"{device}-{number}")),
            resources=specs.make_resources(
                gpus=1 if device == "cuda" else 0, cores=plan["cores"], mem=plan["mem_mib"]
            ),
            name=f"calibrate-{algo}-{env_id.replace('/', '-')}-{number}",
            cwd=str(runs),
            priority=specs.PRIORITY_MAX,
        )
        return msgspec.structs.replace(spec, unguarded=True)

    return make


def limited(make: Callable[[int], JobSpec], limit_s: float) -> Callable[[int], JobSpec]:
    """With a time limit, for the case that nobody is left to stop it."""

    def make_limited(number: int) -> JobSpec:
        spec = make(number)
        resources = msgspec.structs.replace(
            spec.resources, time_limit_ms=round(timedelta(seconds=limit_s).total_seconds() * 1000)
        )
        return msgspec.structs.replace(spec, resources=resources)

    return make_limited


def hold_others(job: Calibration, machine: Machine, make: Callable[[int], JobSpec]) -> None:
    """The curve is one GPU's: the others are taken by jobs that do nothing."""
    template = make(0)
    for number in range(1, len(machine.gpus)):
        spec = msgspec.structs.replace(
            template,
            argv=("sleep", "infinity"),
            name=f"calibrate-holds-gpu-{number}",
            resources=specs.make_resources(
                gpus=1, cores=1, mem=64, exclusive=True, time_limit=timedelta(hours=6)
            ),
        )
        job.start(spec, Curve("hold"), is_first=True)


def stop(job: Calibration) -> None:
    """Its jobs, however it ended; a failure to do so must not hide why."""
    if job.ids:
        note("stopping its jobs")
    try:
        job.stop()
    except RlqError as error:
        warn(f"its jobs may still run ({error.message}): rlq cancel --name 'calibrate-*'")


@contextmanager
def stopping_at_sigterm() -> Iterator[None]:
    """As by Ctrl-C: jobs are not left behind."""

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write(folder: Path, about: dict[str, object], curves: list[Curve], title: str) -> None:
    figures = folder / "calibration.json"
    figures.write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n")
    written = [str(figures)]
    try:
        written.append(str(draw(folder / "calibration.png", curves, title)))
    except ImportError:
        warn("there is no drawing: matplotlib is not installed (pip install 'rlq[sac]')")
    note(f"written: {', '.join(written)}")


def draw(path: Path, curves: list[Curve], title: str) -> Path:
    from matplotlib.figure import Figure

    measured = [curve for curve in curves if curve.points]
    picture = Figure(figsize=(9, 4), layout="constrained")
    together, each = picture.subplots(1, 2)
    for curve in measured:
        jobs = [point.jobs for point in curve.points]
        [line] = together.plot(jobs, [p.total for p in curve.points], "o-", label=curve.device)
        each.plot(jobs, [p.total / p.jobs for p in curve.points], "o-", label=curve.device)
        if curve.knee_is_seen:
            for axes in (together, each):
                axes.axvline(curve.knee, color=line.get_color(), linestyle=":")
    for axes, what in ((together, "steps/s together"), (each, "steps/s of each job")):
        axes.set(xlabel="jobs at a time", ylabel=what, ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
    if measured:
        is_seen = any(curve.knee_is_seen for curve in measured)
        together.legend(title="dotted: knee" if is_seen else None, loc="lower right")
    picture.suptitle(title)
    picture.savefig(path, dpi=120)
    return path
