"""Requests from clients: checked, turned into events for the core, and answered.

A request either only reads, and is answered from what is committed; or it asks for a change,
becomes events, and is answered once their rows are on disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

import msgspec

from rlq.errors import NotFoundError, NotPermittedError, RlqError, UnavailableError, UsageError
from rlq.protocol import PROTOCOL_VERSION, codec
from rlq.protocol import messages as wire
from rlq.protocol.states import FINAL_STATES, LIVE_STATES, JobState
from rlq.version import VERSION
from rlqd.adapters.sqlite import AuditRow, Brief, Row, Store
from rlqd.config import Config
from rlqd.core import model
from rlqd.shell import launching, rlimits, rows, validation
from rlqd.shell.accounts import Accounts, Peer, user_name
from rlqd.shell.rlimits import Rlimits
from rlqd.shell.views import Views

log = logging.getLogger(__name__)

R = TypeVar("R")

#: A reply of more jobs than this, or of more bytes, would keep the loop busy for too long.  The
#: client goes on with `before` where a page ends.
LIST_MAX = 2_000
LIST_BYTES_MAX = 8 * 2**20
#: Likewise one request that changes jobs.
CHANGES_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Route:
    """The way back to who asked."""

    id: bytes
    #: Whose replies wait together where nobody reads them.
    uid: int
    #: The key whose holder asked from another machine; None: asked on this one.
    key: bytes | None = None


@dataclass(slots=True, kw_only=True)
class Change:
    """A request that became events.  `answers` fills up while the core steps."""

    number: int
    events: list[model.Event]
    #: Jobs to be written when the core lets them in.
    incoming: list[tuple[wire.JobSpec, model.JobId]] = field(
        default_factory=list[tuple[wire.JobSpec, model.JobId]]
    )
    environment: dict[str, str] = field(default_factory=dict[str, str])
    peer: Peer
    user: str
    #: What needed no core: no such job, not yours, ended already.
    settled: list[wire.Change] = field(default_factory=list[wire.Change])
    answers: list[model.Accept | model.Refuse] = field(
        default_factory=list[model.Accept | model.Refuse]
    )
    warnings: list[str] = field(default_factory=list[str])
    #: What it is called in the audit, and the jobs in it that are another's.
    verb: str = ""
    detail: str = ""
    others: dict[int, Brief] = field(default_factory=dict[int, Brief])

    def acts(self, at: float) -> Iterator[AuditRow]:
        """What was done to others' jobs: all that the core has accepted and that was news."""
        for answer in self.answers:
            if not isinstance(answer, model.Accept) or answer.note or answer.job_id is None:
                continue
            if (job := self.others.get(answer.job_id)) is not None:
                yield AuditRow(
                    at=at,
                    uid=self.peer.uid,
                    user=self.user,
                    verb=self.verb,
                    job=job.id,
                    owner_uid=job.uid,
                    owner=job.user,
                    detail=self.detail,
                )


#: The states that a verb's selection by pattern picks.
_PICKED: dict[type, frozenset[JobState]] = {
    wire.Cancel: LIVE_STATES,
    wire.Hold: frozenset({JobState.PENDING}),
    wire.Release: frozenset({JobState.PENDING}),
    wire.Prioritize: LIVE_STATES,
    wire.Pause: frozenset({JobState.RUNNING}),
    wire.Resume: frozenset({JobState.SUSPENDED}),
    # Only what went wrong: not what somebody has cancelled, nor what runs.
    wire.Requeue: FINAL_STATES - {JobState.COMPLETED, JobState.CANCELLED},
}
#: About jobs that there are.
VerbRequest = (
    wire.Cancel
    | wire.Hold
    | wire.Release
    | wire.Prioritize
    | wire.Pause
    | wire.Resume
    | wire.Requeue
)
ChangeRequest = wire.Submit | VerbRequest


