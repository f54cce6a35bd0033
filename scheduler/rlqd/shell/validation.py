"""Submissions from outside, checked value by value before anything believes them.

The codec has made sure of types; this makes sure of sense.  A hostile client can send anything
a struct can hold, and `rlq` itself is only one client.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlq.errors import UsageError
from rlq.protocol.messages import JobSpec, Selection, Submit

JOBS_MAX = 100_000
ARGS_MAX = 10_000
#: A program of rlq's own and its options (`JobSpec.via`).
VIA_MAX = 16
#: Linux's own limit of one argument or variable (MAX_ARG_STRLEN), and a sane sum of all.
STRING_BYTES_MAX = 128 * 1024
STRINGS_BYTES_MAX = 2 * 1024 * 1024
NAME_CHARS_MAX = 200
PATH_BYTES_MAX = 4096
RANGES_MAX = 10_000
AFTER_MAX = 10_000
_YEAR_MS = 366 * 86_400_000


def check_submission(submit: Submit) -> None:
    """Raises UsageError naming the first thing that is wrong."""
    if not 1 <= len(submit.jobs) <= JOBS_MAX:
        raise UsageError(
            f"one submission holds 1 to {JOBS_MAX} jobs, this one {len(submit.jobs)}",
            hint="submit in parts",
        )
    _check_env(submit.env)
    if len({spec.held for spec in submit.jobs}) > 1:
        raise UsageError("all jobs of one submission are held, or none", hint="submit twice")
    if len({(spec.after, spec.after_any) for spec in submit.jobs}) > 1:
        raise UsageError("all jobs of one submission follow the same jobs", hint="submit twice")
    for spec in submit.jobs:
        _check_job(spec)


def check_priority(priority: int) -> None:
    """Raises UsageError."""
    _check_range("priority", priority, -1000, 1000)


def check_selection(selection: Selection, *, required: bool = False) -> None:
    """`required`: a verb that acts must be told on what: nothing named is not everything.

    Raises UsageError.
    """
    if required and not (selection.ids or selection.name or selection.states or selection.all):
        raise UsageError(
            "no job is named", hint="give ids or ranges (3-9), --name, --state or --all"
        )
    if len(selection.ids) > RANGES_MAX:
        raise UsageError(f"a selection holds at most {RANGES_MAX} ranges")
    for low, high in selection.ids:
        if not 0 <= low <= high < 2**63:
            raise UsageError(f"{low}-{high} is not a range of job ids")
    if selection.name is not None and len(selection.name) > NAME_CHARS_MAX:
        raise UsageError("the name pattern is too long")
    if selection.uid is not None and not 0 <= selection.uid < 2**32:
        raise UsageError(f"{selection.uid} is not a user id")


def _check_job(spec: JobSpec) -> None:
    if not spec.argv or not spec.argv[0]:
        raise UsageError("the command is empty", hint="rlq submit -- python train.py")
    if len(spec.via) > VIA_MAX:
        raise UsageError(f"at most {VIA_MAX} words go before a command")
    if len(spec.argv) > ARGS_MAX:
        raise UsageError(f"a command has at most {ARGS_MAX} arguments")
    size = 0
    for argument in (*spec.via, *spec.argv):
        size += _check_string("an argument", argument, STRING_BYTES_MAX)
    if size > STRINGS_BYTES_MAX:
        raise UsageError("the command line is too long")
    _check_env(spec.env)
    _check_path("the working folder", spec.cwd)
    if spec.log_path:
        _check_path("the log", spec.log_path)
    if len(spec.name) > NAME_CHARS_MAX or not spec.name.isprintable():
        raise UsageError(
            "a job's name is printable and has at most 200 characters", hint="--name sac-seed3"
        )
    if len(spec.like) > NAME_CHARS_MAX or not spec.like.isprintable():
        raise UsageError(
            "the name that a job is like is printable and has at most 200 characters",
            hint="--like big-sac",
        )
    if len(spec.after) > AFTER_MAX or len(set(spec.after)) < len(spec.after):
        raise UsageError(f"a job follows at most {AFTER_MAX} jobs, each named once")
    for job_id in spec.after:
        _check_range("the id of a job to follow", job_id, 1, 2**63 - 1)
    _check_range("umask", spec.umask, 0, 0o777)
    check_priority(spec.priority)
    _check_range("the grace period", spec.grace_ms, 0, 86_400_000)
    _check_range("the log size", spec.log_mib_max, 1, 2**30)
    if len(spec.env_given) > 1000 or len(spec.frameworks) > 20:
        raise UsageError("too many variables")
    for text in (*spec.env_given, *spec.frameworks, *spec.frameworks.values()):
        _check_string("a variable's or a framework's name", text, 1024)
    resources = spec.resources
    _check_range("GPUs", resources.gpus, 0, 64)
    _check_range("GPU memory", resources.gpu_mem_mib, 1, 2**30)
    _check_range("the SM share", resources.sm_pct, 1, 100)
    _check_range("cores", resources.cores, 1, 65_536)
    _check_range("host memory", resources.mem_mib, 1, 2**40)
    _check_range("the time limit", resources.time_limit_ms, 1, 10 * _YEAR_MS)
    if resources.gpus == 0 and (resources.gpu_mem_mib or resources.sm_pct):
        raise UsageError(
            "GPU memory or SM share for a job without GPU",
            hint="drop --gpus 0, or --gpu-mem and --sm",
        )


def _check_env(env: Mapping[str, str]) -> None:
    size = 0
    for name, value in env.items():
        if not name or "=" in name:
            raise UsageError(f"{name!r} cannot be a variable's name")
        size += _check_string("a variable's name", name, STRING_BYTES_MAX)
        size += _check_string(f"the variable {name}", value, STRING_BYTES_MAX)
    if size > STRINGS_BYTES_MAX:
        raise UsageError("the environment is too large", hint="the limit is 2 MiB")


def _check_path(what: str, path: str) -> None:
    _check_string(what, path, PATH_BYTES_MAX)
    if not path.startswith("/"):
        raise UsageError(f"{what} must be an absolute path, not {path!r}")


def _check_string(what: str, text: str, bytes_max: int) -> int:
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid UTF-8") from error
    if "\0" in text:
        raise UsageError(f"{what} holds a NUL character")
    if size > bytes_max:
        raise UsageError(f"{what} has {size} bytes, the limit is {bytes_max}")
    return size


def _check_range(what: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise UsageError(f"{what}: {value} is out of range", hint=f"{low} to {high}")
