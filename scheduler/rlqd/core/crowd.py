"""Who is on which device, as the throughput guard sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlqd.core.guard import SHARED, DeviceKind, Guard, Occupant, Throughput, Verdict
from rlqd.core.model import (
    BackedOff,
    GpuFacts,
    GpuId,
    Instant,
    JobFacts,
    JobId,
    JobSpec,
    MachineFacts,
)
from rlqd.core.room import Holding

#: Outsiders count as company from this on: a device shared with them is another kind of device,
#: so that what was learned on it alone is not held against it.
OUTSIDE_SM_PCT = 15
OUTSIDE_MILLICORES = 1000

#: Jobs that wait are few if they are no more than this of those that run.
FEW_PCT = 33

#: A GPU, or None: the CPU, which holds the jobs without GPU.
Device = GpuId | None


@dataclass(slots=True)
class Crowd:
    """Kept up to date while a pass starts jobs."""

    #: By this reading alone: `kind` tells what counts.
    kinds: dict[Device, DeviceKind]
    #: A paused job is none.
    occupants: dict[Device, list[Occupant]]
    #: Where rlqd has paused a job: it goes on before another one starts.
    backed_off: dict[Device, BackedOff]
    #: How many wait for room; None: not asked.
    waiting: int | None = None
    #: Verdicts of this pass: hundreds of waiting shapes may be of one program.
    _verdicts: dict[tuple[Device, str, bool], Verdict] = field(
        default_factory=dict[tuple[Device, str, bool], Verdict]
    )

    @classmethod
    def of(
        cls, holdings: Iterable[Holding], facts: MachineFacts, waiting: int | None = None
    ) -> Crowd:
        measured = dict(facts.jobs)
        occupants: dict[Device, list[Occupant]] = {None: [], **{g.id: [] for g in facts.gpus}}
        backed_off: dict[Device, BackedOff] = {}
        for holding in holdings:
            if holding.backed_off is not None:
                backed_off |= {d: holding.backed_off for d in holding.placement.gpus or (None,)}
            if holding.is_paused:
                continue
            job = measured.get(holding.job_id)
            occupant = Occupant(
                job_id=holding.job_id,
                signature=holding.signature,
                since=holding.since,
                steps_milli_per_s=None if job is None else job.steps_milli_per_s,
                reports=job is not None and job.reports,
            )
            for device in holding.placement.gpus or (None,):
                occupants.setdefault(device, []).append(occupant)
        kinds: dict[Device, DeviceKind] = {
            gpu.id: _gpu_kind(gpu, facts.jobs) for gpu in facts.gpus
        }
        is_shared = facts.millicores_outside >= OUTSIDE_MILLICORES
        kinds[None] = f"CPU, {len(facts.cores)} cores" + (SHARED if is_shared else "")
        return cls(kinds, occupants, backed_off, waiting)

    def devices(self) -> list[Device]:
        return list(self.kinds)

    def kind(self, guard: Guard, device: Device) -> DeviceKind:
        return guard.lasting_kind(device or "cpu", self.kinds.get(device, "?"))

    def observe(self, now: Instant, guard: Guard) -> None:
        for device, kind in self.kinds.items():
            guard.note_kind(now, device or "cpu", kind)
            guard.observe(now, device or "cpu", self.kind(guard, device), self.occupants[device])

    def judge(self, now: Instant, guard: Guard, spec: JobSpec, device: Device) -> Verdict:
        if spec.unguarded:
            jobs = len(self.occupants.get(device, []))
            return Verdict(admits=True, because="unguarded", jobs=jobs)
        if (why := self.backed_off.get(device)) is not None:
            return Verdict(admits=False, because="paused", jobs=why.jobs, better=why.better)
        is_last = self._few_wait() and self._is_emptiest(device)
        key = (device, spec.signature, is_last)
        if key not in self._verdicts:
            self._verdicts[key] = guard.judge(
                now,
                self.kind(guard, device),
                self.occupants.get(device, []),
                spec.signature,
                expects_linear=device is None,
                is_last=is_last,
            )
        return self._verdicts[key]

    def _few_wait(self) -> bool:
        if self.waiting is None:
            return False
        running = sum(len(here) for here in self.occupants.values())
        return self.waiting * 100 <= running * FEW_PCT

    def _is_emptiest(self, device: Device) -> bool:
        """Of its sort: the last jobs are to end together on all GPUs."""
        mine = len(self.occupants.get(device, []))
        gpus = [d for d in self.kinds if d is not None]
        return device is None or all(mine <= len(self.occupants.get(d, [])) for d in gpus)

    def throughput(self, guard: Guard, device: Device) -> Throughput:
        """What the jobs on it achieve just now."""
        return guard.throughput(self.kind(guard, device), self.occupants.get(device, []))

    def add(self, now: Instant, job_id: JobId, signature: str, gpus: tuple[GpuId, ...]) -> None:
        one = Occupant(
            job_id=job_id,
            signature=signature,
            since=now,
            steps_milli_per_s=None,
            reports=False,
        )
        for device in gpus or (None,):
            self.occupants.setdefault(device, []).append(one)
        self._verdicts.clear()
        if self.waiting is not None:
            self.waiting -= 1


def _gpu_kind(gpu: GpuFacts, jobs: Iterable[tuple[JobId, JobFacts]]) -> DeviceKind:
    kind = gpu.kind or "GPU"
    if gpu.sm_pct is None:
        return kind
    ours = [share.sm_pct for _, job in jobs for g, share in job.gpus if g == gpu.id]
    if any(sm is None for sm in ours):
        return kind  # whose the load is cannot be told
    outside = gpu.sm_pct - sum(sm for sm in ours if sm is not None)
    return f"{kind}{SHARED}" if outside >= OUTSIDE_SM_PCT else kind
