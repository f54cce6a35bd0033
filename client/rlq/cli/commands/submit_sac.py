"""`rlq submit sac`: the built-in workload, one job for each seed.

Before anything is queued the workload itself is asked what one run needs (`python -m rlq_sac
plan`): it checks the options, computes the replay buffer, and knows what is installed.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec

from rlq import specs
from rlq.cli.app import App, Parsed, verb, warn, whole
from rlq.cli.commands.submit import make_spec, parse_array, queue_options, send
from rlq.cli.complete import complete_folders
from rlq.errors import InternalError, UsageError

STEPS_MAX = 10**12
#: In the names of folders.
SHORT_KEYS = {"learning_rate": "lr"}
#: What a shell or a file system might take for something else.
UNFIT = re.compile(r"[^\w.=+,-]+")
FOLDER_BYTES_MAX = 80
#: At most two digits of exponent: nobody waits for more.
STEPS = re.compile(r"(\d{1,13}(?:\.\d{1,13})?(?:[eE]\+?\d{1,2})?)([kKmM]?)", re.ASCII)
SEED_MAX = 2**31 - 1
N_ENVS_MAX = 1024
#: jax and torch take seconds to import on a busy machine.
PLAN_TIMEOUT_S = 120
GPUS_OF_DEVICE = {"cpu": 0, "cuda": 1, "auto": None}


def parse_seeds(text: str) -> tuple[int, ...]:
    seeds = parse_array(text)
    if max(seeds) > SEED_MAX:
        raise UsageError(f"a seed is at most {SEED_MAX}", hint="--seeds 0-9")
    return seeds


def parse_steps(text: str) -> int:
    """'700000', '700k', '7e5', '1.5M'.

    Raises:
        UsageError: not a whole number of steps.
    """
    match = STEPS.fullmatch(text.strip().replace("_", ""))
    hint = "write 700000, 700k or 7e5"
    if match is None:
        raise UsageError(f"{text!r} is not a number of steps", hint=hint)
    steps = Decimal(match[1]) * {"": 1, "k": 1000, "m": 10**6}[match[2].lower()]
    if steps != int(steps) or not 0 <= steps <= STEPS_MAX:
        raise UsageError(f"{text!r} is not a number of steps that can be", hint=hint)
    return int(steps)


def parse_steps_to_run(text: str) -> int:
    steps = parse_steps(text)
    if steps == 0:
        raise UsageError("a run has at least one step", hint="write 700000, 700k or 7e5")
    return steps


def parse_set(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value:
        raise UsageError(f"{text!r} does not set anything", hint="--set learning_rate=3e-4")
    return text


def choice(*words: str) -> Any:
    def parse(text: str) -> str:
        if text not in words:
            raise UsageError(f"{text!r} is not one of {', '.join(words)}", hint=" or ".join(words))
        return text

    return parse


algo_option = click.option(
    "--algo",
    metavar="sb3|sbx",
    type=Parsed("algo", choice("sb3", "sbx")),
    default="sb3",
    show_default=True,
    help="Stable-Baselines3 (torch) or SBX (JAX).",
)


def setting_words(n_envs: int | None, settings: Sequence[str]) -> list[str]:
    """What decides how fast a training runs, for `python -m rlq_sac`."""
    words = [] if n_envs is None else ["--n-envs", str(n_envs)]
    for setting in settings:
        words += ["--set", setting]
    return words


@verb("sac", short_help="Queue a sweep of SAC trainings, one job for each seed.")
@algo_option
@click.option(
    "--env", "env_id", metavar="ID", required=True, help="The gymnasium environment: Humanoid-v5."
)
@click.option(
    "--steps",
    metavar="N",
    required=True,
    type=Parsed("steps", parse_steps_to_run),
    help="Environment steps of each run.",
)
@click.option(
    "--seeds",
    metavar="FROM-TO",
    default="0",
    show_default=True,
    type=Parsed("seeds", parse_seeds),
    help="One job for each: 0-9, or 1,4,7.",
)
@click.option(
    "--device",
    metavar="auto|cpu|cuda",
    type=Parsed("device", choice(*GPUS_OF_DEVICE)),
    default="auto",
    show_default=True,
    help="auto: a GPU if there is any.",
)
@click.option(
    "--n-envs",
    metavar="N",
    type=Parsed("n-envs", whole("a number of environments", 1, N_ENVS_MAX)),
    help="Environments side by side (SubprocVecEnv); default 1.",
)
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    type=Parsed("setting", parse_set),
    help="A hyperparameter of SAC: batch_size=512; repeatable.",
)
@click.option(
    "--eval-freq",
    metavar="STEPS",
    type=Parsed("steps", parse_steps),
    help="Evaluate this often; 0: never.",
)
@click.option(
    "--checkpoint-freq",
    metavar="STEPS",
    type=Parsed("steps", parse_steps),
    help="Save this often; 0: only when stopped.",
)
@click.option(
    "--eval-episodes",
    metavar="N",
    type=Parsed("episodes", whole("a number of episodes", 1, 10_000)),
    help="Episodes of each evaluation.",
)
@click.option(
    "--save-buffer/--no-save-buffer",
    default=True,
    show_default=True,
    help="Keep the replay buffer in checkpoints.",
)
@click.option(
    "--out",
    metavar="DIR",
    default="runs",
    show_default=True,
    shell_complete=complete_folders,
    help="Where results go.",
)
@click.option(
    "--resume/--no-resume", default=True, show_default=True, help="From the newest checkpoint."
)
@queue_options("--set-env")
def command(
    app: App,
    algo: str,
    env_id: str,
    steps: int,
    seeds: tuple[int, ...],
    device: str,
    n_envs: int | None,
    settings: tuple[str, ...],
    eval_freq: int | None,
    checkpoint_freq: int | None,
    eval_episodes: int | None,
    save_buffer: bool,
    out: str,
    resume: bool,
    variables: tuple[tuple[str, str], ...],
    **options: Any,
) -> None:
    """Queue SAC trainings: Stable-Baselines3 or SBX, one job for each seed.

    Results go to DIR/sac-ENV-ALGO-sSEED, where --name, --n-envs and --set add what tells runs
    apart (sac-Humanoid-v5-sb3-lr=0.001-s0): result.json, checkpoints, a learning curve. Cores
    and memory are computed from the options; --cores and --mem overrule that.

    \b
    rlq submit sac --env Humanoid-v5 --steps 700000 --seeds 0-9
    rlq submit sac --algo sbx --env HalfCheetah-v5 --steps 1000000 --set batch_size=512
    """

    app.require_here("`rlq submit sac` looks for its Python and folders on", "rlq submit sac …")
    specs.text("--env", env_id)
    folder = specs.working_folder(options["cwd"])
    base = options["name"] or f"{algo}-{env_id.replace('/', '-')}"
    training = ["--algo", algo, "--env", env_id, "--steps", str(steps), "--device", device]
    training += setting_words(n_envs, settings)
    if eval_freq is not None:
        training += ["--eval-freq", str(eval_freq)]
    if checkpoint_freq is not None:
        training += ["--checkpoint-freq", str(checkpoint_freq)]
    if eval_episodes is not None:
        training += ["--eval-episodes", str(eval_episodes)]
    training.append("--save-buffer" if save_buffer else "--no-save-buffer")
    training.append("--resume" if resume else "--no-resume")

    kind = folder_name(env_id, algo, options["name"], n_envs, settings)

    def folder_for(seed: int) -> Path:
        return Path(folder, Path(out).expanduser()) / f"{kind}-s{seed}"

    def argv_for(seed: int, verb: str) -> list[str]:
        return workload_argv(verb, training, seed, str(folder_for(seed)))

    # Everything that can be refused here is, before the slow question.
    spec = make_spec(
        tuple(argv_for(seeds[0], "train")), GPUS_OF_DEVICE[device], variables, options
    )
    question = argv_for(seeds[0], "plan")
    for seed in seeds[1:]:
        if folder_for(seed).exists():
            question += ["--also", str(seed), str(folder_for(seed))]
    plan = ask_plan(question, folder)
    for warning in plan.get("warnings", ()):
        warn(str(warning))
    resources = spec.resources
    resources = msgspec.structs.replace(
        resources,
        cores=resources.cores or plan["cores"],
        mem_mib=resources.mem_mib or plan["mem_mib"],
    )
    jobs = [
        msgspec.structs.replace(
            spec,
            argv=specs.check_argv(argv_for(seed, "train")),
            name=specs.check_name(f"{base}-s{seed}"),
            resources=resources,
        )
        for seed in seeds
    ]
    send(app, jobs, quiet=options["quiet"], wait=options["wait"])


def folder_name(
    env_id: str, algo: str, name: str, n_envs: int | None, settings: tuple[str, ...]
) -> str:
    """Runs that differ in what a resumed run must not change do not share a folder.

    'sac-Humanoid-v5-sb3', 'sac-Humanoid-v5-sb3-lr=0.001'.
    """
    pairs = dict(setting.split("=", 1) for setting in settings)
    pairs = {key.strip(): value.strip() for key, value in sorted(pairs.items())}
    parts = [f"n_envs={n_envs}"] if n_envs is not None and n_envs > 1 else []
    parts += [f"{SHORT_KEYS.get(key, key)}={value}" for key, value in pairs.items()]
    told = "-".join([name, *parts] if name else parts)
    shown = UNFIT.sub("_", told)
    if len(shown.encode()) > FOLDER_BYTES_MAX or shown != told.replace("/", "_"):
        # Cut or changed, it might be that of others as well.
        digest = hashlib.sha256(told.encode()).hexdigest()[:6]
        shown = shown.encode()[:FOLDER_BYTES_MAX].decode(errors="ignore") + f"-{digest}"
    return "-".join(["sac", env_id.replace("/", "-"), algo, *([shown] if shown else [])])


def workload_argv(verb: str, training: list[str], seed: int, out: str) -> list[str]:
    """The built-in workload's command line; `verb`: train or plan."""
    return [
        # -P: a random.py in the user's folder must not become the workload's.
        *(sys.executable, "-P", "-m", "rlq_sac", verb, *training),
        *("--seed", str(seed), "--out", out),
    ]


