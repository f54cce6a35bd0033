"""What the host monitor says of CPUs, memory and process trees.

Rules about moments (a race, a reused pid) are shown on a made-up /proc; the rest on real
processes.  Time is the test's: each reading is one second after the last.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.waiting import wait_until

from rlqd.adapters import host
from rlqd.adapters.host import HostMonitor, cpus, short_command
from rlqd.readings import Cpu, HostReading

ME = min(os.sched_getaffinity(0))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---- CPUs --------------------------------------------------------------------------


def two_sockets(root: Path) -> Path:
    """32 CPUs: 2 sockets of 8 cores with 2 threads; thread 2 of core N is N + 16."""
    for number in range(32):
        core = number % 16
        topology = root / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core},{core + 16}\n")
        (topology / "core_id").write_text(f"{core % 8}\n")  # the same in both sockets
    for node, numbers in enumerate(["0-7,16-23", "8-15,24-31"]):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{numbers}\n")
    return root


def test_siblings_share_a_core_and_sockets_do_not(tmp_path: Path) -> None:
    found = {cpu.number: cpu for cpu in cpus(two_sockets(tmp_path), range(32))}
    assert len(found) == 32
    assert len({cpu.physical for cpu in found.values()}) == 16
    assert found[0].physical == found[16].physical
    assert found[0].physical != found[8].physical, "core 0 of each socket"
    assert [found[number].numa_node for number in (0, 7, 8, 16, 31)] == [0, 0, 1, 0, 1]


def test_only_allowed_cpus_are_listed(tmp_path: Path) -> None:
    found = cpus(two_sockets(tmp_path), {17, 8, 1})
    assert found == (
        Cpu(number=1, physical=1, numa_node=0),
        Cpu(number=8, physical=8, numa_node=1),
        Cpu(number=17, physical=1, numa_node=0),
    )


def test_without_topology_every_cpu_is_a_core_on_node_0(tmp_path: Path) -> None:
    assert cpus(tmp_path, {0, 3}) == (
        Cpu(number=0, physical=0, numa_node=0),
        Cpu(number=3, physical=3, numa_node=0),
    )
    folder = tmp_path / "devices/system/cpu/cpu0/topology"
    folder.mkdir(parents=True)
    (folder / "core_cpus_list").write_text("garbage")
    assert cpus(tmp_path, {0}) == (Cpu(number=0, physical=0, numa_node=0),)


def test_this_machines_cpus_are_those_we_may_run_on() -> None:
    assert {cpu.number for cpu in cpus()} == os.sched_getaffinity(0)


# ---- a made-up /proc ---------------------------------------------------------------


class FakeProc:
    """Times in ticks of 10 ms."""

    def __init__(self, root: Path) -> None:
        self.root = root / "proc"
        self.root.mkdir()
        self._born = 0
        self.worked = self.idle = self.waiting = 0
        (self.root / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
        self.put(1, 0, start=0)
        self.put(2, 1, start=1)
        self.tick(0)

    def put(
        self,
        pid: int,
        parent: int,
        *,
        start: int,
        used: int = 0,
        reaped: int = 0,
        rss_mib: int = 0,
        state: str = "S",
    ) -> None:
        """A process, new or as it is now."""
        folder = self.root / str(pid)
        if not folder.exists():
            # Made while all others exist, so that its inode is unlike that of any before it.
            self._born += 1
            fresh = self.root.parent / f"born-{self._born}"
            fresh.mkdir()
            fresh.rename(folder)
        pages = rss_mib * 1024 * 1024 // os.sysconf("SC_PAGE_SIZE")
        fields = [state, parent, *[0] * 9, used, 0, reaped, 0, *[0] * 4, start, 0, pages, 0]
        text = " ".join(map(str, fields))
        (folder / "stat").write_text(f"{pid} (a) name) {text}\n")

    def put_pss(self, pid: int, mib: int) -> None:
        text = f"00-ff ---p 0 00:00 0 [rollup]\nRss: 0 kB\nPss: {mib * 1024} kB\n"
        (self.root / str(pid) / "smaps_rollup").write_text(text)

    def end(self, pid: int) -> None:
        # The real file, held open, answers ESRCH; a plain one can at most be empty.
        (self.root / str(pid) / "stat").write_text("")
        # Kept elsewhere, so that its inode is not given out again.
        self._born += 1
        (self.root / str(pid)).rename(self.root.parent / f"ended-{self._born}")

    def tick(self, worked: int, idle: int = 100, waiting: int = 0) -> None:
        """Time of CPU `ME`; the others are idle."""
        self.worked += worked
        self.idle += idle
        self.waiting += waiting
        lines = [
            f"cpu{number} {self.worked * (number == ME)} 0 0 {self.idle} {self.waiting} 0 0 0 0 0"
            for number in sorted(os.sched_getaffinity(0))
        ]
        (self.root / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines, "intr 1"]))


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[1000, 1], ids=["files-kept-open", "too-few-descriptors"])
def fake(
    proc: FakeProc, clock: Clock, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HostMonitor]:
    monkeypatch.setattr(host, "_HANDLES_MAX", request.param)
    before = len(os.listdir("/proc/self/fd"))
    monitor = HostMonitor(proc_root=proc.root, cgroup_root=proc.root / "none", clock=clock)
    yield monitor
    monitor.close()
    assert len(os.listdir("/proc/self/fd")) == before, "every file is closed again"


@pytest.fixture
def read(fake: HostMonitor, clock: Clock) -> Callable[..., HostReading]:
    def one_second_later(*supervisors: int) -> HostReading:
        clock.now += 1
        return fake.read(supervisors)

    return one_second_later


Read = Callable[..., HostReading]


def test_a_tree_is_all_below_its_supervisor_and_not_itself(
    proc: FakeProc, read: Read, fake: HostMonitor
) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11)
    proc.put(102, 101, start=11)
    proc.put(200, 1, start=20)
    proc.put(201, 200, start=21)
    proc.put(300, 1, start=10)
    reading = read(100, 200)
    assert {pid: tree.pids for pid, tree in reading.trees.items()} == {
        100: (101, 102),
        200: (201,),
    }
    assert [fake.tree_of(pid) for pid in (100, 102, 201, 300, 1, 999)] == [
        *(100, 100, 200, None, None, None)
    ]


def test_a_reading_that_hangs_keeps_nobody_who_asks_whose_a_process_is(
    proc: FakeProc, clock: Clock
) -> None:
    monitor = HostMonitor(proc_root=proc.root, cgroup_root=proc.root / "none", clock=clock)
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11, rss_mib=500)
    stuck = proc.root / "101" / "smaps_rollup"
    os.mkfifo(stuck)  # reading it waits for a writer
    clock.now += 1
    reader = threading.Thread(target=monitor.read, args=((100,),))
    reader.start()
    found: list[int | None] = []
    asker = threading.Thread(target=lambda: found.append(monitor.tree_of(101)), daemon=True)
    try:
        wait_until(lambda: monitor._members.keys(), lambda seen: 101 in seen)
        assert reader.is_alive(), "it hangs"
        asker.start()
        wait_until(lambda: found, bool)
        assert found == [100]
        assert reader.is_alive(), "it hangs still"
    finally:
        stuck.write_text("Pss: 1 kB\n")
        reader.join(30)
    monitor.close()


def test_a_tree_that_was_seen_before_it_was_named_is_found(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11)
    assert read().trees == {}
    assert read(100).trees[100].pids == (101,)


def test_what_is_reparented_stays_in_its_tree(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11)
    proc.put(102, 101, start=12)
    read(100)
    proc.end(101)
    proc.put(102, 1, start=12)  # its supervisor is dying too: even so
    proc.end(100)
    proc.put(103, 102, start=13)
    assert read(100).trees[100].pids == (102, 103)


def test_an_ended_tree_is_not_listed_and_a_forgotten_one_is_nobodys(
    proc: FakeProc, read: Read, fake: HostMonitor
) -> None:
    proc.put(100, 1, start=10)
    proc.put(200, 1, start=10)
    proc.put(201, 200, start=10)
    assert read(100, 200).trees.keys() == {100, 200}
    proc.end(100)
    assert read(100).trees.keys() == set()
    assert fake.tree_of(201) is None


def test_a_reused_pid_does_not_join_the_tree_of_its_predecessor(
    proc: FakeProc, read: Read
) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11)
    read(100)
    proc.end(101)
    proc.put(101, 1, start=500)
    assert read(100).trees[100].pids == ()
    proc.end(100)
    proc.put(100, 1, start=600)
    proc.put(102, 100, start=601)
    assert read(100).trees == {}, "the supervisor's pid is a stranger's now"


def test_a_strangers_reused_pid_joins_the_tree_it_is_born_in(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10)
    proc.put(300, 1, start=10)
    assert read(100).trees[100].pids == ()
    proc.end(300)
    proc.put(300, 100, start=500)
    assert read(100).trees[100].pids == (300,)


def test_a_child_of_a_stranger_whose_pid_went_to_a_job_is_not_the_jobs(
    proc: FakeProc, read: Read
) -> None:
    proc.put(100, 1, start=10)
    proc.put(300, 1, start=10)
    proc.put(301, 300, start=20)
    read(100)
    proc.end(300)  # 301 goes to init, which we do not see, since it is not read again
    proc.put(300, 100, start=500)
    proc.put(302, 301, start=501)
    assert read(100).trees[100].pids == (300,)


def test_a_process_whose_parent_ended_while_we_looked_is_looked_at_again(
    proc: FakeProc, read: Read
) -> None:
    proc.put(100, 1, start=10)
    read(100)
    proc.put(102, 101, start=12)  # read before its parent 101 ended: no such process now
    assert read(100).trees[100].pids == ()
    proc.put(102, 100, start=12)
    assert read(100).trees[100].pids == (102,)


def test_a_gpu_process_younger_than_the_last_reading_is_found(
    proc: FakeProc, read: Read, fake: HostMonitor
) -> None:
    proc.put(100, 1, start=10)
    read(100)
    proc.put(101, 100, start=11)
    proc.put(102, 101, start=12)
    assert fake.tree_of(102) == 100


def test_a_zombie_uses_nothing_and_is_not_listed(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11, rss_mib=50, state="Z")
    tree = read(100).trees[100]
    assert (tree.pids, tree.mem_mib) == ((), 0)


def test_cpu_use_is_unknown_at_first_and_then_per_second(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10, used=3)
    proc.put(101, 100, start=11, used=5000)
    assert read(100).trees[100].cpu_cores is None
    proc.put(100, 1, start=10, used=90)  # the supervisor's own use is not its job's
    proc.put(101, 100, start=11, used=5150)
    proc.put(102, 101, start=12, used=50)
    assert read(100).trees[100].cpu_cores == pytest.approx(2.0)
    assert read(100).trees[100].cpu_cores == pytest.approx(0.0)


def test_what_a_child_used_unseen_before_it_ended_is_counted_once(
    proc: FakeProc, read: Read
) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11, used=40)
    read(100)
    proc.put(101, 100, start=11, used=1000)
    read(100)
    proc.end(101)
    proc.put(100, 1, start=10, reaped=1060)
    assert read(100).trees[100].cpu_cores == pytest.approx(0.6)


def test_children_that_come_and_go_between_readings_are_counted(
    proc: FakeProc, read: Read
) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11)
    read(100)
    proc.put(101, 100, start=11, used=10, reaped=190)
    assert read(100).trees[100].cpu_cores == pytest.approx(2.0)


def test_use_never_goes_negative_where_children_are_not_waited_for(
    proc: FakeProc, read: Read
) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11)
    proc.put(102, 101, start=12, used=90_000)
    read(100)
    proc.end(102)
    proc.put(101, 100, start=11, used=70)
    assert read(100).trees[100].cpu_cores == pytest.approx(0.7)
    proc.put(101, 100, start=11, used=150)
    assert read(100).trees[100].cpu_cores == pytest.approx(0.8)


def test_a_child_reaped_while_we_read_is_not_counted_again(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11, used=360_000)
    read(100)
    proc.end(101)  # its parent, read a moment earlier, had not waited for it
    assert read(100).trees[100].cpu_cores == pytest.approx(0.0)
    proc.put(100, 1, start=10, reaped=360_020)
    assert read(100).trees[100].cpu_cores == pytest.approx(0.2)


# ---- memory ------------------------------------------------------------------------


def test_shared_memory_is_counted_once(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10, rss_mib=30)
    for pid in (101, 102):
        proc.put(pid, 100, start=11, rss_mib=500)
        proc.put_pss(pid, 300)
    assert read(100).trees[100].mem_mib == 600


def test_growth_shows_at_once_between_proportional_readings(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11, rss_mib=1000)
    proc.put_pss(101, 800)
    read(100)
    proc.put_pss(101, 5)  # would be seen, were it read again for so small a change
    proc.put(101, 100, start=11, rss_mib=1050)
    assert read(100).trees[100].mem_mib == 850
    proc.put(101, 100, start=11, rss_mib=3000)
    proc.put_pss(101, 2700)
    assert read(100).trees[100].mem_mib == 2700


def test_where_proportional_memory_is_refused_resident_memory_is_told(
    proc: FakeProc, read: Read
) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11, rss_mib=500)
    assert read(100).trees[100].mem_mib == 500


def test_memory_is_the_machines_without_a_limit(read: Read) -> None:
    reading = read()
    assert (reading.mem_mib_total, reading.mem_mib_available) == (65536, 32768)


@pytest.mark.parametrize("limited", ["lab", "lab/rlq.slice"])
def test_memory_is_the_tightest_cgroups_where_it_has_a_limit(
    proc: FakeProc, tmp_path: Path, limited: str
) -> None:
    root = tmp_path / "cgroup"
    folder = root / limited
    (root / "lab/rlq.slice").mkdir(parents=True)
    (root / "lab/rlq.slice/memory.max").write_text("max\n")
    (root / "lab/rlq.slice/memory.current").write_text("1\n")
    (folder / "memory.max").write_text(f"{16 << 30}\n")
    (folder / "memory.current").write_text(f"{6 << 30}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {2 << 30}\n")
    monitor = HostMonitor(proc_root=proc.root)
    monitor.set_cgroup("/lab/rlq.slice", root)
    reading = monitor.read(())
    assert (reading.mem_mib_total, reading.mem_mib_available) == (16384, 12288)


# ---- the whole machine -------------------------------------------------------------


def test_busy_is_each_cpus_share_since_the_last_reading(proc: FakeProc, read: Read) -> None:
    proc.tick(75, idle=15, waiting=10)  # a CPU that waits for the disk is free to work
    busy = read().busy
    assert busy.keys() == os.sched_getaffinity(0)
    assert busy[ME] == pytest.approx(0.75)
    assert all(share == 0 for number, share in busy.items() if number != ME)


def test_before_there_is_an_interval_the_machine_counts_as_busy(fake: HostMonitor) -> None:
    reading = fake.read(())
    assert set(reading.busy.values()) == {1.0}
    assert reading.cores_outside == len(os.sched_getaffinity(0))


def test_a_reading_right_after_another_keeps_the_rates(
    proc: FakeProc, read: Read, fake: HostMonitor, clock: Clock
) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11)
    read(100)
    proc.tick(50, idle=50)
    proc.put(101, 100, start=11, used=50)
    before = read(100)
    proc.tick(1, idle=0)
    proc.put(101, 100, start=11, used=51)
    clock.now += 0.01
    after = fake.read((100,))
    assert after.busy == before.busy
    assert after.trees[100].cpu_cores == before.trees[100].cpu_cores == pytest.approx(0.5)
    clock.now += 0.99
    assert fake.read((100,)).trees[100].cpu_cores == pytest.approx(0.01)


def test_outside_is_what_the_trees_do_not_explain(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11, used=7777)
    proc.tick(90, idle=10)
    read(100)  # the tree is older than the interval: nothing can be said of it yet
    for second in range(1, 4):
        proc.tick(90, idle=10)
        proc.put(101, 100, start=11, used=7777 + 60 * second)
        # The monitor's own process used a little too, which is not outside either.
        assert read(100).cores_outside == pytest.approx(0.3, abs=0.1)


def test_a_tree_that_began_within_the_interval_is_not_outside(proc: FakeProc, read: Read) -> None:
    proc.tick(0)
    assert read().cores_outside == pytest.approx(0)
    proc.tick(80, idle=20)
    proc.put(100, 1, start=10, used=10)
    proc.put(101, 100, start=11, used=70)
    assert read(100).cores_outside == pytest.approx(0)


def test_a_tree_that_ended_within_the_interval_is_not_outside(proc: FakeProc, read: Read) -> None:
    proc.put(100, 1, start=10)
    proc.put(101, 100, start=11)
    read(100)
    proc.put(101, 100, start=11, used=100)
    proc.tick(100, idle=0)
    read(100)
    proc.tick(100, idle=0)
    proc.end(100)
    proc.end(101)
    assert read(100).cores_outside == pytest.approx(0)


def test_outside_follows_slowly(proc: FakeProc, read: Read) -> None:
    proc.tick(0)
    assert read().cores_outside == pytest.approx(0)
    seen = []
    for _ in range(30):
        proc.tick(100, idle=0)
        seen.append(read().cores_outside)
    assert seen == sorted(seen)
    assert seen[0] < 0.2
    assert 0.5 < seen[9] < 0.7  # one time constant: 63 %
    assert seen[29] > 0.9


# ---- real processes ----------------------------------------------------------------

SUPERVISOR = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # child subreaper
os.setsid()
"""

