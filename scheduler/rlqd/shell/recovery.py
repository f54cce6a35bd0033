"""Coming back: the jobs as the database has them, and a core that goes on with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rlq.protocol.states import JobState
from rlqd.adapters.sqlite import Store
from rlqd.config import Config
from rlqd.core import model
from rlqd.core.machine import Scheduler
from rlqd.shell import rows, shares
from rlqd.shell.views import Live

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """The jobs that have not ended."""

    jobs: list[model.Job] = field(default_factory=list[model.Job])
    live: dict[model.JobId, Live] = field(default_factory=dict[model.JobId, Live])
    #: Those waiting that cannot be read.
    damaged: list[int] = field(default_factory=list[int])


def read(store: Store, config: Config) -> Found:
    """One row that somebody has damaged must not keep all others from running.

    Raises:
        UnavailableError: the database cannot be read.
    """
    found = Found()
    for row in store.live():
        job_id = model.JobId(row.id)
        try:
            state = rows.load_state(rows.load_detail(row.detail))
            spec = rows.core_spec(row.job_spec, row.uid, config)
        except (msgspec.MsgspecError, KeyError, TypeError):
            log.exception("job %d cannot be read from the database; it is left out", row.id)
            if row.state is JobState.PENDING:
                found.damaged.append(row.id)
            continue
        found.jobs.append(model.Job(job_id, spec, row.attempt, state))
        found.live[job_id] = Live(uid=row.uid, user=row.user, started_at=row.started_at)
    return found


def end_damaged(store: Store, ids: Iterable[int]) -> None:
    """A waiting job whose row somebody has damaged would wait for ever, and nobody could
    cancel it."""
    with store.transaction():
        for job_id in ids:
            store.update_state(
                job_id,
                state=JobState.NODE_FAIL,
                held=False,
                attempt=0,
                reason=rows.DAMAGED,
                started_at=None,
                ended_at=time.time(),
                exit_code=None,
                signal=None,
            )


def successor(
    before: Scheduler, jobs: Iterable[model.Job], config: Config, now: model.Instant
) -> Scheduler:
    """A core of these jobs, which knows of the machine and of users what `before` knew.

    Its limits and what is booked are still to be told.
    """
    core = Scheduler.restore(jobs, rows.core_policy(config), now)
    core.facts = before.facts
    core.guard, core.peaks = before.guard, before.peaks
    core.fairness, core.promised = before.fairness, before.promised
    configure(core, config)
    core.fairness.carry_over(now)
    return core


def configure(core: Scheduler, config: Config) -> None:
    core.policy = rows.core_policy(config)
    core.guard.policy = rows.guard_policy(config)
    core.fairness.policy = shares.policy(config)
