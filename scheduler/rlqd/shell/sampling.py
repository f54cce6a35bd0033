"""The monitors' threads, and one picture of the machine out of what they read.

NVML and the host are read by a thread each: a driver that hangs (it happens when a board fails)
must stop neither the event loop nor the reading of CPU and memory.  A thread hands over its
latest reading and wakes the loop through a pipe; readings are values, nothing else is shared.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from rlqd.core import model
from rlqd.readings import Cpu, GpuReading, GpusReading, HostReading

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Readings on demand come no faster than this: a hundred jobs that end in one second must not
#: turn into a hundred readings.
SPACING_S = 0.05


@dataclass(slots=True)
class _Latest(Generic[T]):
    """One reader thread and its latest value."""

    name: str
    read: Callable[[], T]
    period_s: float
    wake_fd: int
    value: T | None = None
    _asked: threading.Event = field(default_factory=threading.Event)
    _stopping: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def ask(self) -> None:
        self._asked.set()

    def stop(self) -> None:
        """Does not wait for a reading that hangs: the thread is a daemon thread."""
        self._stopping = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join(timeout=0.5)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.value = self.read()
                os.write(self.wake_fd, b".")
            except BlockingIOError:
                pass  # the loop has a wake-up waiting already
            except OSError:
                if self._stopping:
                    return
                log.exception("reading %s failed", self.name)
            except Exception:  # a bug in a monitor: the last value goes stale, which is safe
                log.exception("reading %s failed", self.name)
            self._asked.wait(self.period_s)
            self._asked.clear()
            time.sleep(SPACING_S)


def usable_cpus(cpus: tuple[Cpu, ...], include: tuple[int, ...], *, smt: bool) -> tuple[Cpu, ...]:
    """The CPUs the queue may use: all but those left out by the configuration."""
    kept = [c for c in cpus if not include or c.number in include]
    if not smt:
        first = {c.physical: c for c in reversed(kept)}
        kept = [c for c in kept if first[c.physical] is c]
    return tuple(kept)


class Sampler:
    """Reads the machine all the time.  `fileno` becomes readable when there is news."""

    def __init__(
        self,
        *,
        read_host: Callable[[Collection[int]], HostReading],
        read_gpus: Callable[[], GpusReading],
        cpus: tuple[Cpu, ...],
        period_s: float,
        gpus_included: tuple[str, ...] = (),
    ) -> None:
        self.cpus = cpus
        self._included = frozenset(gpus_included)
        #: Supervisors whose trees are read; replaced as a whole, never changed in place.
        self._supervisors: frozenset[int] = frozenset()
        self._read_fd, wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_fd = wake_fd
        self._host = _Latest("host", lambda: read_host(self._supervisors), period_s, wake_fd)
        self._gpus = _Latest("gpus", read_gpus, period_s, wake_fd)

    def fileno(self) -> int:
        return self._read_fd

    def start(self) -> None:
        self._host.start()
        self._gpus.start()

    def stop(self) -> None:
        self._host.stop()
        self._gpus.stop()

    def set_period(self, period_s: float) -> None:
        self._host.period_s = self._gpus.period_s = period_s

    def ask(self) -> None:
        """Read soon, not only when the period is over."""
        self._host.ask()
        self._gpus.ask()

    def watch(self, supervisors: Collection[int]) -> None:
        self._supervisors = frozenset(supervisors)

    def drain(self) -> None:
        """Take the wake-ups off the pipe."""
        try:
            while os.read(self._read_fd, 4096):
                pass
        except BlockingIOError:
            pass

    def host(self) -> HostReading | None:
        return self._host.value

    def gpus(self) -> GpusReading | None:
        """Only the devices the queue may use."""
        reading = self._gpus.value
        if reading is None or not self._included:
            return reading
        kept = tuple(
            g for g in reading.gpus if g.uuid in self._included or str(g.index) in self._included
        )
        return replace(reading, gpus=kept)


def machine_facts(
    host: HostReading,
    gpus: GpusReading | None,
    cpus: tuple[Cpu, ...],
    jobs_by_supervisor: Mapping[int, model.JobId],
    supervisor_of: Callable[[int], int | None],
    rates: Mapping[model.JobId, int | None],
    left_ms: Mapping[model.JobId, int | None] = MappingProxyType({}),
) -> model.MachineFacts:
    """One picture out of both readings.

    Args:
        rates: training steps per 1000 s of the jobs that report.
        left_ms: how long these still run, by their own progress.
        supervisor_of: the supervisor whose tree a process belongs to, or None.
    """
    shares = _gpu_shares(gpus, jobs_by_supervisor, supervisor_of)
    jobs: list[tuple[model.JobId, model.JobFacts]] = []
    for pid, tree in host.trees.items():
        if (job_id := jobs_by_supervisor.get(pid)) is None:
            continue
        cpu = None if tree.cpu_cores is None else round(tree.cpu_cores * 1000)
        on_gpus = tuple(sorted(shares.get(job_id, {}).items()))
        facts = model.JobFacts(
            cpu_millicores=cpu,
            mem_mib=tree.mem_mib,
            gpus=on_gpus,
            steps_milli_per_s=rates.get(job_id),
            reports=job_id in rates,
            left_ms=left_ms.get(job_id),
        )
        jobs.append((job_id, facts))
    # Before the first reading of the GPUs nobody knows whether there are any.
    unread = "the GPUs have not been read yet" if gpus is None else ""
    problem = unread or ("" if gpus is None or gpus.absent else gpus.problem)
    return model.MachineFacts(
        taken_at=model.Instant(host.taken_at_ms),
        gpus_taken_at=model.Instant(0 if gpus is None else gpus.taken_at_ms),
        cores=tuple(
            model.Core(number=c.number, physical=c.physical, numa_node=c.numa_node) for c in cpus
        ),
        busy_permille=tuple((n, round(busy * 1000)) for n, busy in sorted(host.busy.items())),
        millicores_outside=round(host.cores_outside * 1000),
        mem_mib_total=host.mem_mib_total,
        mem_mib_available=host.mem_mib_available,
        gpus=() if gpus is None else tuple(_gpu_facts(g) for g in gpus.gpus),
        gpus_problem=problem,
        jobs=tuple(sorted(jobs)),
    )


def _gpu_facts(gpu: GpuReading) -> model.GpuFacts:
    return model.GpuFacts(
        id=model.GpuId(gpu.uuid),
        index=gpu.index,
        mem_mib_total=gpu.mem_mib_total,
        mem_mib_free=gpu.mem_mib_free,
        sm_pct=gpu.sm_pct,
        cores_near=frozenset(gpu.cores_near),
        problem=gpu.problem,
        kind=gpu.name,
    )


def _gpu_shares(
    gpus: GpusReading | None,
    jobs_by_supervisor: Mapping[int, model.JobId],
    supervisor_of: Callable[[int], int | None],
) -> dict[model.JobId, dict[model.GpuId, model.GpuShare]]:
    """What each job uses of each GPU, its processes taken together."""
    found: dict[model.JobId, dict[model.GpuId, model.GpuShare]] = {}
    for gpu in gpus.gpus if gpus is not None else ():
        for process in gpu.processes:
            supervisor = supervisor_of(process.pid)
            job_id = None if supervisor is None else jobs_by_supervisor.get(supervisor)
            if job_id is None:
                continue
            shares = found.setdefault(job_id, {})
            none = model.GpuShare(mem_mib=None, sm_pct=None)
            before = shares.get(model.GpuId(gpu.uuid), none)
            shares[model.GpuId(gpu.uuid)] = model.GpuShare(
                mem_mib=_sum(before.mem_mib, process.mem_mib),
                sm_pct=_sum(before.sm_pct, process.sm_pct),
            )
    return found


def _sum(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else a + b
