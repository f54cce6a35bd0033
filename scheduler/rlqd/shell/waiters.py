"""Clients that wait for jobs to end.

`rlq wait --all` may be about 100,000 jobs, and asks again every few seconds.  So nothing but
their states is read when it begins, an answer to many names only some of those that run (the
client lists the rest when all is over), and what one peer or user may leave waiting is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rlq.errors import UnavailableError
from rlq.protocol import messages as wire
from rlq.protocol.states import LIVE_STATES
from rlqd.adapters.sqlite import Store
from rlqd.core import model
from rlqd.shell import validation
from rlqd.shell.accounts import Peer
from rlqd.shell.requests import Route, missing_ids, safely
from rlqd.shell.views import Views

WAIT_MS_MAX = 30_000
#: Requests that one connection, or one user over all connections, may leave waiting, and for how
#: many jobs together.
PER_ROUTE_MAX = 64
PER_USER_MAX = 1_000
JOBS_PER_USER_MAX = 2_000_000
#: So many jobs are all shown in the answer; of more, only so many of those that run.
SHOWN_MAX = 100


@dataclass(slots=True, kw_only=True)
class Waiter:
    route: Route
    request_id: bytes
    peer: Peer
    ids: tuple[int, ...]
    left: set[int]
    missing: tuple[int, ...]
    due: model.Instant


#: route, request id, reply.
Send = Callable[[Route, bytes, wire.Reply], None]


@dataclass(slots=True, kw_only=True)
class Waiters:
    store: Store
    views: Views
    _waiting: list[Waiter] = field(default_factory=list[Waiter])

    def add(
        self, route: Route, request_id: bytes, peer: Peer, request: wire.Wait, now: model.Instant
    ) -> None:
        """By pattern, for what matches now: jobs submitted later are not waited for.

        Raises:
            UsageError: a wrong selection.
            UnavailableError: this peer waits for too much already.
        """
        validation.check_selection(request.selection, required=True)
        self._check_number(route, peer)
        live = self.store.ids(request.selection, LIVE_STATES)
        ids = self.store.ids(request.selection) if request.selection.ids else live
        self._check_jobs(peer, len(ids))
        self._waiting.append(
            Waiter(
                route=route,
                request_id=request_id,
                peer=peer,
                ids=tuple(ids),
                left=set(live),
                missing=missing_ids(request.selection, set(ids)),
                due=model.Instant(now + min(max(0, request.timeout_ms), WAIT_MS_MAX)),
            )
        )

    def _check_number(self, route: Route, peer: Peer) -> None:
        for most, n in (
            (PER_ROUTE_MAX, sum(w.route == route for w in self._waiting)),
            (PER_USER_MAX, sum(w.peer.uid == peer.uid for w in self._waiting)),
        ):
            if n >= most:
                raise UnavailableError(
                    f"{n} requests of yours wait for jobs already, and {most} may",
                    hint="wait for several jobs in one request, as `rlq wait 3 5 7-9` does",
                )

    def _check_jobs(self, peer: Peer, n: int) -> None:
        already = sum(len(w.ids) for w in self._waiting if w.peer.uid == peer.uid)
        if already and already + n > JOBS_PER_USER_MAX:
            raise UnavailableError(
                f"your requests wait for {already} jobs already, and {JOBS_PER_USER_MAX} may be"
                " waited for",
                hint="end some of those that wait",
            )

    def ended(self, job_id: model.JobId) -> None:
        for waiter in self._waiting:
            waiter.left.discard(job_id)

    def next_due(self) -> model.Instant | None:
        return min((w.due for w in self._waiting), default=None)

    def answer(self, now: model.Instant, send: Send, *, all_: bool = False) -> None:
        """Those whose jobs have ended or whose time is over; `all_`: everybody."""
        due = [w for w in self._waiting if all_ or not w.left or now >= w.due]
        if not due:
            return
        self._waiting = [w for w in self._waiting if not (all_ or not w.left or now >= w.due)]
        for waiter in due:
            send(waiter.route, waiter.request_id, safely(partial(self._reply, waiter)))

    def _reply(self, waiter: Waiter) -> wire.Waited:
        partial = len(waiter.ids) > SHOWN_MAX
        shown = self._some_running(waiter.left) if partial else waiter.ids
        return wire.Waited(
            done=not waiter.left,
            jobs=tuple(self.views.job(row, waiter.peer) for row in self.store.get(shown).values()),
            missing=waiter.missing,
            partial=partial,
            ended=len(waiter.ids) - len(waiter.left),
        )

    def _some_running(self, left: set[int]) -> Sequence[int]:
        running = (h.job_id for h in self.views.core.holdings())
        return [i for i in running if i in left][:SHOWN_MAX]
