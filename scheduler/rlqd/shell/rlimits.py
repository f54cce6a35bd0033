"""The resource limits (setrlimit(2)) of jobs: those that the submitter's shell had.

They are read from the submitting process itself, by prlimit(2): what a message says of them counts
for nothing, or the queue would be a way around limits.conf.  What the daemon may not give is
lowered to what it may.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

#: (soft, hard) by name; -1: unlimited.
Rlimits = Mapping[str, tuple[int, int]]

NAMES = (
    "RLIMIT_AS",
    "RLIMIT_CORE",
    "RLIMIT_CPU",
    "RLIMIT_DATA",
    "RLIMIT_FSIZE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_NOFILE",
    "RLIMIT_NPROC",
    "RLIMIT_RSS",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
    "RLIMIT_SIGPENDING",
    "RLIMIT_STACK",
)


def of_this_process() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in NAMES}


def of_process(pid: int, uid: int) -> dict[str, tuple[int, int]]:
    """Of a process of this user; none if it is gone, another's, or on another machine."""
    try:
        if pid <= 0 or os.stat(f"/proc/{pid}").st_uid != uid:
            return {}
        return {name: resource.prlimit(pid, getattr(resource, name)) for name in NAMES}
    except OSError:
        return {}


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
