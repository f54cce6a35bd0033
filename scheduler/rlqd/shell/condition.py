"""How the daemon is: what keeps it from starting jobs, from writing, from running on."""

from __future__ import annotations

from dataclasses import dataclass

from rlqd.core import model

#: Of the state folder's disk this little free space is too little.
DISK_MIB_MIN = 32


@dataclass(slots=True, kw_only=True)
class Condition:
    #: Why nothing can be committed, or "".
    broken: str = ""
    draining: bool = False
    disk_is_full: bool = False
    #: The core has contradicted itself a moment ago.
    is_distrusted: bool = False
    wants_stop: bool = False

    def admission(self, now: model.Instant) -> model.AdmissionSet:
        """Whether anything new may start."""
        reason = ""
        if self.draining:
            reason = "the queue is draining (`rlq drain --off` ends it)"
        elif self.disk_is_full:
            reason = "the disk of the daemon's state folder is full"
        elif self.is_distrusted:
            reason = "the scheduler has contradicted itself, and is tried again in a minute"
        return model.AdmissionSet(now, reason)


@dataclass(slots=True, kw_only=True)
class Stats:
    """For doctors."""

    turns: int = 0
    commits: int = 0
    messages: int = 0
    turn_ms_max: float = 0.0
