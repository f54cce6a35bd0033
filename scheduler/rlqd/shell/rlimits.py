"""The resource limits (setrlimit(2)) of jobs: those that the submitter's shell had.

They are read from the submitting process itself, in /proc: what a message says of them counts for
nothing, or the queue would be a way around limits.conf.  What the daemon may not give is lowered
to what it may.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping

#: (soft, hard) by name; -1: unlimited.
Rlimits = Mapping[str, tuple[int, int]]

#: As /proc/PID/limits calls them (fs/proc/base.c).
WORDS = {
    "address space": "RLIMIT_AS",
    "core file size": "RLIMIT_CORE",
    "cpu time": "RLIMIT_CPU",
    "data size": "RLIMIT_DATA",
    "file size": "RLIMIT_FSIZE",
    "locked memory": "RLIMIT_MEMLOCK",
    "msgqueue size": "RLIMIT_MSGQUEUE",
    "nice priority": "RLIMIT_NICE",
    "open files": "RLIMIT_NOFILE",
    "pending signals": "RLIMIT_SIGPENDING",
    "processes": "RLIMIT_NPROC",
    "realtime priority": "RLIMIT_RTPRIO",
    "realtime timeout": "RLIMIT_RTTIME",
    "resident set": "RLIMIT_RSS",
    "stack size": "RLIMIT_STACK",
}
NAMES = tuple(sorted(WORDS.values()))
_LINE = re.compile(r"Max ([a-z ]+?) +(\d+|unlimited) +(\d+|unlimited) ", re.ASCII)


def of_this_process() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in NAMES}


def of_process(pid: int, uid: int) -> dict[str, tuple[int, int]] | None:
    """Of a process of this user; empty where the kernel names none: on another machine, in
    another pid namespace.

    None: it is gone, or not that user's alone any more, as by a set-user-ID program.  Whoever
    asks may have seen to that, so it must not be taken for a process without limits.
    """
    if pid <= 0:
        return {}
    try:
        process = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Of the one process whose folder this is: if its pid is another's by now, they are gone.
        # Not prlimit(2), which takes a pid, and a capability that root in a container lacks.
        limits = _read(process, "limits")
        status = _read(process, "status")
    except OSError:
        return None
    finally:
        os.close(process)
    # Real, effective, saved, of the file system.  Root may give itself any limit.
    ids = next((line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")), [])
    if set(ids) != {str(uid)} and not (uid == 0 and ids[1:2] == ["0"]):
        return None
    return {
        WORDS[word]: (_number(soft), _number(hard))
        for word, soft, hard in _LINE.findall(limits)
        if word in WORDS
    }


def _read(folder: int, name: str) -> str:
    """Raises: OSError."""
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), errors="replace") as file:
        return file.read()


def _number(word: str) -> int:
    return resource.RLIM_INFINITY if word == "unlimited" else int(word)


def to_keep(submitter: Rlimits, own: Rlimits) -> dict[str, tuple[int, int]]:
    """What differs from the daemon's own, and so has to be remembered."""
    return {name: limit for name, limit in submitter.items() if own.get(name) != limit}


def of_job(kept: Rlimits, own: Rlimits) -> dict[str, tuple[int, int]]:
    """What the job gets.

    Args:
        kept: the submitter's, from `to_keep`.
        own: the daemon's, as it was started: it has raised its own number of open files since.
    """
    found = {name: own[name] for name in ("RLIMIT_NOFILE",) if name in own}
    for name, (soft, hard) in kept.items():
        if name in own:
            hard = _lower(hard, own[name][1])
            found[name] = (_lower(soft, hard), hard)
    return found


def _lower(one: int, other: int) -> int:
    if resource.RLIM_INFINITY in (one, other):
        return other if one == resource.RLIM_INFINITY else one
    return min(one, other)