@dataclass(slots=True, kw_only=True)
class Desk:
    config: Config
    store: Store
    views: Views
    accounts: Accounts
    logs_dir: str
    #: The daemon's own, as it was started.
    rlimits: Rlimits
    _number: int = 0
    _limits: dict[Peer, Rlimits] = field(default_factory=dict[Peer, Rlimits])
    _limits_at: model.Instant | None = None

    # ---- changes -------------------------------------------------------------------

    def change(
        self, request: ChangeRequest, peer: Peer, now: model.Instant, next_id: int
    ) -> Change:
        """The events a request amounts to.

        Raises:
            RlqError: the request as a whole is wrong.
        """
        self._number += 1
        user = user_name(peer.uid)
        change = Change(number=self._number, events=[], peer=peer, user=user)
        if isinstance(request, wire.Submit):
            self._submit(change, request, now, next_id)
        else:
            self._verb(change, request, now)
        return change

    def _submit(
        self, change: Change, request: wire.Submit, now: model.Instant, next_id: int
    ) -> None:
        uid = change.peer.uid
        try:
            launching.account_of(uid)
            if change.peer.remote:
                request = launching.at_home(request, uid)
        except KeyError as error:
            raise NotPermittedError(
                f"your account (uid {uid}) is unknown to this machine",
                hint="`getent passwd` must know it: is the directory service up?",
            ) from error
        validation.check_submission(request)
        self._check_priority(max(spec.priority for spec in request.jobs), change.peer)
        kept = self._kept_limits(change.peer, now)
        jobs = (
            spec if spec.rlimits == kept else msgspec.structs.replace(spec, rlimits=kept)
            for spec in request.jobs
        )
        request = msgspec.structs.replace(request, jobs=tuple(jobs))
        ids = range(next_id, next_id + len(request.jobs))
        change.environment = request.env
        change.incoming = [
            (spec, model.JobId(i)) for spec, i in zip(request.jobs, ids, strict=True)
        ]
        # Equal submissions give equal core specs, and the core looks at them as one.
        pairs = tuple(
            (job_id, rows.core_spec(spec, uid, self.config)) for spec, job_id in change.incoming
        )
        after = self._after(request.jobs[0])
        is_held = request.jobs[0].held
        change.events.append(model.Submitted(now, change.number, pairs, is_held, after))
        problem = self.views.core.facts.gpus_problem if self.views.core.facts else ""
        if problem and any(spec.resources.gpus != 0 for spec in request.jobs):
            change.warnings.append(f"the GPUs cannot be read now, so the job waits: {problem}")

    def _kept_limits(self, peer: Peer, now: model.Instant) -> Rlimits:
        """Read once for all that a process submits in one turn."""
        if now != self._limits_at:
            self._limits.clear()
            self._limits_at = now
        if peer not in self._limits:
            self._limits[peer] = rlimits.to_keep(_limits_of(peer), self.rlimits)
        return self._limits[peer]

    def _after(self, spec: wire.JobSpec) -> model.After | None:
        """What it has to wait for, of the jobs it is to follow.

        Raises:
            RlqError: there is no such job, or one has ended otherwise than it should.
        """
        found = self.store.brief(spec.after)
        left: list[model.JobId] = []
        for job_id in spec.after:
            if job_id not in found:
                raise no_job(job_id)
            state = found[job_id].state
            if not state.is_final:
                left.append(model.JobId(job_id))
            elif state is not JobState.COMPLETED and not spec.after_any:
                raise UsageError(
                    f"job {job_id} has ended as {state}, so a job after it would never start",
                    hint=f"--after-any {job_id} asks for its end alone",
                )
        return model.After(job_ids=tuple(left), any_end=spec.after_any) if left else None

    def _check_priority(self, priority: int, peer: Peer) -> None:
        if priority > 0 and not self.accounts.is_operator(peer):
            raise NotPermittedError(
                "only an administrator, on the machine itself, may give a priority above 0"
                if peer.remote
                else "only an administrator may give a priority above 0",
                hint="leave it out, or lower your own jobs' with -1 to -1000",
            )

    def _verb(self, change: Change, request: VerbRequest, now: model.Instant) -> None:
        selection = request.selection
        validation.check_selection(selection, required=True)
        if isinstance(request, wire.Prioritize):
            validation.check_priority(request.priority)
            self._check_priority(request.priority, change.peer)
        is_named = bool(selection.ids)
        is_others = selection.everybody or selection.uid not in (None, change.peer.uid)
        if is_others and not self.accounts.is_operator(change.peer):
            raise NotPermittedError(
                "only administrators act on other users' jobs",
                hint="without --user and --all-users it is about your own",
            )
        if not is_named and selection.uid is None and not selection.everybody:
            # By pattern, everybody acts on their own: administrators say so if they mean others.
            selection = msgspec.structs.replace(selection, uid=change.peer.uid)
        ids = self.store.ids(selection, None if is_named else _PICKED[type(request)])
        if len(ids) > CHANGES_MAX:
            raise UsageError(
                f"that is about {len(ids)} jobs, and one request changes at most {CHANGES_MAX}:"
                " nothing was changed",
                hint=f"do it in parts, such as `{ids[0]}-{ids[CHANGES_MAX - 1]}`",
            )
        found = self.store.brief(ids)
        is_requeue = isinstance(request, wire.Requeue)
        change.verb = type(request).__name__.lower()
        match request:
            case wire.Cancel(now=True):
                change.detail = "at once"
            case wire.Prioritize(priority=priority):
                change.detail = f"to {priority}"
            case _:
                pass
        change.others = {i: one for i, one in found.items() if one.uid != change.peer.uid}
        ended = self.store.get(
            i
            for i, one in found.items()
            if is_requeue
            and one.state.is_final
            and self.accounts.may_act_for(change.peer, one.uid)
        )
        for job_id in missing_ids(selection, found):
            change.settled.append(
                wire.Change(id=job_id, ok=False, message="no such job", kind="not-found")
            )
        for row in found.values():
            if not self.accounts.may_act_for(change.peer, row.uid):
                change.settled.append(_no(row, f"it is {row.user}'s job", "not-permitted"))
            elif row.state.is_final and not is_requeue:
                change.settled.append(_no(row, f"it has ended already: {row.state}", "usage"))
            else:
                finished = finished_job(ended[row.id], self) if row.id in ended else None
                change.events.append(_event(change, request, now, model.JobId(row.id), finished))

    def mine(self, selection: wire.Selection, peer: Peer) -> list[Row]:
        """The started jobs of a selection that this peer may act on.

        Raises:
            UsageError: nothing, or nonsense, is selected.
        """
        validation.check_selection(selection, required=True)
        ids = self.store.ids(selection, LIVE_STATES - {JobState.PENDING})
        return [
            row for row in self.store.get(ids).values() if self.accounts.may_act_for(peer, row.uid)
        ]

    def answer(self, change: Change, request: ChangeRequest) -> wire.Reply:
        """The reply to a change that is committed."""
        if isinstance(request, wire.Submit):
            for answer in change.answers:
                if isinstance(answer, model.Refuse):
                    kind = "refused" if answer.impossible else "unavailable"
                    return wire.Error(kind=kind, message=answer.message, hint=answer.hint)
            return wire.Submitted(
                ids=tuple(job_id for _, job_id in change.incoming),
                log_paths=tuple(
                    launching.log_path(spec, job_id, change.peer.uid, self.logs_dir)
                    for spec, job_id in change.incoming
                ),
                warnings=tuple(change.warnings),
            )
        states = {row.id: row.state for row in self._answered_rows(change)}
        changes = list(change.settled)
        for answer in change.answers:
            assert answer.job_id is not None
            state = states.get(answer.job_id)
            if isinstance(answer, model.Accept):
                message = answer.note or _accepted(request, state)
                changes.append(
                    wire.Change(id=answer.job_id, ok=True, state=state, message=message)
                )
            else:
                changes.append(
                    wire.Change(
                        id=answer.job_id,
                        ok=False,
                        state=state,
                        message=answer.message,
                        kind="usage",
                    )
                )
        return wire.Changed(changes=tuple(sorted(changes, key=lambda c: c.id)))

    def _answered_rows(self, change: Change) -> Iterable[Brief]:
        ids = [a.job_id for a in change.answers if a.job_id is not None]
        return self.store.brief(ids).values()

    # ---- reads ---------------------------------------------------------------------

    def ping(self) -> wire.Pong:
        return wire.Pong(version=VERSION, protocol=PROTOCOL_VERSION, pid=os.getpid())

    def list(self, request: wire.List, peer: Peer) -> wire.Jobs:
        validation.check_selection(request.selection)
        limit = min(request.limit or LIST_MAX, LIST_MAX)
        found, total = self.store.query(
            request.selection,
            limit=max(1, limit),
            before=max(0, request.before),
            bytes_max=LIST_BYTES_MAX,
        )
        jobs = tuple(self.views.job(row, peer) for row in found)
        named = request.selection.ids
        exist = set(self.store.ids(request.selection)) if named and len(jobs) < total else ()
        missing = missing_ids(request.selection, exist or {row.id for row in found})
        return wire.Jobs(jobs=jobs, total=total, missing=missing)

    def why(self, request: wire.Why, peer: Peer) -> wire.Explanation:
        return self.views.explanation(self.row(request.id), peer)

    def environment(self, request: wire.Environment, peer: Peer) -> wire.Variables:
        row = self.row(request.id)
        # Not the administrators': it holds tokens, and to act on a job takes none of them.
        if peer.uid not in (0, row.uid):
            raise NotPermittedError(
                f"job {row.id} is {row.user}'s: its environment is theirs alone"
            )
        return wire.Variables(env=self.store.environment(row.id))

    def audit(self, request: wire.Audit, peer: Peer) -> wire.Acts:
        """What administrators did: all of it for themselves, for others what was done to their
        jobs and claims."""
        sees_all = self.accounts.is_operator(peer)
        most = min(request.limit, LIST_MAX) if request.limit > 0 else LIST_MAX
        found = self.store.audit(
            limit=most + 1,
            before=max(0, request.before),
            job=request.job,
            owner_uid=None if sees_all else peer.uid,
        )
        acts = tuple(
            wire.Act(
                number=one.number,
                at=one.at,
                user=one.user,
                uid=one.uid,
                verb=one.verb,
                job=one.job,
                owner=one.owner,
                detail=one.detail,
            )
            for one in found[:most]
        )
        return wire.Acts(acts=acts, more=len(found) > most)

    def attempts(self, request: wire.Attempts) -> wire.AttemptList:
        row = self.row(request.id)
        return wire.AttemptList(attempts=tuple(self.store.attempts(row.id)))

    def row(self, job_id: int) -> Row:
        found = self.store.get([job_id])
        if job_id not in found:
            raise no_job(job_id)
        return found[job_id]


