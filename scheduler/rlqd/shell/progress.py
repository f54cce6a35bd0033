"""What jobs report of themselves, and the rate and end that follow from it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from rlq.protocol.messages import Progress

#: A rate is taken over this much of the past: long enough to even out evaluations and episode
#: ends, short enough to show when a neighbour slows the job down.
RATE_WINDOW_S = 30.0
#: The guard wants to see what changed: it averages by itself.
RECENT_S = 9.0


@dataclass(slots=True)
class Tracker:
    """One attempt's reports."""

    step: int = 0
    total: int | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    reported_at: float = 0.0
    #: (the job's monotonic seconds, step), oldest first.
    window: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def add(self, t: float, step: int, total: int | None, metrics: dict[str, float]) -> None:
        """`t` is the job's own monotonic clock, so a late datagram does not bend the rate."""
        if self.window and (t <= self.window[-1][0] or step < self.window[-1][1]):
            if t < self.window[-1][0]:
                return  # overtaken by a newer report
            if step < self.window[-1][1]:
                self.window.clear()  # it began anew
        self.window.append((t, step))
        while len(self.window) > 2 and self.window[1][0] <= t - RATE_WINDOW_S:
            self.window.popleft()
        self.step = step
        self.total = total if total is not None else self.total
        self.metrics |= metrics
        self.reported_at = time.time()

    def steps_per_s(self) -> float | None:
        if len(self.window) < 2:
            return None
        (t0, step0), (t1, step1) = self.window[0], self.window[-1]
        return (step1 - step0) / (t1 - t0) if t1 > t0 else None

    def training_milli_per_s(self, now_unix: float) -> int | None:
        """The rate at which it trains, in thousandths of a step per second; None: it does not
        train yet, or has not been heard of for a while (an evaluation, a checkpoint)."""
        if self.metrics.get("warming_up") or now_unix - self.reported_at > RECENT_S:
            return None
        recent = [(t, step) for t, step in self.window if t >= self.window[-1][0] - RECENT_S]
        if len(recent) < 2 or recent[-1][0] - recent[0][0] < RECENT_S / 3:
            return None
        (t0, step0), (t1, step1) = recent[0], recent[-1]
        return round(1000 * (step1 - step0) / (t1 - t0))

    def view(self) -> Progress:
        rate = self.steps_per_s()
        eta_s = None
        if rate and self.total is not None:
            eta_s = max(0.0, (self.total - self.step) / rate)
        return Progress(
            step=self.step,
            total=self.total,
            steps_per_s=None if rate is None else round(rate, 2),
            eta_s=None if eta_s is None else round(eta_s, 1),
            metrics=dict(self.metrics),
            reported_at=self.reported_at,
        )
