"""What was learned does not fill the database, and what was used survives the daemon."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlqd.adapters.sqlite import Store, UseRow
from rlqd.config import Config
from rlqd.core.fairness import Accounted, Use
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


def used(store: Store, *, days_ago: float) -> dict[int, Use]:
    """What a daemon that starts now finds, written down `days_ago`."""
    row = UseRow(uid=7, machine_s=8_000, gpu_s=4_000, core_s=2_000, at=time.time())
    with store.transaction():
        store.put_use([replace(row, at=row.at - days_ago * DAY_S)])
    core = Scheduler()
    ledger_of(store, core).load_use(core, Instant(1_000))
    core.step(Instant(1_000))
    return core.fairness.uses


def test_use_decays_while_no_daemon_runs(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        use = used(store, days_ago=14)[7]
    found = (use.machine_ms, use.gpu_ms, use.core_ms)
    assert found == pytest.approx((2e6, 1e6, 0.5e6), rel=1e-3)


def test_a_clock_that_was_set_back_makes_no_time_pass(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        assert used(store, days_ago=-30)[7].machine_ms == pytest.approx(8e6)


def test_the_table_holds_one_row_for_each_user_who_has_used_something(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        ledger = ledger_of(store, Scheduler())
        ledger.commit([], [], accounted=[Accounted(1, Use(1e3)), Accounted(2, Use(2e3))])
        ledger.commit([], [], accounted=[Accounted(2, Use(3e3))])
        assert [(row.uid, row.machine_s) for row in store.use()] == [(2, 3.0)]
