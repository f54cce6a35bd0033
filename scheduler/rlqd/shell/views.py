"""What clients are shown: rows, live readings and the core's reasons, put together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlq.protocol.messages import (
    Calendar,
    DaemonStatus,
    Explanation,
    Gpu,
    GpuProcess,
    Host,
    Job,
    Machine,
    Throughput,
    Usage,
)
from rlq.protocol.messages import Enforcement as WireEnforcement
from rlq.protocol.states import JobState
from rlq.protocol.units import format_duration
from rlq.version import VERSION
from rlqd.adapters.cgroups import CONTROLLERS, describe
from rlqd.adapters.sqlite import Row
from rlqd.config import Config
from rlqd.core import model
from rlqd.core.crowd import Crowd
from rlqd.core.guard import ONE_JOB
from rlqd.core.machine import Scheduler
from rlqd.core.policy import Plan
from rlqd.core.states import placement_of
from rlqd.fences import Enforcement, Means
from rlqd.readings import GpuReading, GpusReading, HostReading
from rlqd.shell import explaining, launching, rows
from rlqd.shell.accounts import Accounts, Peer
from rlqd.shell.mps import MpsJobs
from rlqd.shell.progress import Tracker
from rlqd.shell.signature import signature_of

#: In place of a command line, with daemon.hide_commands.
HIDDEN = "<hidden>"


@dataclass(slots=True)
class Live:
    """What is known of a job beyond the core's facts while it is not finished."""

    uid: int
    user: str
    started_at: float | None = None
    command_pid: int | None = None
    #: Of the command's own control group; None: it has none.
    cgroup: str | None = None
    progress: Tracker | None = None
    #: As `rows.Detail.log_path`; None: not looked up yet.
    log_path: str | None = None
    #: As `rows.Detail.preempted_by`.
    preempted_by: int | None = None


