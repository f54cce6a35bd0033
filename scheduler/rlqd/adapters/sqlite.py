"""The database: one SQLite file, the only place where jobs outlive the daemon.

Durability: WAL with synchronous=FULL, so that COMMIT returns after fsync of the WAL.  One
commit costs one fsync however many rows it holds: the pump puts many requests in one.

Size of the WAL: SQLite checkpoints by itself once it holds 1,000 pages (4 MiB); as there is
one connection, nothing holds a checkpoint back, and `journal_size_limit` cuts the file down
after a great commit.  `close` folds it away.

Cost of a listing: ids first, from an index, newest first; then only the rows of that page.
Totals by user and state are kept in memory, as this connection is the only writer (rlqd.lock
sees to that), so that no listing counts 100,000 rows.

A file that is removed or replaced under an open connection takes writes all the same, and loses
them: every transaction looks first whether the path still leads to the file that was opened.

A failed statement leaves no half: the transaction is rolled back, and the caller gets an
UnavailableError that names the file and what is wrong with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
import sqlite3
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rlq.errors import InternalError, RlqError, UnavailableError, UsageError
from rlq.protocol.messages import Attempt, JobSpec, Selection
from rlq.protocol.states import FINAL_STATES, LIVE_STATES, JobState
from rlq.protocol.units import ID_MAX

#: "rlq" and a NUL, in the file's header: another program's database is never touched.
APPLICATION_ID = 0x726C7100
#: A selection of more ranges would occupy the daemon for too long.
RANGES_MAX = 10_000
#: Beyond it the check at start would take seconds; damage then shows at first use.
CHECKED_BYTES_MAX = 256 * 1024 * 1024
_CHUNK = 500

#: From version i to i + 1, each in one transaction.  Published ones never change.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        # sha256 of the variables; the body is zlib over msgpack.
        """CREATE TABLE environment (
            id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, body BLOB NOT NULL)""",
        """CREATE TABLE job (
            id INTEGER PRIMARY KEY,
            uid INTEGER NOT NULL,
            user TEXT NOT NULL,
            name TEXT NOT NULL,
            state TEXT NOT NULL,
            held INTEGER NOT NULL,
            priority INTEGER NOT NULL,
            submitted_at REAL NOT NULL,
            started_at REAL,
            ended_at REAL,
            attempt INTEGER NOT NULL,
            reason TEXT NOT NULL,
            exit_code INTEGER,
            signal INTEGER,
            spec BLOB NOT NULL,
            environment_id INTEGER REFERENCES environment (id),
            env_own BLOB,
            detail BLOB NOT NULL)""",
        # Every index ends in the rowid, so these also order by id.
        "CREATE INDEX job_state ON job (state)",
        "CREATE INDEX job_uid_state ON job (uid, state)",
        "CREATE INDEX job_name ON job (name)",
        "CREATE INDEX job_environment ON job (environment_id)",
        "CREATE INDEX job_ended ON job (ended_at) WHERE ended_at IS NOT NULL",
    ),
    # What was measured of programs and devices: opaque here.
    ("CREATE TABLE learned (key TEXT PRIMARY KEY, body BLOB NOT NULL, at REAL NOT NULL)",),
    # Public keys of those who may come in over the network.  Times are Unix seconds.
    (
        """CREATE TABLE remote_key (
            key BLOB PRIMARY KEY,
            uid INTEGER NOT NULL,
            user TEXT NOT NULL,
            enrolled_at REAL NOT NULL,
            enrolled_by TEXT NOT NULL)""",
    ),
    # What administrators did.  A job's number is never given again, so that these may outlive it.
    (
        """CREATE TABLE audit (
            number INTEGER PRIMARY KEY,
            at REAL NOT NULL,
            uid INTEGER NOT NULL,
            user TEXT NOT NULL,
            verb TEXT NOT NULL,
            job INTEGER,
            owner_uid INTEGER,
            owner TEXT NOT NULL,
            detail TEXT NOT NULL)""",
        "CREATE INDEX audit_job ON audit (job)",
        "CREATE INDEX audit_owner ON audit (owner_uid)",
    ),
    # Reservations, maintenance and claims: opaque here.
    ("CREATE TABLE booking (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",),
    # Decayed use of each user up to `at`, for fair share.
    (
        """CREATE TABLE use (
            uid INTEGER PRIMARY KEY,
            machine_s REAL NOT NULL,
            gpu_s REAL NOT NULL,
            core_s REAL NOT NULL,
            at REAL NOT NULL)""",
    ),
    # Earlier attempts of jobs that were queued again; the latest is the job's own row.
    (
        """CREATE TABLE attempt (
            job_id INTEGER NOT NULL,
            number INTEGER NOT NULL,
            state TEXT NOT NULL,
            reason TEXT NOT NULL,
            started_at REAL,
            ended_at REAL NOT NULL,
            exit_code INTEGER,
            signal INTEGER,
            PRIMARY KEY (job_id, number)) WITHOUT ROWID""",
    ),
)

_encode_json = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(JobSpec).decode
_encode_env = msgspec.msgpack.Encoder(order="deterministic").encode
_decode_env = msgspec.msgpack.Decoder(dict[str, str]).decode
_STATES = {state.value: state for state in JobState}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job as it is stored.  Times are Unix seconds."""

    id: int
    uid: int
    user: str
    name: str
    state: JobState
    held: bool
    priority: int
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None
    attempt: int = 0
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    #: JSON of the JobSpec without its variables: read it with `job_spec`.
    spec: bytes
    #: From `Store.insert_environment`; None: no shared environment.
    environment_id: int | None = None
    #: The job's own variables, msgpack; None: none.
    env_own: bytes | None = None
    #: The daemon's own notes about the job (JSON): opaque here.
    detail: bytes = b"{}"

    @classmethod
    def new(
        cls,
        spec: JobSpec,
        *,
        id: int,
        uid: int,
        user: str,
        submitted_at: float,
        environment_id: int | None = None,
        detail: bytes = b"{}",
    ) -> Row:
        """A PENDING job."""
        return cls(
            id=id,
            uid=uid,
            user=user,
            name=spec.name,
            state=JobState.PENDING,
            held=spec.held,
            priority=spec.priority,
            submitted_at=submitted_at,
            spec=_encode_json(msgspec.structs.replace(spec, env={}) if spec.env else spec),
            environment_id=environment_id,
            env_own=_encode_env(spec.env) if spec.env else None,
            detail=detail,
        )

    @property
    def job_spec(self) -> JobSpec:
        """Decoded anew at each use, with the priority as it is now.  Its `env` is empty: see
        `Store.environment`."""
        spec = _decode_spec(self.spec)
        if spec.priority == self.priority:
            return spec
        return msgspec.structs.replace(spec, priority=self.priority)

    def __repr__(self) -> str:
        # `env_own` may hold secrets.
        return f"Row(id={self.id}, user={self.user!r}, name={self.name!r}, state={self.state})"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """Something an administrator did.  Times are Unix seconds."""

    #: Given by the table; ascending.
    number: int = 0
    at: float
    #: Who did it.
    uid: int
    user: str
    verb: str
    #: None: it was about the daemon.
    job: int | None = None
    owner_uid: int | None = None
    owner: str = ""
    detail: str = ""


