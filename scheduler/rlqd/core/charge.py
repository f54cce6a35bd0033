"""What a job is charged: declared, then measured (docs/architecture.md, "Admission").

Until a job has settled it is charged the larger of what was declared (or the default) and what
it was measured at; from then on the larger of its measured peak with a margin and what was
declared.  Settled means that its readings were stable over a window: a fixed sleep would be too
short for a JIT compilation and too long for everything else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rlqd.core.learned import LearnedPeak
from rlqd.core.model import Charge, Instant, JobFacts, JobSpec, MachineFacts, Policy

#: Readings of one window may differ by this much and still be called stable.
STABLE_MEM_MIB = 64
STABLE_MEM_PCT = 5
STABLE_SM_PCT = 10
#: Fewer readings than this say nothing about stability.
READINGS_MIN = 5
NOTHING_LEARNED = LearnedPeak(signature="", mem_mib=0, at=Instant(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What it takes to start a job.  `charge`'s GPU amounts are for each of `gpus` devices."""

    gpus: int
    charge: Charge
    exclusive: bool
    #: Its SM share is nobody's word but a guess: the throughput guard knows better.
    sm_is_guessed: bool = False


def need_of(
    spec: JobSpec, facts: MachineFacts, policy: Policy, learned: LearnedPeak | None = None
) -> Need:
    """What was declared, else what such jobs were measured at, else the default."""
    gpus = spec.gpus if spec.gpus is not None else 1 if facts.gpus or facts.gpus_problem else 0
    return need_on(gpus, spec, facts, policy, learned)


def need_on(
    gpus: int, spec: JobSpec, facts: MachineFacts, policy: Policy, learned: LearnedPeak | None
) -> Need:
    """`need_of` with the number of GPUs decided.

    What was learned is never more than an empty machine has: it ran here before.
    """
    cores, mem_mib = host_amounts_of(spec, facts, policy, learned)
    totals = [g.mem_mib_total for g in facts.gpus if g.mem_mib_total is not None]
    gpu_mem_most = max(totals, default=0) - policy.gpu_mem_mib_reserve
    peak = learned or NOTHING_LEARNED
    charge = Charge(
        cores=cores,
        mem_mib=mem_mib,
        gpu_mem_mib=spec.gpu_mem_mib
        or _expected(peak.gpu_mem_mib, gpu_mem_most, policy.gpu_mem_mib_default, policy)
        if gpus
        else 0,
        sm_pct=spec.sm_pct
        or _expected(peak.sm_pct, policy.sm_pct_limit, policy.sm_pct_default, policy)
        if gpus
        else 0,
    )
    return Need(
        gpus=gpus, charge=charge, exclusive=spec.exclusive, sm_is_guessed=spec.sm_pct is None
    )


def host_amounts_of(
    spec: JobSpec, facts: MachineFacts, policy: Policy, learned: LearnedPeak | None
) -> tuple[int, int]:
    """Cores and MiB of host memory: wherever it runs, the same."""
    peak = learned or NOTHING_LEARNED
    mem_most = facts.mem_mib_total - policy.mem_mib_reserve
    return (
        spec.cores or policy.cores_default,
        spec.mem_mib or _expected(peak.mem_mib, mem_most, policy.mem_mib_default, policy),
    )


def _expected(peak: int, most: int, default: int, policy: Policy) -> int:
    return max(1, min(_with_margin(peak, policy), most)) if peak else default


