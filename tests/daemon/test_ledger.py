"""What was learned does not fill the database."""

from __future__ import annotations

import time
from pathlib import Path

from rlqd.adapters.sqlite import Store
from rlqd.config import Config
from rlqd.core.guard import Estimate, Learned
from rlqd.core.learned import LearnedPeak
from rlqd.core.machine import Scheduler
from rlqd.core.model import Instant
from rlqd.fences import Enforcement, Means
from rlqd.shell import rows
from rlqd.shell.accounts import Accounts
from rlqd.shell.ledger import PRUNE_EVERY, Ledger
from rlqd.shell.views import Views

DAY_S = 86_400


def ledger_of(store: Store, core: Scheduler) -> Ledger:
    views = Views(
        config=Config(),
        logs_dir="/logs",
        core=core,
        live={},
        accounts=Accounts(),
        host=lambda: None,
        gpus=lambda: None,
        supervisor_of=lambda _: None,
        owner_of=lambda _: ("", ""),
        enforcement=lambda: Enforcement(means=Means.AFFINITY),
    )
    return Ledger(store=store, views=views)


def learned(name: str) -> tuple[Learned, LearnedPeak]:
    solo = Learned("GPU", (name,), 0, Estimate(1000, 1, Instant(0)))
    return solo, LearnedPeak(signature=name, mem_mib=1, at=Instant(0))


def test_rows_that_are_too_old_are_dropped_at_the_start(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        with store.transaction():
            for name, days in (("new", 1), ("old", 1000)):
                at = time.time() - days * DAY_S
                store.put_learned(rows.dump_learned(row, at) for row in learned(name))
        core = Scheduler()
        ledger_of(store, core).load_learned(core, Instant(0))
        assert {key.split("\0")[-1] for key in store.learned_keys()} == {"new"}
        assert set(core.peaks.known) == {"new"}


def test_rows_that_the_core_has_forgotten_are_dropped_as_others_come(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        core = Scheduler()
        ledger = ledger_of(store, core)
        for batch in range(0, 2 * PRUNE_EVERY, 500):
            news = [row for n in range(batch, batch + 250) for row in learned(f"p{n}")]
            core.guard.load([row for row in news if isinstance(row, Learned)], Instant(0))
            core.peaks.load([row for row in news if isinstance(row, LearnedPeak)])
            ledger.commit([], [], news)
            for row in news:
                if isinstance(row, LearnedPeak) and row.signature != "p0":
                    core.guard.forget(row.signature)
                    core.peaks.forget(row.signature)
        assert len(store.learned_keys()) <= PRUNE_EVERY
        assert "peak\0p0" in store.learned_keys()