DAEMONISES = (
    SUPERVISOR
    + """
read, write = os.pipe()
if os.fork() == 0:                      # the job
    if os.fork() == 0:                  # its child, which leaves a grandchild and ends
        os.setsid()
        if os.fork() == 0:
            os.write(write, b"%d\\n" % os.getpid())
            while True: pass
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
pid = int(os.read(read, 64))
while os.stat(f"/proc/{pid}") and int(open(f"/proc/{pid}/stat").read().split()[3]) != os.getpid():
    pass
print(pid, flush=True)
sys.stdin.read()
"""
)

BURNS = (
    SUPERVISOR
    + """
import json, time
sys.stdin.readline()
def burn(s):
    while time.process_time() < s: pass
for round in range(4):
    if os.fork() == 0:
        if os.fork() == 0:
            burn(0.1)
            os._exit(0)
        burn(0.1)
        os.wait()
        os._exit(0)
    os.wait()
times = os.times()
print(json.dumps(times.children_user + times.children_system), flush=True)
sys.stdin.read()
"""
)


@contextlib.contextmanager
def supervisor(script: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_daemonised_grandchild_is_in_its_jobs_tree() -> None:
    monitor = HostMonitor()
    with contextlib.closing(monitor), supervisor(DAEMONISES) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        try:
            reading = wait_until(
                lambda: monitor.read([process.pid]),
                lambda seen: (seen.trees[process.pid].cpu_cores or 0) > 0,
            )
            assert reading.trees[process.pid].pids == (grandchild,)
            assert reading.trees[process.pid].mem_mib > 0
            assert monitor.tree_of(grandchild) == process.pid
            assert monitor.tree_of(os.getpid()) is None
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_no_cpu_time_is_lost_or_doubled_as_children_come_and_go() -> None:
    clock = Clock()
    monitor = HostMonitor(clock=clock)
    with contextlib.closing(monitor), supervisor(BURNS) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        monitor.read([process.pid])
        process.stdin.write("go\n")
        process.stdin.flush()
        os.set_blocking(process.stdout.fileno(), False)
        seen_s = 0.0
        used_s = None
        end = time.monotonic() + 60
        while used_s is None:
            assert time.monotonic() < end, f"the burners did not end; seen so far: {seen_s}"
            with contextlib.suppress(TypeError, BlockingIOError):
                used_s = float(json.loads(process.stdout.readline() or "null"))
            clock.now += 1  # so that a rate is the seconds used since the reading before
            seen_s += monitor.read([process.pid]).trees[process.pid].cpu_cores or 0.0
    # A tick is lost at most where one ends: 8 processes.
    assert seen_s == pytest.approx(used_s, abs=0.08)


def test_the_machine_itself_is_read(clock: Clock) -> None:
    monitor = HostMonitor(clock=clock)
    clock.now += 1
    reading = monitor.read(())
    assert reading.busy.keys() == os.sched_getaffinity(0)
    assert all(0 <= share <= 1 for share in reading.busy.values())
    assert 0 <= reading.cores_outside <= sum(reading.busy.values())
    assert 0 < reading.mem_mib_available <= reading.mem_mib_total


def test_a_process_is_described_without_its_arguments(clock: Clock) -> None:
    monitor = HostMonitor(clock=clock)

    def describe() -> tuple[str, str]:
        clock.now += 60  # it is looked at again now and then: it may execute another program
        return monitor.process_owner(process.pid)

    argv = [sys.executable, "-u", "-c", "input()", "--token=secret"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        user, command = wait_until(describe, lambda seen: seen[1].endswith(" -c"))
        process.kill()
    assert user in (getpass.getuser(), str(os.getuid()))
    assert command.startswith("python")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/usr/bin/python3", "-u", "/home/a/train.py", "--key", "x"], "python3 train.py"),
        (["python", "-m", "lab.train", "--key", "x"], "python -m lab.train"),
        (["python", "-W", "error", "-X", "dev", "a.py"], "python a.py"),
        (["/opt/gromacs/gmx", "mdrun"], "gmx"),
        ([], "kworker/0:1"),
        ([""], "kworker/0:1"),
    ],
)
def test_a_command_is_its_program_and_its_script(words: list[str], command: str) -> None:
    assert short_command(words, "kworker/0:1") == command


def test_a_process_named_in_bytes_that_are_no_text_is_described_in_text(clock: Clock) -> None:
    monitor = HostMonitor(clock=clock)

    def describe() -> str:
        clock.now += 60
        return monitor.process_owner(process.pid)[1]

    with subprocess.Popen([b"sleep\xff", b"600"], executable="sleep") as process:
        wait_until(describe, lambda command: command == r"sleep\xff")
        process.kill()


def test_an_ended_process_has_no_owner() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert HostMonitor().process_owner(process.pid) == ("unknown", "ended")
