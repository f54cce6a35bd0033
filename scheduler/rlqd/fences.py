"""What holds a job to its share of the machine, as plain values.

Made by adapters/cgroups.py, carried out by adapters/processes.py and the supervisor; neither
knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one job may use.  None, or no CPUs: not limited."""

    cpus: tuple[int, ...] = ()
    mem_bytes_max: int | None = None
    #: From here on the kernel takes page cache back, and slows the job.
    mem_bytes_high: int | None = None
    #: Threads count too.
    tasks_max: int | None = None
    #: Relative to the other jobs; 100 is everybody's.
    io_weight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """How one job's processes are put under its limits."""

    #: A command line that becomes the supervisor by exec, under the limits.
    wrapper: tuple[str, ...] = ()
    wrapper_env: Mapping[str, str] = field(default_factory=dict)
    #: The folder of the control group that the supervisor makes for the command, so that it can
    #: be killed as one; "": none.
    cgroup: str = ""
    #: The folder whose limits hold the command: `cgroup` itself, or one above it.
    limits: str = ""
    #: Written into `cgroup` by name before the command is put in.
    files: Mapping[str, str] = field(default_factory=dict)


class Means(Enum):
    """By what jobs are held to their limits."""

    SCOPE = "systemd"  # a transient scope per job
    CGROUP = "cgroup"  # a control group of our own per job
    AFFINITY = "affinity"  # each job is pinned to its cores, and that is all


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """What is in force on this machine."""

    means: Means
    #: Of "cpuset", "memory", "pids" and "io": those whose limits the kernel really enforces.
    controllers: frozenset[str] = frozenset()
    #: Why it is no more than that; "": nothing is missing.
    problem: str = ""
    #: The control group (version 2) that all jobs' groups are in, below `cgroup_root`.
    cgroup: str | None = None
    cgroup_root: str = "/sys/fs/cgroup"
