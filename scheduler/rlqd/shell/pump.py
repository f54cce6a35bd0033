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
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import assert_never

import zmq

from rlq.errors import RlqError, UnavailableError
from rlq.protocol import messages as wire
from rlqd.adapters.cgroups import Fences
from rlqd.adapters.curve import CurveServer
from rlqd.adapters.processes import LaunchOrder, Processes
from rlqd.adapters.reports import ReportSocket
from rlqd.adapters.sqlite import Row, Store
from rlqd.adapters.systemd import Notifier
from rlqd.adapters.zeromq import Server
from rlqd.config import Config
from rlqd.core import model
from rlqd.core.machine import Scheduler
from rlqd.core.states import placement_of
from rlqd.shell import enforcing, launching, recovery, sampling
from rlqd.shell.accounts import Accounts
from rlqd.shell.answers import Answers
from rlqd.shell.attempts import Attempts
from rlqd.shell.bookings import Bookings
from rlqd.shell.condition import Condition, Stats
from rlqd.shell.intake import MESSAGES_PER_TURN, Asked, Intake, Question
from rlqd.shell.ledger import Ledger
from rlqd.shell.limits import LimitTable
from rlqd.shell.mps import MpsJobs
from rlqd.shell.progress import Company, Tracker, recent_s
from rlqd.shell.remote import Keyring
from rlqd.shell.requests import Desk, safely, unavailable
from rlqd.shell.rlimits import Rlimits
from rlqd.shell.sampling import Sampler
from rlqd.shell.signals import Signals
from rlqd.shell.state_folder import StateFolder
from rlqd.shell.views import Live, Views
from rlqd.shell.waiters import Waiters

log = logging.getLogger(__name__)

#: How often a daemon that could not commit tries again.
RETRY_MS = 2_000
#: After the core has contradicted itself nothing new starts for so long.
DISTRUST_MS = 60_000
#: The driver of idle boards takes seconds to wake up; systemd and users wait meanwhile.
FIRST_READINGS_MS = 3_000
STATUS_PERIOD_MS = 10_000


