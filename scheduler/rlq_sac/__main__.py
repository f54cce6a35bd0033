"""`python -m rlq_sac train|plan …`.

Exit codes: 0 finished; 2, 3, 7 as in rlq.errors; 143 (SIGTERM) or 130 (Ctrl-C) stopped, resume
with the same command; anything else is a crash with a traceback.

The worker processes of SubprocVecEnv import this module: it must stay light.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import click

from rlq.errors import RlqError, UnavailableError, UsageError
from rlq_sac.settings import (
    KEYWORDS,
    SEED_MAX,
    Settings,
    parse_keywords,
    parse_steps,
)

_Command = Callable[..., None]


class _Steps(click.ParamType[int]):
    name = "STEPS"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        return 0 if self._zero and value.strip() == "0" else parse_steps(value)


def _options(command: _Command) -> _Command:
    for option in reversed(
        [
            click.option(
                "--algo", type=click.Choice(list(KEYWORDS)), default="sb3", show_default=True,
                help="sb3: Stable-Baselines3 (torch); sbx: its JAX sister.",
            ),
            click.option(
                "--env", required=True, metavar="ID", help="A gymnasium id, such as Humanoid-v5."
            ),
            click.option(
                "--steps", type=_Steps(), required=True,
                help="Environment steps: 700000, 7e5 or 700k.",
            ),
            click.option(
                "--seed", type=click.IntRange(0, SEED_MAX), default=0, show_default=True
            ),
            click.option(
                "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
                show_default=True,
            ),
            click.option(
                "--n-envs", type=click.IntRange(1, 1024), default=1, show_default=True,
                help="Environments, each in a process of its own if more than one.",
            ),
            click.option(
                "--set", "pairs", multiple=True, metavar="KEY=VALUE",
                help="A keyword of SAC's constructor: learning_starts=1000, "
                "policy_kwargs.net_arch=[256,256].",
            ),
            click.option(
                "--out", type=click.Path(path_type=Path, file_okay=False),
                help="Folder of the results [default: rlq-sac/ALGO-ENV-seedSEED].",
            ),
            click.option(
                "--eval-freq", type=_Steps(zero=True),
                help="Steps between evaluations; 0: only at the end "
                "[default: a tenth of --steps].",
            ),
            click.option(
                "--eval-episodes", type=click.IntRange(1, 10_000), default=5, show_default=True
            ),
            click.option(
                "--checkpoint-freq", type=_Steps(zero=True),
                help="Steps between checkpoints; 0: only on a stop and at the end "
                "[default: a tenth of --steps].",
            ),
            click.option(
                "--save-buffer/--no-save-buffer", default=True, show_default=True,
                help="Keep the replay buffer in checkpoints.",
            ),
            click.option(
                "--resume/--no-resume", default=True, show_default=True,
                help="Go on from the newest valid checkpoint in --out, or start over.",
            ),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def _settings(
    *,
    pairs: tuple[str, ...],
    out: Path | None,
    eval_freq: int | None,
    checkpoint_freq: int | None,
    **given: Any,
) -> Settings:
    tenth = max(given["steps"] // 10, 1)
    name = f"{given['algo']}-{given['env'].replace('/', '_')}-seed{given['seed']}"
    return Settings(
        keywords=parse_keywords(given["algo"], given["n_envs"], pairs),
        out=out if out is not None else Path("rlq-sac") / name,
        eval_freq=tenth if eval_freq is None else eval_freq,
        checkpoint_freq=tenth if checkpoint_freq is None else checkpoint_freq,
        **given,
    )


@click.group()
def main() -> None:
    """Train SAC (Stable-Baselines3 or SBX) so that it can be stopped and resumed."""


@main.command("plan")
@_options
@click.option(
    "--also", multiple=True, type=(int, click.Path(path_type=Path)), metavar="SEED OUT",
    help="Another run that is the same but for these: its folder is looked at too.",
)  # fmt: skip
def plan_command(also: tuple[tuple[int, Path], ...], **given: Any) -> None:
    """Print as JSON what `train` with the same options needs; refuse what it would refuse."""
    from rlq_sac.identity import check_folder
    from rlq_sac.plan import plan

    settings = _settings(**given)
    needed = plan(settings)
    check_folder(settings)
    for seed, out in also:
        check_folder(dataclasses.replace(settings, seed=seed, out=out))
    click.echo(json.dumps(dataclasses.asdict(needed)))


@main.command("train")
@_options
def train_command(**given: Any) -> None:
    """Train, evaluate, and leave result.json, curve.csv, curve.png and checkpoints in --out."""
    from rlq_sac.stopping import StopRequest

    stop = StopRequest()
    stop.listen()
    sys.exit(_train(_settings(**given), stop))


def _train(settings: Settings, stop: Any) -> int:
    from rlq_sac.environments import INSTALL_HINT, spaces_of
    from rlq_sac.identity import finished
    from rlq_sac.plan import plan

    spaces_of(settings.env)  # says what is wrong with it before seconds of imports
    for warning in plan(settings).warnings:
        click.echo(f"warning: {warning}", err=True)
    if settings.algo == "sbx" and settings.device != "auto":
        os.environ["JAX_PLATFORMS"] = settings.device  # jax reads it when it is imported
    lock = _lock(settings.out)
    try:
        if not settings.resume:
            _set_aside(settings.out)
        result = finished(settings)
        if result is not None:
            return _already(settings, result)
        try:
            from rlq_sac import training

            if settings.algo == "sbx":
                import sbx as _sbx  # noqa: F401
        except ImportError as missing:
            raise UnavailableError(
                f"cannot import what the training needs: {missing}", hint=INSTALL_HINT
            ) from missing
        (settings.out / "result.json").unlink(missing_ok=True)  # of fewer steps than now asked
        return training.train(settings, stop)
    finally:
        lock.close()


def _already(settings: Settings, result: dict[str, Any]) -> int:
    import rlq.job

    click.echo(
        f"already finished: {result['steps']:,} steps, reward {result['mean_reward']}; "
        f"results in {settings.out} (--no-resume starts over)"
    )
    rlq.job.report(settings.steps, settings.steps, mean_reward=result["mean_reward"])
    rlq.job.flush()
    return 0


def _lock(out: Path) -> IO[bytes]:
    """Hold the folder for this process; released when the file is closed, however that comes.

    Raises:
        UsageError: it cannot be made or written to.
        UnavailableError: another run holds it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("ab")
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}", hint="give --out") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UnavailableError(
            f"another run is writing to {out}", hint="give each run an --out of its own"
        ) from None
    return file


def _set_aside(out: Path) -> None:
    """Move an earlier run's files into a folder old-N: starting over deletes nothing."""
    names = ["checkpoints", "result.json", "curve.csv", "curve.png"]
    there = [name for name in names if (out / name).exists()]
    if not there:
        return
    number = 1
    while (out / f"old-{number}").exists():
        number += 1
    (out / f"old-{number}").mkdir()
    for name in there:
        (out / name).rename(out / f"old-{number}" / name)
    click.echo(f"starting over; the earlier run is now in {out / f'old-{number}'}")


def run() -> None:
    try:
        main(prog_name="rlq_sac")
    except RlqError as error:
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    run()
