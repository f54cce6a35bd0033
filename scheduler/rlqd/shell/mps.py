"""What CUDA MPS means for jobs: what they are given, whether they are on it, how they leave it.

A program that cannot reach the MPS control daemon runs on without MPS and says nothing.  So a
job's processes are looked up among the MPS clients once they are on a GPU, and a job that is not
there is shown.  A client that dies of a signal while it computes can take the MPS server, and
with it everybody's jobs, along.  So before a deadly signal the server is told to let go of it;
the signal follows when that is done, or when it has taken too long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from rlq.protocol.messages import JobSpec
from rlqd.adapters.mps import Mps, Release, Which
from rlqd.core import model
from rlqd.readings import GpusReading

log = logging.getLogger(__name__)

#: A deadly signal is held back at most so long: a control daemon that hangs keeps no job alive.
#: Longer than one command may take, so that an answer is waited for where there is one.
RELEASE_MS = 8_000
#: A reading older than this says nothing about now.
STALE_MS = 60_000
#: Programs that find no control daemon in their pipe directory run without MPS.
NOWHERE = "/nonexistent/rlq-without-mps"
VARIABLES = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)


@dataclass(slots=True, kw_only=True)
class _Signal:
    """A signal that is held back until the job's processes are off the server."""

    send: Callable[[], None]
    due: int