def _with_margin(amount: int, policy: Policy) -> int:
    return amount + -(-amount * policy.margin_pct // 100)


@dataclass(frozen=True, slots=True)
class Reading:
    at: Instant
    mem_mib: int
    gpu_mem_mib: int | None  # the largest over its GPUs
    sm_pct: int | None  # likewise
    cpu_millicores: int | None


@dataclass(slots=True)
class Footprint:
    """One attempt's measurements.  Kept in memory only: after a restart of the daemon a job is
    unsettled again and so charged the larger figure, which is safe."""

    settled: bool = False
    mem_mib_peak: int = 0
    gpu_mem_mib_peak: int | None = None
    window: deque[Reading] = field(default_factory=deque[Reading])

    def add(
        self, at: Instant, facts: JobFacts, policy: Policy, *, is_on_gpu: bool = False
    ) -> None:
        gpu_mem = [s.mem_mib for _, s in facts.gpus if s.mem_mib is not None]
        sm = [s.sm_pct for _, s in facts.gpus if s.sm_pct is not None]
        reading = Reading(
            at,
            facts.mem_mib,
            max(gpu_mem, default=None),
            max(sm, default=None),
            facts.cpu_millicores,
        )
        self.mem_mib_peak = max(self.mem_mib_peak, reading.mem_mib)
        if reading.gpu_mem_mib is not None:
            self.gpu_mem_mib_peak = max(self.gpu_mem_mib_peak or 0, reading.gpu_mem_mib)
        self.window.append(reading)
        # One reading older than the window stays, to show that the window is covered.
        while len(self.window) > 1 and self.window[1].at <= at - policy.settle_ms:
            self.window.popleft()
        # Importing for ten seconds is not being settled: it has to have come to what it is for.
        is_at_work = facts.steps_milli_per_s is not None if facts.reports else True
        if is_on_gpu and not self.gpu_mem_mib_peak:
            is_at_work = False
        self.settled = self.settled or (is_at_work and self._is_stable(policy))

    def sm_pct_mean(self) -> int | None:
        """Rounded up, over the window: single readings of a time-sliced GPU jump about."""
        known = [r.sm_pct for r in self.window if r.sm_pct is not None]
        return -(-sum(known) // len(known)) if known else None

    def peak(self, signature: str, at: Instant) -> LearnedPeak:
        """What is to be remembered of this attempt."""
        cpu = [r.cpu_millicores for r in self.window if r.cpu_millicores is not None]
        return LearnedPeak(
            signature=signature,
            mem_mib=self.mem_mib_peak,
            gpu_mem_mib=self.gpu_mem_mib_peak or 0,
            sm_pct=self.sm_pct_mean() or 0,
            cpu_millicores=sum(cpu) // len(cpu) if cpu else 0,
            at=at,
        )

    def _is_stable(self, policy: Policy) -> bool:
        first, last = self.window[0], self.window[-1]
        if len(self.window) < READINGS_MIN or last.at - first.at < policy.settle_ms:
            return False
        half = len(self.window) // 2
        sm = [r.sm_pct for r in self.window if r.sm_pct is not None]
        return (
            _is_flat([r.mem_mib for r in self.window])
            and _is_flat([r.gpu_mem_mib for r in self.window if r.gpu_mem_mib is not None])
            and (
                len(sm) < len(self.window)
                or abs(sum(sm[:half]) // half - sum(sm[-half:]) // half) <= STABLE_SM_PCT
            )
        )


def _is_flat(values: list[int]) -> bool:
    if not values:
        return True
    low, high = min(values), max(values)
    return high - low <= max(STABLE_MEM_MIB, high * STABLE_MEM_PCT // 100)


def charge_now(
    admitted: Charge,
    spec: JobSpec,
    print_: Footprint | None,
    policy: Policy,
    learned: LearnedPeak | None = None,
) -> Charge:
    """What a job that holds resources is charged at this moment.

    A learned peak counts like a declared amount: a run that is small now will grow as the
    others did.
    """
    if print_ is None:
        return admitted

    def charged(first: int, declared: int | None, peak: int | None) -> int:
        if peak is None:  # not readable: what it was admitted with is all there is
            return first
        if not print_.settled:
            return max(first, peak)
        return max(_with_margin(peak, policy), declared or 0)

    is_on_gpu = admitted.gpu_mem_mib > 0
    known_mem = spec.mem_mib or (learned.mem_mib if learned else None)
    known_gpu_mem = spec.gpu_mem_mib or (learned.gpu_mem_mib if learned else None)
    sm_pct = charged(admitted.sm_pct, spec.sm_pct, print_.sm_pct_mean()) if is_on_gpu else 0
    gpu_mem_mib = charged(admitted.gpu_mem_mib, known_gpu_mem, print_.gpu_mem_mib_peak)
    return Charge(
        cores=admitted.cores,
        mem_mib=charged(admitted.mem_mib, known_mem, print_.mem_mib_peak),
        gpu_mem_mib=gpu_mem_mib if is_on_gpu else 0,
        sm_pct=min(sm_pct, 100),
    )
