"""What jobs report of themselves, and the rate and end that follow from it.

People see a rate over half a minute.  The throughput guard compares jobs before and after one was
added, so the rate it is given must not reach back to before: when a job comes, goes, or begins to
train, the rates of all jobs on its device are measured afresh (`Company`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlq.protocol.messages import Progress
from rlqd.core.model import GpuId, JobId

#: A rate is taken over this much of the past: long enough to even out evaluations and episode
#: ends, short enough to show when a neighbour slows the job down.
RATE_WINDOW_S = 30.0
#: The guard averages by itself; its rates are over so much of its own time, at most so long.
RECENT_SHARE = 0.6
RECENT_S_MAX = 9.0
#: A job that has not been heard of for so long evaluates, or saves a checkpoint.
SILENT_S = 9.0
#: Reports closer together than this count as one, and at most so many are kept: what a job sends
#: must not cost the daemon more than what an honest one does.
GRAIN_S = 0.1
WINDOW_MAX = 512
#: Names of metrics that one attempt may use, as `rlq.job` sends at once.
METRICS_MAX = 32
WARMING_UP = "warming_up"
#: Ten years: what goes beyond says nothing.
LEFT_MS_MAX = 10 * 366 * 86_400_000

Phase = Literal["silent", "warming up", "training"]


@dataclass(slots=True)
class Tracker:
    """One attempt's reports."""

    step: int = 0
    total: int | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    reported_at: float = 0.0
    #: (the job's monotonic seconds, step), oldest first.
    window: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_MAX))
    #: The job's seconds from which on the guard's rate is taken; None: from its next report on.
    fresh_from: float | None = None

    def add(self, t: float, step: int, total: int | None, metrics: dict[str, float]) -> None:
        """`t` is the job's own monotonic clock, so a late datagram does not bend the rate."""
        if self.window and (t <= self.window[-1][0] or step < self.window[-1][1]):
            if t < self.window[-1][0]:
                return  # overtaken by a newer report
            if step < self.window[-1][1]:
                self.window.clear()  # it began anew
                self.fresh_from = None
        if len(self.window) > 1 and t - self.window[-2][0] < GRAIN_S:
            self.window[-1] = (t, step)
        else:
            self.window.append((t, step))
        while len(self.window) > 2 and self.window[1][0] <= t - RATE_WINDOW_S:
            self.window.popleft()
        self.step = step
        self.total = total if total is not None else self.total
        if self.phase == "warming up":
            self.fresh_from = None  # how fast it fills its buffer tells nothing of its training
        # A reporter that never speaks of warming up must not inherit the word of one that did.
        self.metrics.pop(WARMING_UP, None)
        for name, value in metrics.items():
            if name in self.metrics or name == WARMING_UP or len(self.metrics) < METRICS_MAX:
                self.metrics[name] = value
        if self.fresh_from is None and self.phase == "training":
            self.fresh_from = t
        self.reported_at = time.time()

    @property
    def phase(self) -> Phase:
        if not self.window:
            return "silent"
        return "warming up" if self.metrics.get(WARMING_UP) else "training"

    def measure_afresh(self) -> None:
        """What it shares its device with has changed."""
        self.fresh_from = None

    def steps_per_s(self) -> float | None:
        if len(self.window) < 2:
            return None
        (t0, step0), (t1, step1) = self.window[0], self.window[-1]
        return (step1 - step0) / (t1 - t0) if t1 > t0 else None

    def training_milli_per_s(self, now_unix: float, recent_s: float = RECENT_S_MAX) -> int | None:
        """The rate at which it trains in its present company, in thousandths of a step per
        second; None: it does not train yet, or has not been heard of for a while."""
        if self.fresh_from is None or self.phase != "training":
            return None
        if now_unix - self.reported_at > SILENT_S:
            return None
        begin = max(self.fresh_from, self.window[-1][0] - recent_s)
        recent = [(t, step) for t, step in self.window if t >= begin]
        if len(recent) < 2 or recent[-1][0] - recent[0][0] < recent_s / 3:
            return None
        (t0, step0), (t1, step1) = recent[0], recent[-1]
        return round(1000 * (step1 - step0) / (t1 - t0))

    def eta_s(self) -> float | None:
        """How long it still runs, as of its last report; None: it does not tell."""
        rate = self.steps_per_s()
        if not rate or self.total is None:
            return None
        return max(0.0, (self.total - self.step) / rate)

    def left_ms(self, now_unix: float) -> int | None:
        """The same as of now.  What it does while it warms up tells nothing of how long the rest
        takes."""
        eta_s = self.eta_s()
        if eta_s is None or self.phase != "training":
            return None
        # A step so slow that nobody lives to see it: no prediction, and no overflow.
        left_ms = 1000 * (eta_s - max(0.0, now_unix - self.reported_at))
        return round(max(0.0, left_ms)) if left_ms < LEFT_MS_MAX else None

    def view(self) -> Progress:
        rate = self.steps_per_s()
        eta_s = self.eta_s()
        return Progress(
            step=self.step,
            total=self.total,
            steps_per_s=None if rate is None else round(rate, 2),
            eta_s=None if eta_s is None else round(eta_s, 1),
            metrics=dict(self.metrics),
            reported_at=self.reported_at,
        )


def recent_s(observe_ms: int) -> float:
    """How much of the past the guard's rates are taken over."""
    return min(RECENT_S_MAX, RECENT_SHARE * observe_ms / 1000)


@dataclass(slots=True)
class Company:
    """Who shares a device with whom (None: the CPU), and what they were doing when last looked."""

    _seen: dict[GpuId | None, dict[JobId, Phase]] = field(
        default_factory=dict[GpuId | None, dict[JobId, Phase]]
    )

    def look(
        self,
        devices: Mapping[JobId, Collection[GpuId]],
        trackers: Mapping[JobId, Tracker],
    ) -> None:
        """Where somebody came, went, or began or ceased to train, all are measured afresh.

        Args:
            devices: of every job that holds resources; none: it runs on the CPU.
        """
        seen: dict[GpuId | None, dict[JobId, Phase]] = {}
        for job_id, gpus in devices.items():
            tracker = trackers.get(job_id)
            for device in gpus or (None,):
                phase = "silent" if tracker is None else tracker.phase
                seen.setdefault(device, {})[job_id] = phase
        for device, now in seen.items():
            if now != self._seen.get(device):
                for job_id in now.keys() & trackers.keys():
                    trackers[job_id].measure_afresh()
        self._seen = seen