_AUDIT_COLUMNS = tuple(one.name for one in fields(AuditRow))


@dataclass(frozen=True, slots=True)
class Brief:
    """Whose a job is, and how it is."""

    id: int
    uid: int
    user: str
    state: JobState


@dataclass(frozen=True, slots=True)
class RemoteKey:
    """A public key, and as whom its holder counts."""

    key: bytes
    uid: int
    user: str
    enrolled_at: float
    #: The name of who enrolled it.
    enrolled_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRow:
    """What a user has used by `at` (Unix seconds), decayed up to then."""

    uid: int
    machine_s: float
    gpu_s: float
    core_s: float
    at: float


_COLUMNS = tuple(one.name for one in fields(Row))
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM job"
_INSERT = f"INSERT INTO job ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class Store:
    """Jobs on disk.  Belongs to one thread.

    Raises (the constructor and every method):
        UnavailableError: the disk is full, failing or read-only; the file is damaged, removed,
            replaced, of a newer rlq, or not rlq's; somebody else keeps it locked.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, migrations: Sequence[Sequence[str]] = MIGRATIONS
    ) -> None:
        self.path = Path(path)
        #: Jobs by (uid, state), kept in step with the table.
        self.counts: Counter[tuple[int, JobState]] = Counter()
        self._undo: Counter[tuple[int, JobState]] = Counter()
        self._next_id = self._next_id_stored = 1
        try:
            # SQLite gives its -wal and -shm the mode of the database: secrets stay the owner's.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file = _identity(os.fstat(fd))
            os.close(fd)
        except OSError as error:
            raise UnavailableError(
                f"cannot open the database {self.path}: {error.strerror}",
                hint="make its folder writable, or choose another with --state-dir",
            ) from error
        with self._errors():
            self._db = sqlite3.connect(self.path, isolation_level=None, cached_statements=256)
        try:
            self._open(migrations)
        except BaseException:
            self._db.close()
            raise

    def _open(self, migrations: Sequence[Sequence[str]]) -> None:
        pragma = self._pragma
        pragma("busy_timeout = 2000")
        version = pragma("user_version")
        if pragma("application_id") != APPLICATION_ID and self._value(
            "SELECT count(*) FROM sqlite_master"
        ):
            raise UnavailableError(
                f"{self.path} is another program's database",
                hint="choose another state folder with --state-dir",
            )
        if version > len(migrations):
            raise UnavailableError(
                f"{self.path} was written by a newer rlq (schema {version}, this one knows"
                f" {len(migrations)})",
                hint="install that version again, or move the file aside to start empty",
            )
        if self.path.stat().st_size <= CHECKED_BYTES_MAX:
            found = pragma("quick_check(1)")
            if found != "ok":
                raise self._damaged(str(found))
        if pragma("journal_mode = WAL") != "wal":
            raise UnavailableError(
                f"{self.path} is on a file system that SQLite cannot write safely to",
                hint="choose a state folder on a local disk with --state-dir",
            )
        pragma("synchronous = FULL")
        pragma("foreign_keys = ON")
        pragma("journal_size_limit = 16777216")
        pragma("cache_size = -8192")
        pragma("temp_store = MEMORY")
        self._migrate(version, migrations)
        for uid, state, n in self._all("SELECT uid, state, count(*) FROM job GROUP BY uid, state"):
            if state not in _STATES:
                raise self._damaged(f"there is no job state {state!r}")
            self.counts[uid, _STATES[state]] = n
        self._next_id = self._next_id_stored = max(
            int(self.meta("next_id") or 1), (self._value("SELECT max(id) FROM job") or 0) + 1
        )
        #: Stays with the file: a copy of the state folder is the same queue.
        self.instance_id = self.meta("instance_id") or ""

    def _migrate(self, version: int, migrations: Sequence[Sequence[str]]) -> None:
        if 0 < version < len(migrations):
            self._back_up(self.path.with_name(f"{self.path.name}.v{version}.bak"))
        for target, statements in enumerate(migrations[version:], start=version + 1):
            with self.transaction():
                for statement in statements:
                    self._run(statement)
                if target == 1:
                    self._run(f"PRAGMA application_id = {APPLICATION_ID}")
                    self.set_meta("instance_id", str(uuid.uuid4()))
                self._run(f"PRAGMA user_version = {target}")

    def _back_up(self, target: Path) -> None:
        part = target.with_name(target.name + ".part")
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with self._errors(), contextlib.closing(sqlite3.connect(part)) as copy:
            self._db.backup(copy)
        part.replace(target)

    def close(self) -> None:
        """Fold the WAL away and close.  Safe to repeat; an open transaction is rolled back."""
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lost(self) -> UnavailableError | None:
        """Why nothing may be written, if the file at `path` is no longer the one that is open.

        One call of stat(2); whoever moves the file back makes it good again.
        """
        try:
            if _identity(os.stat(self.path)) == self._file:
                return None
            what = "was replaced while rlqd runs; restart rlqd to go on with the new one"
        except FileNotFoundError:
            what = (
                "was removed while rlqd runs; move it back, or restart rlqd to begin with an"
                " empty queue"
            )
        except OSError as error:
            what = f"cannot be looked at: {error.strerror}"
        return UnavailableError(
            f"the database {self.path} {what}", hint="running jobs run on either way"
        )

    # ---- transactions --------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block is on disk when it ends, or none of it."""
        self.begin()
        try:
            yield
        except BaseException:
            self.rollback()
            raise
        self.commit()

    def begin(self) -> None:
        if (lost := self.lost()) is not None:
            raise lost
        self._run("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Durable when it returns.  When it raises, the transaction has been rolled back."""
        try:
            if self._next_id != self._next_id_stored:
                self.set_meta("next_id", str(self._next_id))
            self._run("COMMIT")
        except BaseException:
            self.rollback()
            raise
        self._next_id_stored = self._next_id
        self._undo.clear()

    def rollback(self) -> None:
        """Never raises: called where something is wrong already.  Nothing to do: does nothing."""
        # A full or failing disk makes SQLite roll back by itself.
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
        self.counts.subtract(self._undo)
        self._undo.clear()
        # Ids handed out meanwhile may have been seen by somebody: they are not given again.

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    # ---- writing -------------------------------------------------------------------

    @property
    def next_id(self) -> int:
        """Above every id there ever was, pruned jobs' included."""
        return self._next_id

    def insert_job(self, row: Row) -> None:
        self.insert_jobs((row,))

    def insert_jobs(self, rows: Iterable[Row]) -> None:
        """Within a transaction: alone, each row would cost an fsync."""
        assert self._db.in_transaction
        rows = list(rows)
        with self._errors():
            self._db.executemany(
                _INSERT, [tuple(getattr(row, column) for column in _COLUMNS) for row in rows]
            )
        for row in rows:
            self._count(row.uid, row.state, 1)
            self._next_id = max(self._next_id, row.id + 1)

    def insert_environment(self, env: dict[str, str]) -> int | None:
        """The id of the environment, stored once however many jobs share it; None: empty."""
        if not env:
            return None
        body = _encode_env(env)
        digest = hashlib.sha256(body).digest()
        known = self._value("SELECT id FROM environment WHERE hash = ?", digest)
        if known is None:
            known = self._run(
                "INSERT INTO environment (hash, body) VALUES (?, ?)",
                (digest, zlib.compress(body, 1)),
            ).lastrowid
        assert isinstance(known, int)
        return known

    def update_state(
        self,
        id: int,
        *,
        state: JobState,
        held: bool,
        attempt: int,
        reason: str,
        started_at: float | None,
        ended_at: float | None,
        exit_code: int | None,
        signal: int | None,
        priority: int | None = None,
        detail: bytes | None = None,
    ) -> None:
        """All that changes in a job's life.  `priority`, `detail` None: as it was.

        Raises:
            InternalError: no such job.
        """
        found = self._run("SELECT uid, state FROM job WHERE id = ?", (id,)).fetchone()
        if found is None:
            raise InternalError(f"job {id} is not in the database")
        self._run(
            "UPDATE job SET state = ?, held = ?, attempt = ?, reason = ?, started_at = ?,"
            " ended_at = ?, exit_code = ?, signal = ?, priority = coalesce(?, priority),"
            " detail = coalesce(?, detail) WHERE id = ?",
            (
                *(state.value, held, attempt, reason, started_at),
                *(ended_at, exit_code, signal, priority, detail, id),
            ),
        )
        uid, before = found
        self._count(uid, _STATES[before], -1)
        self._count(uid, state, 1)

    def update_detail(self, id: int, detail: bytes) -> None:
        self._run("UPDATE job SET detail = ? WHERE id = ?", (detail, id))

    def add_attempt(self, job_id: int, attempt: Attempt) -> None:
        """An attempt that is over, though the job is not.  Told again, it is the same."""
        self._run(
            "INSERT OR REPLACE INTO attempt (job_id, number, state, reason, started_at, ended_at,"
            " exit_code, signal) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(job_id, attempt.number, attempt.state, attempt.reason),
                *(attempt.started_at, attempt.ended_at, attempt.exit_code, attempt.signal),
            ),
        )

    def attempts(self, job_id: int) -> list[Attempt]:
        """The job's earlier attempts, the first first."""
        return [
            Attempt(
                number=number,
                state=state,
                reason=reason,
                started_at=started_at,
                ended_at=ended_at,
                exit_code=exit_code,
                signal=signal,
            )
            for number, state, reason, started_at, ended_at, exit_code, signal in self._all(
                "SELECT number, state, reason, started_at, ended_at, exit_code, signal"
                " FROM attempt WHERE job_id = ? ORDER BY number",
                job_id,
            )
        ]

    def prune(self, before: float, *, limit: int = 5000) -> int:
        """Forget up to `limit` jobs that ended before this time, and what administrators did
        before it; how many jobs were forgotten.

        A transaction of its own.  Call again while it returns `limit`.
        """
        with self.transaction():
            marks = ", ".join("?" * len(FINAL_STATES))
            old = self._all(
                f"SELECT id, uid, state FROM job WHERE ended_at < ? AND state IN ({marks})"
                " ORDER BY ended_at LIMIT ?",
                before,
                *(state.value for state in FINAL_STATES),
                limit,
            )
            with self._errors():
                self._db.executemany("DELETE FROM job WHERE id = ?", [(row[0],) for row in old])
                self._db.executemany(
                    "DELETE FROM attempt WHERE job_id = ?", [(row[0],) for row in old]
                )
            for _, uid, state in old:
                self._count(uid, _STATES[state], -1)
            if old:
                self._run(
                    "DELETE FROM environment WHERE NOT EXISTS"
                    " (SELECT 1 FROM job WHERE environment_id = environment.id)"
                )
            # Of a job that is still known, all is kept.
            self._run(
                "DELETE FROM audit WHERE at < ? AND NOT EXISTS"
                " (SELECT 1 FROM job WHERE job.id = audit.job)",
                (before,),
            )
        return len(old)

    def put_audit(self, acts: Iterable[AuditRow]) -> None:
        columns = _AUDIT_COLUMNS[1:]
        with self._errors():
            self._db.executemany(
                f"INSERT INTO audit ({', '.join(columns)}) VALUES"
                f" ({', '.join('?' * len(columns))})",
                [tuple(getattr(act, column) for column in columns) for act in acts],
            )

    def audit(
        self, *, limit: int, before: int = 0, job: int | None = None, owner_uid: int | None = None
    ) -> list[AuditRow]:
        """What administrators did, newest first; `before`: only numbers below it, 0: from the
        newest; `job`, `owner_uid`: only acts on that job, on jobs of that user."""
        terms, values = ["number < ?"], [before if 0 < before <= ID_MAX else ID_MAX]
        for column, value in (("job", job), ("owner_uid", owner_uid)):
            if value is not None:
                if not 0 <= value <= ID_MAX:
                    return []
                terms.append(f"{column} = ?")
                values.append(value)
        rows = self._all(
            f"SELECT {', '.join(_AUDIT_COLUMNS)} FROM audit WHERE {' AND '.join(terms)}"
            " ORDER BY number DESC LIMIT ?",
            *values,
            limit,
        )
        return [AuditRow(**dict(zip(_AUDIT_COLUMNS, row, strict=True))) for row in rows]

    def meta(self, key: str) -> str | None:
        value: str | None = self._value("SELECT value FROM meta WHERE key = ?", key)
        return value

    def set_meta(self, key: str, value: str) -> None:
        self._run("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))

    def insert_booking(self, body: bytes) -> int:
        """Its id."""
        row = self._run("INSERT INTO booking (body) VALUES (?)", (body,)).lastrowid
        assert row is not None
        return row

    def drop_bookings(self, ids: Iterable[int]) -> None:
        for id in ids:
            self._run("DELETE FROM booking WHERE id = ?", (id,))

    def bookings(self) -> list[tuple[int, bytes]]:
        """All rows of `insert_booking`, by id."""
        return self._all("SELECT id, body FROM booking ORDER BY id")

    def put_learned(self, rows: Iterable[tuple[str, bytes, float]]) -> None:
        """(key, body, Unix time): added, or put in the place of the key's old row."""
        with self._errors():
            self._db.executemany(
                "INSERT OR REPLACE INTO learned (key, body, at) VALUES (?, ?, ?)", list(rows)
            )

    def drop_learned(self, keys: Iterable[str]) -> None:
        with self._errors():
            self._db.executemany("DELETE FROM learned WHERE key = ?", [(key,) for key in keys])

    def put_use(self, rows: Iterable[UseRow]) -> None:
        """All of it, in the place of all there was.  Within a transaction."""
        assert self._db.in_transaction
        self._run("DELETE FROM use")
        with self._errors():
            self._db.executemany(
                "INSERT INTO use (uid, machine_s, gpu_s, core_s, at) VALUES (?, ?, ?, ?, ?)",
                [(row.uid, row.machine_s, row.gpu_s, row.core_s, row.at) for row in rows],
            )

    def put_remote_key(self, key: RemoteKey) -> None:
        self._run(
            "INSERT INTO remote_key (key, uid, user, enrolled_at, enrolled_by)"
            " VALUES (?, ?, ?, ?, ?)",
            (key.key, key.uid, key.user, key.enrolled_at, key.enrolled_by),
        )

    def drop_remote_key(self, key: bytes) -> None:
        self._run("DELETE FROM remote_key WHERE key = ?", (key,))

    # ---- reading -------------------------------------------------------------------

    def remote_keys(self) -> list[RemoteKey]:
        """By user and age."""
        return [
            RemoteKey(*row)
            for row in self._all(
                "SELECT key, uid, user, enrolled_at, enrolled_by FROM remote_key"
                " ORDER BY user, enrolled_at, key"
            )
        ]

    def use(self) -> list[UseRow]:
        """By user."""
        found = self._all("SELECT uid, machine_s, gpu_s, core_s, at FROM use ORDER BY uid")
        return [
            UseRow(uid=uid, machine_s=machine_s, gpu_s=gpu_s, core_s=core_s, at=at)
            for uid, machine_s, gpu_s, core_s, at in found
        ]

    def live(self) -> Iterator[Row]:
        """The jobs that have not ended, by id.  Rows may be changed while it runs."""
        ids = sorted(self._ids_by_state(LIVE_STATES, None))
        return self._rows(ids)

    def get(self, ids: Iterable[int]) -> dict[int, Row]:
        """The jobs that exist among these, in the order asked for."""
        return {row.id: row for row in self._rows([id for id in ids if 0 <= id <= ID_MAX])}

    def learned(self) -> list[tuple[str, bytes, float]]:
        """All rows of `put_learned`, by key."""
        return self._all("SELECT key, body, at FROM learned ORDER BY key")

    def learned_keys(self) -> set[str]:
        return {key for (key,) in self._all("SELECT key FROM learned")}

    def environment(self, id: int) -> dict[str, str]:
        """All variables of a job: the shared ones, then its own on top.  Unknown job: none."""
        found = self._run(
            "SELECT body, env_own FROM job"
            " LEFT JOIN environment ON environment.id = job.environment_id WHERE job.id = ?",
            (id,),
        ).fetchone()
        if found is None:
            return {}
        body, own = found
        try:
            shared = _decode_env(zlib.decompress(body)) if body is not None else {}
            return shared | (_decode_env(own) if own is not None else {})
        except (zlib.error, msgspec.DecodeError) as error:
            raise self._damaged(f"the environment of job {id} cannot be read") from error

    def brief(self, ids: Iterable[int]) -> dict[int, Brief]:
        """As `get`, of what a row holds only whose it is and how it is: a fraction of the cost."""
        wanted = [id for id in ids if 0 <= id <= ID_MAX]
        found: dict[int, Brief] = {}
        for start in range(0, len(wanted), _CHUNK):
            chunk = wanted[start : start + _CHUNK]
            marks = ", ".join("?" * len(chunk))
            rows = self._all(f"SELECT id, uid, user, state FROM job WHERE id IN ({marks})", *chunk)
            by_id = {id: Brief(id, uid, user, _STATES[state]) for id, uid, user, state in rows}
            found |= {id: by_id[id] for id in chunk if id in by_id}
        return found

    def query(
        self, selection: Selection, *, limit: int = 0, before: int = 0, bytes_max: int = 0
    ) -> tuple[list[Row], int]:
        """A page of the jobs selected, newest first, and how many there are in all.

        `limit` 0: no limit; `before`: only ids below it, 0: from the newest.  `total` counts
        the whole selection.  `selection.all` changes nothing: an empty selection is everything.
        `bytes_max`: the page ends once its rows are of this size (0: whatever it is), but holds
        one row at least; rows beyond it are not even read.

        Raises:
            UsageError: too many ranges, or an unusable name pattern.
        """
        most = limit if limit > 0 else ID_MAX
        top = before if 0 < before <= ID_MAX else ID_MAX
        if selection.ids or selection.name is not None:
            ids = self.ids(selection)
            page: Iterable[int] = (id for id in reversed(ids) if id < top)
            total = len(ids)
        else:
            states = frozenset(selection.states) or frozenset(JobState)
            uid = selection.uid
            page = self._newest_ids(states, uid, top, most)
            total = sum(
                n
                for (owner, state), n in self.counts.items()
                if state in states and uid in (None, owner)
            )
        shown = list(islice(page, most))
        if bytes_max and len(shown) > 1:
            shown = self._within(shown, bytes_max)
        return list(self._rows(shown)), total

    def ids(self, selection: Selection, states: Iterable[JobState] | None = None) -> list[int]:
        """The ids selected, ascending; `states`: only those of them in one of these states.

        Raises:
            UsageError: too many ranges, or an unusable name pattern.
        """
        wanted = frozenset(selection.states) or frozenset(JobState)
        if states is not None:
            wanted &= frozenset(states)
        if not wanted or not _fits(selection.uid):
            return []
        if not selection.ids and selection.name is None:
            return sorted(self._ids_by_state(wanted, selection.uid))
        terms: list[str] = []
        values: list[object] = []
        if selection.uid is not None:
            terms.append("+uid = ?")  # `+`: not by the index, the other terms say more
            values.append(selection.uid)
        if len(wanted) < len(JobState):
            terms.append(f"+state IN ({', '.join('?' * len(wanted))})")
            values += [state.value for state in wanted]
        if selection.name is not None:
            terms.append("name GLOB ?")
            # A shell's [!a] is GLOB's [^a].
            values.append(selection.name.replace("[!", "[^"))
        if not selection.ids:
            return sorted(self._column(f"SELECT id FROM job WHERE {' AND '.join(terms)}", *values))
        if selection.name is not None:
            terms[-1] = "+name GLOB ?"
        sql = " AND ".join(["SELECT id FROM job WHERE id BETWEEN ? AND ?", *terms])
        found: list[int] = []
        for low, high in _merged(selection.ids):
            found += self._column(f"{sql} ORDER BY id", low, high, *values)
        return found

    def counts_by_state(self, uid: int | None = None) -> dict[JobState, int]:
        """How many jobs are in each state; states without jobs are left out."""
        counts: Counter[JobState] = Counter()
        for (owner, state), n in self.counts.items():
            if n and uid in (None, owner):
                counts[state] += n
        return dict(counts)

    # ---- inside --------------------------------------------------------------------

    def _ids_by_state(self, states: Iterable[JobState], uid: int | None) -> list[int]:
        found: list[int] = []
        for state in states:
            if uid is None:
                found += self._column("SELECT id FROM job WHERE state = ?", state.value)
            else:
                found += self._column(
                    "SELECT id FROM job WHERE uid = ? AND state = ?", uid, state.value
                )
        return found

    def _newest_ids(
        self, states: frozenset[JobState], uid: int | None, top: int, most: int
    ) -> Iterator[int]:
        """Ids below `top`, descending, at least `most` of them if there are."""
        if uid is None and len(states) == len(JobState):
            sql = "SELECT id FROM job WHERE id < ? ORDER BY id DESC LIMIT ?"
            yield from self._column(sql, top, most)
            return
        # The index orders by id within one state only: one query each, then merged.
        by_state: list[list[int]] = []
        tail = "state = ? AND id < ? ORDER BY id DESC LIMIT ?"
        for state in states if _fits(uid) else ():
            if uid is None:
                sql, values = f"SELECT id FROM job WHERE {tail}", [state.value, top, most]
            else:
                sql = f"SELECT id FROM job WHERE uid = ? AND {tail}"
                values = [uid, state.value, top, most]
            by_state.append(self._column(sql, *values))
        yield from heapq.merge(*by_state, reverse=True)

    def _within(self, ids: Sequence[int], bytes_max: int) -> list[int]:
        """The first of these whose rows together are of this size; one at least."""
        size = 0
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            marks = ", ".join("?" * len(chunk))
            # SQLite knows the length of a value without reading it.
            sql = f"SELECT id, length(spec) + length(detail) FROM job WHERE id IN ({marks})"
            sizes = dict(self._all(sql, *chunk))
            for at, id in enumerate(chunk, start=start):
                size += sizes.get(id, 0)
                if size > bytes_max:
                    return list(ids[: max(1, at)])
        return list(ids)

    def _rows(self, ids: Sequence[int]) -> Iterator[Row]:
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            marks = ", ".join("?" * len(chunk))
            rows = {row[0]: row for row in self._all(f"{_SELECT} WHERE id IN ({marks})", *chunk)}
            for id in chunk:
                if id in rows:
                    yield _row(rows[id])

    def _count(self, uid: int, state: JobState, by: int) -> None:
        self.counts[uid, state] += by
        if self._db.in_transaction:
            self._undo[uid, state] += by

    def _run(self, sql: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _all(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._db.execute(sql, values).fetchall()

    def _column(self, sql: str, *values: object) -> list[int]:
        return [row[0] for row in self._all(sql, *values)]

    def _value(self, sql: str, *values: object) -> Any:
        rows = self._all(sql, *values)
        return rows[0][0] if rows else None

    def _pragma(self, pragma: str) -> Any:
        return self._value(f"PRAGMA {pragma}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _explained(self, error: sqlite3.Error) -> RlqError:
        """The one place where SQLite's errors become ours."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        where = self.path.parent
        match code:
            case sqlite3.SQLITE_FULL:
                return UnavailableError(
                    f"the disk that holds {where} is full: nothing was changed",
                    hint="free some space there and try again",
                )
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
                return UnavailableError(
                    f"the database {self.path} cannot be written to: {error}",
                    hint=f"check the permissions and the mount of {where}",
                )
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_NOLFS:
                name = getattr(error, "sqlite_errorname", "")
                return UnavailableError(
                    f"the disk that holds {where} fails: {error} ({name})",
                    hint="look at `dmesg` and at the free space there",
                )
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return UnavailableError(
                    f"another program keeps {self.path} locked",
                    hint="close whatever has it open (`fuser`), such as a sqlite3 shell",
                )
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return self._damaged(str(error))
            case sqlite3.SQLITE_NOMEM:
                return UnavailableError("the daemon has no memory left for its database")
            case _ if "GLOB pattern too complex" in str(error):
                return UsageError("the name pattern is too long")
            case _:
                return InternalError(f"the database refused a statement: {error}")

    def _damaged(self, what: str) -> UnavailableError:
        return UnavailableError(
            f"the database {self.path} is damaged: {what}",
            hint=f"it was left as it is; keep a copy, then try `sqlite3 {self.path} .recover`,"
            " or move it aside with its -wal and -shm to start with an empty queue",
        )


def _fits(uid: int | None) -> bool:
    """SQLite's integers have 64 bits; a hostile message's may have more."""
    return uid is None or 0 <= uid <= ID_MAX


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending and disjoint, and within what SQLite can hold."""
    if len(ranges) > RANGES_MAX:
        raise UsageError(
            f"{len(ranges)} ranges of ids are too many at once", hint=f"the most is {RANGES_MAX}"
        )
    merged: list[tuple[int, int]] = []
    for low, high in sorted((max(0, low), min(high, ID_MAX)) for low, high in ranges):
        if low > high:
            continue
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _row(values: tuple[Any, ...]) -> Row:
    by_name = dict(zip(_COLUMNS, values, strict=True))
    by_name["state"] = _STATES[by_name["state"]]
    by_name["held"] = bool(by_name["held"])
    return Row(**by_name)
