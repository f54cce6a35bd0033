"""The queue from Python.

    from rlq import Client
    with Client() as queue:
        job = queue.submit(["python", "train.py"], cores=1)
        [done] = queue.wait(job)
        print(done.state, done.exit_code)

A Client belongs to one thread of one process: make one per thread, and a new one after a fork.
Results are the protocol's own frozen structs (`rlq.protocol.messages`); what fails raises an
`rlq.errors.RlqError`, which carries a `hint`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from rlq import paths, specs
from rlq.errors import (
    SAME_VERSION,
    NotFoundError,
    ProtocolError,
    UnreachableError,
    UsageError,
    from_wire,
)
from rlq.protocol import messages as m
from rlq.protocol.states import JobState
from rlq.protocol.units import ID_MAX
from rlq.transport import Connection, ConnectionLostError, Place, is_answering

#: Requests that may be sent again when the daemon restarts before it answers: they change
#: nothing, or doing them twice is the same as once.
_REPEATABLE = (
    m.Ping
    | m.List
    | m.Cancel
    | m.Hold
    | m.Release
    | m.Prioritize
    | m.Pause
    | m.Resume
    | m.Wait
    | m.Why
    | m.Environment
    | m.Attempts
    | m.Devices
    | m.Status
    | m.Profile
    | m.Share
    | m.Audit
    | m.Drain
    | m.Claim
    | m.Bookings
    | m.ListKeys
)
#: How often a broken connection is tried again; a restart of the daemon takes about a second.
_RECONNECT_INTERVAL_S = 0.1
WAIT_STEP_MS = 10_000

R = TypeVar("R")
Ids = int | Iterable[int]
#: `Client.list` hides the builtin from the annotations below it.
JobList = list[m.Job]
IdList = list[int]
ChangeList = list[m.Change]


class Client:
    """A connection to rlqd, made at the first request.

    Args:
        socket: where the daemon listens; None: RLQ_SOCKET, else the system's daemon, else the
            user's own.
        host: another machine's daemon, `HOST` or `HOST:PORT` (docs/remote.md); None: RLQ_HOST,
            unless `socket` or RLQ_SOCKET is set.
        autostart: start the user's own daemon when none runs; RLQ_NO_AUTOSTART=1 forbids it.
        timeout_s: how long an answer may take, and how long a restarting daemon is waited for.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        host: str | None = None,
        autostart: bool = True,
        timeout_s: float = 30.0,
    ) -> None:
        self._host: str | None = None
        if host is not None or os.environ.get("RLQ_HOST"):
            # Here and not above, as autostart below: most commands never need it.
            from rlq.remote import chosen_host

            self._host = chosen_host(socket, host)
        self._named = None if socket is None else Path(os.path.abspath(socket))
        self._autostart = autostart and os.environ.get("RLQ_NO_AUTOSTART", "") in {"", "0"}
        self._timeout_s = timeout_s
        self._connection: Connection | None = None
        self._pid = os.getpid()
        self._request_ids = count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Safe to repeat; a later request connects again."""
        connection, self._connection = self._connection, None
        # A forked child has the parent's sockets but not its I/O threads: hands off.
        if connection is not None and os.getpid() == self._pid:
            connection.close()

    @property
    def socket(self) -> Path:
        """Where the daemon listens (connecting first if need be).

        Raises:
            UsageError: on another machine.
        """
        place = self._connect().place
        if not isinstance(place, Path):
            raise UsageError(f"the daemon is on {place}: it has no socket here")
        return place

    @property
    def address(self) -> str:
        """The socket, or the other machine (connecting first if need be)."""
        return str(self._connect().place)

    @property
    def host(self) -> str | None:
        """The other machine whose daemon this is for; None: this one's."""
        return self._host

    # ---- submitting ----------------------------------------------------------------

    def submit(
        self,
        argv: Sequence[str],
        *,
        name: str = "",
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        set_env: Mapping[str, str] | None = None,
        gpus: int | None = None,
        gpu_mem: specs.Size | None = None,
        sm: specs.Share | None = None,
        cores: int | None = None,
        mem: specs.Size | None = None,
        exclusive: bool = False,
        time_limit: specs.Span | None = None,
        priority: int = 0,
        grace: specs.Span | None = None,
        requeue: bool = False,
        held: bool = False,
        after: Iterable[int] = (),
        after_any: bool = False,
        hooks: bool = True,
        log: str | os.PathLike[str] | None = None,
        log_max: specs.Size | None = None,
        like: str | None = None,
        preemptible: bool = False,
        check: bool = True,
    ) -> int:
        """Queue one command; its id.  When this returns, the job survives whatever comes.

        Args:
            argv: the command, word by word; no shell is involved.
            env: the whole environment (None: this process's).
            set_env: variables on top of it, which rlqd leaves alone.
            gpus: 0: none; None: one if the machine has any.
            gpu_mem, mem, log_max: "2G", or MiB.
            sm: "30%", or per cent of each GPU's multiprocessors.
            time_limit, grace: a timedelta, or text such as "2h30m" ("30" is minutes).
            after: ids of jobs that must have completed before it starts; if one does not, it is
                cancelled.  `after_any`: however they end.
            hooks: let its Python programs report by themselves (docs/reporting.md).
            like: charge and pack it like other jobs of this name (None: told by the command).
            preemptible: it may be stopped for a job of higher priority, and goes on where it was
                when it is run again.
            check: refuse a program that is not there, rather than have it fail to start.
            log: `%j` in it becomes the job's id, `%x` its name.

        On another machine (`host`) paths are that machine's, relative ones and `~` from one's
        home there; `env` None is what a login there would give, and `check` does not apply.

        Raises:
            UsageError: an argument is wrong.
            RefusedError: this machine can never run it.
        """
        spec = specs.make_spec(
            argv,
            resources=specs.make_resources(
                gpus=gpus,
                gpu_mem=gpu_mem,
                sm=sm,
                cores=cores,
                mem=mem,
                exclusive=exclusive,
                time_limit=time_limit,
            ),
            name=name,
            cwd=cwd,
            env=env,
            set_env=set_env,
            priority=priority,
            grace=grace,
            requeue=requeue,
            held=held,
            after=after,
            after_any=after_any,
            hooks=hooks,
            log=log,
            log_max=log_max,
            like=like,
            preemptible=preemptible,
            remote=self._host is not None,
        )
        if check and self._host is None:
            variables = {**(os.environ if env is None else env), **spec.env}
            specs.check_program(spec.argv, spec.cwd, variables.get("PATH", os.defpath))
        return self.submit_many([spec], env=env)[0]

    def submit_many(
        self, jobs: Iterable[m.JobSpec], *, env: Mapping[str, str] | None = None
    ) -> IdList:
        """Queue all of them or none; their ids in order.  They share `env` (None: this
        process's); `rlq.specs.make_spec` makes a job."""
        batch = tuple(jobs)
        if not batch:
            return []
        return list_of(self._ask(m.Submit(jobs=batch, env=self._captured(env)), m.Submitted).ids)

    def submit_pipelined(
        self,
        jobs: Iterable[m.JobSpec],
        *,
        env: Mapping[str, str] | None = None,
        window: int = 256,
    ) -> Iterator[int]:
        """Queue one by one, each durable by itself, without waiting for one answer before the
        next request.  The first refusal raises; jobs whose ids came before it are queued."""
        shared = self._captured(env)
        requests = (m.Submit(jobs=(job,), env=shared) for job in jobs)
        for reply in self.requests(requests, window=window):
            yield _expect(reply, m.Submitted).ids[0]

    # ---- looking -------------------------------------------------------------------

    def get(self, job: int) -> m.Job:
        """One job.

        Raises:
            NotFoundError: there is none by this id.
        """
        found = self._ask(m.List(selection=select(job)), m.Jobs)
        if not found.jobs:
            raise _no_jobs([job])
        return found.jobs[0]

    def logs_path(self, job: int) -> Path:
        """The file its output goes to, on this machine and readable to its user; there is none
        before it has started."""
        return Path(self.get(job).log_path)

    def list(
        self,
        selection: m.Selection | None = None,
        *,
        name: str | None = None,
        states: Iterable[JobState] = (),
        uid: int | None = None,
        limit: int = 0,
        before: int = 0,
    ) -> JobList:
        """The jobs that match all of what is given, newest first.

        Args:
            selection: instead of `name` (a shell pattern), `states` and `uid`.
            limit: at most this many; 0: all.
            before: only ids below this one; 0: from the newest.
        """
        if selection is None:
            selection = m.Selection(name=name, states=tuple(states), uid=uid)
        return list_of(self.pages(m.List(selection=selection, limit=limit, before=before)).jobs)

    def pages(self, asked: m.List) -> m.Jobs:
        """What `asked` asks for, in as many requests as it takes: the daemon ends a page when it
        holds enough.  `total` is that of the first page."""
        return self.rest_of(asked, self._ask(asked, m.Jobs))

    def rest_of(self, asked: m.List, first: m.Jobs) -> m.Jobs:
        """`first` answered `asked`: the pages after it put to it.

        Jobs may change between two pages; each is told as it was on its own.
        """
        jobs, page = list_of(first.jobs), first
        #: Beyond the last job there is nothing to ask for.
        left = first.total if asked.before == 0 else ID_MAX
        if asked.limit > 0:
            left = min(left, asked.limit)
        while page.jobs and len(jobs) < left:
            more = msgspec.structs.replace(
                asked, before=page.jobs[-1].id, limit=asked.limit and asked.limit - len(jobs)
            )
            page = self._ask(more, m.Jobs)
            jobs += page.jobs
        return msgspec.structs.replace(first, jobs=tuple(jobs))

    def wait(
        self,
        jobs: Ids,
        timeout: float | None = None,
        *,
        on_update: Callable[[m.Waited], None] | None = None,
        step_ms: int = WAIT_STEP_MS,
    ) -> JobList:
        """Until all have ended, or `timeout` seconds are over: the jobs as they are then, in the
        order asked for (`job.state.is_final` tells).  A restart of the daemon is waited out.

        `on_update` gets the daemon's word every `step_ms` or sooner: of many jobs only those
        that run, and how many have ended.

        Raises:
            NotFoundError: one of them does not exist.
        """
        ids = [jobs] if isinstance(jobs, int) else list_of(jobs)
        if not ids:
            return []
        deadline = None if timeout is None else time.monotonic() + timeout
        selection = select(ids)
        while True:
            timeout_ms = step_ms
            if deadline is not None:
                timeout_ms = max(0, min(step_ms, round((deadline - time.monotonic()) * 1000)))
            waited = self._ask(m.Wait(selection=selection, timeout_ms=timeout_ms), m.Waited)
            found = {job.id: job for job in waited.jobs}
            missing = [] if waited.partial else sorted(set(ids) - found.keys())
            if waited.missing or missing:
                raise _no_jobs(missing or waited.missing)
            if on_update is not None:
                on_update(waited)
            if waited.done or (deadline is not None and time.monotonic() >= deadline):
                break
        if waited.partial:
            found = {job.id: job for job in self.list(selection)}
            if missing := sorted(set(ids) - found.keys()):
                raise _no_jobs(missing)
        return [found[job] for job in ids]

    def why(self, job: int) -> m.Explanation:
        return self._ask(m.Why(id=job), m.Explanation)

    def environment(self, job: int) -> dict[str, str]:
        """The variables of one's own job."""
        return self._ask(m.Environment(id=job), m.Variables).env

    def attempts(self, job: int) -> tuple[m.Attempt, ...]:
        """Those that are over of a job that was queued again, the first first."""
        return self._ask(m.Attempts(id=job), m.AttemptList).attempts

    def devices(self) -> m.Machine:
        return self._ask(m.Devices(), m.Machine)

    def profile(self, pattern: str = "") -> m.Profiles:
        """What was learned of the programs whose signature matches (docs/throughput.md)."""
        return self._ask(m.Profile(pattern=pattern), m.Profiles)

    def share(self, job: int | None = None) -> m.Shares:
        """How the users stand by fair share; with a waiting job: how its rank is made up."""
        return self._ask(m.Share(job=job), m.Shares)

    def forget(self, signature: str) -> str:
        """Drop what was learned of a program (the daemon's own user, or root)."""
        return self._ask(m.Forget(signature=signature), m.Ok).message

    def audit(self, job: int | None = None, *, limit: int = 50) -> m.Acts:
        """What administrators did, the latest first: to one's own jobs; to administrators, all.

        `limit` 0: no limit.
        """
        page = self._ask(m.Audit(job=job, limit=limit), m.Acts)
        found = page.acts
        while page.more and page.acts and (not limit or len(found) < limit):
            left = limit - len(found) if limit else 0
            asked = m.Audit(job=job, limit=left, before=page.acts[-1].number)
            page = self._ask(asked, m.Acts)
            found += page.acts
        return m.Acts(acts=found, more=page.more)

    def status(self) -> m.DaemonStatus:
        return self._ask(m.Status(), m.DaemonStatus)

    def ping(self) -> m.Pong:
        return self._ask(m.Ping(), m.Pong)

    # ---- acting --------------------------------------------------------------------

    def cancel(self, jobs: Ids | m.Selection, *, now: bool = False) -> ChangeList:
        """SIGTERM, then SIGKILL after the job's grace period (`now`: at once)."""
        return self._change(m.Cancel(selection=select(jobs), now=now))

    def hold(self, jobs: Ids | m.Selection) -> ChangeList:
        return self._change(m.Hold(selection=select(jobs)))

    def release(self, jobs: Ids | m.Selection) -> ChangeList:
        return self._change(m.Release(selection=select(jobs)))

    def prioritize(self, jobs: Ids | m.Selection, priority: int) -> ChangeList:
        """Higher goes first; only administrators of a shared queue go above 0."""
        return self._change(m.Prioritize(selection=select(jobs), priority=priority))

    def pause(self, jobs: Ids | m.Selection) -> ChangeList:
        return self._change(m.Pause(selection=select(jobs)))

    def resume(self, jobs: Ids | m.Selection) -> ChangeList:
        return self._change(m.Resume(selection=select(jobs)))

    def requeue(self, jobs: Ids | m.Selection) -> ChangeList:
        return self._change(m.Requeue(selection=select(jobs)))

    def drain(self, on: bool = True) -> str:
        """Start nothing more, or go on starting; what the daemon said."""
        return self._ask(m.Drain(on=on), m.Ok).message

    def reserve(
        self,
        *,
        users: Sequence[str] = (),
        gpus: int = 0,
        gpu_indices: Sequence[int] = (),
        cores: int | None = None,
        mem_mib: int | None = None,
        starts_at: float | None = None,
        ends_at: float,
        name: str = "",
        maintenance: bool = False,
    ) -> m.Booking:
        """Book capacity for some users' jobs (administrators); docs/bookings.md.

        Args:
            gpus: so many devices of the daemon's choice, beside those of `gpu_indices`.
            cores, mem_mib: None: for each GPU what a job gets that declares nothing.
            starts_at, ends_at: Unix seconds; None: now.
            maintenance: all of the machine, for nobody's jobs.
        """
        asked = m.Reserve(
            name=name,
            users=tuple(users),
            gpus=gpus,
            gpu_indices=tuple(gpu_indices),
            cores=cores,
            mem_mib=mem_mib,
            starts_at=time.time() if starts_at is None else starts_at,
            ends_at=ends_at,
            maintenance=maintenance,
        )
        return self._ask(asked, m.Booked).booking

    def claim(self, gpu: int, *, for_ms: int) -> m.Booking:
        """Keep a GPU for one's own work outside the queue, from now on."""
        return self._ask(m.Claim(gpu_index=gpu, for_ms=for_ms), m.Booked).booking

    def release_claim(self, gpu: int | None = None) -> str:
        """End one's claim (None: of whatever GPU); what the daemon said."""
        return self._ask(m.Unbook(claim=True, gpu_index=gpu), m.Ok).message

    def unbook(self, name: str) -> str:
        """End what is booked by this name; what the daemon said."""
        return self._ask(m.Unbook(name=name), m.Ok).message

    def bookings(self) -> m.Calendar:
        """What is booked and not over, and quiet hours."""
        return self._ask(m.Bookings(), m.Calendar)

    def stop_daemon(self) -> str:
        """The daemon exits; running jobs run on."""
        return self._ask(m.Stop(), m.Ok).message

    # ---- the wire ------------------------------------------------------------------

    def request(self, message: m.Request, *, timeout_s: float | None = None) -> m.Reply:
        """Any request of the protocol.

        Raises:
            RlqError: the daemon's refusal, by its kind.
            UnreachableError: nobody answers.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if isinstance(message, m.Wait):
            limit_s += message.timeout_ms / 1000
        reply = self._exchange(message, limit_s)
        if isinstance(reply, m.Error):
            raise from_wire(reply.kind, reply.message, reply.hint)
        return reply

    def requests(self, messages: Iterable[m.Request], *, window: int = 256) -> Iterator[m.Reply]:
        """The replies to `messages`, in their order; up to `window` are under way at a time.

        A refusal is yielded as `Error`, so that the others' replies are not lost.  Do not use
        this client for anything else until the iterator is exhausted or closed.

        Raises:
            UnreachableError: the daemon is gone; what it did with the unanswered ones is not
                known.
        """
        if window < 1:
            raise UsageError("a window has at least one request")
        connection = self._connect()
        source = iter(messages)
        due: dict[bytes, None] = {}  # in the order asked
        arrived: dict[bytes, m.Reply] = {}
        exhausted = False
        try:
            while True:
                while not exhausted and len(due) < window:
                    message = next(source, None)
                    if message is None:
                        exhausted = True
                        break
                    request_id = self._next_id()
                    connection.send(request_id, message)
                    due[request_id] = None
                if not due:
                    return
                first = next(iter(due))
                while first not in arrived:
                    received = connection.receive(time.monotonic() + self._timeout_s)
                    if received is None:
                        raise self._silent(connection)
                    if received[0] in due:
                        arrived[received[0]] = received[1]
                del due[first]
                yield arrived.pop(first)
        finally:
            if due:
                # Replies still to come must not be taken for answers to later requests.
                self.close()

    def _ask(self, message: m.Request, expected: type[R]) -> R:
        return _expect(self.request(message), expected)

    def _change(self, message: m.Request) -> ChangeList:
        return list_of(self._ask(message, m.Changed).changes)

    def _exchange(self, message: m.Request, limit_s: float) -> m.Reply:
        deadline = time.monotonic() + limit_s
        connection = self._connect()
        while True:
            request_id = self._next_id()
            try:
                connection.send(request_id, message)
                while received := connection.receive(deadline):
                    if received[0] == request_id:
                        return received[1]
            except ConnectionLostError:
                self.close()
                if not isinstance(message, _REPEATABLE):
                    raise
                connection = self._reconnect(connection.place, deadline)
                continue
            except BaseException:
                self.close()  # an answer may still be on its way
                raise
            self.close()
            raise self._silent(connection)

    def _connect(self) -> Connection:
        if os.getpid() != self._pid:
            raise UsageError(
                "this Client was made before a fork, in another process",
                hint="make a new Client in each process",
            )
        if self._connection is None:
            self._connection = Connection(self._find(), timeout_s=self._timeout_s)
        return self._connection

    def _reconnect(self, place: Place, deadline: float) -> Connection:
        """To a daemon that restarts.  One that was stopped is not started again from here."""
        patience = max(deadline, time.monotonic() + min(self._timeout_s, 1.0))
        while not is_answering(place):
            if time.monotonic() >= patience:
                raise _nobody(place, "the daemon went away and did not come back")
            time.sleep(_RECONNECT_INTERVAL_S)
        self._connection = Connection(place, timeout_s=self._timeout_s)
        return self._connection

    def _find(self) -> Place:
        """Where a daemon answers, started if that is allowed and needed."""
        if self._host is not None:
            from rlq.remote import find

            return find(self._host)
        named = self._named is not None or bool(os.environ.get("RLQ_SOCKET"))
        places = [self._named] if self._named is not None else paths.candidate_sockets()
        for place in places:
            if is_answering(place):
                return place
        # A socket named by hand, or a system daemon that is down, is not ours to replace.
        if named:
            raise _nobody(places[0], "no daemon answers")
        system = paths.system_socket()
        if system in places and system.exists():
            raise UnreachableError(
                f"the system's daemon does not answer on {system}",
                hint="see `systemctl status rlqd`, or start it: `sudo systemctl start rlqd`",
            )
        if not self._autostart:
            raise UnreachableError(
                f"no daemon runs (nobody answers on {places[-1]})",
                hint="start one with `rlq daemon start`, or allow it to start by itself: without"
                " --no-autostart and RLQ_NO_AUTOSTART",
            )
        # Here and not above, as logging below: most commands never need them.
        from rlq.autostart import start_daemon

        return start_daemon()

    def _captured(self, env: Mapping[str, str] | None) -> dict[str, str]:
        if env is None and self._host is not None:
            return {}  # this machine's means nothing on the other
        sent, left_out = specs.capture_env(env)
        if left_out:
            import logging

            for key in left_out:
                logging.getLogger("rlq").warning(
                    "the variable %s is not valid UTF-8 and is left out", key
                )
        return sent

    def _silent(self, connection: Connection) -> UnreachableError:
        return UnreachableError(
            f"the daemon on {connection.place} does not answer in time",
            hint="it may be busy or stopped: `rlq doctor` looks for what is wrong",
        )

    def _next_id(self) -> bytes:
        return next(self._request_ids).to_bytes(8, "big")

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def select(jobs: Ids | m.Selection) -> m.Selection:
    """Ids as a selection, neighbours joined into ranges (they all have to exist: see `wait`)."""
    if isinstance(jobs, m.Selection):
        return jobs
    ids = [jobs] if isinstance(jobs, int) else sorted(set(jobs))
    if not ids:
        raise UsageError("no job was named")
    if ids[0] < 0:
        raise UsageError(f"{ids[0]} is not the id of a job", hint="ids are whole numbers from 1")
    ranges: list[tuple[int, int]] = []
    for job in ids:
        if ranges and ranges[-1][1] == job - 1:
            ranges[-1] = (ranges[-1][0], job)
        else:
            ranges.append((job, job))
    return m.Selection(ids=tuple(ranges))


T = TypeVar("T")


def list_of(items: Iterable[T]) -> list[T]:
    """`list(...)`, where a method of that name is in the way."""
    return [*items]


def _expect(reply: m.Reply, expected: type[R]) -> R:
    if isinstance(reply, m.Error):
        raise from_wire(reply.kind, reply.message, reply.hint)
    if not isinstance(reply, expected):
        raise ProtocolError(
            f"the daemon answered {type(reply).__name__} where {expected.__name__} was due",
            hint=SAME_VERSION,
        )
    return reply


def _no_jobs(ids: Iterable[int]) -> NotFoundError:
    named = ", ".join(str(job) for job in ids)
    return NotFoundError(f"there is no job {named}", hint="`rlq list` shows the jobs")


def _nobody(path: Place, what: str) -> UnreachableError:
    if not isinstance(path, Path):
        return UnreachableError(
            f"{what} on {path}", hint=f"`ssh {path.host} systemctl status rlqd` says more"
        )
    if path.exists():
        return UnreachableError(
            f"{what} on {path}",
            hint="the socket file is left over from a daemon that is gone: start it again",
        )
    return UnreachableError(
        f"{what} on {path}: there is no such socket",
        hint="start one there, or leave out --socket and RLQ_SOCKET to use your own daemon",
    )
