"""From what people write to a `JobSpec`: checked here, so that a mistake never leaves the house.

Shared by `Client.submit` and `rlq submit`; each refusal names the argument and is a UsageError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rlq import frameworks
from rlq.errors import UsageError
from rlq.protocol import units
from rlq.protocol.messages import JobSpec, Resources

NAME_CHARS_MAX = 200
PRIORITY_MAX = 1000
#: No machine we know has more; a larger number is a slip.
GPUS_MAX = 64
CORES_MAX = 4096
#: What rlqd puts in for %j and %x in the path of a log.
LOG_CODES = frozenset("jx")
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})

Size = str | int  # "2G", or MiB
Share = str | int  # "30%", or per cent
Span = str | timedelta  # "2h30m", "45s"; "30" is minutes


def make_resources(
    *,
    gpus: int | None = None,
    gpu_mem: Size | None = None,
    sm: Share | None = None,
    cores: int | None = None,
    mem: Size | None = None,
    exclusive: bool = False,
    time_limit: Span | None = None,
) -> Resources:
    """What a job asks for; None: not declared.

    Raises:
        UsageError: a value that no machine could mean.
    """
    if gpus == 0 and (gpu_mem is not None or sm is not None):
        raise UsageError(
            "a job without a GPU (gpus 0) cannot ask for GPU memory or SM share",
            hint="leave out --gpu-mem and --sm, or give --gpus 1",
        )
    return Resources(
        gpus=_whole("gpus", gpus, 0, GPUS_MAX),
        gpu_mem_mib=_mib("gpu_mem", gpu_mem),
        sm_pct=None if sm is None else units.parse_pct(str(sm)),
        cores=_whole("cores", cores, 1, CORES_MAX),
        mem_mib=_mib("mem", mem),
        exclusive=exclusive,
        time_limit_ms=None if time_limit is None else _ms("time_limit", time_limit),
    )


def make_spec(
    argv: Sequence[str],
    *,
    resources: Resources,
    name: str = "",
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    set_env: Mapping[str, str] | None = None,
    priority: int = 0,
    grace: Span | None = None,
    requeue: bool = False,
    held: bool = False,
    after: Iterable[int] = (),
    after_any: bool = False,
    hooks: bool = True,
    log: str | os.PathLike[str] | None = None,
    log_max: Size | None = None,
    like: str | None = None,
    preemptible: bool = False,
    remote: bool = False,
) -> JobSpec:
    """One job.  `set_env`: on top of the environment it is submitted with, and left as it is by
    rlqd.  `env`: that environment (None: this process's), only looked at, to find the command's
    Python.  `cwd`: None is the current one, by the name the shell has for it.  `remote`: it is
    for another machine, so that nothing is looked for on this one.

    Raises:
        UsageError: something in it cannot be run or recorded.
    """
    folder = remote_folder(cwd) if remote else working_folder(cwd)
    variables = dict(set_env or {})
    for key, value in variables.items():
        check_variable(key, value)
    grace_ms = None if grace is None else _ms("grace", grace)
    if log is not None and remote:
        log_path = os.path.normpath(os.path.join(folder, text("the log's path", log)))
    elif log is not None:
        log_path = os.path.join(folder, os.path.expanduser(text("the log's path", log)))
        log_path = os.path.normpath(log_path)
        check_log_path(log_path)
    else:
        log_path = ""
    words = check_argv(argv)
    installed: dict[str, str] = {}
    if resources.gpu_mem_mib is not None and resources.gpus != 0 and not remote:
        # Only a declared amount becomes a cap, and only a cap depends on a version.
        found_in = {**(os.environ if env is None else env), **variables}
        installed = frameworks.versions(words, found_in, folder)
    return JobSpec(
        argv=words,
        cwd=folder,
        env=variables,
        umask=current_umask(),
        name=check_name(name or default_name(argv)),
        resources=resources,
        priority=_whole("priority", priority, -PRIORITY_MAX, PRIORITY_MAX) or 0,
        grace_ms=grace_ms,
        requeue=requeue,
        held=held,
        after=tuple(dict.fromkeys(_whole("after", job, 1, 2**63 - 1) or 0 for job in after)),
        after_any=after_any,
        hooks=hooks,
        env_given=tuple(variables),
        frameworks=installed,
        log_path=log_path,
        log_mib_max=_mib("log_max", log_max),
        like="" if like is None else check_like(like),
        preemptible=preemptible,
    )


def check_argv(argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, str):
        raise UsageError(
            "the command is one string", hint='give a list: ["python", "train.py"], or shlex.split'
        )
    words = tuple(text("a word of the command", word) for word in argv)
    if not words or not words[0]:
        raise UsageError("there is no command to run", hint="rlq submit -- python train.py")
    return words


def check_log_path(path: str) -> None:
    """
    Raises:
        UsageError: no log could be written there, as far as it is known before there is an id.
    """
    for code in re.findall(r"%([A-Za-z])", path):
        if code not in LOG_CODES:
            raise UsageError(
                f"%{code} in the log's path {path} means nothing",
                hint="%j is the job's id, %x its name",
            )
    folder = os.path.dirname(path)
    while "%" in folder:
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        there = folder
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        if not os.path.isdir(there):
            raise UsageError(
                f"there is no folder {folder} for the log: {there} is not a folder",
                hint=f"name another, such as {os.path.join(os.path.dirname(there), '%j.log')}",
            )
        raise UsageError(f"there is no folder {folder} for the log", hint=f"mkdir -p {folder}")
    if os.path.isdir(path):
        raise UsageError(
            f"the log's path {path} is a folder",
            hint=f"name a file, such as {os.path.join(path, '%j.log')}",
        )


def check_program(
    argv: Sequence[str], cwd: str, path: str | None, *, verb: str = "submit"
) -> None:
    """Better now than as a failed job in an hour.  `path`: None is this process's.

    `verb`: the one that was typed, for the hints.

    Raises:
        UsageError: there is no such program, or it cannot be executed.
    """
    import shutil

    program = argv[0]
    first, *more = program.split()[:2] or [""]
    is_quoted = bool(more) and len(argv) == 1 and not Path(cwd, program).exists()
    if is_quoted and (shutil.which(first, path=path) or Path(cwd, first).is_file()):
        raise UsageError(
            f"there is no program {program!r}: it is a whole command in one word",
            hint=f"do not quote the whole command: rlq {verb} -- {program}",
        )
    if "/" in program:
        file = Path(cwd, program)
        if file.is_file() and os.access(file, os.X_OK):
            return
        if file.is_dir():
            raise UsageError(
                f"{program} is a folder, not a program", hint=f"rlq {verb} -- python train.py"
            )
        if file.is_file():
            raise UsageError(f"{program} is not executable", hint=_how_to_run(program, verb))
        raise UsageError(f"there is no program {program}", hint=f"looked in {cwd}")
    if shutil.which(program, path=path) is None:
        if Path(cwd, program).is_file():
            raise UsageError(
                f"{program} is a file here, not a program on PATH",
                hint=f"rlq {verb} -- ./{program}"
                if os.access(Path(cwd, program), os.X_OK)
                else _how_to_run(program, verb),
            )
        raise UsageError(
            f"there is no program {program!r} on PATH",
            hint="did you forget `--` before the command?"
            f" rlq {verb} [options] -- python train.py",
        )


def _how_to_run(program: str, verb: str) -> str:
    name = program if "/" in program else f"./{program}"
    if program.endswith(".py"):
        return f"rlq {verb} -- python {program} (or chmod +x it, and {verb} {name})"
    return f"chmod +x {name}, then rlq {verb} -- {name}"


def check_like(like: str) -> str:
    """What `rlq profile` is to call the program of a job."""
    checked = text("like", like)
    if not checked or len(checked) > NAME_CHARS_MAX or not checked.isprintable():
        raise UsageError(
            f"{checked!r} is no name to know a program by",
            hint=f"printable, 1 to {NAME_CHARS_MAX} characters: --like big-sac",
        )
    return checked


def check_name(name: str) -> str:
    checked = text("the name", name)
    if len(checked) > NAME_CHARS_MAX:
        raise UsageError(
            f"a name has at most {NAME_CHARS_MAX} characters, this one {len(checked)}",
            hint="--name gives a shorter one",
        )
    if not checked.isprintable():
        raise UsageError(
            f"the name {checked!r} has characters that cannot be printed",
            hint="use letters, digits, - and _",
        )
    return checked


def check_variable(key: str, value: str) -> None:
    if not key or "=" in key:
        raise UsageError(f"{key!r} is not the name of a variable", hint="--env NAME=VALUE")
    text("a variable's name", key)
    text(f"the value of {key}", value, show=False)


def text(what: str, value: str | os.PathLike[str], *, show: bool = True) -> str:
    """`value` as a string that can be sent and given to a program.

    Raises:
        UsageError: not UTF-8, or with a NUL byte.
    """
    written = os.fspath(value)
    shown = f" ({written!a})" if show else ""
    try:
        written.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{what} is not valid UTF-8{shown}", hint="rename it, or wrap it in a script"
        ) from None
    if "\0" in written:
        raise UsageError(f"{what} has a NUL byte in it{shown}", hint="no program can be given one")
    return written


def default_name(argv: Sequence[str]) -> str:
    """'train.py' of 'python -u train.py', 'gym' of 'python -m gym', 'run.sh' of 'sh run.sh',
    else the program."""
    words = [os.path.basename(word) for word in argv]
    name = words[0] if words else ""
    if name.startswith(("python", "pypy")):
        rest = iter(argv[1:])
        for word in rest:
            if word == "-m":
                name = next(rest, name)
                break
            if word in {"-W", "-X"}:
                next(rest, None)
            elif word == "-c":
                break
            elif not word.startswith("-"):
                name = os.path.basename(word)
                break
    elif name in SHELLS:
        for word in argv[1:]:
            if not word.startswith("-"):
                name = os.path.basename(word)
                break
            if not word.startswith("--") and "c" in word:
                break  # of a command there is no short name
    printable = "".join(c if c.isprintable() else "?" for c in name)
    return printable[:NAME_CHARS_MAX]


def working_folder(cwd: str | os.PathLike[str] | None = None) -> str:
    """An absolute path.  Where $PWD is the same folder its words are kept: a home behind a link
    stays where people know it.

    Raises:
        UsageError: there is no such folder.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the current folder does not exist any more", hint="cd somewhere, or give --cwd"
        ) from None
    named = os.environ.get("PWD", "")
    try:
        if named.startswith("/") and os.path.samefile(named, here):
            here = named
    except OSError:
        pass
    if cwd is None:
        return text("the current folder", here)
    folder = os.path.normpath(os.path.join(here, os.path.expanduser(text("cwd", cwd))))
    if not os.path.isdir(folder):
        kind = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise UsageError(f"the working folder {folder} {kind}", hint="--cwd names a folder")
    return folder


