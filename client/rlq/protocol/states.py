"""Job states, by Slurm's names (squeue(1), JOB STATE CODES)."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"  # admitted, its process not yet reported alive
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"  # asked to stop, not yet gone
    COMPLETED = "COMPLETED"  # exit code 0
    FAILED = "FAILED"  # exit code other than 0, or a signal
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"  # of the GPU or of the host; the reason says which
    NODE_FAIL = "NODE_FAIL"  # the machine or the job's supervisor went away under it
    LAUNCH_FAILED = "LAUNCH_FAILED"  # the command could not be started at all

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.OUT_OF_MEMORY,
        JobState.NODE_FAIL,
        JobState.LAUNCH_FAILED,
    }
)
LIVE_STATES = frozenset(JobState) - FINAL_STATES
