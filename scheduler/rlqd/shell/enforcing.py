"""What each job is held to, from what it declared, where it was placed, and the configuration."""

from __future__ import annotations

from rlq.protocol.messages import JobSpec
from rlqd.config import Enforce
from rlqd.core.model import Placement
from rlqd.fences import Limits

#: The supervisor's own memory and the kernel's for its processes are counted with the job's.
SUPERVISOR_MIB = 16
#: A job over this share of its limit is slowed while the kernel takes page cache back.  Close to
#: the limit: one that has outgrown it for good is to end soon, not to crawl on, holding a GPU.
HIGH_PCT = 98


def limits_of(spec: JobSpec, placement: Placement, config: Enforce) -> Limits:
    """Only a declared amount of memory is a limit: a default is a guess, and no job is killed
    for a guess."""
    declared_mib = spec.resources.mem_mib
    most = None
    if declared_mib is not None:
        mib = declared_mib + -(-declared_mib * config.mem_pct_margin // 100) + SUPERVISOR_MIB
        most = mib * 2**20
    return Limits(
        cpus=placement.cores,
        mem_bytes_max=most,
        mem_bytes_high=None if most is None else most * HIGH_PCT // 100,
        tasks_max=config.tasks_max or None,
        io_weight=config.io_weight,
    )
