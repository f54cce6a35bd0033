"""The throughput guard: stop packing when one more job no longer makes the machine faster.

Utilisation cannot tell (NVML's is the share of time in which any kernel ran): two jobs may halve
each other while it reads 30 %, and one tiny kernel reads 100 %.  So the guard goes by what the
jobs achieve.  The measure is system throughput, STP = sum over jobs of (steps/s now) / (steps/s
alone) (Snavely and Tullsen 2000; Eyerman and Eeckhout 2008): k jobs that do not disturb each
other give k, k jobs that merely take turns give 1.

For each kind of device and mix of jobs the guard learns STP(k).  One more job is worth starting
while STP(k + 1) - STP(k) is above a threshold.  Where STP(k + 1) is not known:

* what is running is measured first: without STP(k) there is nothing to compare with;
* if the last job added less than the threshold, one more will not add more (STP is concave in
  practice: contention only grows);
* while the jobs hardly disturb each other, their number may double without waiting for a
  measurement of each step;
* otherwise one more is started, and its effect measured.

The CPU is a device too, with a prior: cores are given out whole, so k jobs on cores of their own
are expected to give k until measured otherwise.

Only training rates count: what a job does before its first gradient step says nothing (the shell
leaves `steps_milli_per_s` None then).  A mix with a job that reports nothing is not judged.

Amounts are integers: rates in thousandths of a step per second, STP in thousandths of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlqd.core.model import GuardPolicy, Instant, JobId

#: STP of one job alone, by definition.
ONE_JOB = 1000
#: Weight of a new observation against what was learned, in per cent.
NEW_PCT = 30
#: At this efficiency (STP / k, in thousandths) jobs count as undisturbed.
UNDISTURBED = 900

Signature = str
DeviceKind = str


@dataclass(frozen=True, slots=True, order=True)
class Mix:
    """Jobs on one device.  Mixes of the same signatures and size are taken for alike: with
    every rate divided by its job's own rate alone, their proportions matter little, and the
    number of different mixes stays learnable."""

    kind: DeviceKind
    signatures: tuple[Signature, ...]  # distinct, sorted
    jobs: int

    @classmethod
    def of(cls, kind: DeviceKind, signatures: Iterable[Signature]) -> Mix:
        found = list(signatures)
        return cls(kind, tuple(sorted(set(found))), len(found))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A learned figure, how often it was observed, and when last."""

    value: int
    observations: int
    at: Instant

    def with_observation(self, value: int, at: Instant) -> Estimate:
        blended = (self.value * (100 - NEW_PCT) + value * NEW_PCT) // 100
        return Estimate(blended, self.observations + 1, at)


@dataclass(frozen=True, slots=True)
class Learned:
    """One row of what is known, for the database: a job's rate alone (`jobs` == 0), or STP."""

    kind: DeviceKind
    signatures: tuple[Signature, ...]
    jobs: int
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A job on a device, as the guard sees it."""

    job_id: JobId
    signature: Signature  # "": unknown
    since: Instant
    #: As in JobFacts.
    steps_milli_per_s: int | None
    #: It has reported something, if only that it warms up.
    reports: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one more job is worth starting, and why, as data."""

    admits: bool
    #: "free", "unjudged", "unguarded", "prior", "known", "explore", "measuring", "flat"
    because: str
    jobs: int = 0
    stp: int | None = None
    #: Expected STP with one more, less STP now.
    gain: int | None = None

    @property
    def is_judged(self) -> bool:
        """By what the jobs on the device achieve; else only by whether there is room."""
        return self.because not in ("unjudged", "free")


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Of the jobs on one device, in thousandths.  None: not known."""

    jobs: int
    stp: int | None = None
    antt: int | None = None


@dataclass(slots=True)
class _Watch:
    """A device's jobs since they last changed."""

    jobs: tuple[JobId, ...]
    since: Instant
    readings: list[tuple[Instant, int]] = field(default_factory=list[tuple[Instant, int]])


