"""What a job's state tells by itself: what it holds, when it is due, when it will have ended.

States change in core/machine.py alone.
"""

from __future__ import annotations

from dataclasses import replace
from signal import Signals
from typing import assert_never

from rlqd.core.crowd import Device
from rlqd.core.model import (
    BackedOff,
    Completing,
    Exit,
    Finished,
    GpuId,
    Instant,
    Job,
    Outcome,
    Pending,
    Placement,
    Policy,
    Running,
    Starting,
    State,
    Suspended,
)
from rlqd.core.policy import latest_end

#: SIGKILL is sent again this often until the process is reported gone.
KILL_AGAIN_MS = 5_000
#: No device: a job on more than one is never paused by rlqd.
SEVERAL = "several"


def placement_of(state: State) -> Placement | None:
    """What a job in this state holds."""
    match state:
        case Pending() | Finished():
            return None
        case Starting(placement=placement) | Running(placement=placement):
            return placement
        case Suspended(placement=placement) | Completing(placement=placement):
            return placement
        case _:
            assert_never(state)


def deadline_of(state: State) -> Instant | None:
    """When this state needs a Tick if nothing else happens."""
    match state:
        case Pending(not_before=at):
            return at
        case Starting(deadline=at):
            return at
        case Running(deadline=at) | Completing(kill_at=at):
            return at
        case Suspended(backed_off=why):
            return None if why is None else why.until
        case Finished():
            return None
        case _:
            assert_never(state)


def on_this_clock(now: Instant, job: Job, policy: Policy) -> State:
    """The state of a job that an earlier daemon wrote down: the clock may have begun anew since,
    so no moment lies further ahead than it ever can."""

    def at_most(at: Instant, ms: int) -> Instant:
        return min(at, Instant(now + ms))

    match job.state:
        case Pending(since=since, not_before=not_before):
            not_before = at_most(not_before, policy.launch_retry_delay_ms)
            return replace(job.state, since=min(since, now), not_before=not_before)
        case Starting():
            return replace(job.state, deadline=Instant(now + policy.launch_timeout_ms))
        case Running(since=since, deadline=deadline, rested_at=rested_at):
            limit = job.spec.time_limit_ms
            if deadline is None or limit is None:
                # The default limit has come or gone with the configuration: as it is now.
                deadline = None if limit is None else Instant(now + limit)
            else:
                deadline = at_most(deadline, limit)
            rested_at = None if rested_at is None else min(rested_at, now)
            return replace(
                job.state, since=min(since, now), deadline=deadline, rested_at=rested_at
            )
        case Completing(kill_at=kill_at):
            kill_at = at_most(kill_at, max(job.spec.grace_ms, KILL_AGAIN_MS))
            return replace(job.state, kill_at=kill_at)
        case Suspended(left_ms=left_ms):
            limit = job.spec.time_limit_ms
            known = left_ms is not None and limit is not None
            return replace(job.state, left_ms=left_ms if known else limit)
        case Finished():
            return job.state
        case _:
            assert_never(job.state)


def device_of(placement: Placement) -> Device:
    match placement.gpus:
        case ():
            return None
        case (gpu,):
            return gpu
        case _:
            return GpuId(SEVERAL)


def backed_off_by(job: Job) -> BackedOff | None:
    return job.state.backed_off if isinstance(job.state, Suspended) else None


def is_in_line(state: State) -> bool:
    """It may start, or tries to."""
    return isinstance(state, Starting) or (isinstance(state, Pending) and not state.held)


def running_since(now: Instant, job: Job) -> Instant:
    """Since when an attempt runs; one that has yet to start, since now."""
    match job.state:
        case Running(since=since):
            return since
        case Suspended() | Starting() | Completing():
            return now
        case Pending() | Finished():
            raise AssertionError(f"{job} holds nothing")
        case _:
            assert_never(job.state)


def known_end(now: Instant, job: Job) -> Instant | None:
    match job.state:
        case Running(deadline=at):
            return None if at is None else Instant(at + job.spec.grace_ms)
        case Suspended():
            return None
        case Starting():
            return latest_end(now, job.spec)
        case Completing(kill_at=at):
            return max(at, now)
        case Pending() | Finished():
            raise AssertionError(f"{job} holds nothing")
        case _:
            assert_never(job.state)


def end_of(exit_: Exit) -> Finished:
    if exit_.oom == "gpu":
        return Finished(Outcome.OUT_OF_MEMORY, exit_, "ran out of GPU memory")
    if exit_.oom == "host":
        limit_mib = exit_.oom_limit_mib
        at = "" if limit_mib is None else f": it reached its limit of {limit_mib} MiB"
        return Finished(Outcome.OUT_OF_MEMORY, exit_, f"ran out of host memory{at}")
    if exit_.signal is not None:
        return Finished(Outcome.FAILED, exit_, f"killed by {_signal_name(exit_.signal)}")
    if exit_.code == 0:
        return Finished(Outcome.COMPLETED, exit_, "")
    return Finished(Outcome.FAILED, exit_, f"exit code {exit_.code}")


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