def monotonic_ms() -> model.Instant:
    return model.Instant(time.monotonic_ns() // 1_000_000)


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
    intake: Intake = field(init=False)
    folder: StateFolder = field(init=False)
    answers: Answers = field(init=False)
    condition: Condition = field(default_factory=Condition)
    stats: Stats = field(default_factory=Stats)
    _company: Company = field(default_factory=Company)
    _poller: zmq.Poller = field(default_factory=zmq.Poller)
    _facts: list[model.Event] = field(default_factory=list[model.Event])
    _retry_at: int = 0
    _distrusted_until: int = 0
    _status_due: int = 0

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
        self.folder = StateFolder(path=self.state_dir, store=self.store, condition=self.condition)
        self.intake = Intake(
            condition=self.condition,
            stats=self.stats,
            store=self.store,
            desk=self.desk,
            attempts=self.attempts,
            keyring=self.keyring,
            server=self.server,
            remote=self.remote,
        )
        self.answers = Answers(
            condition=self.condition,
            stats=self.stats,
            config_path=self.config_path,
            state_dir=self.state_dir,
            socket_path=self.socket_path,
            store=self.store,
            accounts=self.accounts,
            views=self.views,
            desk=self.desk,
            ledger=self.ledger,
            waiters=self.waiters,
            bookings=self.bookings,
            keyring=self.keyring,
            server=self.server,
            remote=self.remote,
            reports=self.reports,
            sampler=self.sampler,
            fences=self.fences,
            mps=self.mps,
            tell=lambda fact: self._facts.append(fact),
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
        self.condition.draining = self.store.meta("draining") == "1"
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
        while not self.condition.wants_stop:
            self.turn(self._timeout_ms())
        self.notifier.stopping()
        self.sampler.stop()
        if self.mps is not None:
            self.mps.mps.stop()

    def turn(self, timeout_ms: int) -> None:
        ready = dict(self._poller.poll(timeout_ms))
        began = time.perf_counter()
        now = monotonic_ms()
        if self.signals.fileno() in ready:
            self._take_signals()
        taken = self.intake.take(ready, now)
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
        if self.condition.broken:
            self._retry_if_due(now)
        if not self.condition.broken:
            self._step(now, taken.asked)
        for one in taken.asked:
            self.intake.reply(one.route, one.request_id, safely(partial(self._outcome, one)))
        for question in taken.questions:
            self._answer(question, now)
        self.waiters.answer(now, self.intake.reply, all_=self.condition.wants_stop)
        self.attempts.discard_some()
        # Last: a request of this turn may be about a job that is to be forgotten.
        self.folder.prune(now, self.config.daemon.keep_finished_ms)
        self.stats.turns += 1
        self.stats.turn_ms_max = max(self.stats.turn_ms_max, (time.perf_counter() - began) * 1000)

    def _timeout_ms(self) -> int:
        """Until something is due; at most a second, for the watchdog's sake."""
        now = monotonic_ms()
        times: list[int] = []
        if (due := self.waiters.next_due()) is not None:
            times.append(due)
        times += self.mps.next_due() if self.mps is not None else ()
        if self.condition.broken:
            times.append(self._retry_at)
        elif (wakeup := self.core.next_wakeup()) is not None:
            times.append(wakeup)
        if (self._facts and not self.condition.broken) or self.attempts.has_discards():
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
        self.condition.is_distrusted = True
        self._distrusted_until = now + DISTRUST_MS
        # What it has in memory alone may be what is wrong.
        self.core = Scheduler(now=now)
        self._break("the scheduler has contradicted itself; rlqd's log says how", now)
        with contextlib.suppress(RlqError):
            self.ledger.load_use(self.core, now)

    def _break(self, why: str, now: model.Instant) -> None:
        """Nothing of this step is on disk: stop deciding until the disk takes rows again."""
        self.condition.broken = why
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
        except RlqError as error:
            self.condition.broken = error.message
            self._facts.clear()
            self.attempts.forget()
            return
        log.info("changes are taken again")
        self.condition.broken = ""

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

    def _answer(self, question: Question, now: model.Instant) -> None:
        reply = safely(partial(self.answers.reply, question, now))
        if reply is not None:
            self.intake.reply(question.route, question.request_id, reply)

    def _outcome(self, one: Asked) -> wire.Reply:
        if self.condition.broken:
            raise unavailable(self.condition.broken)
        return self.desk.answer(one.change, one.request)

    # ---- coming back ---------------------------------------------------------------

    def _recover(self, now: model.Instant) -> None:
        """Rebuild the core from the database, then learn what became of each process.

        `now`: this turn's; the core's clock must not be ahead of the step that follows.

        Raises:
            UnavailableError: what became of a process cannot be found out yet: a full disk.
        """
        rebuilt = self._rebuild(now)
        jobs = rebuilt.jobs
        recovery.end_damaged(self.store, rebuilt.damaged)
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
        self._facts.append(self.condition.admission(now))
        if found:
            log.info("found %d jobs that had started before", len(found))

    def _rebuild(self, now: model.Instant) -> recovery.Found:
        """The core as the database has it."""
        self.live.clear()
        found = recovery.read(self.store, self.config)
        self.live.update(found.live)
        self.core = recovery.successor(self.core, found.jobs, self.config, now)
        self.core.limits = self.limits.of((job.spec.user for job in found.jobs), now)
        self.views.core = self.core
        self.views.invalidate()
        return found

    # ---- housekeeping --------------------------------------------------------------

    def _housekeep(self, now: model.Instant) -> None:
        """
        Raises:
            UnavailableError: the state folder is gone, and the socket: the daemon is to end.
        """
        self.notifier.watchdog()
        if not self.condition.broken and (news := self.bookings.news(now)) is not None:
            self._facts.append(news)
        if self.folder.is_time_to_look(now):
            self._look_at_database(now)
        self.fences.look()
        if self.condition.is_distrusted and now >= self._distrusted_until:
            self.condition.is_distrusted = False
            self._facts.append(self.condition.admission(now))
        if self.folder.fullness_has_changed(now):
            self._facts.append(self.condition.admission(now))
        if now >= self._status_due:
            self._status_due = now + STATUS_PERIOD_MS
            counts = self.answers.counts()
            self.notifier.status(
                f"{counts.get('RUNNING', 0)} running, {counts.get('PENDING', 0)} waiting"
            )

    def _look_at_database(self, now: model.Instant) -> None:
        """Raises UnavailableError, which ends the daemon: its socket's file is gone as well, so
        that nobody could be told, and a successor may be serving already."""
        if (lost := self.store.lost()) is None:
            self._listen_again()
            return
        if not self.server.listening():
            raise lost
        if not self.condition.broken:
            log.error("cannot write to the database: %s", lost)
            self._break(lost.message, now)

    def _listen_again(self) -> None:
        """$XDG_RUNTIME_DIR goes with its user's last session, and /tmp has its cleaners: the
        daemon and its jobs stay, and are to be found again when the user is back."""
        if self.server.listen_again():
            log.warning("%s was removed: it is there again", self.socket_path)
        self.reports.listen_again()

    def _take_signals(self) -> None:
        arrived = self.signals.take()
        if signal.SIGHUP in arrived:
            self._reload()
        if arrived & {signal.SIGTERM, signal.SIGINT}:
            self.condition.wants_stop = True

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
            recovery.configure(self.core, self.config)
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
