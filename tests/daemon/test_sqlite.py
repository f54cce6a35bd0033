"""The database, on real files: what was committed is there, and a failing disk is said to fail."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlq.errors import InternalError, UnavailableError, UsageError
from rlq.protocol.messages import JobSpec, Resources, Selection
from rlq.protocol.states import JobState
from rlqd.adapters.sqlite import MIGRATIONS, RANGES_MAX, Row, Store

ALICE, BOB = 1001, 1002


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "rlq.db") as opened:
        yield opened


def row(
    id: int, *, uid: int = ALICE, name: str = "train", env: dict[str, str] | None = None
) -> Row:
    spec = JobSpec(argv=("python", "train.py"), cwd="/home", name=name, env=env or {})
    return Row.new(spec, id=id, uid=uid, user=f"u{uid}", submitted_at=1000.0 + id)


def fill(store: Store, *rows: Row) -> None:
    with store.transaction():
        store.insert_jobs(rows)


def finish(
    store: Store, id: int, state: JobState = JobState.COMPLETED, at: float = 2000.0
) -> None:
    store.update_state(
        id,
        state=state,
        held=False,
        attempt=1,
        reason="",
        started_at=at - 1,
        ended_at=at,
        exit_code=0,
        signal=None,
    )


def listed(store: Store, selection: Selection, limit: int = 0, before: int = 0) -> list[int]:
    return [found.id for found in store.query(selection, limit=limit, before=before)[0]]


# ---- rows --------------------------------------------------------------------------


def test_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    spec = JobSpec(
        argv=("a", "b c", "\n"),
        cwd="/ä",
        name="n",
        held=True,
        priority=-3,
        resources=Resources(gpus=0, mem_mib=7),
        env={"TOKEN": "hunter2"},
    )
    with Store(tmp_path / "rlq.db") as store, store.transaction():
        shared = store.insert_environment({"PATH": "/bin", "TOKEN": "other"})
        made = Row.new(
            spec,
            id=1,
            uid=ALICE,
            user="alice",
            submitted_at=1.5,
            environment_id=shared,
            detail=b'{"x":1}',
        )
        store.insert_job(made)
    with Store(tmp_path / "rlq.db") as store:
        assert store.get([1]) == {1: made}
        assert made.job_spec == JobSpec(
            argv=spec.argv, cwd="/ä", name="n", held=True, priority=-3, resources=spec.resources
        )
        assert store.environment(1) == {"PATH": "/bin", "TOKEN": "hunter2"}


def test_an_environment_is_in_no_repr_and_not_in_the_spec(store: Store) -> None:
    made = row(1, env={"TOKEN": "hunter2"})
    assert "hunter2" not in repr(made)
    assert b"hunter2" not in made.spec


def test_the_database_is_its_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with Store(tmp_path / "rlq.db") as store:
            fill(store, row(1))
            modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
    finally:
        os.umask(old)
    assert modes == {"rlq.db": 0o600, "rlq.db-wal": 0o600, "rlq.db-shm": 0o600}


def test_update_state_changes_what_it_names_and_keeps_the_rest(store: Store) -> None:
    fill(store, row(1), row(2))
    with store.transaction():
        store.update_detail(1, b'{"step":5}')
        store.update_state(
            1,
            state=JobState.FAILED,
            held=False,
            attempt=2,
            reason="boom",
            started_at=1.0,
            ended_at=2.0,
            exit_code=None,
            signal=9,
        )
    found = store.get([1, 2])
    assert (found[1].state, found[1].attempt, found[1].reason) == (JobState.FAILED, 2, "boom")
    assert (found[1].signal, found[1].ended_at, found[1].detail) == (9, 2.0, b'{"step":5}')
    assert found[1].job_spec == row(1).job_spec
    assert found[2] == row(2)


def test_updating_a_job_that_is_not_there_is_our_bug(store: Store) -> None:
    with pytest.raises(InternalError, match="job 7"):
        finish(store, 7)


def test_live_gives_the_jobs_that_have_not_ended_by_id(store: Store) -> None:
    fill(store, *(row(id) for id in range(1, 1301)))
    with store.transaction():
        for id in range(2, 1301, 2):
            finish(store, id)
        store.update_state(
            7,
            state=JobState.RUNNING,
            held=False,
            attempt=1,
            reason="",
            started_at=1.0,
            ended_at=None,
            exit_code=None,
            signal=None,
        )
    assert [found.id for found in store.live()] == list(range(1, 1301, 2))


# ---- transactions ------------------------------------------------------------------


def test_a_failed_block_leaves_nothing_and_its_ids_are_not_given_again(store: Store) -> None:
    fill(store, row(1))

    def failing() -> None:
        with store.transaction():
            store.insert_jobs([row(2), row(3, uid=BOB)])
            finish(store, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing()
    assert store.query(Selection()) == ([row(1)], 1)
    assert store.counts_by_state() == {JobState.PENDING: 1}
    assert not store.in_transaction
    assert store.next_id == 4


def test_ids_are_not_reused_after_pruning_and_reopening(tmp_path: Path) -> None:
    with Store(tmp_path / "rlq.db") as store:
        assert store.next_id == 1
        fill(store, row(5))
        with store.transaction():
            finish(store, 5)
        assert store.prune(9999.0) == 1
    with Store(tmp_path / "rlq.db") as store:
        assert store.query(Selection()) == ([], 0)
        assert store.next_id == 6


def test_the_instance_id_and_meta_stay_with_the_file(tmp_path: Path) -> None:
    with Store(tmp_path / "rlq.db") as store:
        first = store.instance_id
        store.set_meta("boot_id", "a")
    with Store(tmp_path / "rlq.db") as store:
        assert store.instance_id == first != ""
        assert store.meta("boot_id") == "a"
        assert store.meta("nothing") is None
    with Store(tmp_path / "other.db") as store:
        assert store.instance_id != first


WRITER = """
import sys
from rlqd.adapters.sqlite import Store, Row
from rlq.protocol.messages import JobSpec
store = Store(sys.argv[1])
spec = JobSpec(argv=("x",), cwd="/", name="n" * 500)
while True:
    first = store.next_id
    with store.transaction():
        for id in range(first, first + 7):
            store.insert_job(Row.new(spec, id=id, uid=1, user="u", submitted_at=0.0))
    print(first + 6, flush=True)