def remote_folder(cwd: str | os.PathLike[str] | None) -> str:
    """A folder of another machine: absolute, or `~/...`; relative ones are below the home."""
    if cwd is None:
        return "~"
    folder = text("cwd", cwd)
    return os.path.normpath(folder if folder.startswith(("/", "~")) else f"~/{folder}")


def capture_env(env: Mapping[str, str] | None = None) -> tuple[dict[str, str], list[str]]:
    """The environment to send (None: this process's), and the names that had to be left out
    because a name or value is not UTF-8."""
    sent: dict[str, str] = {}
    left_out: list[str] = []
    for key, value in (os.environ if env is None else env).items():
        try:
            key.encode()
            value.encode()
        except UnicodeEncodeError:
            left_out.append(ascii(key)[1:-1])
        else:
            sent[key] = value
    return sent, left_out


def current_umask() -> int:
    # os.umask can only be read by setting it, which another thread would see.
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _whole(what: str, value: int | None, least: int, most: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{what} is {value!r}", hint=f"a whole number from {least} to {most}")
    return value


def _mib(what: str, value: Size | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, str):
        return units.parse_mib(value)
    return _whole(what, value, 1, 2**40)


def _ms(what: str, value: Span) -> int:
    if isinstance(value, timedelta):
        return units.parse_duration_ms(f"{value / timedelta(milliseconds=1):.0f}ms")
    if not isinstance(value, str):
        raise UsageError(f"{what} is {value!r}", hint="a timedelta, or text such as '2h30m'")
    return units.parse_duration_ms(value)