@dataclass(slots=True)
class Guard:
    policy: GuardPolicy = field(default_factory=GuardPolicy)
    solo: dict[tuple[DeviceKind, Signature], Estimate] = field(
        default_factory=dict[tuple[DeviceKind, Signature], Estimate]
    )
    stp: dict[Mix, Estimate] = field(default_factory=dict[Mix, Estimate])
    _watches: dict[str, _Watch] = field(default_factory=dict[str, _Watch])
    #: Programs that never report: the next job of one is not waited for at all.
    _mute: set[Signature] = field(default_factory=set[Signature])
    #: What changed since `take_changes`, by key.
    _changed: dict[tuple[DeviceKind, tuple[Signature, ...], int], Learned] = field(
        default_factory=dict[tuple[DeviceKind, tuple[Signature, ...], int], Learned]
    )

    # ---- learning ------------------------------------------------------------------

    def observe(
        self, now: Instant, device: str, kind: DeviceKind, occupants: Sequence[Occupant]
    ) -> None:
        """A reading of one device.  Learns once the same jobs have run together long enough."""
        for o in occupants:
            if o.reports:
                self._mute.discard(o.signature)
            elif now - o.since > self.policy.first_report_ms:
                self._mute.add(o.signature)
        jobs = tuple(sorted(o.job_id for o in occupants))
        watch = self._watches.get(device)
        if watch is None or watch.jobs != jobs:
            watch = self._watches[device] = _Watch(jobs, now)
        rates = [o.steps_milli_per_s for o in occupants]
        if not jobs or any(r is None for r in rates) or not all(o.signature for o in occupants):
            watch.readings.clear()
            return
        if len(occupants) == 1:
            one = occupants[0]
            assert one.steps_milli_per_s is not None
            watch.readings.append((now, one.steps_milli_per_s))
            if (mean := self._settled_mean(watch, now)) is not None:
                self._learn_solo(kind, one.signature, mean, now)
            return
        total = self.normalised(kind, occupants)
        if total is None:
            return
        watch.readings.append((now, total))
        if (mean := self._settled_mean(watch, now)) is not None:
            self._learn_stp(Mix.of(kind, (o.signature for o in occupants)), mean, now)

    def normalised(self, kind: DeviceKind, occupants: Sequence[Occupant]) -> int | None:
        """STP of these rates; None while the rate of one of them alone is not known."""
        total = 0
        for o in occupants:
            solo = self.solo_of(kind, o.signature)
            if solo is None or o.steps_milli_per_s is None:
                return None
            total += o.steps_milli_per_s * ONE_JOB // max(1, solo)
        return total

    def solo_of(self, kind: DeviceKind, signature: Signature) -> int | None:
        found = self.solo.get((kind, signature))
        return None if found is None else found.value

    def _settled_mean(self, watch: _Watch, now: Instant) -> int | None:
        """The mean over the window, once it is covered by steady readings; then starts anew."""
        while watch.readings and watch.readings[0][0] < now - 2 * self.policy.observe_ms:
            watch.readings.pop(0)
        first_at = watch.readings[0][0]
        if now - first_at < self.policy.observe_ms or len(watch.readings) < 4:
            return None
        values = [value for _, value in watch.readings]
        half = len(values) // 2
        early, late = sum(values[:half]) // half, sum(values[-half:]) // half
        # Still warming up, or changing phase: the early part is forgotten.
        if abs(late - early) * 100 > max(early, late) * self.policy.steady_pct:
            del watch.readings[:half]
            return None
        watch.readings.clear()
        return sum(values) // len(values)

    def _learn_solo(self, kind: DeviceKind, signature: Signature, rate: int, at: Instant) -> None:
        key = (kind, signature)
        before = self.solo.get(key)
        if before is not None and self._contradicts(before.value, rate):
            # The program changed under its name: what was learned with it is of no use.
            before = None
            self.stp = {m: e for m, e in self.stp.items() if signature not in m.signatures}
        after = Estimate(rate, 1, at) if before is None else before.with_observation(rate, at)
        self.solo[key] = after
        self._changed[kind, (signature,), 0] = Learned(kind, (signature,), 0, after)

    def _learn_stp(self, mix: Mix, value: int, at: Instant) -> None:
        before = self.stp.get(mix)
        if before is not None and self._contradicts(before.value, value):
            before = None
        after = Estimate(value, 1, at) if before is None else before.with_observation(value, at)
        self.stp[mix] = after
        row = Learned(mix.kind, mix.signatures, mix.jobs, after)
        self._changed[mix.kind, mix.signatures, mix.jobs] = row

    def _contradicts(self, old: int, new: int) -> bool:
        return abs(new - old) * 100 > max(old, new) * self.policy.contradicts_pct

    # ---- judging -------------------------------------------------------------------

    def judge(
        self,
        now: Instant,
        kind: DeviceKind,
        occupants: Sequence[Occupant],
        signature: Signature,
        *,
        expects_linear: bool,
    ) -> Verdict:
        """Whether a job of this signature is worth starting beside these.

        Args:
            expects_linear: the device has a prior of STP(k) = k: the CPU, by whole cores.
        """
        k = len(occupants)
        if not self.policy.enabled:
            return Verdict(admits=True, because="unjudged", jobs=k)
        if k == 0:
            return Verdict(admits=True, because="free", jobs=0, stp=0, gain=ONE_JOB)
        silent = [o for o in occupants if self._is_silent(now, o)]
        if silent or not signature:
            return Verdict(admits=True, because="unjudged", jobs=k)
        mine = [o.signature for o in occupants]
        here, more = Mix.of(kind, mine), Mix.of(kind, [*mine, signature])
        stp = self.stp_of(now, here)
        stp_more = self.stp_of(now, more)
        threshold = self.policy.threshold_pct * ONE_JOB // 100
        if stp is not None and stp_more is not None:
            gain = stp_more - stp
            return Verdict(admits=gain >= threshold, because="known", jobs=k, stp=stp, gain=gain)
        last_gain = self._last_gain(now, here, stp)
        if last_gain is not None and last_gain < threshold:
            return Verdict(admits=False, because="flat", jobs=k, stp=stp, gain=last_gain)
        if expects_linear:
            return Verdict(admits=True, because="prior", jobs=k, stp=stp, gain=ONE_JOB)
        if stp is not None:
            return Verdict(admits=True, because="explore", jobs=k, stp=stp)
        if self._may_double(now, here):
            return Verdict(admits=True, because="explore", jobs=k)
        return Verdict(admits=False, because="measuring", jobs=k)

    def stp_of(self, now: Instant, mix: Mix) -> int | None:
        if mix.jobs == 1:
            return ONE_JOB if (mix.kind, mix.signatures[0]) in self.solo else None
        found = self.stp.get(mix)
        if found is None or now - found.at > self.policy.forget_ms:
            return None
        return found.value

    def _is_silent(self, now: Instant, occupant: Occupant) -> bool:
        """It reports nothing, and has had the time to: only the four resources count then."""
        if not occupant.signature:
            return True
        if occupant.steps_milli_per_s is not None:
            return False
        ran_ms = now - occupant.since
        if not occupant.reports and occupant.signature in self._mute:
            return True
        limit = self.policy.patience_ms if occupant.reports else self.policy.first_report_ms
        return ran_ms > limit

    def _last_gain(self, now: Instant, here: Mix, stp: int | None) -> int | None:
        """What the last job added, if both figures are known."""
        if stp is None or here.jobs < 2:
            return None
        before = self.stp_of(now, replace(here, jobs=here.jobs - 1))
        return None if before is None else stp - before

    def _may_double(self, now: Instant, here: Mix) -> bool:
        """Twice the largest number that is known to run undisturbed."""
        for jobs in range(here.jobs - 1, 1, -1):
            known = self.stp_of(now, replace(here, jobs=jobs))
            if known is not None:
                return known >= UNDISTURBED * jobs and here.jobs < 2 * jobs
        return False

    def throughput(self, kind: DeviceKind, occupants: Sequence[Occupant]) -> Throughput:
        """What these jobs achieve just now, as far as all of them report and are known alone."""
        rates = {
            o.job_id: o.steps_milli_per_s for o in occupants if o.steps_milli_per_s is not None
        }
        solo = {
            o.job_id: rate
            for o in occupants
            if (rate := self.solo_of(kind, o.signature)) is not None
        }
        is_known = 0 < len(occupants) == len(rates)
        return Throughput(
            jobs=len(occupants),
            stp=self.normalised(kind, occupants) if is_known else None,
            antt=antt(rates, solo) if is_known else None,
        )

    # ---- keeping -------------------------------------------------------------------

    def take_changes(self) -> list[Learned]:
        """What was learned since the last call, for the database."""
        changes = sorted(
            self._changed.values(), key=lambda row: (row.kind, row.signatures, row.jobs)
        )
        self._changed.clear()
        return changes

    def known(self, now: Instant) -> list[Learned]:
        """All that counts now, sorted by device, mix and number of jobs."""
        rows = [Learned(kind, (one,), 0, found) for (kind, one), found in self.solo.items()]
        rows += [Learned(m.kind, m.signatures, m.jobs, found) for m, found in self.stp.items()]
        fresh = [r for r in rows if now - r.estimate.at <= self.policy.forget_ms]
        return sorted(fresh, key=lambda row: (row.kind, row.signatures, row.jobs))

    def forget(self, signature: Signature) -> None:
        """The program, and every mix it was in."""
        self.solo = {key: found for key, found in self.solo.items() if key[1] != signature}
        self.stp = {m: found for m, found in self.stp.items() if signature not in m.signatures}
        self._mute.discard(signature)
        self._changed = {k: row for k, row in self._changed.items() if signature not in k[1]}
        # A reading that is under way may have been divided by what is forgotten now.
        self._watches.clear()

    def load(self, rows: Iterable[Learned], now: Instant) -> None:
        """Take in what an earlier daemon learned.  Too old: left out."""
        for row in rows:
            if now - row.estimate.at > self.policy.forget_ms:
                continue
            if row.jobs == 0:
                self.solo[row.kind, row.signatures[0]] = row.estimate
            else:
                self.stp[Mix(row.kind, row.signatures, row.jobs)] = row.estimate


def antt(rates: Mapping[JobId, int], solo: Mapping[JobId, int]) -> int | None:
    """Average normalised turnaround time in thousandths: how much slower a job is than alone.

    Eyerman and Eeckhout 2008.  None if nothing is known or a job stands still.
    """
    slowdowns = [
        solo[job_id] * ONE_JOB // rate
        for job_id, rate in rates.items()
        if rate > 0 and job_id in solo
    ]
    return sum(slowdowns) // len(slowdowns) if len(slowdowns) == len(rates) > 0 else None
