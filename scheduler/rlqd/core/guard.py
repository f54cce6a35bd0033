"""The throughput guard: stop packing when one more job no longer makes the machine faster.

Utilisation cannot tell (NVML's is the share of time in which any kernel ran): two jobs may halve
each other while it reads 30 %, and one tiny kernel reads 100 %.  So the guard goes by what the
jobs achieve.  The measure is system throughput, STP = sum over jobs of (steps/s now) / (steps/s
alone) (Snavely and Tullsen 2000; Eyerman and Eeckhout 2008): k jobs that do not disturb each
other give k, k jobs that merely take turns give 1.

For each kind of device and mix of jobs the guard learns STP(k); between two numbers that are
known it is taken to be a straight line.  One more job is worth starting while there is a known
number above k that gives, per job added, more than a threshold.  Beyond the largest known number:

* what is running is measured first: without STP(k) there is nothing to compare with;
* if the last jobs added less than the threshold each, one more will not add more (STP is concave
  in practice: contention only grows);
* while the jobs hardly disturb each other, their number may double without waiting for a
  measurement of each step, and while each still adds half a job, grow by half;
* otherwise one more is started, and its effect measured.

Rates alone are learned from jobs alone, which a machine that is full never sees.  Until then a
job's rate alone is guessed: from the slowdown of those beside it whose rate alone is known, or,
if none is, as if they were undisturbed.  Guesses serve to compare, and are put right later.

The CPU is a device too, with a prior: cores are given out whole, so k jobs on cores of their own
are expected to give k until measured otherwise.

Only training rates count: what a job does before its first gradient step says nothing (the shell
leaves `steps_milli_per_s` None then).  A mix with a job that reports nothing is not judged.

Amounts are integers: rates in thousandths of a step per second, STP in thousandths of a job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd

from rlqd.core.learned import SIGNATURES_MAX
from rlqd.core.model import GuardPolicy, Instant, JobId

#: STP of one job alone, by definition.
ONE_JOB = 1000
#: Weight of a new observation against what was learned, in per cent.
NEW_PCT = 30
#: At this efficiency (STP / k, in thousandths) jobs count as undisturbed.
UNDISTURBED = 900
#: While the last jobs added so much each, their number may grow by half at once.
WORTHWHILE = 500
#: One more of the last jobs may cost so much of what there is.
HARMLESS_PCT = 2
#: A job that pauses (an evaluation, a checkpoint) counts as going on as before for so long.
PAUSE_MS = 30_000
#: Fewer jobs were faster if they gave so much more, by so many measurements of those that run.
SLOWER_PCT = 5
SLOWER_OBSERVATIONS = 2
#: What the kind of a device is called that outsiders use as well.
SHARED = ", shared"
#: For so long the readings have to say so, or the opposite.  A process of ours that has just
#: started or ended is an outsider in a reading or two.
SHARED_AFTER_MS = 5_000

#: How many mixes for each program that is remembered.
MIXES_PER_SIGNATURE = 5

Signature = str
DeviceKind = str


@dataclass(frozen=True, slots=True, order=True)
class Mix:
    """Jobs on one device.  Mixes of the same proportions, to a quarter, are taken for alike: so
    the number of different mixes stays learnable."""

    kind: DeviceKind
    #: Sorted; one that is repeated has so many parts of the whole.
    signatures: tuple[Signature, ...]
    jobs: int

    @classmethod
    def of(cls, kind: DeviceKind, signatures: Iterable[Signature]) -> Mix:
        found = sorted(signatures)
        counts = Counter(found)
        if len(counts) < 2:
            return cls(kind, tuple(counts), len(found))
        parts = {one: max(1, round(4 * n / len(found))) for one, n in counts.items()}
        by = gcd(*parts.values())
        names = tuple(one for one, part in parts.items() for _ in range(part // by))
        return cls(kind, names, len(found))


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
    #: "free", "unjudged", "unguarded", "prior", "known", "explore", "measuring", "flat",
    #: "alike", "last", "paused"
    because: str
    jobs: int = 0
    #: Where one of the `jobs` is paused: so many were faster.
    better: int = 0
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

    kind: DeviceKind
    jobs: tuple[JobId, ...]
    since: Instant
    #: (when, the rate of each job), oldest first.
    readings: list[tuple[Instant, tuple[int, ...]]] = field(
        default_factory=list[tuple[Instant, tuple[int, ...]]]
    )


@dataclass(frozen=True, slots=True)
class _Trained:
    """The last rate of a job, and when."""

    at: Instant
    rate: int


_Points = list[tuple[int, Estimate]]
_Index = dict[tuple[DeviceKind, frozenset[Signature]], dict[tuple[Signature, ...], _Points]]


@dataclass(slots=True)
class _Sharing:
    """Whether outsiders use a device, and since when the readings have said the opposite."""

    is_shared: bool = False
    differs_since: Instant | None = None


@dataclass(slots=True)
class Guard:
    policy: GuardPolicy = field(default_factory=GuardPolicy)
    solo: dict[tuple[DeviceKind, Signature], Estimate] = field(
        default_factory=dict[tuple[DeviceKind, Signature], Estimate]
    )
    stp: dict[Mix, Estimate] = field(default_factory=dict[Mix, Estimate])
    _watches: dict[str, _Watch] = field(default_factory=dict[str, _Watch])
    _sharing: dict[str, _Sharing] = field(default_factory=dict[str, _Sharing])
    _trained: dict[JobId, _Trained] = field(default_factory=dict[JobId, _Trained])
    #: Rates alone of jobs that were never seen alone.
    _guessed: dict[tuple[DeviceKind, Signature], int] = field(
        default_factory=dict[tuple[DeviceKind, Signature], int]
    )
    #: Programs that never report: the next job of one is not waited for at all.
    _mute: set[Signature] = field(default_factory=set[Signature])
    #: Programs that have reported: a job of one that has yet to is not taken for mute.
    _vocal: set[Signature] = field(default_factory=set[Signature])
    #: `stp` by device, programs and proportions; None: not sorted out since the last reading.
    _index: _Index | None = None
    #: What changed since `take_changes`, by key.
    _changed: dict[tuple[DeviceKind, tuple[Signature, ...], int], Learned] = field(
        default_factory=dict[tuple[DeviceKind, tuple[Signature, ...], int], Learned]
    )

    # ---- learning ------------------------------------------------------------------

    def observe(
        self, now: Instant, device: str, kind: DeviceKind, occupants: Sequence[Occupant]
    ) -> None:
        """A reading of one device.  Learns once the same jobs have run together long enough."""
        self._index = None
        # Forgotten, a mute program is waited for once more, and a vocal one told again.
        if len(self._mute) > SIGNATURES_MAX:
            self._mute.clear()
        if len(self._vocal) > SIGNATURES_MAX:
            self._vocal.clear()
        for o in occupants:
            if o.reports:
                self._mute.discard(o.signature)
                self._vocal.add(o.signature)
            elif now - o.since > self.policy.first_report_ms and o.signature not in self._vocal:
                self._mute.add(o.signature)
        here = sorted(occupants, key=lambda o: o.job_id)
        jobs = tuple(o.job_id for o in here)
        watch = self._watches.get(device)
        if watch is None or watch.jobs != jobs or watch.kind != kind:
            for gone in set(watch.jobs if watch else ()) - set(jobs):
                self._trained.pop(gone, None)
            watch = self._watches[device] = _Watch(kind, jobs, now)
        rates = [self._rate(now, watch, o) for o in here]
        known = tuple(rate for rate in rates if rate is not None)
        if not jobs or len(known) < len(jobs) or not all(o.signature for o in here):
            watch.readings.clear()
            return
        watch.readings.append((now, known))
        means = self._settled_means(watch, now)
        if means is None:
            return
        signatures = [o.signature for o in here]
        if len(here) == 1:
            if here[0].steps_milli_per_s is not None:
                self._learn_solo(kind, signatures[0], means[0], now)
            return
        self._guess(kind, signatures, means)
        total = 0
        for signature, mean in zip(signatures, means, strict=True):
            solo = self._solo_or_guess(kind, signature)
            assert solo is not None
            total += mean * ONE_JOB // max(1, solo)
        self._learn_stp(Mix.of(kind, signatures), total, now)

    def normalised(self, kind: DeviceKind, occupants: Sequence[Occupant]) -> int | None:
        """STP of these rates; None while the rate of one of them alone is not known."""
        total = 0
        for o in occupants:
            solo = self.solo_of(kind, o.signature)
            if solo is None or o.steps_milli_per_s is None:
                return None
            total += o.steps_milli_per_s * ONE_JOB // max(1, solo)
        return total

    def _rate(self, now: Instant, watch: _Watch, o: Occupant) -> int | None:
        """Its rate, or the last one beside the same jobs if it only pauses."""
        if o.steps_milli_per_s is not None:
            self._trained[o.job_id] = _Trained(now, o.steps_milli_per_s)
            return o.steps_milli_per_s
        last = self._trained.get(o.job_id)
        if last is None or last.at < watch.since or now - last.at > PAUSE_MS:
            return None
        return last.rate

    def solo_of(self, kind: DeviceKind, signature: Signature) -> int | None:
        """Its rate alone; beside outsiders, what it would be without them, so that their share
        counts as lost."""
        found = self.solo.get((kind.removesuffix(SHARED), signature))
        if found is None:
            found = self.solo.get((kind, signature))
        return None if found is None else found.value

    def _solo_or_guess(self, kind: DeviceKind, signature: Signature) -> int | None:
        solo = self.solo_of(kind, signature)
        return self._guessed.get((kind, signature)) if solo is None else solo

    def _guess(
        self, kind: DeviceKind, signatures: Sequence[Signature], means: Sequence[int]
    ) -> None:
        """Give every program here a rate alone, measured or not."""
        jobs = list(zip(signatures, means, strict=True))
        kept = [
            mean * ONE_JOB // max(1, solo)
            for signature, mean in jobs
            if (solo := self._solo_or_guess(kind, signature)) is not None
        ]
        share = max(1, min(ONE_JOB, sum(kept) // len(kept))) if kept else ONE_JOB
        for signature in sorted(set(signatures)):
            if self._solo_or_guess(kind, signature) is None:
                mine = [mean for other, mean in jobs if other == signature]
                self._guessed[kind, signature] = sum(mine) * ONE_JOB // (len(mine) * share)

    def _settled_means(self, watch: _Watch, now: Instant) -> list[int] | None:
        """Each job's mean over the window, once it is covered by steady readings; then starts
        anew."""
        while watch.readings and watch.readings[0][0] < now - 2 * self.policy.observe_ms:
            watch.readings.pop(0)
        first_at = watch.readings[0][0]
        if now - first_at < self.policy.observe_ms or len(watch.readings) < 4:
            return None
        columns = list(zip(*(rates for _, rates in watch.readings), strict=True))
        means = [sum(column) // len(column) for column in columns]
        half = len(watch.readings) // 2
        # All jobs count alike, however fast one of them steps.
        early = late = 0
        for column, mean in zip(columns, means, strict=True):
            early += sum(column[:half]) * ONE_JOB // (half * max(1, mean))
            late += sum(column[-half:]) * ONE_JOB // (half * max(1, mean))
        # Still warming up, or changing phase: the early part is forgotten.
        if abs(late - early) * 100 > max(early, late) * self.policy.steady_pct:
            del watch.readings[:half]
            return None
        watch.readings.clear()
        return means

    def _learn_solo(self, kind: DeviceKind, signature: Signature, rate: int, at: Instant) -> None:
        key = (kind, signature)
        before = self.solo.get(key)
        if before is not None and self._contradicts(before.value, rate):
            # The program changed under its name: what was learned with it is of no use.
            before = None
            self._drop_mixes_of(signature)
        if (guess := self._guessed.pop(key, None)) is not None and before is None:
            self._correct(kind, signature, guess, rate)
        after = Estimate(rate, 1, at) if before is None else before.with_observation(rate, at)
        self.solo[key] = after
        self._changed[kind, (signature,), 0] = Learned(kind, (signature,), 0, after)

    def _drop_mixes_of(self, signature: Signature) -> None:
        self.stp = {m: e for m, e in self.stp.items() if signature not in m.signatures}

    def _correct(self, kind: DeviceKind, signature: Signature, guess: int, rate: int) -> None:
        """What was divided by a guess is divided by the truth; where it is only a part of the
        sum, it is learned anew."""
        for mix, found in list(self.stp.items()):
            if mix.kind == kind and mix.signatures == (signature,):
                value = min(found.value * guess // max(1, rate), mix.jobs * ONE_JOB)
                self.stp[mix] = replace(found, value=value)
                self._note(mix)
            elif mix.kind == kind and signature in mix.signatures:
                del self.stp[mix]

    def _learn_stp(self, mix: Mix, value: int, at: Instant) -> None:
        before = self.stp.get(mix)
        if before is not None and self._contradicts(before.value, value):
            before = None
        after = Estimate(value, 1, at) if before is None else before.with_observation(value, at)
        self.stp[mix] = after
        self._note(mix)

    def _note(self, mix: Mix) -> None:
        if self._is_guessed(mix):
            return  # of no use without the guess
        row = Learned(mix.kind, mix.signatures, mix.jobs, self.stp[mix])
        self._changed[mix.kind, mix.signatures, mix.jobs] = row

    def _is_guessed(self, mix: Mix) -> bool:
        return any((mix.kind, signature) in self._guessed for signature in mix.signatures)

    def _contradicts(self, old: int, new: int) -> bool:
        return abs(new - old) * 100 > max(old, new) * self.policy.contradicts_pct

    # ---- outsiders -----------------------------------------------------------------

    def note_kind(self, now: Instant, device: str, kind: DeviceKind) -> None:
        """A reading of one device says that it is shared with outsiders, or is not."""
        sharing = self._sharing.setdefault(device, _Sharing())
        if kind.endswith(SHARED) == sharing.is_shared:
            sharing.differs_since = None
        elif sharing.differs_since is None:
            sharing.differs_since = now
        elif now - sharing.differs_since >= SHARED_AFTER_MS:
            self._sharing[device] = _Sharing(not sharing.is_shared)

    def lasting_kind(self, device: str, kind: DeviceKind) -> DeviceKind:
        """`kind`, as it has been for a while."""
        sharing = self._sharing.get(device)
        alone = kind.removesuffix(SHARED)
        return alone + SHARED if sharing is not None and sharing.is_shared else alone

    # ---- judging -------------------------------------------------------------------

    def judge(
        self,
        now: Instant,
        kind: DeviceKind,
        occupants: Sequence[Occupant],
        signature: Signature,
        *,
        expects_linear: bool,
        is_last: bool = False,
    ) -> Verdict:
        """Whether a job of this signature is worth starting beside these.

        Args:
            expects_linear: the device has a prior of STP(k) = k: the CPU, by whole cores.
            is_last: few others wait.  Left for later, it would run on a machine half empty, so
                it is started if only it does no harm.
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
        threshold = self.policy.threshold_pct * ONE_JOB // 100
        curve = self._curve(now, here, more)
        stp = _value_at(curve, k)
        ahead = [(n, value) for n, value in curve if n > k]
        is_last = is_last and k < _with_the_last(curve, threshold)
        if stp is not None and ahead:
            gain = max((value - stp) // (n - k) for n, value in ahead)
            if is_last and gain * 100 >= -stp * HARMLESS_PCT:
                return Verdict(admits=True, because="last", jobs=k, stp=stp, gain=gain)
            return Verdict(admits=gain >= threshold, because="known", jobs=k, stp=stp, gain=gain)
        last_gain = _last_gain(curve) if stp is not None else None
        if sum(n > 1 for n, _ in curve) < 2:
            # Of these proportions no gain is known yet.
            elsewhere = self._gain_elsewhere(now, here, more)
            if elsewhere is not None and elsewhere < threshold:
                if stp is None:
                    return Verdict(admits=False, because="measuring", jobs=k)
                is_harmless = is_last and elsewhere * 100 >= -stp * HARMLESS_PCT
                because = "last" if is_harmless else "alike"
                return Verdict(
                    admits=is_harmless, because=because, jobs=k, stp=stp, gain=elsewhere
                )
        if last_gain is not None and last_gain < threshold:
            assert stp is not None
            if is_last and last_gain * 100 >= -stp * HARMLESS_PCT:
                return Verdict(admits=True, because="last", jobs=k, stp=stp, gain=last_gain)
            return Verdict(admits=False, because="flat", jobs=k, stp=stp, gain=last_gain)
        if expects_linear:
            return Verdict(admits=True, because="prior", jobs=k, stp=stp, gain=ONE_JOB)
        if stp is not None or k < self._reach(curve, here):
            return Verdict(admits=True, because="explore", jobs=k, stp=stp)
        return Verdict(admits=False, because="measuring", jobs=k)

    def _curve(self, now: Instant, here: Mix, more: Mix) -> list[tuple[int, int]]:
        """What is known of STP(k), by k: of jobs like these up to here, and with one like the
        next beyond."""
        known = {
            n: found.value
            for n, found in self._points(here)
            if n <= here.jobs and now - found.at <= self.policy.forget_ms
        }
        known |= {
            n: found.value
            for n, found in self._points(more)
            if n > here.jobs and now - found.at <= self.policy.forget_ms
        }
        if all(self.solo_of(here.kind, one) is not None for one in here.signatures):
            known[1] = ONE_JOB
        return sorted(known.items())

    def _gain_elsewhere(self, now: Instant, here: Mix, more: Mix) -> int | None:
        """What one more job gave where the same programs ran in other proportions; of several,
        the middle one.  None: nothing is known of that, or there is one program alone."""
        if len(programs := set(more.signatures)) < 2:
            return None
        gains: list[int] = []
        for points in self._alike(here.kind, frozenset(programs)):
            curve = sorted(
                (n, found.value) for n, found in points if now - found.at <= self.policy.forget_ms
            )
            if not curve:
                continue
            below, above = _value_at(curve, here.jobs), _value_at(curve, more.jobs)
            if below is not None and above is not None:
                gains.append(above - below)
            elif curve[-1][0] <= here.jobs and (gain := _last_gain(curve)) is not None:
                gains.append(gain)
        return sorted(gains)[(len(gains) - 1) // 2] if gains else None

    def _points(self, mix: Mix) -> _Points:
        """Of mixes like this one, whatever their number."""
        return (
            self._sorted_out()
            .get((mix.kind, frozenset(mix.signatures)), {})
            .get(mix.signatures, [])
        )

    def _alike(self, kind: DeviceKind, programs: frozenset[Signature]) -> Iterable[_Points]:
        """Of mixes of these programs, in whatever proportions."""
        return self._sorted_out().get((kind, programs), {}).values()

    def _sorted_out(self) -> _Index:
        """Once after each reading."""
        if self._index is None:
            self._index = {}
            for m, found in self.stp.items():
                alike = self._index.setdefault((m.kind, frozenset(m.signatures)), {})
                alike.setdefault(m.signatures, []).append((m.jobs, found))
        return self._index

    def _reach(self, curve: Sequence[tuple[int, int]], here: Mix) -> int:
        """Up to how many jobs may be started without a measurement in between."""
        below = [(n, value) for n, value in curve if n < here.jobs]
        if not below or self._is_guessed(here):
            return 0
        n, value = below[-1]
        if n < 2:
            return 0
        if value >= UNDISTURBED * n:
            return 2 * n
        gain = _last_gain(below)
        return n + n // 2 if gain is not None and gain >= WORTHWHILE else 0

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
        if not occupant.reports and occupant.signature in self._mute:
            return True
        last = self._trained.get(occupant.job_id)
        quiet_ms = now - (occupant.since if last is None else max(last.at, occupant.since))
        reports = occupant.reports or self._is_vocal(occupant.signature)
        return quiet_ms > (self.policy.patience_ms if reports else self.policy.first_report_ms)

    def _is_vocal(self, signature: Signature) -> bool:
        return signature in self._vocal or any(one == signature for _, one in self.solo)

    def measured(self, device: str, kind: DeviceKind, occupants: Sequence[Occupant]) -> int | None:
        """STP of just these jobs, measured more than once since they have run together."""
        watch = self._watches.get(device)
        jobs = tuple(sorted(o.job_id for o in occupants))
        if watch is None or (watch.kind, watch.jobs) != (kind, jobs):
            return None
        if len(jobs) == 1:
            return ONE_JOB
        found = self.stp.get(Mix.of(kind, (o.signature for o in occupants)))
        if found is None or found.at < watch.since or found.observations < SLOWER_OBSERVATIONS:
            return None
        return found.value

    def faster(
        self, now: Instant, kind: DeviceKind, occupants: Sequence[Occupant], without: Occupant
    ) -> int | None:
        """How many jobs like these, but fewer, gave clearly more; None: none are known to."""
        here = Mix.of(kind, (o.signature for o in occupants))
        left = Mix.of(kind, (o.signature for o in occupants if o is not without))
        found = self.stp.get(here)
        if found is None:
            return None
        fewer = [(n, e) for n, e in self._points(here) if n < here.jobs]
        fewer += [(n, e) for n, e in self._points(left) if n == left.jobs]
        known = [(e.value, n) for n, e in fewer if now - e.at <= self.policy.forget_ms]
        if all(self.solo_of(kind, one) is not None for one in left.signatures):
            known.append((ONE_JOB, 1))
        value, n = max(known, default=(0, 0))
        return n if value * 100 > found.value * (100 + SLOWER_PCT) else None

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
        rows += [
            Learned(m.kind, m.signatures, m.jobs, found)
            for m, found in self.stp.items()
            if not self._is_guessed(m)
        ]
        fresh = [r for r in rows if now - r.estimate.at <= self.policy.forget_ms]
        return sorted(fresh, key=lambda row: (row.kind, row.signatures, row.jobs))

    def prune(self, now: Instant, most: int = SIGNATURES_MAX) -> None:
        """Drop what is too old to count, and all but the `most` programs observed last."""
        last: dict[Signature, Instant] = {}
        for key, found in self.solo.items():
            last[key[1]] = max(last.get(key[1], found.at), found.at)
        for mix, found in self.stp.items():
            for one in mix.signatures:
                last[one] = max(last.get(one, found.at), found.at)
        fresh = [one for one, at in last.items() if now - at <= self.policy.forget_ms]
        kept = set(sorted(fresh, key=lambda one: (-last[one], one))[:most])

        def counts(signatures: Iterable[Signature], found: Estimate) -> bool:
            return now - found.at <= self.policy.forget_ms and kept.issuperset(signatures)

        self.solo = {key: e for key, e in self.solo.items() if counts((key[1],), e)}
        self.stp = {mix: e for mix, e in self.stp.items() if counts(mix.signatures, e)}
        if len(self.stp) > MIXES_PER_SIGNATURE * most:
            newest = sorted(self.stp.items(), key=lambda item: (-item[1].at, item[0]))
            self.stp = dict(newest[: MIXES_PER_SIGNATURE * most])
        # A guess goes with the mixes that were divided by it, never before them.
        self._guessed = {key: rate for key, rate in self._guessed.items() if key[1] in kept}
        self._index = None

    def row_keys(self) -> list[tuple[DeviceKind, tuple[Signature, ...], int]]:
        """(kind, signatures, jobs) of every row there may be in the database."""
        return [
            *((kind, (one,), 0) for kind, one in self.solo),
            *((mix.kind, mix.signatures, mix.jobs) for mix in self.stp),
        ]

    def forget(self, signature: Signature) -> None:
        """The program, and every mix it was in."""
        self.solo = {key: found for key, found in self.solo.items() if key[1] != signature}
        self.stp = {m: found for m, found in self.stp.items() if signature not in m.signatures}
        self._guessed = {k: rate for k, rate in self._guessed.items() if k[1] != signature}
        self._mute.discard(signature)
        self._vocal.discard(signature)
        self._changed = {k: row for k, row in self._changed.items() if signature not in k[1]}
        self._index = None
        # A reading that is under way may have been divided by what is forgotten now.
        self._watches.clear()

    def load(self, rows: Iterable[Learned], now: Instant) -> None:
        """Take in what an earlier daemon learned.  Too old: left out."""
        self._index = None
        for row in rows:
            if now - row.estimate.at > self.policy.forget_ms:
                continue
            if row.jobs == 0:
                self.solo[row.kind, row.signatures[0]] = row.estimate
            else:
                self.stp[Mix(row.kind, row.signatures, row.jobs)] = row.estimate


def _value_at(curve: Sequence[tuple[int, int]], k: int) -> int | None:
    """On the curve at k, or on the line between its neighbours; None: beyond what is known."""
    below = [point for point in curve if point[0] <= k]
    above = [point for point in curve if point[0] >= k]
    if not below or not above:
        return None
    (k0, value0), (k1, value1) = below[-1], above[0]
    return value0 if k0 == k1 else value0 + (value1 - value0) * (k - k0) // (k1 - k0)


def _with_the_last(curve: Sequence[tuple[int, int]], threshold: int) -> int:
    """Up to how many the last ones of a queue may make it: half as many again as help, or two
    more.  Without a bound, of jobs that come one by one each is the last when it comes."""
    knee = 1
    for (n0, value0), (n, value) in pairwise(curve):
        if value - value0 >= threshold * (n - n0):
            knee = n
    return knee + max(2, knee // 2)


def _last_gain(curve: Sequence[tuple[int, int]]) -> int | None:
    """What the last jobs added each.  Over a quarter of them: one reading of noise must not
    look like a knee."""
    if len(curve) < 2:
        return None
    k, value = curve[-1]
    k0, value0 = max(point for point in curve[:-1] if point[0] <= max(curve[0][0], k - k // 4))
    return (value - value0) // (k - k0)


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
