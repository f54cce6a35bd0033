"""What jobs of one signature were measured at, charged the next time nothing is declared.

A peak is kept for every resource.  It rises at once and sinks slowly, so that one short run does
not make the next long one look small: host memory grows for hours as a replay buffer fills.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlqd.core.model import Instant

#: A smaller peak pulls the learned one down by this share of the difference.
SINK_PCT = 20
#: Programs that are remembered.  Who submits a new name each time must not fill the memory.
SIGNATURES_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPeak:
    """0: not known."""

    signature: str
    mem_mib: int
    gpu_mem_mib: int = 0
    sm_pct: int = 0
    cpu_millicores: int = 0
    runs: int = 1
    at: Instant

    def after(self, newer: LearnedPeak) -> LearnedPeak:
        """This, and then one more run."""
        return LearnedPeak(
            signature=self.signature,
            mem_mib=_follow(self.mem_mib, newer.mem_mib),
            gpu_mem_mib=_follow(self.gpu_mem_mib, newer.gpu_mem_mib),
            sm_pct=_follow(self.sm_pct, newer.sm_pct),
            cpu_millicores=_follow(self.cpu_millicores, newer.cpu_millicores),
            runs=self.runs + newer.runs,
            at=newer.at,
        )


def _follow(old: int, new: int) -> int:
    if new == 0 or new >= old:
        return max(old, new)
    return old - (old - new) * SINK_PCT // 100


@dataclass(slots=True)
class Peaks:
    """By signature.  Jobs without one ("") are never learned from."""

    forget_ms: int = 90 * 86_400_000
    known: dict[str, LearnedPeak] = field(default_factory=dict[str, LearnedPeak])
    _changed: set[str] = field(default_factory=set[str])

    def get(self, signature: str, now: Instant) -> LearnedPeak | None:
        found = self.known.get(signature)
        return found if found is not None and now - found.at <= self.forget_ms else None

    def learn(self, peak: LearnedPeak) -> None:
        before = self.get(peak.signature, peak.at)
        self.known[peak.signature] = peak if before is None else before.after(peak)
        self._changed.add(peak.signature)

    def forget(self, signature: str) -> None:
        self.known.pop(signature, None)
        self._changed.discard(signature)

    def prune(self, now: Instant, most: int = SIGNATURES_MAX) -> None:
        """Drop what is too old to count, and all but the `most` programs that ended last."""
        fresh = [peak for peak in self.known.values() if now - peak.at <= self.forget_ms]
        newest = sorted(fresh, key=lambda peak: (-peak.at, peak.signature))[:most]
        self.known = {peak.signature: peak for peak in newest}
        self._changed &= self.known.keys()

    def take_changes(self) -> list[LearnedPeak]:
        """What changed since the last call, for the database."""
        changes = [self.known[s] for s in sorted(self._changed)]
        self._changed.clear()
        return changes

    def load(self, rows: Iterable[LearnedPeak]) -> None:
        self.known.update({row.signature: row for row in rows})
