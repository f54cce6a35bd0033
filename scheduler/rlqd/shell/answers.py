"""Requests that the core has no say in: questions, and what administrators do to the daemon.

A question is answered from what is committed, after the commit of its turn.  What changes
something here is a transaction of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlq.errors import NotFoundError, NotPermittedError, UnavailableError
from rlq.protocol import messages as wire
from rlqd.adapters.cgroups import Fences
from rlqd.adapters.curve import CurveServer
from rlqd.adapters.reports import ReportSocket
from rlqd.adapters.sqlite import Store
from rlqd.adapters.zeromq import Server
from rlqd.core import model
from rlqd.shell import learning, shares
from rlqd.shell.accounts import Accounts, Peer
from rlqd.shell.bookings import Bookings
from rlqd.shell.condition import DISK_MIB_MIN, Condition, Stats
from rlqd.shell.intake import Question
from rlqd.shell.ledger import Ledger
from rlqd.shell.mps import MpsJobs
from rlqd.shell.remote import Keyring
from rlqd.shell.requests import Desk, act_of, unavailable
from rlqd.shell.sampling import Sampler
from rlqd.shell.views import Views
from rlqd.shell.waiters import Waiters

R = TypeVar("R")


@dataclass(slots=True, kw_only=True)
class Answers:
    condition: Condition
    stats: Stats
    config_path: str
    state_dir: Path
    socket_path: Path
    store: Store
    accounts: Accounts
    views: Views
    desk: Desk
    ledger: Ledger
    waiters: Waiters
    bookings: Bookings
    keyring: Keyring
    server: Server
    remote: CurveServer | None
    reports: ReportSocket
    sampler: Sampler
    fences: Fences
    mps: MpsJobs | None
    #: A fact for the core's next step.
    tell: Callable[[model.Event], None]

    def reply(self, question: Question, now: model.Instant) -> wire.Reply | None:
        """The reply, or None if it comes later.

        Raises:
            RlqError: nothing was changed.
        """
        peer = question.peer
        match question.request:
            case wire.Ping():
                return self.desk.ping()
            case wire.List() as request:
                return self.desk.list(request, peer)
            case wire.Why() as request:
                return self.desk.why(request, peer)
            case wire.Environment() as request:
                return self.desk.environment(request, peer)
            case wire.Attempts() as request:
                return self.desk.attempts(request)
            case wire.Devices():
                return self.views.machine(peer)
            case wire.Status():
                return self._status()
            case wire.Wait() as request:
                self.waiters.add(question.route, question.request_id, peer, request, now)
                return None
            case wire.Share(job=job):
                return shares.shares(self.views.core, None if job is None else self.desk.row(job))
            case wire.Profile(pattern=pattern):
                return learning.profiles(
                    self.views.core,
                    pattern,
                    time.time(),
                    peer.uid,
                    sees_all=self.accounts.is_operator(peer),
                )
            case wire.Forget(signature=signature):
                return self._forget(signature, peer, now)
            case wire.Drain(on=on):
                return self._drain(on, peer, now)
            case wire.Audit() as request:
                return self.desk.audit(request, peer)
            case wire.Reserve() as request:
                self._require_operator(peer)
                return self._booking(partial(self.bookings.reserve, request, peer))
            case wire.Claim() as request:
                return self._booking(partial(self.bookings.claim, request, peer))
            case wire.Unbook() as request:
                return self._booking(partial(self.bookings.end, request, peer))
            case wire.Bookings():
                return self.bookings.calendar()
            case wire.Stop():
                self._require_operator(peer)
                self.condition.wants_stop = True
                # Nothing to record it on is no reason to go on.
                with contextlib.suppress(UnavailableError), self.store.transaction():
                    self.ledger.record(act_of(peer, "stop"))
                return wire.Ok(message="stopping; running jobs run on")
            case wire.ListKeys():
                uid = None if self.accounts.is_operator(peer) else peer.uid
                return self.keyring.list(self.remote, uid)
            case wire.EnrolKey() as request:
                self._require_operator(peer)
                return self.keyring.enrol(request, peer)
            case wire.RevokeKey() as request:
                self._require_operator(peer)
                return self.keyring.revoke(request, peer)
            case _:
                raise AssertionError(f"{type(question.request).__name__} is a change")

    def _require_operator(self, peer: Peer) -> None:
        if peer.remote:
            raise NotPermittedError(
                "this is done on the machine itself, not from another one",
                hint="ssh to it, and run the same command there",
            )
        if not self.accounts.is_operator(peer):
            group = self.accounts.admin_group
            raise NotPermittedError(
                f"only root and the members of the group {group} may do this"
                if group
                else "only root and the daemon's own user may do this",
                hint="ask an administrator",
            )

    def _drain(self, on: bool, peer: Peer, now: model.Instant) -> wire.Reply:
        self._require_operator(peer)
        with self.store.transaction():
            self.store.set_meta("draining", "1" if on else "0")
            self.ledger.record(act_of(peer, "drain", "" if on else "off"))
        self.condition.draining = on
        self.tell(self.condition.admission(now))
        running = sum(self.counts().get(s, 0) for s in ("RUNNING", "CONFIGURING", "COMPLETING"))
        if on:
            run_on = f"{running} job runs on" if running == 1 else f"{running} jobs run on"
            return wire.Ok(message=f"draining: nothing new starts; {run_on}")
        return wire.Ok(message="no longer draining")

    def _booking(self, change: Callable[[], R]) -> R:
        if self.condition.broken:
            raise unavailable(self.condition.broken)
        return change()

    def _forget(self, signature: str, peer: Peer, now: model.Instant) -> wire.Reply:
        self._require_operator(peer)
        if self.condition.broken:
            raise unavailable(self.condition.broken)
        if not self.ledger.forget(signature, act_of(peer, "forget", signature)):
            raise NotFoundError(
                f"nothing was learned of {signature!r}", hint="`rlq profile` lists the signatures"
            )
        self.tell(model.ProgramForgotten(now, signature))
        return wire.Ok(message=f"forgotten: {signature}")

    def counts(self) -> dict[str, int]:
        return {str(state): n for state, n in self.store.counts_by_state().items()}

    def _status(self) -> wire.DaemonStatus:
        return self.views.status(
            state_dir=str(self.state_dir),
            socket=str(self.socket_path),
            draining=self.condition.draining,
            problems=tuple(self._problems()),
            counts=self.counts(),
            config_path=self.config_path,
            stats={
                "turns": self.stats.turns,
                "commits": self.stats.commits,
                "messages": self.stats.messages,
                "turn_ms_max": round(self.stats.turn_ms_max, 2),
                "reports_dropped": self.reports.dropped,
                **self._remote_stats(),
            },
        )

    def _remote_stats(self) -> dict[str, int]:
        if self.remote is None:
            return {}
        return {
            "remote_connections": self.remote.connections,
            "remote_refused": self.remote.refused,
            "remote_dropped": self.remote.dropped,
        }

    def _problems(self) -> list[str]:
        problems: list[str] = []
        if not self.server.listening():
            problems.append(f"{self.socket_path} was removed: restart rlqd to be found again")
        if self.condition.broken:
            problems.append(f"nothing can be changed: {self.condition.broken}")
        elif (lost := self.store.lost()) is not None:
            problems.append(f"nothing can be changed: {lost.message}")
        if self.condition.disk_is_full:
            problems.append(
                f"less than {DISK_MIB_MIN} MiB is free for {self.state_dir}: nothing new starts"
            )
        if self.condition.is_distrusted:
            problems.append(
                "the scheduler has contradicted itself: nothing new starts for a minute;"
                " rlqd's log says more"
            )
        if lacking := self.fences.lacking():
            problems.append(f"jobs start without limits: {lacking}")
        gpus = self.sampler.gpus()
        if gpus is not None and gpus.problem and not gpus.absent:
            problems.append(f"GPUs: {gpus.problem}")
        if gpus is not None:
            problems += [f"GPU {g.index} ({g.name}): {g.problem}" for g in gpus.gpus if g.problem]
        if self.mps is not None:
            problems += self.mps.problems()
        room_is_unread = self.views.core.facts is not None and self.views.core.room() is None
        if room_is_unread:
            problems.append("the machine's readings are too old: nothing new starts")
        return problems
