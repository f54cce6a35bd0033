"""Reading the host: CPUs, memory, and what each job's process tree uses.

The daemon is to idle below 1 % of a core beside 50 jobs and several hundred other processes, so
a reading spends its time with care:

- One listing of /proc tells the pids and, with them, inode numbers.  The kernel drops a
  process's inode when it is reaped, so an unchanged inode is the same process: nothing is read
  of a process outside the jobs after its first sight.  (Once a minute all of that is forgotten,
  should some kernel not keep to it.)  Our own processes are told apart by their start time.
- Whose a process is, is decided once: its parent's.  Supervisors are child subreapers, so what
  a job daemonises stays below its supervisor, and membership never changes.
- Each of our processes costs one read of /proc/PID/stat per reading: CPU times, the times of
  its reaped children, and resident memory come from there.  The file is kept open, which halves
  that cost and can only ever mean the same process; a text unchanged is not parsed again.
- Memory that several processes share (forked environment workers, the pages of libtorch) must
  not be counted once for each.  The kernel's proportional figure (Pss in smaps_rollup) is the
  honest one, but it walks the page tables: about 1 ms per 100 MiB, while holding a lock that the
  job's own page faults need.  So it is read seldom, for those processes that changed most or
  were measured longest ago, within a budget of 0.2 % of a core; in between the resident set's
  changes are added to it.

CPU time must survive the process that used it.  A child's time moves to its parent's "reaped
children" when the parent waits for it; what moves there, less what had been counted while the
child lived, is what the child used unseen.  A parent that ignores SIGCHLD loses that rest, and
only that.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from rlqd.readings import Cpu, HostReading, TreeReading

_HZ = os.sysconf("SC_CLK_TCK")
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
#: Times are counted in ticks of 10 ms: over less than this, a rate is mostly rounding.
_INTERVAL_MIN_S = 0.1
_SMOOTHING_S = 10.0
#: Of a process tree.  /proc is read while it changes: a chain of parents might run in a circle.
_DEPTH_MAX = 1000
_FORGET_S = 60.0
#: A process's description changes when it executes another program.
_DESCRIBED_S = 10.0
#: Of the daemon's file descriptors, at most so many are spent on open /proc files.
_HANDLES_MAX = 1000
_PSS_SHARE = 0.002
_PSS_BURST_S = 0.02
_PSS_AGE_S = 30.0
_PSS_CHANGE = 0.1


def cpus(sys_root: Path = Path("/sys"), allowed: Collection[int] | None = None) -> tuple[Cpu, ...]:
    """The CPUs that this daemon may run on, by number.

    Without topology files every CPU is a core of its own, on node 0.
    """
    numbers = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes: dict[int, int] = {}
    for folder in sorted(sys_root.glob("devices/system/node/node[0-9]*")):
        for number in _cpu_list(_text(folder / "cpulist")):
            nodes[number] = int(folder.name.removeprefix("node"))
    found = []
    for number in numbers:
        topology = sys_root / f"devices/system/cpu/cpu{number}/topology"
        # `core_cpus_list` is the newer name of `thread_siblings_list`.
        siblings = _cpu_list(_text(topology / "core_cpus_list")) or _cpu_list(
            _text(topology / "thread_siblings_list")
        )
        # core_id is unique only within a package or die; the lowest sibling is, everywhere.
        physical = min(siblings, default=number)
        found.append(Cpu(number=number, physical=physical, numa_node=nodes.get(number, 0)))
    return tuple(found)


class HostMonitor:
    """Reads CPU load, memory and the jobs' process trees.  Safe to use from several threads.

    The jobs live under the memory limits of the daemon's own cgroup, unless `set_cgroup` names
    another: a daemon whose jobs run in scopes must name theirs.

    Make the monitor well before the first reading: rates are of the time between.  Before
    0.1 s have passed, the machine counts as busy, which admits nothing.
    """

    def __init__(
        self,
        *,
        proc_root: Path = Path("/proc"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = str(proc_root)
        self._cgroup_root = cgroup_root
        self._cgroup = _own_cgroup(proc_root)
        self._clock = clock
        self._lock = threading.Lock()

        self._read_at = self._forgot_at = self._rated_at = clock()
        self._cpu_ticks = self._read_cpu_ticks()
        self._daemon_s = _own_cpu_s()
        self._busy: dict[int, float] | None = None
        self._cores_outside: float | None = None
        #: Since `_rated_at`: ticks that our trees used, and whether a tree's use is unknown.
        self._ours_ticks = 0.0
        self._ours_unknown = False

        self._inodes: dict[int, int] = {}
        self._first = True
        self._outside: dict[int, _Outsider] = {}
        self._doubtful: dict[int, int] = {}
        #: Parents before their children.
        self._ours: dict[int, _Process] = {}
        #: pid -> its supervisor and start time, at the last reading.  Never changed, only
        #: replaced: read without the lock.
        self._members: Mapping[int, tuple[int, int]] = {}
        self._trees: dict[int, _Tree] = {}
        self._pss_credit_s = _PSS_BURST_S
        self._handles_left = min(_HANDLES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        #: By pid and start time: when and how it was described.
        self._described: dict[tuple[int, int], tuple[float, tuple[str, str]]] = {}

    def set_cgroup(self, cgroup: str, cgroup_root: Path) -> None:
        """The jobs are in this one (v2, below `cgroup_root`), and under its memory limit."""
        with self._lock:
            self._cgroup, self._cgroup_root = cgroup, cgroup_root

    def read(self, supervisors: Collection[int]) -> HostReading:
        with self._lock:
            now = self._clock()
            taken_at_ms = int(now * 1000)
            self._follow_trees(frozenset(supervisors), now)
            self._members = {pid: (p.supervisor, p.start) for pid, p in self._ours.items()}
            self._measure_pss(now)
            trees = self._read_trees(now)
            self._rate_cpus(now)
            self._read_at = now
            total, available = self._memory()
            allowed = os.sched_getaffinity(0)
            busy = self._busy
            return HostReading(
                taken_at_ms=taken_at_ms,
                busy=dict.fromkeys(sorted(allowed), 1.0) if busy is None else dict(busy),
                cores_outside=(
                    float(len(allowed)) if self._cores_outside is None else self._cores_outside
                ),
                mem_mib_total=total,
                mem_mib_available=available,
                trees=trees,
            )

    def tree_of(self, pid: int) -> int | None:
        """The supervisor, of those last given to `read`, whose tree this process is in.

        Never waits for a reading: one may hang (smaps_rollup waits for a lock of the process).
        """
        members, start = self._members, math.inf
        for _ in range(_DEPTH_MAX):
            if ours := members.get(pid):
                supervisor, born = ours
                return supervisor if born <= start else None
            stat = self._stat(pid)
            if stat is None or stat.start > start:
                return None
            pid, start = stat.parent, stat.start
        return None

    def process_owner(self, pid: int) -> tuple[str, str]:
        """A process's user and short command, for people: ("alice", "python train.py").

        Arguments beyond the script are left out: they may hold secrets.  For one thread; does
        not wait for a reading.
        """
        stat = self._stat(pid)
        if stat is None:
            return ("unknown", "ended")
        key, now = (pid, stat.start), self._clock()
        if (known := self._described.get(key)) is None or now - known[0] >= _DESCRIBED_S:
            if len(self._described) >= 1024:
                self._described.clear()
            self._described[key] = known = (now, _describe(pid))
        return known[1]

    def close(self) -> None:
        with self._lock:
            for process in self._ours.values():
                self._close(process)
            self._ours, self._trees, self._outside, self._inodes = {}, {}, {}, {}
            self._members = {}

    # ---- which process is whose ----------------------------------------------------

    def _follow_trees(self, supervisors: frozenset[int], now: float) -> None:
        inodes = self._list_processes()
        if now - self._forgot_at >= _FORGET_S:
            self._forgot_at = now
            self._inodes, self._outside = {}, {}
            fresh = inodes.keys() - self._ours.keys()
            newborn: set[int] = set()
        else:
            fresh = {pid for pid, inode in inodes.items() if self._inodes.get(pid) != inode}
            for pid in self._inodes.keys() - inodes.keys():
                self._outside.pop(pid, None)
            newborn = set() if self._first else set(fresh)
        self._first = False

        for pid in self._trees.keys() - supervisors:
            fresh |= self._drop_tree(pid, now)
        fresh |= self._update_ours(now)
        oldest = math.inf
        for pid in supervisors - self._trees.keys():
            self._trees[pid] = tree = _Tree()
            # A supervisor that is in the tree of another would be a strange thing: it is the
            # nearest one's.
            if member := self._ours.pop(pid, None):
                self._close(member)
            if (stat := self._stat(pid)) is None:
                continue
            self._ours[pid] = process = _Process(pid, pid, stat)
            # Born since the last reading: all that it used, it used since then.
            if pid in newborn:
                tree.counts_births = True
                tree.count_birth(process)
            else:
                self._ours_unknown = True
            oldest = min(oldest, stat.start)
        # What was seen before its supervisor was named to us: no child is older than it.
        fresh |= {pid for pid, outsider in self._outside.items() if outsider.start >= oldest}

        found: dict[int, _Stat] = {}
        for pid in fresh:
            self._outside.pop(pid, None)
            if pid not in self._ours and pid in inodes:
                if stat := self._stat(pid):
                    found[pid] = stat
                    self._outside[pid] = _Outsider(stat.parent, stat.start)
                else:
                    del inodes[pid]  # ended just now
        doubtful: dict[int, int] = {}
        # Parents before their children, here and so in all later readings: see _Tree.settle.
        for pid, stat in sorted(found.items(), key=lambda item: (item[1].start, item[0])):
            supervisor, certain = self._resolve(pid)
            if supervisor is not None:
                del self._outside[pid]
                self._ours[pid] = process = _Process(pid, supervisor, stat)
                self._trees[supervisor].count_birth(process)
            elif not certain and self._doubtful.get(pid) != stat.start:
                # Its parent ended while we looked, or is hidden from us: look again, once.
                doubtful[pid] = stat.start
                del inodes[pid]
        for pid in doubtful:
            del self._outside[pid]
        self._inodes, self._doubtful = inodes, doubtful
        for tree in self._trees.values():
            self._ours_ticks += tree.settle()

    def _resolve(self, pid: int) -> tuple[int | None, bool]:
        """The supervisor above a process, and whether the answer is certain."""
        start = math.inf
        for _ in range(_DEPTH_MAX):
            if ours := self._ours.get(pid):
                # A parent is older than its child, or the pid is somebody else's by now.
                return (ours.supervisor, True) if ours.start <= start else (None, True)
            if (outsider := self._outside.get(pid)) is None:
                return None, pid == 0
            if outsider.start > start:
                return None, True
            pid, start = outsider.parent, outsider.start
        return None, True

    def _update_ours(self, now: float) -> set[int]:
        """Read our processes again; the pids that are somebody else's by now."""
        reused = set()
        for pid, process in list(self._ours.items()):
            data = self._read_stat(process)
            if data == process.data:
                continue
            tree = self._trees[process.supervisor]
            stat = _Stat.parse(data) if data else None
            if stat is None or stat.start != process.start:
                tree.count_end(process)
                self._close(self._ours.pop(pid))
                if stat is not None:
                    reused.add(pid)
                if pid == process.supervisor:
                    # The last stretch of its tree's use went with it.
                    self._ours_ticks += (tree.rate or 0.0) * (now - self._read_at) * _HZ
                continue
            tree.count_change(process, stat)
            process.update(stat)
            process.data = data
        return reused

    def _drop_tree(self, supervisor: int, now: float) -> set[int]:
        """Forget a tree; the pids that were in it, which may be somebody's."""
        tree = self._trees.pop(supervisor)
        pids = {pid for pid, process in self._ours.items() if process.supervisor == supervisor}
        if supervisor in pids:
            self._ours_ticks += (tree.rate or 0.0) * (now - self._read_at) * _HZ
        for pid in pids:
            self._close(self._ours.pop(pid))
        return pids

    def _list_processes(self) -> dict[int, int]:
        with os.scandir(self._proc) as entries:
            return {int(e.name): e.inode() for e in entries if e.name.isdecimal()}

    def _read_stat(self, process: _Process) -> bytes | None:
        """/proc/PID/stat, from the open file where there is one; None or empty: it has ended."""
        if process.handle is None:
            path = f"{self._proc}/{process.pid}/stat"
            if self._handles_left <= 0:
                return _bytes(path)
            try:
                process.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
            self._handles_left -= 1
        try:
            return os.pread(process.handle, 4096, 0)
        except OSError:  # ESRCH: the process is gone, whoever has its pid now
            return None

    def _close(self, process: _Process) -> None:
        if process.handle is not None:
            os.close(process.handle)
            process.handle = None
            self._handles_left += 1

    def _stat(self, pid: int) -> _Stat | None:
        data = _bytes(f"{self._proc}/{pid}/stat")
        return _Stat.parse(data) if data else None

    # ---- what the trees use --------------------------------------------------------

    def _read_trees(self, now: float) -> dict[int, TreeReading]:
        members: dict[int, list[_Process]] = {pid: [] for pid in self._trees}
        alive = set()
        for process in self._ours.values():
            alive.add(process.supervisor)
            if process.pid != process.supervisor and not process.zombie:
                members[process.supervisor].append(process)
        readings = {}
        for supervisor, tree in self._trees.items():
            tree.update_rate(now)
            if supervisor in alive:
                processes = members[supervisor]
                kib = sum(process.mem_kib for process in processes)
                readings[supervisor] = TreeReading(
                    pids=tuple(sorted(process.pid for process in processes)),
                    cpu_cores=tree.rate,
                    mem_mib=-(-kib // 1024),
                )
        return readings

    def _measure_pss(self, now: float) -> None:
        self._pss_credit_s = min(
            _PSS_BURST_S, self._pss_credit_s + _PSS_SHARE * (now - self._read_at)
        )
        wanting = [process for process in self._ours.values() if process.wants_pss(now)]
        wanting.sort(key=lambda process: process.pss_at)
        for process in wanting:
            if self._pss_credit_s <= 0:
                return
            before = time.thread_time()
            process.take_pss(_pss_kib(f"{self._proc}/{process.pid}/smaps_rollup"), now)
            self._pss_credit_s -= time.thread_time() - before

    # ---- the whole machine ---------------------------------------------------------

    def _rate_cpus(self, now: float) -> None:
        elapsed_s = now - self._rated_at
        if elapsed_s < _INTERVAL_MIN_S:
            return
        ticks = self._read_cpu_ticks()
        busy = {}
        for number in sorted(os.sched_getaffinity(0)):
            if number in ticks and number in self._cpu_ticks:
                worked, total = (
                    new - old
                    for new, old in zip(ticks[number], self._cpu_ticks[number], strict=True)
                )
                busy[number] = min(1.0, max(0.0, worked / total)) if total > 0 else 0.0
        daemon_s = _own_cpu_s()
        ours_s = self._ours_ticks / _HZ + daemon_s - self._daemon_s
        outside = max(0.0, sum(busy.values()) - ours_s / elapsed_s)
        if not self._ours_unknown:
            if self._cores_outside is None:
                self._cores_outside = outside
            else:
                weight = 1.0 - math.exp(-elapsed_s / _SMOOTHING_S)
                self._cores_outside += weight * (outside - self._cores_outside)
        self._busy = busy
        self._cpu_ticks, self._daemon_s, self._rated_at = ticks, daemon_s, now
        self._ours_ticks, self._ours_unknown = 0.0, False

    def _read_cpu_ticks(self) -> dict[int, tuple[int, int]]:
        """Ticks (worked, in all) of each CPU that is on line.

        Not by psutil, whose list has no numbers: with one CPU off line, the rest would shift.
        """
        found = {}
        for line in (_bytes(f"{self._proc}/stat") or b"").splitlines():
            if not line.startswith(b"cpu"):
                break
            name, *fields = line.split()
            if name != b"cpu":
                # user nice system idle iowait irq softirq steal; guests are in user already
                times = [int(value) for value in fields[:8]]
                total = sum(times)
                found[int(name[3:])] = (total - sum(times[3:5]), total)
        return found

    def _memory(self) -> tuple[int, int]:
        """Total and available MiB: the machine's, or of the tightest cgroup around the jobs."""
        lines = (_bytes(f"{self._proc}/meminfo") or b"").split(b"\n")
        fields = {
            name: value.split() for name, _, value in (line.partition(b":") for line in lines)
        }
        total = int(fields[b"MemTotal"][0]) * 1024
        available = int(fields[b"MemAvailable"][0]) * 1024
        if self._cgroup is not None:
            folder = self._cgroup_root / self._cgroup.lstrip("/")
            while folder.is_relative_to(self._cgroup_root):
                limit = _text(folder / "memory.max").strip()
                current = _text(folder / "memory.current").strip()
                if limit.isdecimal() and current.isdecimal():
                    total = min(total, int(limit))
                    free = int(limit) - int(current) + _inactive_file(folder)
                    available = min(available, max(0, free))
                folder = folder.parent
        return total >> 20, available >> 20


class _Stat(NamedTuple):
    """From /proc/PID/stat.  Times in ticks."""

    zombie: bool
    parent: int
    #: User and system time of the process itself, and of the children it has waited for.
    used: int
    reaped: int
    #: Since boot: with the pid, an identity.
    start: int
    #: Resident memory.  Since Linux 6.2 it may be off by some MiB on machines of many cores.
    rss_kib: int

    @classmethod
    def parse(cls, data: bytes) -> _Stat | None:
        # The command's name may hold anything, parentheses and spaces included.
        fields = data[data.rfind(b")") + 2 :].split(b" ", 22)
        if len(fields) < 22:
            return None
        return cls(
            fields[0] in (b"Z", b"X"),
            int(fields[1]),
            int(fields[11]) + int(fields[12]),
            int(fields[13]) + int(fields[14]),
            int(fields[19]),
            int(fields[21]) * _PAGE_KIB,
        )


@dataclass(frozen=True, slots=True)
class _Outsider:
    parent: int
    start: int


class _Process:
    """A process of a job, or its supervisor."""

    __slots__ = (
        *("pid", "supervisor", "start", "used", "reaped", "rss_kib", "zombie", "handle", "data"),
        *("pss_kib", "pss_rss_kib", "pss_at", "pss_refused"),
    )

    def __init__(self, pid: int, supervisor: int, stat: _Stat) -> None:
        self.pid = pid
        self.supervisor = supervisor
        self.start = stat.start
        #: An open /proc/PID/stat, and its text when last read.
        self.handle: int | None = None
        self.data: bytes | None = b""
        self.pss_kib: int | None = None
        self.pss_rss_kib = 0
        self.pss_at = -math.inf
        self.pss_refused = False
        self.update(stat)

    def update(self, stat: _Stat) -> None:
        self.used = stat.used
        self.reaped = stat.reaped
        self.rss_kib = stat.rss_kib
        self.zombie = stat.zombie

    @property
    def mem_kib(self) -> int:
        if self.pss_kib is None:
            return self.rss_kib
        return max(0, self.pss_kib + self.rss_kib - self.pss_rss_kib)

    def wants_pss(self, now: float) -> bool:
        if self.zombie or self.pss_refused or self.pid == self.supervisor:
            return False
        change = abs(self.rss_kib - self.pss_rss_kib)
        return now - self.pss_at >= _PSS_AGE_S or change > _PSS_CHANGE * self.pss_rss_kib

    def take_pss(self, kib: int | None, now: float) -> None:
        """None: not permitted, or the kernel has no such file; resident memory must do."""
        self.pss_refused = kib is None
        self.pss_kib, self.pss_rss_kib, self.pss_at = kib, self.rss_kib, now


@dataclass(slots=True)
class _Tree:
    """One job's use of CPU time, in ticks, through births and deaths of its processes."""

    #: What its processes used, the supervisor itself left out, since the tree was first seen.
    used: int = 0
    #: A process that is new to us began since the last reading.  Not so in the first reading
    #: of a tree that is older: what its processes used before is not this interval's.
    counts_births: bool = False
    #: Cores' worth of work when last rated.
    rate: float | None = None
    based_at: float | None = None
    based_used: int = 0

    # Of the current reading: used by processes we saw; moved to "reaped children", and how much
    # of that was counted while the child lived; used by the supervisor itself.
    _seen: int = 0
    _reaped: int = 0
    _counted: int = 0
    _supervisor: int = 0
    #: Counted in the reading before, of processes whose reaper had not taken it over yet.
    _owed: int = 0

    def count_change(self, process: _Process, stat: _Stat) -> None:
        self._count(process, stat.used - process.used, stat.reaped - process.reaped)

    def count_birth(self, process: _Process) -> None:
        if self.counts_births:
            self._count(process, process.used, process.reaped)

    def count_end(self, process: _Process) -> None:
        self._counted += process.used + process.reaped

    def _count(self, process: _Process, used: int, reaped: int) -> None:
        if process.pid == process.supervisor:
            self._supervisor += used
        else:
            self._seen += used
        self._reaped += reaped

    def settle(self) -> int:
        """End a reading; ticks that the tree and its supervisor used in it.

        Reading takes time.  A parent is read before its child, so a child that is reaped in
        between is gone already, and its time not yet with the parent: it comes in the next
        reading, and hours of CPU time would be counted again.  The other way round would be
        worse, which is why the order matters.
        """
        used = max(0, self._seen) + max(0, self._reaped - self._counted - self._owed)
        ours = used + max(0, self._supervisor)
        self.used += used
        self._owed = max(0, self._counted - self._reaped)
        self._seen = self._reaped = self._counted = self._supervisor = 0
        self.counts_births = True
        return ours

    def update_rate(self, now: float) -> None:
        if self.based_at is not None:
            elapsed_s = now - self.based_at
            if elapsed_s < _INTERVAL_MIN_S:
                return
            self.rate = (self.used - self.based_used) / _HZ / elapsed_s
        self.based_at, self.based_used = now, self.used


def _describe(pid: int) -> tuple[str, str]:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            user = process.username()
            words, name = process.cmdline(), process.name()
    except (psutil.Error, OSError):
        return ("unknown", "unknown")
    # Bytes that are no UTF-8 must not break the message that this goes into.
    command = short_command(words, name).encode(errors="surrogateescape")
    return (user, command.decode(errors="backslashreplace"))


def short_command(words: Sequence[str], name: str) -> str:
    """A command line for people: the program and, of an interpreter, the script.

    `name`: the kernel's, for what has no command line.
    """
    if not words or not words[0]:
        return name
    command, rest = os.path.basename(words[0]), words[1:]
    if command.startswith(("python", "pypy")):
        for position, word in enumerate(rest):
            if word == "-m":
                return f"{command} -m {' '.join(rest[position + 1 : position + 2])}".strip()
            if word == "-c":
                return f"{command} -c"
            if not word.startswith("-") and rest[position - 1 : position] not in (["-W"], ["-X"]):
                return f"{command} {os.path.basename(word)}"
    return command


def _own_cpu_s() -> float:
    # Not the reaped children's: a supervisor's whole job would appear there at once.
    times = os.times()
    return times.user + times.system


def _own_cgroup(proc_root: Path) -> str | None:
    for line in _text(proc_root / "self/cgroup").splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    return None


def _inactive_file(folder: Path) -> int:
    """Bytes of page cache that the kernel takes back before it refuses memory."""
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file" and value.isdecimal():
            return int(value)
    return 0


def _pss_kib(path: str) -> int | None:
    for line in (_bytes(path) or b"").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1])
    return None


def _cpu_list(text: str) -> tuple[int, ...]:
    """ "0-3,8" -> (0, 1, 2, 3, 8); () for what is no such list."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return ()
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _bytes(path: str) -> bytes | None:
    """A file of /proc; None if it cannot be read: its process has ended, or is not ours to see."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = chunk = os.read(handle, 65536)
        while len(chunk) == 65536:
            data += (chunk := os.read(handle, 65536))
        return data
    except OSError:
        return None
    finally:
        os.close(handle)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
