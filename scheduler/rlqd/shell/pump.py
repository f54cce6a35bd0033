"""The event loop: one turn takes in all there is to know, steps the core once, commits once.

    poll -> facts -> core.step -> COMMIT -> launches and signals -> replies

A turn that cannot commit changes nothing: the core is thrown away and rebuilt from the
database, as after a restart, as soon as the disk takes rows again.  So "disk full" and "killed"
are one code path (`_recover`), and it is exercised at every start.  A core that contradicts itself
takes it too, and for a while afterwards nothing new starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar, assert_never

import msgspec
import zmq

from rlq.errors import NotFoundError, NotPermittedError, ProtocolError, RlqError, UnavailableError
from rlq.protocol import codec
from rlq.protocol import messages as wire
from rlq.protocol.states import JobState
from rlqd.adapters.cgroups import Fences
from rlqd.adapters.curve import CurveServer
from rlqd.adapters.processes import LaunchOrder, Processes
from rlqd.adapters.reports import ReportSocket
from rlqd.adapters.sqlite import Row, Store
from rlqd.adapters.systemd import Notifier
from rlqd.adapters.zeromq import Received, Server
from rlqd.config import Config
from rlqd.core import model
from rlqd.core.machine import Scheduler
from rlqd.core.states import placement_of
from rlqd.shell import enforcing, launching, learning, rows, sampling, shares
from rlqd.shell.accounts import Accounts, Peer, user_name
from rlqd.shell.attempts import Attempts
from rlqd.shell.bookings import Bookings
from rlqd.shell.ledger import Ledger
from rlqd.shell.limits import LimitTable
from rlqd.shell.mps import MpsJobs
from rlqd.shell.progress import Company, Tracker, recent_s
from rlqd.shell.remote import Keyring
from rlqd.shell.requests import (
    Change,
    ChangeRequest,
    Desk,
    Route,
    act_of,
    safely,
    unavailable,
)
from rlqd.shell.rlimits import Rlimits
from rlqd.shell.sampling import Sampler
from rlqd.shell.signals import Signals
from rlqd.shell.views import Live, Views
from rlqd.shell.waiters import Waiters
from rlqd.shell.wall_clock import WallClock

log = logging.getLogger(__name__)

R = TypeVar("R")

#: How often a daemon that could not commit tries again.
RETRY_MS = 2_000
#: After the core has contradicted itself nothing new starts for so long.
DISTRUST_MS = 60_000
#: Free space of the state folder is looked at this often, and this little is too little.
DISK_PERIOD_MS = 10_000
DISK_MIB_MIN = 32
#: How long a removed or replaced database stays unnoticed where nothing is to be written.
DATABASE_PERIOD_MS = 2_000
#: The driver of idle boards takes seconds to wake up; systemd and users wait meanwhile.
FIRST_READINGS_MS = 3_000
STATUS_PERIOD_MS = 10_000
#: Time to set a clock right again.
PRUNE_PAUSE_MS = 24 * 3_600_000
MESSAGES_PER_TURN = 512


def monotonic_ms() -> model.Instant:
    return model.Instant(time.monotonic_ns() // 1_000_000)


@dataclass(frozen=True, slots=True)
class Asked:
    route: Route
    request_id: bytes
    request: ChangeRequest
    change: Change


@dataclass(frozen=True, slots=True)
class Question:
    """A request that only reads: answered after the commit of this turn."""

    route: Route
    request_id: bytes
    peer: Peer
    request: wire.Request


@dataclass(slots=True, kw_only=True)
class Stats:
    turns: int = 0
    commits: int = 0
    messages: int = 0
    turn_ms_max: float = 0.0


@dataclass(slots=True, kw_only=True)
class Pump:
    config: Config
    config_path: str
    state_dir: Path
    logs_dir: Path
    socket_path: Path
    report_path: Path
    store: Store
    server: Server
    reports: ReportSocket
    processes: Processes
    sampler: Sampler
    supervisor_of: Callable[[int], int | None]
    owner_of: Callable[[int], tuple[str, str]]
    notifier: Notifier
    signals: Signals
    #: Reads the configuration again; raises RlqError if it is wrong.
    reload: Callable[[], Config]
    #: The daemon's resource limits as it was started.
    rlimits: Rlimits
    keyring: Keyring
    #: None: nobody is served but on this machine.
    remote: CurveServer | None = None
    fences: Fences
    #: None: CUDA MPS is left alone.
    mps: MpsJobs | None = None

    wants_stop: bool = False

    accounts: Accounts = field(default_factory=Accounts)
    core: Scheduler = field(default_factory=Scheduler)
    live: dict[model.JobId, Live] = field(default_factory=dict[model.JobId, Live])
    limits: LimitTable = field(init=False)
    bookings: Bookings = field(init=False)
    views: Views = field(init=False)
    desk: Desk = field(init=False)
    ledger: Ledger = field(init=False)
    waiters: Waiters = field(init=False)
    attempts: Attempts = field(init=False)
    stats: Stats = field(default_factory=Stats)
    _company: Company = field(default_factory=Company)
    _poller: zmq.Poller = field(default_factory=zmq.Poller)
    _facts: list[model.Event] = field(default_factory=list[model.Event])
    #: Why nothing can be committed, or "".
    _broken: str = ""
    _retry_at: int = 0
    _draining: bool = False
    _disk_is_full: bool = False
    #: The core has contradicted itself; None: not lately.
    _distrusted_until: int | None = None
    _disk_due: int = 0
    _database_due: int = 0
    _status_due: int = 0
    _prune_due: int = 0
    _wall_clock: WallClock = field(
        default_factory=lambda: WallClock(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))
    )

    def __post_init__(self) -> None:
        self.accounts.admin_group = self.config.daemon.admin_group
        self.limits = LimitTable(self.config.limits, self.accounts)
        self.bookings = Bookings(
            store=self.store,
            config=self.config,
            accounts=self.accounts,
            core=lambda: self.core,
            gpu_indices=lambda: self.views.gpu_indices(),
        )
        self.views = Views(
            config=self.config,
            logs_dir=str(self.logs_dir),
            core=self.core,
            live=self.live,
            accounts=self.accounts,
            host=self.sampler.host,
            gpus=self.sampler.gpus,
            supervisor_of=self.supervisor_of,
            owner_of=self.owner_of,
            enforcement=lambda: self.fences.found,
            booked_now=partial(self.bookings.calendar, current_only=True),
            kept_words=self.bookings.words,
            mps=self.mps,
        )
        self.desk = Desk(
            config=self.config,
            store=self.store,
            views=self.views,
            accounts=self.accounts,
            logs_dir=str(self.logs_dir),
            rlimits=self.rlimits,
        )
        self.ledger = Ledger(store=self.store, views=self.views)
        self.waiters = Waiters(store=self.store, views=self.views)
        self.attempts = Attempts(
            processes=self.processes,
            poller=self._poller,
            sampler=self.sampler,
            live=self.live,
            mps=self.mps,
            fence_failed=self.fences.failed,
        )
        for local in (self.server.socket, self.server.connections.source):
            self._poller.register(local, zmq.POLLIN)
        for source in (self.reports, self.sampler, self.signals):
            self._poller.register(source, zmq.POLLIN)
        if self.mps is not None:
            self._poller.register(self.mps.mps, zmq.POLLIN)
        for peers in self.remote.sources if self.remote is not None else ():
            self._poller.register(peers, zmq.POLLIN)

    # ---- the loop ------------------------------------------------------------------

    def start(self) -> None:
        """Take up where the last daemon stopped.  Raises RlqError if the store cannot be used."""
        self._check_accounts()
        self._draining = self.store.meta("draining") == "1"
        now = monotonic_ms()
        self._recover(now)
        self.ledger.load_use(self.core, now)
        self.sampler.start()
        if self.mps is not None:
            self.mps.mps.start()
        self._await_readings()

    def _await_readings(self) -> None:
        """Know the machine before anybody is served: what it can never run is refused at
        submission.  Not for ever: a driver may hang, and the CPU's jobs need no GPU."""
        patience = monotonic_ms() + FIRST_READINGS_MS
        while (left_ms := patience - monotonic_ms()) > 0:
            select.select([self.sampler], [], [], left_ms / 1000)
            self.sampler.drain()
            if self.sampler.host() is not None and self.sampler.gpus() is not None:
                break
        self._take_readings(monotonic_ms())

    def run(self) -> None:
        """Until SIGTERM or a Stop request.  Running jobs run on."""
        while not self.wants_stop:
            self.turn(self._timeout_ms())
        self.notifier.stopping()
        self.sampler.stop()
        if self.mps is not None:
            self.mps.mps.stop()

    def turn(self, timeout_ms: int) -> None:
        ready = dict(self._poller.poll(timeout_ms))
        began = time.perf_counter()
        now = monotonic_ms()
        asked: list[Asked] = []
        questions: list[Question] = []
        if self.signals.fileno() in ready:
            self._take_signals()
        if self.server.connections.source in ready:
            self.server.tend()
        if self.server.socket in ready:
            for received in self.server.receive(MESSAGES_PER_TURN):
                peer = _peer(received)
                route = Route(received.route, peer.uid)
                self._receive(route, peer, received.frames, now, asked, questions)
        if self.remote is not None:
            self._receive_remote(self.remote, now, asked, questions)
        if self.reports.fileno() in ready:
            self._take_reports()
        if self.mps is not None:
            self.mps.send_due()
            if self.mps.mps.fileno() in ready:
                self.mps.take()
        if self.sampler.fileno() in ready or (self.mps and self.mps.mps.fileno() in ready):
            self._take_readings(now)
        for fd in ready:
            # One end may have taken another descriptor of its job with it.
            if isinstance(fd, int) and self.attempts.watches(fd):
                self._facts += self.attempts.news(fd, now)
        self._housekeep(now)
        if self._broken:
            self._retry_if_due(now)
        if not self._broken:
            self._step(now, asked)
        for one in asked:
            self._reply(one.route, one.request_id, safely(partial(self._outcome, one)))
        for question in questions:
            self._answer(question, now)
        self.waiters.answer(now, self._reply, all_=self.wants_stop)
        self.attempts.discard_some()
        self._prune_if_due(now)
        self.stats.turns += 1
        self.stats.turn_ms_max = max(self.stats.turn_ms_max, (time.perf_counter() - began) * 1000)

    def _timeout_ms(self) -> int:
        """Until something is due; at most a second, for the watchdog's sake."""
        now = monotonic_ms()
        times: list[int] = []
        if (due := self.waiters.next_due()) is not None:
            times.append(due)
        times += self.mps.next_due() if self.mps is not None else ()
        if self._broken:
            times.append(self._retry_at)
        elif (wakeup := self.core.next_wakeup()) is not None:
            times.append(wakeup)
        if (self._facts and not self._broken) or self.attempts.has_discards():
            return 0
        return max(0, min(1000, min((at - now for at in times), default=1000)))

    def _step(self, now: model.Instant, asked: list[Asked]) -> None:
        facts, self._facts = self._facts, []
        events: list[model.Event] = [*facts, *(e for one in asked for e in one.change.events)]
        wakeup = self.core.next_wakeup()
        if not events and (wakeup is None or wakeup > now):
            return
        self.core.limits = self.limits.of(_submitters(asked), now)
        try:
            actions = self.core.step(now, events)
        except Exception:
            log.exception("the scheduler has contradicted itself: please report this")
            self._distrust(now)
            return
        self.views.invalidate()
        by_number = {one.change.number: one.change for one in asked}
        for action in actions:
            if isinstance(action, model.Accept | model.Refuse):
                by_number[action.request].answers.append(action)
        persists = [a.job for a in actions if isinstance(a, model.Persist)]
        learned = [row for a in actions if isinstance(a, model.Learn) for row in a.rows]
        accounted = [one for a in actions if isinstance(a, model.Account) for one in a.users]
        try:
            if persists or learned or accounted:
                self.ledger.commit(persists, by_number.values(), learned, accounted)
                self.stats.commits += 1
        except RlqError as error:
            # InternalError too: what the core decided is not on disk, whatever the reason.
            log.error("cannot write to the database: %s", error)
            self._break(error.message, now)
            return
        for action in actions:
            self._carry_out(action)

    # ---- committing ----------------------------------------------------------------

    def _distrust(self, now: model.Instant) -> None:
        """A bug of ours.  Were it to end the daemon, its successor could meet the same facts and
        end too, and the queue be gone until somebody finds out which job it is.  So the step did
        not happen, and starting, which is most of what there is to decide, is left for a while:
        the job can be cancelled or held meanwhile."""
        self._distrusted_until = now + DISTRUST_MS
        # What it has in memory alone may be what is wrong.
        self.core = Scheduler(now=now)
        self._break("the scheduler has contradicted itself; rlqd's log says how", now)
        with contextlib.suppress(RlqError):
            self.ledger.load_use(self.core, now)

    def _break(self, why: str, now: model.Instant) -> None:
        """Nothing of this step is on disk: stop deciding until the disk takes rows again."""
        self._broken = why
        self._retry_at = now + RETRY_MS
        self._facts.clear()
        self.attempts.forget()
        # What the core decided did not happen: nobody is to be shown it.
        with contextlib.suppress(RlqError):
            self._rebuild(now)

    def _retry_if_due(self, now: model.Instant) -> None:
        if now < self._retry_at:
            return
        self._retry_at = now + RETRY_MS
        try:
            with self.store.transaction():
                # Larger than a page, so that a disk with a few bytes left is still full.
                self.store.set_meta("probe", "x" * 16_384)
            with self.store.transaction():
                self.store.set_meta("probe", "")
            self._recover(now)
        except UnavailableError as error:
            self._broken = error.message
            self._facts.clear()
            self.attempts.forget()
            return
        log.info("changes are taken again")
        self._broken = ""

    # ---- effects -------------------------------------------------------------------

    def _carry_out(self, action: model.Action) -> None:
        match action:
            case model.Persist(job=job):
                if isinstance(job.state, model.Finished | model.Pending):
                    self._left(job)
            case model.Launch():
                self._launch(action)
            case model.Terminate(job_id=job_id, attempt=attempt):
                self.attempts.terminate(job_id, attempt)
            case model.Kill(job_id=job_id, attempt=attempt):
                self.attempts.kill(job_id, attempt)
            case model.Freeze(job_id=job_id, attempt=attempt, on=on):
                self.attempts.freeze(job_id, attempt, on=on)
            case model.SampleNow():
                self.sampler.ask()
            case model.Accept() | model.Refuse() | model.Learn() | model.Account():
                pass
            case _:
                assert_never(action)

    def _launch(self, launch: model.Launch) -> None:
        """Whatever is wrong with one job must not end the daemon, again at each restart."""
        try:
            order = self._order(launch)
        except KeyError:
            # No such user, or a directory service (LDAP, sssd) that is down: worth a few tries.
            reason, passing = "its user is unknown to this machine", True
        except RlqError as error:
            reason, passing = error.message, True
        except Exception as error:
            log.exception("job %d cannot be launched", launch.job_id)
            reason, passing = f"rlqd failed to launch it: {error!r}", False
        else:
            self._facts += self.attempts.launch(order, monotonic_ms())
            return
        self._facts.append(
            model.LaunchFailed(monotonic_ms(), launch.job_id, launch.attempt, reason, passing)
        )

    def _order(self, launch: model.Launch) -> LaunchOrder:
        row = self.store.get([launch.job_id])[launch.job_id]
        account = launching.account_of(row.uid)
        return launching.order(
            row,
            launch,
            account,
            submitted=self.store.environment(row.id),
            queue={
                "RLQ_SOCKET": str(self.socket_path),
                "RLQ_REPORT_SOCKET": str(self.report_path),
                "RLQ_JOB_NAME": row.name,
                **self.processes.markers(row.id, launch.attempt),
            },
            logs_dir=str(self.logs_dir),
            config=self.config,
            facts=self.core.facts,
            rlimits=self.rlimits,
            mps=self._mps_variables(row, launch, account.uid),
            fence=self.fences.fence(
                row.id,
                launch.attempt,
                enforcing.limits_of(row.job_spec, launch.placement, self.config.enforce),
            ),
        )

    def _mps_variables(self, row: Row, launch: model.Launch, uid: int) -> dict[str, str | None]:
        if self.mps is None or not launch.placement.gpus:
            return {}
        indices = self.views.gpu_indices()
        numbers = [indices[gpu] for gpu in launch.placement.gpus if gpu in indices]
        return self.mps.variables(launch.job_id, uid, row.job_spec, numbers)

    def _left(self, job: model.Job) -> None:
        """It holds nothing (any more), and that is on disk."""
        if job.attempt:
            self.attempts.discard(job.id, job.attempt)
        if self.mps is not None:
            self.mps.forget(job.id)
        if isinstance(job.state, model.Finished):
            self.live.pop(job.id, None)
            self.waiters.ended(job.id)

    # ---- facts ---------------------------------------------------------------------

    def _take_readings(self, now: model.Instant) -> None:
        self.sampler.drain()
        host = self.sampler.host()
        if host is None:
            return
        facts = sampling.machine_facts(
            host,
            self.sampler.gpus(),
            self.sampler.cpus,
            self.attempts.jobs_by_supervisor(),
            self.supervisor_of,
            self._training_rates(),
            {
                i: live.progress.left_ms(time.time())
                for i, live in self.live.items()
                if live.progress
            },
        )
        if self.mps is not None:
            self.mps.look(self.sampler.gpus(), self._job_of)
            if closed := self.mps.closes_gpus():
                # Like a device that cannot be read: it admits nothing, and disturbs nothing.
                gpus = tuple(replace(g, problem=g.problem or closed) for g in facts.gpus)
                facts = replace(facts, gpus=gpus)
        self._facts.append(model.MachineSampled(now, facts))

    def _job_of(self, pid: int) -> model.JobId | None:
        supervisor = self.supervisor_of(pid)
        return None if supervisor is None else self.attempts.jobs_by_supervisor().get(supervisor)

    def _training_rates(self) -> dict[model.JobId, int | None]:
        at, over_s = time.time(), recent_s(self.config.guard.observe_ms)
        trackers = {i: live.progress for i, live in self.live.items() if live.progress is not None}
        devices = {h.job_id: h.placement.gpus for h in self.core.holdings()}
        self._company.look(devices, trackers)
        return {i: tracker.training_milli_per_s(at, over_s) for i, tracker in trackers.items()}

    def _take_reports(self) -> None:
        for report in self.reports.receive(MESSAGES_PER_TURN):
            job_id = model.JobId(report.job)
            job, live = self.core.jobs.get(job_id), self.live.get(job_id)
            if job is None or live is None or job.attempt != report.attempt:
                continue
            if report.uid not in (0, live.uid):
                continue  # somebody else's job
            if live.progress is None:
                live.progress = Tracker()
            live.progress.add(report.t, report.step, report.total, report.metrics)

    # ---- requests ------------------------------------------------------------------

    def _receive_remote(
        self,
        remote: CurveServer,
        now: model.Instant,
        asked: list[Asked],
        questions: list[Question],
    ) -> None:
        remote.tend()
        for received in remote.receive(MESSAGES_PER_TURN):
            peer = self.keyring.peer_of(received.key)
            if peer is None:
                # A key that was revoked meanwhile gets what an unknown one gets: nothing.
                remote.dropped += 1
                continue
            route = Route(received.route, peer.uid, received.key)
            self._receive(route, peer, received.frames, now, asked, questions)

    def _receive(
        self,
        route: Route,
        peer: Peer,
        frames: list[bytes],
        now: model.Instant,
        asked: list[Asked],
        questions: list[Question],
    ) -> None:
        self.stats.messages += 1
        try:
            request_id, request = codec.decode_request(frames)
        except ProtocolError as error:
            self._reply(route, codec.request_id_of(frames), codec.error_reply(error))
            return
        match request:
            case (
                wire.Submit()
                | wire.Cancel()
                | wire.Hold()
                | wire.Release()
                | wire.Prioritize()
                | wire.Pause()
                | wire.Resume()
                | wire.Requeue()
            ):
                next_id = self.store.next_id + sum(len(one.change.incoming) for one in asked)
                change = safely(partial(self._change, request, peer, now, next_id))
                if isinstance(change, wire.Error):
                    self._reply(route, request_id, change)
                else:
                    asked.append(Asked(route, request_id, request, change))
            case _:
                questions.append(Question(route, request_id, peer, request))

    def _change(
        self, request: ChangeRequest, peer: Peer, now: model.Instant, next_id: int
    ) -> Change:
        if self._broken:
            self._stop_unrecorded(request, peer)
        return self.desk.change(request, peer, now, next_id)

    def _stop_unrecorded(self, request: ChangeRequest, peer: Peer) -> NoReturn:
        """A full disk records nothing, but the job that fills it must be stoppable."""
        stopped: list[int] = []
        if isinstance(request, wire.Cancel):
            for row in self.desk.mine(request.selection, peer):
                if done := self.attempts.stop_unrecorded(row.id, row.attempt, request.now):
                    log.info("%s stops job %d of %s", user_name(peer.uid), row.id, row.user)
                stopped += done
        if not stopped:
            raise unavailable(self._broken)
        numbers = ", ".join(map(str, stopped))
        raise UnavailableError(
            f"asked {numbers} to stop, though nothing can be recorded: {self._broken}",
            hint="cancel again once there is space: until then a stopped job counts as failed",
        )

    def _answer(self, question: Question, now: model.Instant) -> None:
        reply = safely(partial(self._read, question, now))
        if reply is not None:
            self._reply(question.route, question.request_id, reply)

    def _outcome(self, one: Asked) -> wire.Reply:
        if self._broken:
            raise unavailable(self._broken)
        return self.desk.answer(one.change, one.request)

    def _read(self, question: Question, now: model.Instant) -> wire.Reply | None:
        """The reply, or None if it comes later."""
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
                return shares.shares(self.core, None if job is None else self.desk.row(job))
            case wire.Profile(pattern=pattern):
                return learning.profiles(
                    self.core,
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
                self.wants_stop = True
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
        self._draining = on
        self._tell_admission(now)
        running = sum(self._counts().get(s, 0) for s in ("RUNNING", "CONFIGURING", "COMPLETING"))
        if on:
            run_on = f"{running} job runs on" if running == 1 else f"{running} jobs run on"
            return wire.Ok(message=f"draining: nothing new starts; {run_on}")
        return wire.Ok(message="no longer draining")

    def _booking(self, change: Callable[[], R]) -> R:
        if self._broken:
            raise unavailable(self._broken)
        return change()

    def _forget(self, signature: str, peer: Peer, now: model.Instant) -> wire.Reply:
        self._require_operator(peer)
        if self._broken:
            raise unavailable(self._broken)
        if not self.ledger.forget(signature, act_of(peer, "forget", signature)):
            raise NotFoundError(
                f"nothing was learned of {signature!r}", hint="`rlq profile` lists the signatures"
            )
        self._facts.append(model.ProgramForgotten(now, signature))
        return wire.Ok(message=f"forgotten: {signature}")

    def _reply(self, route: Route, request_id: bytes, reply: wire.Reply) -> None:
        request_id = request_id or b"?"
        frames = safely(partial(codec.encode, request_id, reply))
        if isinstance(frames, wire.Error):
            frames = codec.encode(request_id, frames)
        if route.key is None:
            self.server.send(route.id, frames, route.uid)
        elif self.remote is not None and self.keyring.peer_of(route.key) is not None:
            self.remote.send(route.id, frames, route.uid)

    def _counts(self) -> dict[str, int]:
        return {str(state): n for state, n in self.store.counts_by_state().items()}

    def _status(self) -> wire.DaemonStatus:
        return self.views.status(
            state_dir=str(self.state_dir),
            socket=str(self.socket_path),
            draining=self._draining,
            problems=tuple(self._problems()),
            counts=self._counts(),
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
        if self._broken:
            problems.append(f"nothing can be changed: {self._broken}")
        elif (lost := self.store.lost()) is not None:
            problems.append(f"nothing can be changed: {lost.message}")
        if self._disk_is_full:
            problems.append(
                f"less than {DISK_MIB_MIN} MiB is free for {self.state_dir}: nothing new starts"
            )
        if self._distrusted_until is not None:
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
        room_is_unread = self.core.facts is not None and self.core.room() is None
        if room_is_unread:
            problems.append("the machine's readings are too old: nothing new starts")
        return problems

    # ---- coming back ---------------------------------------------------------------

    def _recover(self, now: model.Instant) -> None:
        """Rebuild the core from the database, then learn what became of each process.

        `now`: this turn's; the core's clock must not be ahead of the step that follows.

        Raises:
            UnavailableError: what became of a process cannot be found out yet: a full disk.
        """
        jobs, damaged = self._rebuild(now)
        self._end_damaged(damaged)
        self.ledger.load_learned(self.core, now)
        try:
            found = [
                self.attempts.recover(job, now)
                for job in jobs
                if not isinstance(job.state, model.Pending)
            ]
        except OSError as error:
            raise UnavailableError(
                f"cannot find out what became of the jobs that had started: {error}",
                hint=f"make room on the disk of {self.state_dir}",
            ) from error
        self.attempts.discard_all_but((j.id, j.attempt) for j in jobs)
        if self.mps is not None:
            self.mps.recover(
                {
                    job.id: self.live[job.id].uid
                    for job in jobs
                    if (place := placement_of(job.state)) is not None and place.gpus
                }
            )
        self._facts = [*found]
        self.bookings.forget()
        if (news := self.bookings.news(now)) is not None:
            self._facts.append(news)
        self._tell_admission(now)
        if found:
            log.info("found %d jobs that had started before", len(found))

    def _end_damaged(self, ids: Iterable[int]) -> None:
        """A waiting job whose row somebody has damaged would wait for ever, and nobody could
        cancel it."""
        with self.store.transaction():
            for job_id in ids:
                self.store.update_state(
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

    def _rebuild(self, now: model.Instant) -> tuple[list[model.Job], list[int]]:
        """The core as the database has it: its jobs, and those waiting that cannot be read."""
        jobs: list[model.Job] = []
        damaged: list[int] = []
        self.live.clear()
        for row in self.store.live():
            job_id = model.JobId(row.id)
            try:
                state = rows.load_state(rows.load_detail(row.detail))
                spec = rows.core_spec(row.job_spec, row.uid, self.config)
            except (msgspec.MsgspecError, KeyError, TypeError):
                # One row that somebody has damaged must not keep all others from running.
                log.exception("job %d cannot be read from the database; it is left out", row.id)
                if row.state is JobState.PENDING:
                    damaged.append(row.id)
                continue
            jobs.append(model.Job(job_id, spec, row.attempt, state))
            self.live[job_id] = Live(uid=row.uid, user=row.user, started_at=row.started_at)
        before = self.core
        self.core = Scheduler.restore(jobs, rows.core_policy(self.config), now)
        self.core.limits = self.limits.of((job.spec.user for job in jobs), now)
        self.core.facts = before.facts
        self.core.guard, self.core.peaks = before.guard, before.peaks
        self.core.guard.policy = rows.guard_policy(self.config)
        self.core.fairness, self.core.promised = before.fairness, before.promised
        self.core.fairness.policy = shares.policy(self.config)
        self.core.fairness.carry_over(now)
        self.views.core = self.core
        self.views.invalidate()
        return jobs, damaged

    # ---- housekeeping --------------------------------------------------------------

    def _housekeep(self, now: model.Instant) -> None:
        self.notifier.watchdog()
        if not self._broken and (news := self.bookings.news(now)) is not None:
            self._facts.append(news)
        if now >= self._database_due:
            self._database_due = now + DATABASE_PERIOD_MS
            self._look_at_database(now)
        self.fences.look()
        if self._distrusted_until is not None and now >= self._distrusted_until:
            self._distrusted_until = None
            self._tell_admission(now)
        if now >= self._disk_due:
            self._disk_due = now + DISK_PERIOD_MS
            self._look_at_disk(now)
        if now >= self._status_due:
            self._status_due = now + STATUS_PERIOD_MS
            counts = self._counts()
            self.notifier.status(
                f"{counts.get('RUNNING', 0)} running, {counts.get('PENDING', 0)} waiting"
            )

    def _prune_if_due(self, now: model.Instant) -> None:
        """Last in a turn: a request of this turn may be about a job that is to be forgotten."""
        keep_ms = self.config.daemon.keep_finished_ms
        if keep_ms is not None and now >= self._prune_due and not self._broken:
            self._prune_due = now + 60_000
            boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            if by_s := self._wall_clock.set_by_s(time.time(), boot_s):
                log.warning("the clock was set by %d s: no job is forgotten for a day", by_s)
                self._prune_due = now + PRUNE_PAUSE_MS
                return
            with contextlib.suppress(UnavailableError):
                self.store.prune(time.time() - keep_ms / 1000)

    def _look_at_database(self, now: model.Instant) -> None:
        """Raises UnavailableError, which ends the daemon: its socket's file is gone as well, so
        that nobody could be told, and a successor may be serving already."""
        if (lost := self.store.lost()) is None:
            self._listen_again()
            return
        if not self.server.listening():
            raise lost
        if not self._broken:
            log.error("cannot write to the database: %s", lost)
            self._break(lost.message, now)

    def _listen_again(self) -> None:
        """$XDG_RUNTIME_DIR goes with its user's last session, and /tmp has its cleaners: the
        daemon and its jobs stay, and are to be found again when the user is back."""
        if self.server.listen_again():
            log.warning("%s was removed: it is there again", self.socket_path)
        self.reports.listen_again()

    def _look_at_disk(self, now: model.Instant) -> None:
        try:
            found = os.statvfs(self.state_dir)
        except OSError as error:
            log.error("cannot look at %s: %s", self.state_dir, error)
            return
        is_full = found.f_bavail * found.f_frsize < DISK_MIB_MIN * 2**20
        if is_full != self._disk_is_full:
            self._disk_is_full = is_full
            log.log(
                logging.ERROR if is_full else logging.INFO,
                "the disk of %s is %s",
                self.state_dir,
                "full: nothing new starts" if is_full else "no longer full",
            )
            self._tell_admission(now)

    def _tell_admission(self, now: model.Instant) -> None:
        reason = ""
        if self._draining:
            reason = "the queue is draining (`rlq drain --off` ends it)"
        elif self._disk_is_full:
            reason = "the disk of the daemon's state folder is full"
        elif self._distrusted_until is not None:
            reason = "the scheduler has contradicted itself, and is tried again in a minute"
        self._facts.append(model.AdmissionSet(now, reason))

    def _take_signals(self) -> None:
        arrived = self.signals.take()
        if signal.SIGHUP in arrived:
            self._reload()
        if arrived & {signal.SIGTERM, signal.SIGINT}:
            self.wants_stop = True

    def _check_accounts(self) -> None:
        """No reason not to serve: a directory service may be down, and come back."""
        group = self.accounts.admin_group
        if group and self.accounts.gid(group) is None:
            log.warning("daemon.admin_group: there is no group %s on this machine (now)", group)
        for key in self.limits.unknown():
            log.warning("%s: there is none of this name on this machine (now)", key)

    def _reload(self) -> None:
        self.notifier.reloading()
        try:
            self.config = self.reload()
        except RlqError as error:
            hint = f" (hint: {error.hint})" if error.hint else ""
            log.error("the configuration is left as it was: %s%s", error, hint)
        else:
            logging.getLogger().setLevel(self.config.daemon.log_level.upper())
            self.accounts.admin_group = self.config.daemon.admin_group
            self.accounts.forget()
            self.limits.reconfigure(self.config.limits)
            self._check_accounts()
            self.core.policy = rows.core_policy(self.config)
            self.core.guard.policy = rows.guard_policy(self.config)
            self.core.fairness.policy = shares.policy(self.config)
            self.views.config = self.desk.config = self.bookings.config = self.config
            self.bookings.forget()
            self.sampler.set_period(self.config.monitor.period_ms / 1000)
            log.info(
                "the configuration was read again; at the next start change: [cpu] include and"
                " smt, [gpu] include, [mps], [remote], enforce.mode, daemon.max_message, and the"
                " default grace and time limit of jobs that are in the queue"
            )
        self.notifier.ready("ready")


def _submitters(asked: Iterable[Asked]) -> Iterator[int]:
    """Whose jobs may join the queue now."""
    for one in asked:
        for event in one.change.events:
            match event:
                case model.Submitted():
                    yield one.change.peer.uid
                case model.RequeueRequested(finished=model.Job(spec=spec)):
                    yield spec.user
                case _:
                    pass


def _peer(received: Received) -> Peer:
    """As whom a message counts.  A user's own daemon runs everything as that user, whoever came
    through to its socket: root by sudo, or, where the kernel names nobody, only themselves."""
    if os.geteuid() != 0 or received.peer is None:
        pid = 0 if received.peer is None else received.peer.pid
        return Peer(uid=os.geteuid(), gid=os.getegid(), pid=pid)
    return Peer(uid=received.peer.uid, gid=received.peer.gid, pid=received.peer.pid)