def _limits_of(peer: Peer) -> Rlimits:
    """The resource limits of the process that asks.

    Raises:
        NotPermittedError: they cannot be known any more; the daemon's own would be a way around
            limits.conf.
    """
    found = rlimits.of_process(peer.pid, peer.uid)
    if found is not None:
        return found
    if os.geteuid() != 0:
        return {}  # a user's own daemon, which may give no more than its own: asked by root, say
    raise NotPermittedError(
        "the process that connected has ended, or runs as another user: its resource limits,"
        " which jobs inherit, are not known",
        hint="submit from the process that connects",
    )


def act_of(peer: Peer, verb: str, detail: str = "") -> AuditRow:
    """Something an administrator does to the daemon."""
    return AuditRow(
        at=time.time(), uid=peer.uid, user=user_name(peer.uid), verb=verb, detail=detail
    )


def finished_job(row: Row, desk: Desk) -> model.Job:
    """A finished job as the core would have it, to be queued again.

    Raises:
        UsageError: its row is damaged.
    """
    try:
        state = rows.load_state(rows.load_detail(row.detail))
        spec = rows.core_spec(row.job_spec, row.uid, desk.config)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise UsageError(
            f"job {row.id} cannot be queued again: {rows.DAMAGED}", hint="submit it anew"
        ) from error
    return model.Job(model.JobId(row.id), spec, row.attempt, state)


