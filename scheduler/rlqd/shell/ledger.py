"""What a step changed, put on disk: every row of it in one transaction."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

import msgspec

from rlq.errors import UnavailableError
from rlq.protocol.messages import Attempt
from rlq.protocol.states import JobState
from rlqd.adapters.sqlite import AuditRow, Row, Store, UseRow
from rlqd.core import model
from rlqd.core.fairness import Accounted, Use
from rlqd.core.guard import Learned
from rlqd.core.learned import LearnedPeak
from rlqd.core.machine import Scheduler
from rlqd.shell import launching, rows
from rlqd.shell.accounts import user_name
from rlqd.shell.requests import Change
from rlqd.shell.views import Live, Views

log = logging.getLogger(__name__)


#: Pruning looks at all that was learned: done at the start, and after so many new rows.
PRUNE_EVERY = 1_000


def in_words(act: AuditRow) -> str:
    """For the journal."""
    on = f" job {act.job} of {act.owner}" if act.job is not None else ""
    detail = f" ({act.detail})" if act.detail else ""
    return f"{act.user} (uid {act.uid}): {act.verb}{on}{detail}"


@dataclass(slots=True, kw_only=True)
class Ledger:
    store: Store
    views: Views
    #: Learned rows written since they were pruned.
    _learned: int = 0

    def commit(
        self,
        jobs: Iterable[model.Job],
        changes: Iterable[Change],
        learned: Iterable[Learned | LearnedPeak] = (),
        accounted: Iterable[Accounted] = (),
    ) -> None:
        """One fsync, however many requests waited for it.

        Args:
            jobs: as the step left them; of several versions of one job the last counts.
            changes: the requests of this step, for what the core does not know of a new job.
            accounted: what all users have used by now; none: nothing new.

        Raises:
            UnavailableError: nothing was written.
        """
        at = time.time()
        changes = tuple(changes)
        latest = {job.id: job for job in jobs}
        incoming = {
            job_id: (spec, change)
            for change in changes
            for spec, job_id in change.incoming
            if job_id in latest
        }
        environments: dict[int, int | None] = {}
        new: list[Row] = []
        with self.store.transaction():
            for job_id, (spec, change) in incoming.items():
                if change.number not in environments:
                    environments[change.number] = self.store.insert_environment(change.environment)
                uid = change.peer.uid
                log_path = launching.log_path(spec, job_id, uid, self.views.logs_dir)
                new.append(
                    Row.new(
                        spec,
                        id=job_id,
                        uid=uid,
                        user=change.user,
                        submitted_at=at,
                        environment_id=environments[change.number],
                        detail=rows.dump_detail(latest[job_id].state, None, None, None, log_path),
                    )
                )
                self.views.live[job_id] = Live(uid=uid, user=change.user, log_path=log_path)
            if new:
                self.store.insert_jobs(new)
            for job_id, user in _queued_again(changes):
                if job_id in latest and job_id not in self.views.live:
                    self.views.live[job_id] = Live(uid=user, user=user_name(user))
            acts = [act for change in changes for act in change.acts(at)]
            self.store.put_audit(acts)
            news = [rows.dump_learned(row, at) for row in learned]
            self.store.put_learned(news)
            self._learned += len(news)
            if self._learned >= PRUNE_EVERY:
                self._learned = 0
                self.store.drop_learned(self._stale_keys(self.views.core, self.views.core.now))
            if used := [_use_row(one, at) for one in accounted]:
                self.store.put_use(used)
            for job in latest.values():
                if job.id not in incoming or not isinstance(job.state, model.Pending):
                    self._update(job, at)
        for act in acts:
            log.info("%s", in_words(act))

    def record(self, act: AuditRow) -> None:
        """An administrator's act on the daemon.  Within the transaction of what it did."""
        self.store.put_audit((act,))
        log.info("%s", in_words(act))

    def load_learned(self, core: Scheduler, now: model.Instant) -> None:
        """Give the core what earlier daemons learned.  A row that cannot be read is dropped: it
        costs a measurement."""
        at = time.time()
        found: list[Learned | LearnedPeak] = []
        unreadable: list[str] = []
        for key, body, learned_at in self.store.learned():
            age_ms = max(0, round((at - learned_at) * 1000))
            try:
                found.append(rows.load_learned(key, body, age_ms, now))
            except msgspec.MsgspecError:
                unreadable.append(key)
        if unreadable:
            log.warning("%d learned figures cannot be read and are dropped", len(unreadable))
        core.guard.load([row for row in found if isinstance(row, Learned)], now)
        core.peaks.load([row for row in found if isinstance(row, LearnedPeak)])
        if stale := self._stale_keys(core, now):
            # The disk may be full: they do no harm until the next time.
            with contextlib.suppress(UnavailableError), self.store.transaction():
                self.store.drop_learned(stale)

    def load_use(self, core: Scheduler, now: model.Instant) -> None:
        """Give the core what users had used when the last daemon wrote it down.

        By the wall clock, as no other outlives a reboot.  A clock that was set back since makes
        no time pass; one that was set forward lets everybody's use decay, and alike.
        """
        rows = self.store.use()
        at = max((row.at for row in rows), default=0.0)
        age_ms = max(0, round((time.time() - at) * 1000)) if rows else 0
        core.fairness.load(
            [
                Accounted(row.uid, Use(row.machine_s * 1e3, row.gpu_s * 1e3, row.core_s * 1e3))
                for row in rows
            ],
            model.Instant(now - age_ms) if rows else None,
        )

    def _stale_keys(self, core: Scheduler, now: model.Instant) -> set[str]:
        """What no longer counts goes from the core; and these rows of it may go."""
        core.guard.prune(now)
        core.peaks.prune(now)
        kept = {rows.throughput_key(*key) for key in core.guard.row_keys()}
        kept |= {rows.peak_key(signature) for signature in core.peaks.known}
        return self.store.learned_keys() - kept

    def forget(self, signature: str, act: AuditRow) -> int:
        """Drop what was learned of a program, and of the mixes it was in; how many figures.

        Raises:
            UnavailableError: nothing was dropped.
        """
        keys = [key for key, _, _ in self.store.learned() if rows.is_about(key, signature)]
        if keys:
            with self.store.transaction():
                self.store.drop_learned(keys)
                self.record(act)
        return len(keys)

    def _keep_attempt(self, job: model.Job, at: float) -> None:
        """It waits again, or has begun anew: how the attempt before ended would be overwritten."""
        row = self.store.get([job.id])[job.id]
        has_begun_anew = job.attempt > row.attempt
        if row.started_at is None or not (has_begun_anew or isinstance(job.state, model.Pending)):
            return
        state: str = row.state if row.state.is_final else _ended_as(row)
        self.store.add_attempt(
            job.id,
            Attempt(
                number=row.attempt,
                state=state,
                reason=row.reason,
                started_at=row.started_at,
                ended_at=row.ended_at or at,
                exit_code=row.exit_code,
                signal=row.signal,
            ),
        )

    def _update(self, job: model.Job, at: float) -> None:
        state = job.state
        live = self.views.live[job.id]
        placement = rows.wire_placement(state, self.views.gpu_indices())
        usage = progress = None
        match state:
            case model.Pending() | model.Starting():
                if job.attempt > isinstance(state, model.Starting):
                    self._keep_attempt(job, at)
                live.started_at = live.progress = live.command_pid = None
            case model.Running() | model.Suspended() | model.Completing():
                live.started_at = live.started_at or at
            case model.Finished():
                before = rows.load_detail(self.store.get([job.id])[job.id].detail)
                placement = before.placement
                usage = self.views.usage(job) or before.usage
                progress = live.progress.view() if live.progress is not None else None
            case _:
                assert_never(state)
        if live.log_path is None:
            stored = rows.load_detail(self.store.get([job.id])[job.id].detail)
            live.log_path, live.preempted_by = stored.log_path, stored.preempted_by
        if isinstance(state, model.Pending) and state.preempted_by is not None:
            live.preempted_by = state.preempted_by
        is_final = isinstance(state, model.Finished)
        exit_ = state.exit if isinstance(state, model.Finished) else model.Exit()
        self.store.update_state(
            job.id,
            state=rows.job_state(state),
            held=isinstance(state, model.Pending) and state.held,
            attempt=job.attempt,
            reason=state.reason if isinstance(state, model.Finished) else "",
            started_at=live.started_at,
            ended_at=at if is_final else None,
            exit_code=exit_.code,
            signal=exit_.signal,
            priority=job.spec.priority,
            detail=rows.dump_detail(
                state, placement, usage, progress, live.log_path, live.preempted_by
            ),
        )


def _queued_again(changes: Iterable[Change]) -> Iterator[tuple[model.JobId, int]]:
    """The jobs that had ended and whose they are."""
    for change in changes:
        for event in change.events:
            if isinstance(event, model.RequeueRequested) and event.finished is not None:
                yield event.job_id, event.finished.spec.user


def _use_row(one: Accounted, at: float) -> UseRow:
    use = one.use
    return UseRow(
        uid=one.user,
        machine_s=use.machine_ms / 1e3,
        gpu_s=use.gpu_ms / 1e3,
        core_s=use.core_ms / 1e3,
        at=at,
    )


def _ended_as(row: Row) -> str:
    """How the attempt of a job that is queued again ended, before that is written down."""
    try:
        state = rows.load_state(rows.load_detail(row.detail))
    except (msgspec.MsgspecError, KeyError, TypeError):
        return JobState.NODE_FAIL  # somebody has damaged the row
    match state:
        case model.Completing(cause=model.Cause.REQUEUED):
            return "REQUEUED"
        case model.Completing(cause=model.Cause.PREEMPTED):
            return "PREEMPTED"
        case _:
            return JobState.NODE_FAIL
