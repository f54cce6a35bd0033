"""The folder that everything is kept in: whether it is still there, has room, and is tidied."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from rlq.errors import UnavailableError
from rlqd.adapters.sqlite import Store
from rlqd.core import model
from rlqd.shell.condition import DISK_MIB_MIN, Condition
from rlqd.shell.wall_clock import WallClock

log = logging.getLogger(__name__)

DISK_PERIOD_MS = 10_000
#: How long a removed or replaced database stays unnoticed where nothing is to be written.
LOOK_PERIOD_MS = 2_000
PRUNE_PERIOD_MS = 60_000
#: Time to set a clock right again.
PRUNE_PAUSE_MS = 24 * 3_600_000


@dataclass(slots=True, kw_only=True)
class StateFolder:
    path: Path
    store: Store
    condition: Condition
    _look_due: int = 0
    _disk_due: int = 0
    _prune_due: int = 0
    _wall_clock: WallClock = field(
        default_factory=lambda: WallClock(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))
    )

    def is_time_to_look(self, now: model.Instant) -> bool:
        """Whether it and the sockets are still there."""
        if now < self._look_due:
            return False
        self._look_due = now + LOOK_PERIOD_MS
        return True

    def fullness_has_changed(self, now: model.Instant) -> bool:
        """Whether the disk has filled up, or has room again; looks when it is time to."""
        if now < self._disk_due:
            return False
        self._disk_due = now + DISK_PERIOD_MS
        try:
            found = os.statvfs(self.path)
        except OSError as error:
            log.error("cannot look at %s: %s", self.path, error)
            return False
        is_full = found.f_bavail * found.f_frsize < DISK_MIB_MIN * 2**20
        if is_full == self.condition.disk_is_full:
            return False
        self.condition.disk_is_full = is_full
        log.log(
            logging.ERROR if is_full else logging.INFO,
            "the disk of %s is %s",
            self.path,
            "full: nothing new starts" if is_full else "no longer full",
        )
        return True

    def prune(self, now: model.Instant, keep_ms: int | None) -> None:
        """Forget jobs that ended so long ago; None: none.  When it is time to."""
        if keep_ms is None or now < self._prune_due or self.condition.broken:
            return
        self._prune_due = now + PRUNE_PERIOD_MS
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if by_s := self._wall_clock.set_by_s(time.time(), boot_s):
            log.warning("the clock was set by %d s: no job is forgotten for a day", by_s)
            self._prune_due = now + PRUNE_PAUSE_MS
            return
        with contextlib.suppress(UnavailableError):
            self.store.prune(time.time() - keep_ms / 1000)