def no_job(job_id: int) -> NotFoundError:
    return NotFoundError(f"there is no job {job_id}", hint="`rlq history` lists them all")


def missing_ids(selection: wire.Selection, found: Container[int]) -> tuple[int, ...]:
    """Ids that were named one by one and do not exist: a range may have gaps."""
    if selection.name is not None or selection.states or selection.uid is not None:
        return ()
    return tuple(low for low, high in selection.ids if low == high and low not in found)


def safely(make: Callable[[], R]) -> R | wire.Error:
    """What is made, or the error in its place: one request's trouble is that request's alone."""
    try:
        return make()
    except RlqError as error:
        return codec.error_reply(error)
    except Exception as error:
        log.exception("a request failed")
        return wire.Error(kind="internal", message=f"rlqd failed to answer: {error!r}")


def unavailable(reason: str) -> UnavailableError:
    return UnavailableError(
        f"the daemon cannot take changes just now: {reason}", hint="`rlq status` says more"
    )


def _event(
    change: Change,
    request: VerbRequest,
    now: model.Instant,
    job_id: model.JobId,
    finished: model.Job | None,
) -> model.JobRequest:
    """What a verb asks of one job; `finished`: a job that has ended, to be queued again."""
    number = change.number
    match request:
        case wire.Cancel(now=at_once):
            by = change.user if job_id in change.others else ""
            return model.CancelRequested(now, number, job_id, at_once, by)
        case wire.Hold():
            return model.HoldRequested(now, number, job_id)
        case wire.Release():
            return model.ReleaseRequested(now, number, job_id)
        case wire.Prioritize(priority=priority):
            return model.PrioritySet(now, number, job_id, priority)
        case wire.Pause():
            return model.PauseRequested(now, number, job_id)
        case wire.Resume():
            return model.ResumeRequested(now, number, job_id)
        case wire.Requeue():
            return model.RequeueRequested(now, number, job_id, finished)
        case _:
            assert_never(request)


def _no(row: Brief, message: str, kind: str) -> wire.Change:
    return wire.Change(id=row.id, ok=False, state=row.state, message=message, kind=kind)


def _accepted(request: ChangeRequest, state: JobState | None) -> str:
    match request:
        case wire.Cancel() if state is JobState.COMPLETING:
            return "stopping"
        case wire.Cancel():
            return "cancelled"
        case wire.Hold():
            return "held"
        case wire.Release():
            return "released"
        case wire.Prioritize(priority=priority):
            return f"has priority {priority}"
        case wire.Pause():
            return "paused"
        case wire.Resume():
            return "resumed"
        case wire.Requeue() if state is JobState.COMPLETING:
            return "stopping, then queued again"
        case wire.Requeue():
            return "queued again"
        case _:
            return ""