@dataclass(slots=True)
class Views:
    """Reads everything, changes nothing."""

    config: Config
    logs_dir: str
    core: Scheduler
    live: dict[model.JobId, Live]
    accounts: Accounts
    host: Callable[[], HostReading | None]
    gpus: Callable[[], GpusReading | None]
    supervisor_of: Callable[[int], int | None]
    owner_of: Callable[[int], tuple[str, str]]
    enforcement: Callable[[], Enforcement]
    #: What is booked just now, and a window of the core's in words.
    booked_now: Callable[[], Calendar] = Calendar
    kept_words: explaining.KeptWords = str
    #: None: CUDA MPS is left alone.
    mps: MpsJobs | None = None
    started_at: float = field(default_factory=time.time)
    _plan: Plan | None = None
    _plan_is_fresh: bool = False

    def invalidate(self) -> None:
        """A step was taken: what was planned before it is out of date."""
        self._plan_is_fresh = False

    def plan(self) -> Plan | None:
        if not self._plan_is_fresh:
            self._plan = self.core.plan()
            self._plan_is_fresh = True
        return self._plan

    # ---- jobs ----------------------------------------------------------------------

    def job(self, row: Row, viewer: Peer) -> Job:
        """One job.  Its environment is never in it."""
        job_id = model.JobId(row.id)
        spec = rows.shown_spec(row)
        detail = rows.load_detail(row.detail)
        live = self.live.get(job_id)
        known = self.core.jobs.get(job_id)
        is_hidden = self.config.daemon.hide_commands and not self.accounts.may_act_for(
            viewer, row.uid
        )
        reason = row.reason
        if is_hidden and tells_of_command(row):
            reason = HIDDEN
        placement, usage, progress = detail.placement, detail.usage, detail.progress
        pid = None
        after: tuple[int, ...] = ()
        if known is not None:
            if isinstance(known.state, model.Pending):
                after = () if known.state.after is None else known.state.after.job_ids
                reason = explaining.waiting_reason(self.core, self.plan(), known, self.kept_words)
            elif isinstance(known.state, model.Completing):
                reason = _stopping(self.core.now, known.state)
            elif isinstance(known.state, model.Suspended) and known.state.backed_off is not None:
                reason = explaining.paused_reason(known.state.backed_off, self._where(known))
            else:
                reason = self._remark(job_id) or reason
            usage = self.usage(known) or usage
            placement = rows.wire_placement(known.state, self.gpu_indices())
        if live is not None:
            pid = live.command_pid
            if live.progress is not None:
                progress = live.progress.view()
        return Job(
            id=row.id,
            name=row.name,
            user=row.user,
            uid=row.uid,
            state=row.state,
            reason=reason,
            held=row.held,
            after=after,
            priority=row.priority,
            argv=(HIDDEN,) if is_hidden else spec.argv,
            cwd="" if is_hidden else spec.cwd,
            resources=spec.resources,
            attempt=row.attempt,
            preempted_by=detail.preempted_by,
            submitted_at=row.submitted_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            exit_code=row.exit_code,
            signal=row.signal,
            placement=placement,
            usage=usage,
            progress=progress,
            pid=pid,
            log_path=""
            if is_hidden
            else detail.log_path or launching.log_path(spec, row.id, row.uid, self.logs_dir),
            signature="" if is_hidden else signature_of(spec),
        )

    def _remark(self, job_id: model.JobId) -> str:
        """What its user should know of a running job; "": nothing."""
        remarks = [] if self.mps is None else [self.mps.remark(job_id)]
        live, found = self.live.get(job_id), self.enforcement()
        is_bare = live is not None and live.command_pid is not None and live.cgroup is None
        if is_bare and found.cgroup is not None:
            is_so_now = found.means is Means.AFFINITY
            why = found.problem if is_so_now else "none could be set when it started"
            remarks.append(f"runs without limits: {why}")
        return "; ".join(filter(None, remarks))

    def usage(self, job: model.Job) -> Usage | None:
        """What a running job was last measured at; None: not yet, or not running."""
        measured = dict(self.core.facts.jobs).get(job.id) if self.core.facts is not None else None
        if measured is None:
            return None
        print_ = self.core.footprints.get(job.id)
        mem = [s.mem_mib for _, s in measured.gpus if s.mem_mib is not None]
        sm = [s.sm_pct for _, s in measured.gpus if s.sm_pct is not None]
        cpu = measured.cpu_millicores
        return Usage(
            cpu_cores=None if cpu is None else cpu / 1000,
            mem_mib=measured.mem_mib,
            gpu_mem_mib=max(mem, default=None),
            sm_pct=max(sm, default=None),
            settled=print_ is not None and print_.settled,
        )

    def _where(self, job: model.Job) -> str:
        placement = placement_of(job.state)
        gpus = placement.gpus if placement is not None else ()
        return f"GPU {self.gpu_indices().get(gpus[0], '?')}" if gpus else "the CPU"

    def explanation(self, row: Row, viewer: Peer) -> Explanation:
        job = self.core.jobs.get(model.JobId(row.id))
        if job is None or not isinstance(job.state, model.Pending):
            view = self.job(row, viewer)
            summary = _state_words(view)
            if job is not None and isinstance(job.state, model.Suspended) and job.state.backed_off:
                left_ms = max(0, job.state.backed_off.until - self.core.now)
                summary = (
                    f"{view.reason}; it goes on in {format_duration(left_ms / 1000)} at the latest"
                    f" (`rlq resume {row.id}`: at once, for good)"
                )
            return Explanation(id=row.id, state=view.state, summary=summary)
        return explaining.explanation(
            self.core,
            self.plan(),
            job,
            now_unix=time.time(),
            user_of=lambda job_id: self.live[job_id].user if job_id in self.live else "",
            kept=self.kept_words,
        )

    # ---- the machine ---------------------------------------------------------------

    def gpu_indices(self) -> dict[model.GpuId, int]:
        reading = self.gpus()
        return {} if reading is None else {model.GpuId(g.uuid): g.index for g in reading.gpus}

    def machine(self, viewer: Peer) -> Machine:
        host, gpus = self.host(), self.gpus()
        holdings = self.core.holdings()
        booked = self.booked_now()
        facts = self.core.facts
        crowd = Crowd.of(holdings, facts) if facts is not None else None
        physical = len({c.physical for c in facts.cores}) if facts is not None else 0
        return Machine(
            host=Host(
                cores=len(facts.cores) if facts is not None else 0,
                cores_physical=physical,
                cores_assigned=len({c for h in holdings for c in h.placement.cores}),
                cores_outside=0.0 if host is None else round(host.cores_outside, 2),
                mem_mib_total=0 if host is None else host.mem_mib_total,
                mem_mib_available=0 if host is None else host.mem_mib_available,
                mem_mib_charged=sum(h.charge.mem_mib for h in holdings),
                throughput=self._throughput(crowd, None),
            ),
            gpus=tuple(self._gpu(g, crowd, viewer) for g in (() if gpus is None else gpus.gpus)),
            nvml_problem="not read yet" if gpus is None else gpus.problem,
            nvml_absent=gpus is not None and gpus.absent,
            bookings=booked.bookings,
            quiet=booked.quiet,
        )

    def _throughput(self, crowd: Crowd | None, device: model.GpuId | None) -> Throughput:
        if crowd is None:
            return Throughput()
        found = crowd.throughput(self.core.guard, device)
        return Throughput(
            jobs=found.jobs,
            stp=None if found.stp is None else found.stp / ONE_JOB,
            antt=None if found.antt is None else found.antt / ONE_JOB,
        )

    def _gpu(self, gpu: GpuReading, crowd: Crowd | None, viewer: Peer) -> Gpu:
        gpu_id = model.GpuId(gpu.uuid)
        here = [h for h in self.core.holdings() if gpu_id in h.placement.gpus]
        account = self.accounts.account(viewer.uid)
        viewer_name = str(viewer.uid) if account is None else account.name
        hides = self.config.daemon.hide_commands and not self.accounts.is_operator(viewer)
        processes: list[GpuProcess] = []
        for process in gpu.processes:
            user, command = self.owner_of(process.pid)
            if hides and user != viewer_name:
                command = HIDDEN
            processes.append(
                GpuProcess(
                    pid=process.pid,
                    user=user,
                    command=command,
                    job=self._job_of(process.pid),
                    mem_mib=process.mem_mib,
                    sm_pct=process.sm_pct,
                    mps=None if self.mps is None else self.mps.is_client(process.pid),
                )
            )
        return Gpu(
            uuid=gpu.uuid,
            index=gpu.index,
            name=gpu.name,
            problem=gpu.problem,
            mem_mib_total=gpu.mem_mib_total,
            mem_mib_free=gpu.mem_mib_free,
            sm_pct=gpu.sm_pct,
            temperature_c=gpu.temperature_c,
            power_w=gpu.power_w,
            mig=gpu.mig,
            cores_near=gpu.cores_near,
            processes=tuple(processes),
            mem_mib_charged=sum(h.charge.gpu_mem_mib for h in here),
            sm_pct_charged=sum(h.charge.sm_pct for h in here),
            throughput=self._throughput(crowd, gpu_id),
        )

    def _job_of(self, pid: int) -> int | None:
        supervisor = self.supervisor_of(pid)
        if supervisor is None:
            return None
        for job_id in self.live:
            job = self.core.jobs.get(job_id)
            if job is not None and supervisor_pid(job.state) == supervisor:
                return job_id
        return None

    def status(
        self,
        *,
        state_dir: str,
        socket: str,
        draining: bool,
        problems: tuple[str, ...],
        counts: dict[str, int],
        config_path: str,
        stats: dict[str, float],
    ) -> DaemonStatus:
        return DaemonStatus(
            version=VERSION,
            pid=os.getpid(),
            uid=os.geteuid(),
            started_at=self.started_at,
            state_dir=state_dir,
            socket=socket,
            draining=draining,
            problems=problems,
            counts=counts,
            rss_mib=_rss_mib(),
            config_path=config_path,
            stats=dict(stats),
            enforcement=_enforcement(self.enforcement()),
        )


