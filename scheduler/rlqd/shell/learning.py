"""What the core has learned, for people: `rlq profile`."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from rlq.protocol.messages import Curve, CurvePoint, Profiled, Profiles, SoloRate
from rlqd.core.guard import ONE_JOB, Learned
from rlqd.core.learned import LearnedPeak
from rlqd.core.machine import Scheduler
from rlqd.core.model import Instant
from rlqd.shell.signature import shown_as


def profiles(
    core: Scheduler, pattern: str, now_unix: float, viewer_uid: int, *, sees_all: bool
) -> Profiles:
    """Everything that still counts, of the viewer's programs whose signature matches."""
    learned = [
        replace(row, signatures=shown)
        for row in core.guard.known(core.now)
        if (shown := _shown(row.signatures, viewer_uid, sees_all)) and _matches(shown, pattern)
    ]
    peaks = {
        shown[0]: peak
        for signature in core.peaks.known
        if (shown := _shown((signature,), viewer_uid, sees_all))
        and _matches(shown, pattern)
        and (peak := core.peaks.get(signature, core.now))
    }
    alone = [row for row in learned if row.jobs == 0]
    names = {*peaks, *(row.signatures[0] for row in alone)}

    def unix(at: Instant) -> float:
        return now_unix - (core.now - at) / 1000

    def solo_of(signature: str) -> tuple[SoloRate, ...]:
        return tuple(
            SoloRate(
                device=row.kind,
                steps_per_s=row.estimate.value / 1000,
                observations=row.estimate.observations,
                learned_at=unix(row.estimate.at),
            )
            for row in alone
            if row.signatures == (signature,)
        )

    def program(signature: str, peak: LearnedPeak | None) -> Profiled:
        solo = solo_of(signature)
        if peak is None:
            latest = max((one.learned_at for one in solo), default=0.0)
            return Profiled(signature=signature, learned_at=latest, solo=solo)
        return Profiled(
            signature=signature,
            runs=peak.runs,
            learned_at=unix(peak.at),
            # 0 is how the core writes "not known".
            mem_mib=peak.mem_mib or None,
            gpu_mem_mib=peak.gpu_mem_mib or None,
            sm_pct=peak.sm_pct or None,
            cpu_cores=peak.cpu_millicores / 1000 if peak.cpu_millicores else None,
            solo=solo,
        )

    def point(row: Learned) -> CurvePoint:
        return CurvePoint(
            jobs=row.jobs,
            stp=row.estimate.value / ONE_JOB,
            observations=row.estimate.observations,
            learned_at=unix(row.estimate.at),
        )

    curves: dict[tuple[str, tuple[str, ...]], list[CurvePoint]] = {}
    for row in learned:
        if row.jobs:
            curves.setdefault((row.kind, row.signatures), []).append(point(row))
    return Profiles(
        programs=tuple(program(name, peaks.get(name)) for name in sorted(names)),
        curves=tuple(
            Curve(device=device, signatures=signatures, points=tuple(points))
            for (device, signatures), points in curves.items()
        ),
    )


def _shown(learned: tuple[str, ...], viewer_uid: int, sees_all: bool) -> tuple[str, ...]:
    """Empty: one of them is another user's."""
    found = [shown_as(one, viewer_uid, sees_all=sees_all) for one in learned]
    names = tuple(one for one in found if one is not None)
    return names if len(names) == len(learned) else ()


def _matches(signatures: tuple[str, ...], pattern: str) -> bool:
    """A shell pattern is held against the whole, words against any part of it."""
    if not pattern:
        return True
    if any(c in pattern for c in "*?["):
        return any(fnmatchcase(signature, pattern) for signature in signatures)
    return any(pattern.lower() in signature.lower() for signature in signatures)
