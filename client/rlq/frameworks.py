"""Which torch and jaxlib a command will import, told from the file system alone.

The daemon caps a job's GPU memory with variables that only some versions understand (and that
others refuse to start with), so it has to know the version before the job runs.  Importing is
far too slow, and the command's Python is seldom ours: the folder names of its site-packages
tell.  What cannot be told is left out, and no cap that needs it is set.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

_DIST_INFO = re.compile(r"(torch|jaxlib)-([0-9][^-]*)\.dist-info")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")


def versions(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> dict[str, str]:
    """`{"torch": "2.13.0+cpu", "jaxlib": "0.10.2"}`, as far as found."""
    found: dict[str, str] = {}
    for prefix in _prefixes(argv, env, cwd):
        for folder in prefix.glob("lib/python3*/site-packages"):
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            for name in names:
                if match := _DIST_INFO.fullmatch(name):
                    found.setdefault(match[1], match[2])
        if found:
            break
    return found


def _prefixes(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> list[Path]:
    """Where the command's Python is likely installed, the likeliest first."""
    prefixes: list[Path] = []
    program = shutil.which(
        os.path.join(cwd, argv[0]) if "/" in argv[0] else argv[0], path=env.get("PATH")
    )
    interpreter = program and (_interpreter_of(program) or program)
    if interpreter and _PYTHON.fullmatch(os.path.basename(interpreter)):
        # Not resolved: a virtual environment's python is a link to the system's.
        prefixes.append(Path(interpreter).parent.parent)
    prefixes.extend(Path(env[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name))
    return prefixes


def _interpreter_of(program: str) -> str | None:
    """The interpreter in a script's first line, if there is one."""
    try:
        with open(program, "rb") as script:
            first = script.readline(512)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = os.fsdecode(first[2:]).split()
    return words[0] if words else None
