"""How fast k equal jobs are together, for k = 1, 2, 3, …: measured, not guessed.

One job is added at a time and those before it run on: start-up and compilation, which take
longer than the measurement, are paid once for each job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlq.client import Client
from rlq.errors import RefusedError, UnavailableError
from rlq.protocol.messages import Job, JobSpec
from rlq.protocol.states import JobState

#: One more job must add this much of a job's speed alone (as `guard.threshold` by default).
GAIN_LEAST = 0.05
#: After so many jobs in a row that added less, it is not going to grow again.
FLAT_ENOUGH = 2
POLL_S = 0.5
#: A job that does not start for so long although there is nothing else is short of something.
START_PATIENCE_S = 15.0
#: Importing torch or jax beside k others, filling the buffer, compiling.
TRAIN_PATIENCE_S = 300.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """k jobs at a time.  `rates`: each job's steps/s, in the order they were started."""

    jobs: int
    rates: tuple[float, ...]
    #: steps/s of one job alone on this device.
    solo: float
    #: STP of one job less.
    stp_before: float
    #: The daemon's own readings were steady enough for it to remember.
    learned: bool = True

    @property
    def total(self) -> float:
        return sum(self.rates)

    @property
    def stp(self) -> float:
        """System throughput: how many times one job's speed alone."""
        return self.total / self.solo

    @property
    def antt(self) -> float:
        """Average normalised turnaround time: how many times longer a job takes."""
        return sum(self.solo / rate for rate in self.rates) / self.jobs

    @property
    def gain(self) -> float:
        return self.stp - self.stp_before


@dataclass
class Curve:
    """Of one device."""

    device: str
    points: list[Point] = field(default_factory=list[Point])
    #: Why it ends where it does.
    ended: str = ""

    @property
    def knee(self) -> int:
        """The number of jobs up to which each added enough; 0: nothing was measured."""
        for point in self.points:
            if point.gain < GAIN_LEAST:
                return point.jobs - 1
        return self.points[-1].jobs if self.points else 0

    @property
    def knee_is_seen(self) -> bool:
        """The curve goes on past it, so it is one."""
        return bool(self.points) and self.knee < self.points[-1].jobs

    def is_flat(self) -> bool:
        last = self.points[-FLAT_ENOUGH:]
        return len(last) == FLAT_ENOUGH and all(point.gain < GAIN_LEAST for point in last)


@dataclass
class Calibration:
    """Whoever makes one calls `stop` in the end, come what may."""

    client: Client
    seconds: float
    say: Say
    #: Every job ever started here.
    ids: list[int] = field(default_factory=list[int])

    def measure(self, curve: Curve, make_spec: Callable[[int], JobSpec], jobs_max: int) -> None:
        """Add to `curve` until it is flat or no more jobs fit."""
        running: list[int] = []
        while len(running) < jobs_max:
            job = self.start(make_spec(len(running) + 1), curve, is_first=not running)
            if job is None:
                return
            running.append(job)
            self.say(f"{curve.device}: {len(running)} running, waiting until all of them train")
            self.until_training(running)
            self.say(f"{curve.device}: measuring {len(running)} for {self.seconds:.0f} s")
            rates, learned = self.rates_of(running)
            solo = curve.points[0].solo if curve.points else rates[0]
            before = curve.points[-1].stp if curve.points else 0.0
            curve.points.append(Point(len(running), rates, solo, before, learned))
            if curve.is_flat():
                curve.ended = f"the last {FLAT_ENOUGH} jobs added nothing"
                return
        curve.ended = f"--jobs-max {jobs_max}"

    def start(self, spec: JobSpec, curve: Curve, *, is_first: bool) -> int | None:
        """The job, running; None: it does not fit (and `curve.ended` says why)."""
        try:
            [job] = self.client.submit_many([spec])
        except RefusedError as error:
            if is_first:
                raise
            curve.ended = error.message
            return None
        self.ids.append(job)
        patience = time.monotonic() + START_PATIENCE_S
        while (now := self.client.get(job)).state in (JobState.PENDING, JobState.CONFIGURING):
            is_late = time.monotonic() >= patience
            if now.state is JobState.PENDING and is_late:
                curve.ended = self.client.why(job).summary
                self.end([job])
                if is_first:
                    raise UnavailableError(
                        f"not even one job starts: {curve.ended}",
                        hint="`rlq gpus` shows what there is",
                    )
                return None
            time.sleep(POLL_S)
        return job

    def until_training(self, ids: Sequence[int]) -> None:
        """Until each has reported twice since it began to learn."""
        seen: dict[int, set[int]] = {job: set() for job in ids}
        patience = time.monotonic() + TRAIN_PATIENCE_S
        while True:
            for job in self.look(ids):
                progress = job.progress
                if progress is not None and not progress.metrics.get("warming_up"):
                    seen[job.id].add(progress.step)
            late = [job for job, steps in seen.items() if len(steps) < 2]
            if not late:
                return
            if time.monotonic() >= patience:
                raise UnavailableError(
                    f"job {late[0]} does not train after {TRAIN_PATIENCE_S:.0f} s",
                    hint=f"rlq logs {late[0]}",
                )
            time.sleep(POLL_S)

    def rates_of(self, ids: Sequence[int]) -> tuple[tuple[float, ...], bool]:
        """Each job's steps/s over `seconds` or a little more, and whether the daemon has
        learned of it: that is waited for, but no longer than as long again."""
        first = {job.id: job for job in self.look(ids)}
        began_unix, began = time.time(), time.monotonic()
        while True:
            time.sleep(POLL_S)
            last = {job.id: job for job in self.look(ids)}
            spent = time.monotonic() - began
            if spent < self.seconds:
                continue
            rates = [rate_between(first[job], last[job]) for job in ids]
            known = [rate for rate in rates if rate is not None]
            is_learned = self.has_learned(last[ids[0]].signature, len(ids), began_unix)
            if len(known) == len(rates) and (is_learned or spent >= 2 * self.seconds):
                return tuple(known), is_learned
            if spent >= max(4 * self.seconds, TRAIN_PATIENCE_S):
                silent = ids[rates.index(None)]
                raise UnavailableError(
                    f"job {silent} has reported no step for {spent:.0f} s",
                    hint=f"rlq logs {silent}",
                )

    def has_learned(self, signature: str, jobs: int, since_unix: float) -> bool:
        found = self.client.profile()
        if jobs == 1:
            solos = [p.solo for p in found.programs if p.signature == signature]
            return any(one.learned_at >= since_unix for solo in solos for one in solo)
        return any(
            point.jobs == jobs and point.learned_at >= since_unix
            for curve in found.curves
            if curve.signatures == (signature,)
            for point in curve.points
        )

    def look(self, ids: Sequence[int]) -> list[Job]:
        """The jobs.

        Raises:
            UnavailableError: one has ended, which none should.
        """
        jobs = [self.client.get(job) for job in ids]
        for job in jobs:
            if job.state.is_final:
                raise UnavailableError(
                    f"job {job.id} has ended: {job.state} ({job.reason or 'no reason'})",
                    hint=f"rlq logs {job.id}",
                )
        return jobs

    def end(self, ids: Sequence[int]) -> None:
        """Stop them and wait until they are gone, so that they disturb no more."""
        if ids:
            self.client.cancel(list(ids), now=True)
            self.client.wait(list(ids), timeout=30)

    def stop(self) -> None:
        """All of them."""
        self.end(self.ids)


