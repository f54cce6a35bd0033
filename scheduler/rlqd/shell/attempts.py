"""The processes of started jobs: launched, watched, signalled, found again, and cleared away.

Whatever happens to one becomes an event for the core; what to do about it is the core's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

import zmq

from rlqd.adapters import processes
from rlqd.adapters.mps import Release, Which
from rlqd.adapters.processes import End, Handle, LaunchOrder, Processes
from rlqd.core import model
from rlqd.shell.mps import MpsJobs
from rlqd.shell.sampling import Sampler
from rlqd.shell.views import Live

#: Folders of ended attempts are removed a few at a time: nobody waits for it.
DISCARDS_PER_TURN = 8


@dataclass(slots=True, kw_only=True)
class Attempts:
    processes: Processes
    poller: zmq.Poller
    sampler: Sampler
    live: dict[model.JobId, Live]
    #: None: CUDA MPS is left alone.
    mps: MpsJobs | None = None
    #: Told why a job's scope could not be made.
    fence_failed: Callable[[str], None]
    _handles: dict[model.JobId, Handle] = field(default_factory=dict[model.JobId, Handle])
    #: Whose a polled descriptor is.  A handle's own numbers do not tell: its ready pipe is
    #: closed early, and the number then is the next launch's.
    _watched: dict[int, Handle] = field(default_factory=dict[int, Handle])
    _ended: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])

    def jobs_by_supervisor(self) -> dict[int, model.JobId]:
        return {handle.pid: job_id for job_id, handle in self._handles.items()}

    def watches(self, fd: int) -> bool:
        return fd in self._watched

    # ---- orders --------------------------------------------------------------------

    def launch(self, order: LaunchOrder, now: model.Instant) -> list[model.Event]:
        """What is known at once: nothing, or that it failed."""
        handle = self.processes.launch(order)
        if isinstance(handle, processes.LaunchError):
            if handle.stage == "fence":
                self.fence_failed(handle.message)
            return [_launch_failed(now, handle)]
        self._adopt(handle)
        return []

    def terminate(self, job_id: model.JobId, attempt: int) -> None:
        self._signal(job_id, attempt, Which.UNHANDLED, self.processes.terminate)

    def kill(self, job_id: model.JobId, attempt: int) -> None:
        self._signal(job_id, attempt, Which.ALL, self.processes.kill)

    def _signal(
        self, job_id: model.JobId, attempt: int, which: Which, send: Callable[[Handle], None]
    ) -> None:
        """At once, or, for a job on CUDA MPS, when its processes are off the MPS server."""
        if (handle := self._handle(job_id, attempt)) is None:
            return
        if self.mps is None:
            send(handle)
            return

        def send_now() -> None:
            # By then it may have ended, and its pidfd's number be another's.
            if (handle := self._handle(job_id, attempt)) is not None:
                send(handle)

        release = Release(job=job_id, attempt=attempt, root_pid=handle.pid, which=which)
        self.mps.before(release, send_now)

    def freeze(self, job_id: model.JobId, attempt: int, *, on: bool) -> None:
        if handle := self._handle(job_id, attempt):
            (self.processes.freeze if on else self.processes.thaw)(handle)

    def _handle(self, job_id: model.JobId, attempt: int) -> Handle | None:
        """None: it has gone, and its end is on the way to the core."""
        handle = self._handles.get(job_id)
        return handle if handle is not None and handle.attempt == attempt else None

    # ---- news ----------------------------------------------------------------------

    def news(self, fd: int, now: model.Instant) -> list[model.Event]:
        """`fd`, one of ours, is readable: what happened."""
        handle = self._watched[fd]
        job_id = model.JobId(handle.job)
        if fd == handle.ready_fd:
            return self._launch_news(handle, now)
        self._unwatch(handle)
        if self._handles.get(job_id) is handle:
            del self._handles[job_id]
        self._tell_sampler()
        end = self._reap(handle)
        match end:
            case processes.ExitRecord():
                return [_exited(now, end)]
            case processes.LaunchError():
                if end.stage == "fence":
                    self.fence_failed(end.message)
                # Perhaps told before, by the ready pipe: the core drops stale news.
                return [_launch_failed(now, end)]
            case processes.Lost(reason=reason):
                return [model.ProcessLost(now, job_id, handle.attempt, reason)]
            case _:
                assert_never(end)

    def _reap(self, handle: Handle) -> End:
        try:
            return self.processes.reap(handle)
        except OSError as error:  # a cleaner of /tmp has been at the state folder, or it is full
            reason = f"its records cannot be read: {error.strerror}"
            return processes.Lost(job=handle.job, attempt=handle.attempt, reason=reason)

    def _launch_news(self, handle: Handle, now: model.Instant) -> list[model.Event]:
        job_id = model.JobId(handle.job)
        assert handle.ready_fd is not None
        # The last word closes the descriptor, so it must not be polled by then.
        self._unwatch_one(handle.ready_fd, handle)
        said = self.processes.read_ready(handle)
        match said:
            case None:
                self._watch(handle.ready_fd, handle)
                return []
            case processes.Started(pid=pid, command_pid=command_pid, cgroup=cgroup):
                if job_id in self.live:
                    self.live[job_id].command_pid = command_pid
                    self.live[job_id].cgroup = cgroup
                return [model.ProcessStarted(now, job_id, handle.attempt, pid)]
            case processes.LaunchError():
                return [_launch_failed(now, said)]
            case processes.Silent():
                return []  # the pidfd will tell
            case _:
                assert_never(said)

    # ---- coming back ---------------------------------------------------------------

    def recover(self, job: model.Job, now: model.Instant) -> model.Event:
        """What became of a job that a former daemon started, or was about to start."""
        found = self.processes.recover(job.id, job.attempt)
        match found:
            case processes.Alive(handle=handle):
                self._adopt(handle)
                self.live[job.id].command_pid = handle.command_pid
                self.live[job.id].cgroup = handle.cgroup
                return model.ProcessStarted(now, job.id, job.attempt, handle.pid)
            case processes.Exited(record=record):
                ago_ms = max(0, round((time.time() - record.ended_at) * 1000))
                return replace(_exited(now, record), ago_ms=ago_ms)
            case processes.LaunchError():
                return _launch_failed(now, found)
            case processes.Lost(reason=reason):
                return model.ProcessLost(now, job.id, job.attempt, reason)
            case processes.Voided():
                return model.LaunchVoided(now, job.id, job.attempt)
            case _:
                assert_never(found)

    def stop_unrecorded(self, job_id: int, attempt: int, at_once: bool) -> list[int]:
        """Signal a job of which nothing can be recorded: [job_id] if there was one to signal."""
        try:
            found = self.processes.recover(job_id, attempt)
        except OSError:
            return []
        if not isinstance(found, processes.Alive):
            return []
        (self.processes.kill if at_once else self.processes.terminate)(found.handle)
        self.processes.release(found.handle)
        return [job_id]

    def forget(self) -> None:
        """Let go of every process without touching it: `recover` finds them again."""
        for handle in self._handles.values():
            self._unwatch(handle)
            self.processes.release(handle)
        self._handles.clear()
        self._ended.clear()

    # ---- clearing away -------------------------------------------------------------

    def discard(self, job_id: model.JobId, attempt: int) -> None:
        """Its end is committed: its folder may go, some time."""
        self._ended.append((job_id, attempt))

    def discard_all_but(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Folders left by a daemon that died between the commit of an end and its clearing."""
        kept = set(wanted)
        self._ended.extend(key for key in self.processes.attempts() if key not in kept)

    def has_discards(self) -> bool:
        return bool(self._ended)

    def discard_some(self) -> None:
        for _ in range(min(DISCARDS_PER_TURN, len(self._ended))):
            self.processes.discard(*self._ended.popleft())

    # ---- inside --------------------------------------------------------------------

    def _adopt(self, handle: Handle) -> None:
        self._handles[model.JobId(handle.job)] = handle
        self._watch(handle.pidfd, handle)
        if handle.ready_fd is not None:
            self._watch(handle.ready_fd, handle)
        self._tell_sampler()

    def _watch(self, fd: int, handle: Handle) -> None:
        self._watched[fd] = handle
        self.poller.register(fd, zmq.POLLIN)

    def _unwatch(self, handle: Handle) -> None:
        self._unwatch_one(handle.pidfd, handle)
        if handle.ready_fd is not None:
            self._unwatch_one(handle.ready_fd, handle)

    def _unwatch_one(self, fd: int, handle: Handle) -> None:
        if self._watched.get(fd) is handle:
            del self._watched[fd]
            self.poller.unregister(fd)

    def _tell_sampler(self) -> None:
        self.sampler.watch([handle.pid for handle in self._handles.values()])


def _launch_failed(now: model.Instant, error: processes.LaunchError) -> model.LaunchFailed:
    return model.LaunchFailed(
        now, model.JobId(error.job), error.attempt, error.message, error.passing
    )


def _exited(now: model.Instant, record: processes.ExitRecord) -> model.ProcessExited:
    exit_ = model.Exit(
        code=record.code,
        signal=record.signal,
        oom=record.oom,
        oom_limit_mib=record.oom_limit_mib,
        stopped_by_others=record.stopped_by_others,
    )
    return model.ProcessExited(now, model.JobId(record.job), record.attempt, exit_)