"""


def test_kill_9_loses_no_commit_and_leaves_no_half(tmp_path: Path) -> None:
    acknowledged = 0
    for stop_after in (1, 20, 90):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "rlq.db")], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            for _ in range(stop_after):
                acknowledged = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
        # The last line may have been cut off by the kill, but it was whole lines that we read.
        acknowledged = max([acknowledged, *map(int, rest[:-1])])
        with Store(tmp_path / "rlq.db") as store:
            _, total = store.query(Selection(), limit=1)
            assert total >= acknowledged
            assert total % 7 == 0
            assert store.next_id == total + 1


# ---- environments ------------------------------------------------------------------


def environments(store: Store) -> int:
    with sqlite3.connect(store.path) as other:
        count: int = other.execute("SELECT count(*) FROM environment").fetchone()[0]
    other.close()
    return count


def test_equal_environments_are_stored_once_and_go_with_their_last_job(store: Store) -> None:
    with store.transaction():
        ours = store.insert_environment({"A": "1", "B": "2"})
        assert store.insert_environment({"B": "2", "A": "1"}) == ours
        other = store.insert_environment({"A": "1"})
        assert store.insert_environment({}) is None
        for id, environment in ((1, ours), (2, ours), (3, other)):
            spec = JobSpec(argv=("x",), cwd="/")
            store.insert_job(
                Row.new(spec, id=id, uid=1, user="u", submitted_at=0.0, environment_id=environment)
            )
    assert environments(store) == 2
    with store.transaction():
        finish(store, 1, at=10.0)
        finish(store, 3, at=10.0)
    assert store.prune(20.0) == 2
    assert environments(store) == 1
    assert store.environment(2) == {"A": "1", "B": "2"}
    assert store.environment(99) == {}


def test_prune_forgets_only_what_ended_before(store: Store) -> None:
    fill(store, *(row(id) for id in range(1, 6)))
    with store.transaction():
        for id, at in ((1, 10.0), (2, 20.0), (3, 30.0)):
            finish(store, id, at=at)
    assert store.prune(30.0, limit=1) == 1
    assert listed(store, Selection()) == [5, 4, 3, 2]
    assert store.prune(30.0) == 1
    assert store.prune(30.0) == 0
    assert listed(store, Selection()) == [5, 4, 3]
    assert store.counts_by_state() == {JobState.COMPLETED: 1, JobState.PENDING: 2}


# ---- selections --------------------------------------------------------------------


@pytest.fixture
def mixed(store: Store) -> Store:
    """1-6 alice's, 7-10 bob's; 3 and 8 COMPLETED, 4 FAILED."""
    fill(
        store,
        *(row(id, name=f"sac-{id}") for id in range(1, 7)),
        *(row(id, uid=BOB, name="Sac[x]") for id in range(7, 11)),
    )
    with store.transaction():
        finish(store, 3)
        finish(store, 8)
        finish(store, 4, JobState.FAILED)
    return store


P, C, F = JobState.PENDING, JobState.COMPLETED, JobState.FAILED


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
        (Selection(all=True), [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
        (Selection(states=(C,)), [8, 3]),
        (Selection(states=(C, F)), [8, 4, 3]),
        (Selection(uid=BOB), [10, 9, 8, 7]),
        (Selection(uid=BOB, states=(P, F)), [10, 9, 7]),
        (Selection(uid=4242), []),
        (Selection(ids=((3, 5), (9, 9))), [9, 5, 4, 3]),
        (Selection(ids=((5, 9), (3, 6), (4, 4))), [9, 8, 7, 6, 5, 4, 3]),
        (Selection(ids=((3, 9),), states=(C,), uid=BOB), [8]),
        (Selection(name="sac-*"), [6, 5, 4, 3, 2, 1]),
        (Selection(name="sac-[!12]", states=(P,)), [6, 5]),
        (Selection(name="*[[]x]"), [10, 9, 8, 7]),
        (Selection(name="sac-?", ids=((2, 8),), uid=ALICE), [6, 5, 4, 3, 2]),
        (Selection(name=""), []),
        (Selection(ids=((0, 2**64),)), [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
        (Selection(ids=((-(2**64), 1), (2**64, 2**65))), [1]),
        (Selection(ids=((9, 2),)), []),
        (Selection(uid=2**64), []),
        (Selection(uid=-1, states=(P,)), []),
        (Selection(uid=2**64, name="*"), []),
    ],
)
def test_a_selection_is_the_jobs_that_match_every_field(
    mixed: Store, selection: Selection, expected: list[int]
) -> None:
    assert listed(mixed, selection) == expected
    assert mixed.ids(selection) == sorted(expected)
    # Pages put together are the whole, and each knows the total.
    pages: list[int] = []
    before = 0
    while True:
        rows, total = mixed.query(selection, limit=2, before=before)
        assert total == len(expected)
        if not rows:
            break
        pages += [found.id for found in rows]
        before = pages[-1]
        if before <= 1:
            break
    assert pages == expected


def test_ids_can_be_narrowed_to_the_states_a_verb_applies_to(mixed: Store) -> None:
    assert mixed.ids(Selection(uid=ALICE), states=[P]) == [1, 2, 5, 6]
    assert mixed.ids(Selection(states=(C,)), states=[P]) == []
    assert mixed.ids(Selection(ids=((1, 4),)), states=[F, C]) == [3, 4]


def test_too_many_ranges_and_too_long_patterns_are_refused(mixed: Store) -> None:
    mixed.ids(Selection(ids=((1, 1),) * RANGES_MAX))
    with pytest.raises(UsageError, match="too many"):
        mixed.ids(Selection(ids=((1, 1),) * (RANGES_MAX + 1)))
    with pytest.raises(UsageError, match="too long"):
        mixed.ids(Selection(name="*" * 60_000))


def test_get_keeps_the_order_asked_for_and_leaves_out_what_is_missing(mixed: Store) -> None:
    assert list(mixed.get([9, 77, 2, 2**70, -1, 5])) == [9, 2, 5]


def test_counts_are_those_of_the_table_after_any_history(mixed: Store) -> None:
    mixed.begin()
    finish(mixed, 9)
    mixed.rollback()
    mixed.prune(1e9, limit=1)
    expected: dict[JobState, int] = {}
    for found in mixed.query(Selection())[0]:
        expected[found.state] = expected.get(found.state, 0) + 1
    assert mixed.counts_by_state() == expected
    assert mixed.counts_by_state(BOB)[P] == 3
    with Store(mixed.path) as again:
        assert again.counts_by_state() == expected


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        Selection(states=tuple(s for s in JobState if not s.is_final)),
        Selection(uid=ALICE),
        Selection(uid=ALICE, states=(P, JobState.RUNNING)),
        Selection(ids=((5, 9),), states=(P,), uid=ALICE),
        Selection(name="sac*"),
        Selection(name="*7"),
    ],
)
def test_no_listing_walks_the_whole_table(mixed: Store, selection: Selection) -> None:
    statements: list[str] = []
    mixed._db.set_trace_callback(statements.append)
    mixed.query(selection, limit=100)
    mixed._db.set_trace_callback(None)
    assert statements
    plans = [
        step[3] for sql in statements for step in mixed._db.execute(f"EXPLAIN QUERY PLAN {sql}")
    ]
    for plan in plans:
        if plan.startswith("SCAN"):
            # Names without a fixed beginning: along the names, without touching the rows.  By
            # id from the newest: stops at the limit.
            newest_first = plan == "SCAN job" and "LIMIT 100" in statements[0]
            assert "USING COVERING INDEX job_name" in plan or newest_first, plan
        assert "TEMP B-TREE" not in plan


# ---- the file ----------------------------------------------------------------------

#: A database as version 1 wrote it.  Not to be edited: old files out there look like this.
V1_ROW = (
    "INSERT INTO job VALUES (3, 1001, 'alice', 'old', 'COMPLETED', 0, 5, 1.0, 2.0, 3.0, 1, 'r',"
    ' 0, NULL, CAST(\'{"argv":["x"],"cwd":"/","name":"old"}\' AS BLOB), NULL, NULL,'
    " CAST('{}' AS BLOB))"
)


def test_a_database_of_version_1_is_read(tmp_path: Path) -> None:
    Store(tmp_path / "rlq.db", migrations=MIGRATIONS[:1]).close()
    with sqlite3.connect(tmp_path / "rlq.db") as old:
        old.execute(V1_ROW)
    old.close()
    with Store(tmp_path / "rlq.db") as store:
        [found] = store.query(Selection())[0]
        assert (found.id, found.user, found.state, found.priority) == (3, "alice", C, 5)
        assert found.job_spec.argv == ("x",)
        assert store.next_id == 4


NEXT = (*MIGRATIONS, ("ALTER TABLE job ADD COLUMN colour TEXT", "UPDATE job SET colour = 'red'"))


def test_a_migration_keeps_the_rows_and_a_copy_of_the_old_file(store: Store) -> None:
    fill(store, row(1))
    path = store.path
    store.close()
    with Store(path, migrations=NEXT) as migrated:
        assert listed(migrated, Selection()) == [1]
        assert migrated._value("SELECT colour FROM job") == "red"
    backup = path.with_name(f"rlq.db.v{len(MIGRATIONS)}.bak")
    assert backup.stat().st_mode & 0o777 == 0o600
    with Store(backup) as old:
        assert listed(old, Selection()) == [1]


def test_a_failing_migration_changes_nothing(store: Store) -> None:
    fill(store, row(1))
    path = store.path
    store.close()
    with pytest.raises(InternalError):
        Store(path, migrations=(*NEXT[:-1], (*NEXT[-1], "SYNTAX ERROR")))
    with Store(path) as same:
        assert listed(same, Selection()) == [1]
        assert same._pragma("user_version") == len(MIGRATIONS)


def test_a_newer_schema_is_refused_and_left_alone(store: Store) -> None:
    path = store.path
    store.close()
    Store(path, migrations=NEXT).close()
    before = path.read_bytes()
    with pytest.raises(UnavailableError, match="newer rlq"):
        Store(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rlq.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(UnavailableError, match="another program's"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("where", ["header", "middle", "cut"])
def test_a_damaged_file_is_named_and_left_alone(store: Store, where: str) -> None:
    fill(store, *(row(id, name="x" * 100) for id in range(1, 400)))
    path = store.path
    store.close()
    content = bytearray(path.read_bytes())
    if where == "header":
        content[:100] = b"\xa5" * 100
    elif where == "middle":
        content[4096 * 3 : 4096 * 12] = b"\xa5" * (4096 * 9)
    else:
        del content[len(content) // 2 :]
    path.write_bytes(content)
    with pytest.raises(UnavailableError, match=r"rlq\.db is damaged") as caught:
        Store(path)
    assert "left as it is" in (caught.value.hint or "")
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"none/rlq\.db"):
        Store(tmp_path / "none/rlq.db")
    with pytest.raises(UnavailableError, match="cannot open"):
        Store(tmp_path)


def test_a_full_database_refuses_the_whole_transaction_and_recovers(store: Store) -> None:
    fill(store, row(1))
    store._pragma(f"max_page_count = {store._pragma('page_count') + 3}")
    with pytest.raises(UnavailableError, match="is full: nothing was changed"):
        fill(store, *(row(id, name="x" * 900) for id in range(2, 100)))
    assert not store.in_transaction
    assert store.query(Selection()) == ([row(1)], 1)
    store._pragma("max_page_count = 1000000")
    fill(store, row(store.next_id))
    assert store.query(Selection())[1] == 2


def _mount_tmpfs(folder: Path, options: bytes) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mount(b"rlq-test", bytes(folder), b"tmpfs", 0, options) == 0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or not _mount_tmpfs(folder, b"size=1m"):
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    ctypes.CDLL(None).umount2(bytes(folder), 2)  # MNT_DETACH


def test_a_full_disk_refuses_and_serves_again_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with Store(small_disk / "rlq.db") as store:
        fill(store, row(1))
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(UnavailableError, match=r"the disk that holds .* (is full|fails)"):
            fill(store, *(row(id, name="x" * 900) for id in range(2, 300)))
        assert store.query(Selection()) == ([row(1)], 1)
        ballast.unlink()
        fill(store, row(store.next_id))
        assert store.query(Selection())[1] == 2
    with Store(small_disk / "rlq.db") as again:
        assert again.query(Selection())[1] == 2


def test_a_locked_database_is_said_to_be_locked(store: Store) -> None:
    store._pragma("busy_timeout = 1")
    other = sqlite3.connect(store.path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError, match="another program keeps"):
        store.begin()
    other.rollback()
    other.close()
    fill(store, row(1))


def test_the_wal_does_not_grow_for_ever(store: Store) -> None:
    for start in range(1, 6000, 100):
        fill(store, *(row(id, name="x" * 900) for id in range(start, start + 100)))
    assert store.path.stat().st_size > 5_000_000
    assert store.path.with_name("rlq.db-wal").stat().st_size < 5_000_000


def test_every_commit_is_synchronous(store: Store) -> None:
    assert store._pragma("synchronous") == 2
    assert store._pragma("journal_mode") == "wal"
    assert store._pragma("foreign_keys") == 1