def ask_plan(argv: list[str], folder: str) -> dict[str, Any]:
    """What one run needs: {"cores", "mem_mib", "gpus", "warnings"}.

    Raises:
        UsageError: the workload refuses the options, or is not installed.
    """
    if find_spec("rlq_sac") is None or find_spec("gymnasium") is None:
        raise UsageError(
            "the SAC workload is not installed", hint=f"{sys.executable} -m pip install 'rlq[sac]'"
        )
    try:
        answer = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, timeout=PLAN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InternalError(
            f"the SAC workload did not answer in {PLAN_TIMEOUT_S} s", hint=f"try {' '.join(argv)}"
        ) from None
    if answer.returncode:
        message, hint = read_refusal(answer.stderr)
        kind = UsageError if answer.returncode == 2 else InternalError
        raise kind(message, hint=hint)
    try:
        plan = json.loads(answer.stdout)
        if not all(type(plan[key]) is int and plan[key] > 0 for key in ("cores", "mem_mib")):
            raise ValueError("cores and mem_mib are not numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise InternalError(
            f"the SAC workload's plan cannot be read: {error}", hint=f"try {' '.join(argv)}"
        ) from error
    assert isinstance(plan, dict)
    return plan


def read_refusal(stderr: str) -> tuple[str, str | None]:
    """The `error:` and `hint:` lines of what the workload said."""
    said = {"error": "", "hint": ""}
    for line in stderr.splitlines():
        key, colon, rest = line.partition(":")
        if colon and key in said and not said[key]:
            said[key] = rest.strip()
    lines = stderr.strip().splitlines()
    fallback = lines[-1] if lines else "the SAC workload failed without a word"
    return said["error"] or fallback, said["hint"] or None