def tells_of_command(row: Row) -> bool:
    """Whether the reason of such an end may name the command, its folder or its log: it could not
    be started, and perhaps was cancelled meanwhile."""
    ends = (JobState.LAUNCH_FAILED, JobState.CANCELLED, JobState.TIMEOUT)
    return row.state in ends and row.exit_code is None and row.signal is None


def _enforcement(found: Enforcement) -> WireEnforcement:
    return WireEnforcement(
        means=found.means.value,
        controllers=tuple(c for c in CONTROLLERS if c in found.controllers),
        problem=found.problem,
        summary=describe(found),
    )


def supervisor_pid(state: model.State) -> int | None:
    match state:
        case model.Running(pid=pid) | model.Suspended(pid=pid) | model.Completing(pid=pid):
            return pid
        case model.Pending() | model.Starting() | model.Finished():
            return None


def _stopping(now: model.Instant, state: model.Completing) -> str:
    why = "its time limit is reached" if state.cause is model.Cause.TIMED_OUT else "being stopped"
    if state.preempted_by is not None:
        why = f"PREEMPTED by job {state.preempted_by}"
    return f"{why}; SIGKILL in {format_duration(max(0, state.kill_at - now) / 1000)}"


def _state_words(job: Job) -> str:
    where = ""
    if job.placement is not None:
        devices = ", ".join(f"GPU {i}" for i in job.placement.gpu_indices)
        cores = ",".join(str(c) for c in job.placement.cores)
        where = f" on {devices} and core {cores}" if devices else f" on core {cores}"
    if job.state.is_final:
        return f"it has ended: {job.state}" + (f" ({job.reason})" if job.reason else "")
    why = f" ({job.reason})" if job.state is JobState.COMPLETING and job.reason else ""
    if job.state is JobState.SUSPENDED and not job.reason:
        why = f" (`rlq resume {job.id}` lets it go on)"
    return f"it is not waiting: {job.state}{where}{why}"


def _rss_mib() -> int:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20