@dataclass(slots=True, kw_only=True)
class MpsJobs:
    """The jobs' side of one control daemon."""

    mps: Mps
    required: bool
    multi_user: bool
    cap_sm: bool
    #: Jobs that started without MPS, and why.
    _without: dict[model.JobId, str] = field(init=False, default_factory=dict[model.JobId, str])
    #: As whom jobs run that were started with MPS.
    _uids: dict[model.JobId, int] = field(init=False, default_factory=dict[model.JobId, int])
    #: When each process was first seen on a GPU.
    _seen_ms: dict[int, int] = field(init=False, default_factory=dict[int, int])
    #: Jobs that have a process on a GPU that is no MPS client: that process.
    _strays: dict[model.JobId, int] = field(init=False, default_factory=dict[model.JobId, int])
    _held: dict[tuple[int, int, Which], _Signal] = field(
        init=False, default_factory=dict[tuple[int, int, Which], _Signal]
    )
    #: Whose clients were let go of before: a further signal need not wait.
    _done: set[tuple[int, int, Which]] = field(
        init=False, default_factory=set[tuple[int, int, Which]]
    )
    _last_problem: str = field(init=False, default="")
    #: The servers that the last problem may have damaged: it is told while one of them runs.
    _blamed: frozenset[int] = field(init=False, default=frozenset())

    # ---- whether GPUs may be given out ---------------------------------------------

    def problem(self) -> str:
        """Why MPS cannot be used now; "": it can."""
        reading = self.mps.reading()
        if reading is None:
            return "the CUDA MPS control daemon has not been asked yet"
        age_ms = _now_ms() - reading.taken_at_ms
        if age_ms > STALE_MS:
            return f"the CUDA MPS control daemon has not answered for {age_ms // 1000} s"
        if reading.problem:
            return reading.problem
        for server in reading.servers:
            if server.status == "FAULT":
                return (
                    f"the CUDA MPS server (pid {server.pid}) has failed, and takes no new client"
                    " until the jobs that were on the same GPU have ended"
                )
        return ""

    def closes_gpus(self) -> str:
        """Why no job may start on a GPU now; "": they may."""
        if self.required or self.mps.reading() is None:
            return self.problem()
        return ""

    # ---- starting ------------------------------------------------------------------

    def variables(
        self, job_id: model.JobId, uid: int, spec: JobSpec, gpu_indices: Collection[int]
    ) -> dict[str, str | None]:
        """What a job that starts on GPUs is given; None: unset.

        Args:
            uid: as whom it runs.
            gpu_indices: of its GPUs, as nvidia-smi numbers them.
        """
        self.forget(job_id)
        reason = self._why_without(uid, spec)
        if reason:
            self._without[job_id] = reason
            return {**dict.fromkeys(VARIABLES), "CUDA_MPS_PIPE_DIRECTORY": NOWHERE}
        self._uids[job_id] = uid
        return self._caps(spec, gpu_indices) | {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.mps.pipe_dir),
            "CUDA_MPS_LOG_DIRECTORY": str(self.mps.log_dir),
        }

    def _caps(self, spec: JobSpec, gpu_indices: Collection[int]) -> dict[str, str | None]:
        """Only a declared amount is a cap, as everywhere."""
        caps: dict[str, str | None] = dict.fromkeys(VARIABLES)
        resources = spec.resources
        if self.cap_sm and resources.sm_pct is not None:
            caps["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(resources.sm_pct)
        if resources.gpu_mem_mib is not None:
            # By number, as documented; nothing says whether the program's numbers are meant (from
            # 0, of the GPUs it sees) or the server's.  The job uses no other GPU: name both.
            numbers = sorted({*range(len(gpu_indices)), *gpu_indices})
            limit = f"{resources.gpu_mem_mib}M"
            caps["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{n}={limit}" for n in numbers)
        return caps

    def _why_without(self, uid: int, spec: JobSpec) -> str:
        if "CUDA_MPS_PIPE_DIRECTORY" in spec.env_given:
            return "its own CUDA_MPS_PIPE_DIRECTORY was given with --env"
        if problem := self.problem():
            return f"when it started, {problem}"
        if self.multi_user:
            return ""
        reading = self.mps.reading()
        servers = reading.servers if reading is not None else ()
        # The control daemon would keep another user's program waiting inside cuInit until these
        # have ended, with its cores and memory held for nothing.
        others = {s.uid for s in servers if s.clients} | set(self._uids.values())
        if others - {uid, None}:
            return "when it started, the MPS server was another user's, and serves one at a time"
        return ""

    # ---- looking after -------------------------------------------------------------

    def look(self, gpus: GpusReading | None, job_of: Callable[[int], model.JobId | None]) -> None:
        """Compare who is on the GPUs with who is an MPS client, job by job.

        Args:
            job_of: the job whose process this is, or None.
        """
        reading = self.mps.reading()
        if gpus is None or reading is None or reading.problem:
            return  # nothing to compare; what was found before stays
        if self._blamed and not self._blamed & {server.pid for server in reading.servers}:
            self._last_problem, self._blamed = "", frozenset()
        on_gpus = {p.pid for gpu in gpus.gpus for p in gpu.processes}
        self._seen_ms = {pid: self._seen_ms.get(pid, gpus.taken_at_ms) for pid in sorted(on_gpus)}
        strays: dict[model.JobId, int] = {}
        attached: set[model.JobId] = set()
        unknown = False
        for pid, seen_ms in self._seen_ms.items():
            if (job_id := job_of(pid)) is None:
                continue
            if pid in reading.clients:
                attached.add(job_id)
            elif reading.taken_at_ms > seen_ms:
                strays[job_id] = pid
            else:
                unknown = True
        # A job with one client is on MPS: a helper of it that only draws is on the GPU as well.
        strays = {job_id: pid for job_id, pid in strays.items() if job_id not in attached}
        for job_id in strays.keys() - self._strays.keys():
            log.warning("job %d: %s", job_id, _stray_words(strays[job_id]))
        self._strays = strays
        if unknown:
            self.mps.ask()

    def is_client(self, pid: int) -> bool | None:
        """None: nobody knows."""
        reading = self.mps.reading()
        if reading is None or reading.problem:
            return None
        if pid in reading.clients:
            return True
        return False if pid in self._strays.values() else None

    def remark(self, job_id: model.JobId) -> str:
        """What is to be said of a running job; "": it is on MPS, or on no GPU yet."""
        if job_id in self._without:
            return f"runs without CUDA MPS: {self._without[job_id]}"
        if job_id in self._strays:
            return _stray_words(self._strays[job_id])
        return ""

    def problems(self) -> list[str]:
        """For `rlq status`."""
        problems: list[str] = []
        if problem := self.problem():
            effect = "no job starts on a GPU" if self.closes_gpus() else "jobs start without MPS"
            problems.append(f"{problem}: {effect}")
        if remarks := sorted(self._without.keys() | self._strays.keys()):
            ids = ", ".join(map(str, remarks))
            problems.append(f"without CUDA MPS: job {ids} (`rlq show ID` tells why)")
        if self._last_problem:
            problems.append(self._last_problem)
        return problems

    def forget(self, job_id: model.JobId) -> None:
        """It holds no GPU (any more)."""
        if self._uids.pop(job_id, None) is not None:
            self.mps.ask()  # a client that died badly has left its mark on the server
        self._without.pop(job_id, None)
        self._strays.pop(job_id, None)
        self._done = {key for key in self._done if key[0] != job_id}
        for key in [key for key in self._held if key[0] == job_id]:
            del self._held[key]

    def recover(self, uids: Mapping[model.JobId, int]) -> None:
        """After a restart: taken to be on MPS until its processes are seen elsewhere."""
        self._uids = dict(uids)
        self._held.clear()
        self._done.clear()

    # ---- ending --------------------------------------------------------------------

    def before(self, order: Release, send: Callable[[], None]) -> None:
        """Have the job's clients terminated, then `send` the signal."""
        if order.job not in self._uids:
            send()  # it never was on MPS
            return
        key = (order.job, order.attempt, order.which)
        if key in self._held:
            return  # it is on its way
        if key in self._done:
            send()
            return
        self._held[key] = _Signal(send=send, due=_now_ms() + RELEASE_MS)
        self.mps.release(order)

    def take(self) -> None:
        """There is news from the thread."""
        for released in self.mps.drain():
            order = released.order
            if released.terminated:
                pids = ", ".join(map(str, released.terminated))
                log.info("job %d: MPS client %s terminated", order.job, pids)
            if released.problem:
                self._blame(order.job, released.problem)
            self._send((order.job, order.attempt, order.which))

    def send_due(self) -> None:
        now_ms = _now_ms()
        for key in [key for key, held in self._held.items() if held.due <= now_ms]:
            self._blame(key[0], f"no answer within {RELEASE_MS // 1000} s")
            self._send(key)

    def next_due(self) -> Iterable[int]:
        return (held.due for held in self._held.values())

    def _send(self, key: tuple[int, int, Which]) -> None:
        if (held := self._held.pop(key, None)) is None:
            return  # sent when it was due, or the job has ended by itself
        self._done.add(key)
        held.send()

    def _blame(self, job: int, problem: str) -> None:
        log.warning("job %d could not be taken off the MPS server: %s", job, problem)
        reading = self.mps.reading()
        servers = reading.servers if reading is not None else ()
        if not servers:
            return  # no server, no client: nothing was harmed
        self._blamed = frozenset(server.pid for server in servers)
        self._last_problem = (
            f"job {job} was ended while it may have been an MPS client ({problem}): if jobs on the"
            " GPUs fail or hang now, end them and restart the MPS control daemon"
        )


def _stray_words(pid: int) -> str:
    return (
        f"runs without CUDA MPS: its process {pid} is on a GPU, but is no client of the MPS server"
    )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
