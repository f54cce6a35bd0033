"""Can everybody run this installation, and can nobody but root replace it?

The system's daemon runs as root and starts each job as its user, with this Python, which that
user must be able to run.  And what root runs must be root's own: whoever may write to it may
become root.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlq.errors import RefusedError

NOBODY = 65534
TRY_TIMEOUT_S = 60
HINT = (
    "install it where all can read and only root can write, with a Python of the system's:"
    "\n  sudo /usr/bin/python3 -m venv /opt/rlq"
    "\n  sudo /opt/rlq/bin/pip install .          # in the clone of rlq"
    "\n  sudo /opt/rlq/bin/rlqd install"
)


def require_shared(files: Iterable[str | Path], python: str) -> None:
    """`files`: the program, its interpreter, its packages.

    Raises:
        RefusedError: others cannot run them, or others than root could replace them.
    """
    for file in map(Path, files):
        for place in ways(file):
            if (problem := trouble(place, os.stat(place))) is not None:
                leads = "" if file.resolve() == file else f", which leads to {file.resolve()},"
                raise RefusedError(f"{file}{leads} cannot serve everybody: {problem}", hint=HINT)
    # The last word: access lists, mount options and security modules are not in the mode.
    tried = subprocess.run(
        [python, "-I", "-c", "import msgspec, zmq, rlq.cli, rlqd.supervisor"],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TRY_TIMEOUT_S,
        check=False,
    )
    if tried.returncode:
        said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
        raise RefusedError(f"other users cannot run {python}: {said}", hint=HINT)


def ways(path: Path) -> Iterator[Path]:
    """`path` and every folder on the way to it, links followed and not, "/" first."""
    seen: set[Path] = set()
    for way in (Path(os.path.abspath(path)), path.resolve()):
        for place in (*reversed(way.parents), way):
            if place not in seen:
                seen.add(place)
                yield place


def trouble(place: Path, found: os.stat_result) -> str | None:
    """What is wrong with one file or folder on the way; None: nothing."""
    is_folder = stat.S_ISDIR(found.st_mode)
    if not found.st_mode & (stat.S_IXOTH if is_folder else stat.S_IROTH):
        return f"{place} is closed to other users"
    if found.st_uid != 0:
        return f"{place} belongs to {_user(found.st_uid)}, who could replace what root runs"
    # In a sticky folder, as /tmp is, nobody can replace what is root's.
    if found.st_mode & stat.S_IWOTH and not (is_folder and found.st_mode & stat.S_ISVTX):
        return f"everybody may write to {place}, and could replace what root runs"
    is_groups = found.st_mode & stat.S_IWGRP and not (is_folder and found.st_mode & stat.S_ISVTX)
    if is_groups and (group := _peopled(found.st_gid)) is not None:
        return f"the group {group} may write to {place}, and could replace what root runs"
    return None


def _peopled(gid: int) -> str | None:
    """The group's name, if anybody but root is in it: Debian's /usr/local is writable for its
    group staff, in which nobody is."""
    if gid == 0:
        return None
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return f"{gid}"
    if set(group.gr_mem) - {"root"} or any(u.pw_gid == gid and u.pw_uid for u in pwd.getpwall()):
        return group.gr_name
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
