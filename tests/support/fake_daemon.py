"""A daemon that runs nothing: a ROUTER socket, the real codec, a dictionary of jobs.

Tests set its `jobs`, its `answers` (to a type of request: a reply, or a function of the request),
and read its `requests`.  It is no model of rlqd: what it does not need to know it makes up.
"""

from __future__ import annotations

import fnmatch
import os
import pwd
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from rlq import __version__
from rlq.errors import ProtocolError
from rlq.protocol import PROTOCOL_VERSION, codec
from rlq.protocol import messages as m
from rlq.protocol.states import LIVE_STATES, JobState

ME = os.getuid()
MY_NAME = pwd.getpwuid(ME).pw_name
POLL_MS = 10

Answer = m.Reply | Callable[[m.Request], m.Reply | None]


def make_job(id: int, state: JobState = JobState.PENDING, **fields: object) -> m.Job:
    job = m.Job(
        id=id,
        name=f"job-{id}",
        user=MY_NAME,
        uid=ME,
        state=state,
        argv=("true",),
        cwd="/",
        submitted_at=time.time() - 60,
    )
    return msgspec.structs.replace(job, **fields)


class FakeDaemon:
    """Answers on `path` from a thread until the `with` block ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: dict[int, m.Job] = {}
        #: What was submitted, with the environment that was shared.
        self.submitted: list[tuple[m.JobSpec, dict[str, str]]] = []
        self.requests: list[m.Request] = []
        self.answers: dict[type[m.Request], Answer] = {}
        self.env: dict[str, str] = {}
        self.draining = False
        self.acts: tuple[m.Act, ...] = ()
        self.stopping = threading.Event()
        self._failure: BaseException | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._serve, name="fake-rlqd", daemon=True)
        self._ready = threading.Event()
        self._waiting: list[tuple[bytes, bytes, m.Wait, float]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._failure is not None and error is None:
            raise self._failure

    def stop(self) -> None:
        """As kill -9: connections break, the socket file stays."""
        self.stopping.set()
        self._thread.join(10)
        self._context.term()

    def add(self, *jobs: m.Job) -> None:
        self.jobs |= {job.id: job for job in jobs}

    def set(self, id: int, **fields: object) -> None:
        self.jobs[id] = msgspec.structs.replace(self.jobs[id], **fields)

    def asked(self, kind: type[m.Request]) -> list[m.Request]:
        return [request for request in self.requests if isinstance(request, kind)]

    # ---- the thread ----------------------------------------------------------------

    def _serve(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        try:
            socket.bind(f"ipc://{self.path}")
            self._ready.set()
            while not self.stopping.is_set():
                if socket.poll(POLL_MS):
                    peer, *frames = socket.recv_multipart()
                    self._handle(socket, peer, frames)
                self._answer_waiting(socket)
        except BaseException as failure:
            self._failure = failure
        finally:
            socket.close(linger=200)

    def _handle(self, socket: zmq.Socket[bytes], peer: bytes, frames: list[bytes]) -> None:
        try:
            request_id, request = codec.decode_request(frames)
        except ProtocolError as error:
            refusal = codec.error_reply(error)
            socket.send_multipart(
                [peer, *codec.encode(codec.request_id_of(frames) or b"?", refusal)]
            )
            return
        self.requests.append(request)
        if type(request) in self.answers:
            answer = self.answers[type(request)]
            reply = answer(request) if callable(answer) else answer
        elif isinstance(request, m.Wait):
            deadline = time.monotonic() + request.timeout_ms / 1000
            self._waiting.append((peer, request_id, request, deadline))
            return
        else:
            reply = self._reply(request)
        if reply is not None:
            socket.send_multipart([peer, *codec.encode(request_id, reply)])
        if isinstance(request, m.Stop) and isinstance(reply, m.Ok):
            self.stopping.set()

    def _answer_waiting(self, socket: zmq.Socket[bytes]) -> None:
        still = []
        for peer, request_id, request, deadline in self._waiting:
            jobs, missing = self._select(request.selection)
            done = all(job.state.is_final for job in jobs)
            if done or time.monotonic() >= deadline:
                waited = m.Waited(done=done, jobs=tuple(jobs), missing=missing)
                socket.send_multipart([peer, *codec.encode(request_id, waited)])
            else:
                still.append((peer, request_id, request, deadline))
        self._waiting = still

    def _reply(self, request: m.Request) -> m.Reply:
        match request:
            case m.Ping():
                return m.Pong(version=__version__, protocol=PROTOCOL_VERSION, pid=os.getpid())
            case m.Submit():
                return self._submit(request)
            case m.List():
                jobs, missing = self._select(request.selection)
                jobs.sort(key=lambda job: -job.id)
                total = len(jobs)
                jobs = [job for job in jobs if not request.before or job.id < request.before]
                shown = tuple(jobs[: request.limit or None])
                return m.Jobs(jobs=shown, total=total, missing=missing)
            case m.Cancel():
                return self._change(request.selection, state=JobState.CANCELLED)
            case m.Hold():
                return self._change(request.selection, held=True)
            case m.Release():
                return self._change(request.selection, held=False)
            case m.Prioritize(priority=priority):
                return self._change(request.selection, priority=priority)
            case m.Pause():
                return self._change(request.selection, state=JobState.SUSPENDED)
            case m.Resume():
                return self._change(request.selection, state=JobState.RUNNING)
            case m.Requeue():
                return self._change(request.selection, ended_too=True, state=JobState.PENDING)
            case m.Why():
                if request.id not in self.jobs:
                    return m.Error(kind="not-found", message=f"there is no job {request.id}")
                state = self.jobs[request.id].state
                return m.Explanation(id=request.id, state=state, summary="It is made up.")
            case m.Environment():
                return m.Variables(env=self.env)
            case m.Attempts():
                return m.AttemptList(attempts=())
            case m.Devices():
                return m.Machine(host=HOST)
            case m.Share(job=job):
                return shares_of(job)
            case m.Profile():
                return m.Profiles()
            case m.Forget():
                return m.Ok(message=f"forgotten: {request.signature}")
            case m.Audit():
                return m.Acts(acts=self.acts)
            case m.Status():
                return m.DaemonStatus(
                    version=__version__,
                    pid=os.getpid(),
                    uid=ME,
                    started_at=time.time() - 100,
                    state_dir=str(self.path.parent),
                    socket=str(self.path),
                    draining=self.draining,
                )
            case m.Drain():
                self.draining = request.on
                return m.Ok(message="draining" if request.on else "open")
            case m.Reserve():
                return m.Booked(
                    booking=m.Booking(
                        kind="maintenance" if request.maintenance else "reservation",
                        name=request.name or "made_up_1",
                        by="root",
                        users=request.users,
                        gpu_indices=tuple(range(request.gpus)),
                        cores=request.cores or 0,
                        mem_mib=request.mem_mib or 0,
                        starts_at=request.starts_at,
                        ends_at=request.ends_at,
                    )
                )
            case m.Claim():
                now = time.time()
                return m.Booked(
                    booking=m.Booking(
                        kind="claim",
                        name="claim_1",
                        by="me",
                        gpu_indices=(request.gpu_index,),
                        starts_at=now,
                        ends_at=now + request.for_ms / 1000,
                    )
                )
            case m.Unbook():
                return m.Ok(message=f"no longer booked: {request.name or 'claim_1'}")
            case m.Bookings():
                return m.Calendar()
            case m.Stop() | m.EnrolKey() | m.RevokeKey():
                return m.Ok()
            case m.ListKeys():
                return m.Keys(server_key="a" * 52, endpoint="tcp://127.0.0.1:7757")
            case m.Wait():
                raise AssertionError("answered later")

    def _submit(self, request: m.Submit) -> m.Submitted:
        first = max(self.jobs, default=0) + 1
        ids = tuple(range(first, first + len(request.jobs)))
        for id, spec in zip(ids, request.jobs, strict=True):
            self.submitted.append((spec, request.env))
            self.add(
                make_job(
                    id,
                    name=spec.name,
                    argv=spec.argv,
                    cwd=spec.cwd,
                    resources=spec.resources,
                    held=spec.held,
                    log_path=spec.log_path or str(self.path.parent / f"{id}.log"),
                )
            )
        return m.Submitted(ids=ids, log_paths=tuple(self.jobs[id].log_path for id in ids))

    def _select(self, selection: m.Selection) -> tuple[list[m.Job], tuple[int, ...]]:
        jobs = [
            job
            for job in self.jobs.values()
            if (not selection.ids or any(a <= job.id <= b for a, b in selection.ids))
            and (selection.name is None or fnmatch.fnmatchcase(job.name, selection.name))
            and (not selection.states or job.state in selection.states)
            and (selection.uid is None or job.uid == selection.uid)
        ]
        missing = tuple(a for a, b in selection.ids if a == b and a not in self.jobs)
        return jobs, missing

    def _change(
        self, selection: m.Selection, *, ended_too: bool = False, **fields: object
    ) -> m.Changed:
        jobs, missing = self._select(selection)
        changes = [
            m.Change(id=id, ok=False, kind="not-found", message="no such job") for id in missing
        ]
        for job in jobs:
            if job.uid != ME:
                changes.append(
                    m.Change(id=job.id, ok=False, kind="not-permitted", message=f"{job.user}'s")
                )
            elif job.state in LIVE_STATES or ended_too:
                self.set(job.id, **fields)
                changes.append(m.Change(id=job.id, ok=True, state=self.jobs[job.id].state))
            elif selection.ids:
                changes.append(
                    m.Change(id=job.id, ok=False, kind="usage", message=f"already {job.state}")
                )
        return m.Changed(changes=tuple(sorted(changes, key=lambda change: change.id)))


HOST = m.Host(
    cores=16,
    cores_physical=8,
    cores_assigned=3,
    cores_outside=1.5,
    mem_mib_total=64 * 1024,
    mem_mib_available=40 * 1024,
    mem_mib_charged=12 * 1024,
)


def shares_of(job: int | None) -> m.Shares:
    """Ada has had much, Bob nothing; job 7 is Ada's and waits."""

    def standing(user: str, uid: int, hours: float, held: float, factor: float) -> m.UserShare:
        return m.UserShare(
            user=user,
            uid=uid,
            shares=1,
            part=0.5,
            machine_hours=hours,
            gpu_hours=hours / 2,
            core_hours=hours * 16,
            held=held,
            counted_hours=hours + held,
            factor=factor,
        )

    rank = m.JobRank(
        id=7, user="ada", priority=0, waited_s=86_400, age=142, share=2_500, jobs_ahead=12
    )
    return m.Shares(
        users=(standing("bob", 1002, 0, 0, 1.0), standing("ada", 1001, 120.5, 0.5, 0.25)),
        half_life_s=7 * 86_400,
        held_counts_as_s=3_600,
        age_weight=1_000,
        age_max_s=7 * 86_400,
        share_weight=10_000,
        job=rank if job == 7 else None,
    )