def rate_between(first: Job, last: Job) -> float | None:
    """steps/s by the reports of a job; None: it has not reported meanwhile."""
    a, b = first.progress, last.progress
    if a is None or b is None or b.reported_at <= a.reported_at or b.step <= a.step:
        return None
    return (b.step - a.step) / (b.reported_at - a.reported_at)


# ---- showing -----------------------------------------------------------------------

BAR_COLUMNS = 56


def plot(curve: Curve) -> str:
    """Plain text, at most 80 columns: what k jobs give together."""
    most = max(point.total for point in curve.points)
    lines = ["jobs  steps/s together (= one job's part, # the others')"]
    for point in curve.points:
        length = max(1, round(BAR_COLUMNS * point.total / most))
        own = max(1, round(length / point.jobs))
        bar = "=" * own + "#" * (length - own)
        mark = "  <- knee" if point.jobs == curve.knee and curve.knee_is_seen else ""
        lines.append(f"{point.jobs:>4}  {bar} {figure(point.total)}{mark}")
    return "\n".join(lines)


def table(curve: Curve) -> str:
    lines = ["jobs  steps/s each  together    STP   ANTT   gain"]
    for point in curve.points:
        mark = "  <- knee" if point.jobs == curve.knee and curve.knee_is_seen else ""
        lines.append(
            f"{point.jobs:>4}  {figure(point.total / point.jobs):>12}  {figure(point.total):>8}"
            f"  {point.stp:5.2f}  {point.antt:5.2f}  {point.gain:+5.2f}{mark}"
        )
    return "\n".join(lines)


def figure(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.1f}"


def verdict(curve: Curve) -> str:
    if not curve.points:
        return f"{curve.device}: nothing was measured ({curve.ended})"
    best = curve.points[curve.knee - 1]
    jobs = "1 job" if best.jobs == 1 else f"{best.jobs} jobs"
    said = f"{curve.device}: {jobs} at a time, {best.stp:.1f}x one job's speed"
    if len(curve.points) == 1:
        said += f"; a second was not measured ({curve.ended})"
    elif not curve.knee_is_seen:
        said += f"; each still helped when it ended ({curve.ended})"
    return said


def document(curve: Curve) -> dict[str, object]:
    return {
        "device": curve.device,
        "knee": curve.knee,
        "knee_is_seen": curve.knee_is_seen,
        "ended": curve.ended,
        "points": [
            {
                "jobs": point.jobs,
                "steps_per_s": [round(rate, 3) for rate in point.rates],
                "steps_per_s_total": round(point.total, 3),
                "stp": round(point.stp, 4),
                "antt": round(point.antt, 4),
                "gain": round(point.gain, 4),
                "learned": point.learned,
            }
            for point in curve.points
        ],
    }
