"""Limits that a job cannot lift: a systemd scope for each job, or a control group of our own.

Which of the two is tried, not guessed.  systemd accepts every limit and enforces those whose
controller it has: a user's manager is not given cpuset by default, and on a machine that still
boots with control groups of version 1 none of them is in version 2.  So a first scope is made
at the start of the daemon, and the files in its folder tell.

* **systemd runs**: each job gets a transient scope in rlq.slice, by systemd-run, which becomes
  the job's supervisor.  A scope belongs to the manager, not to rlqd.service, and so lives on
  whatever happens to the daemon.  A sub-group of the daemon's own service would not: on systemd
  252 a service with Delegate=yes and KillMode=process fails each restart with 219/CGROUP.
* **no systemd**, as in most containers, but a group of version 2 that this daemon may write to:
  a sub-group for each job.  Under systemd this is never done: the tree is systemd's.
* else nothing: jobs are pinned to their cores.

Inside a scope the command has a group of its own, `job`, beside its supervisor: killing the
group leaves the supervisor to write down how the command ended.  `Delegate=` with no controllers
makes that folder ours by systemd's rules; it also keeps systemd (from 253 on) from stopping the
scope when the kernel kills a process in it for memory.

A scope that cannot be made starts nothing, and no job is to wait for a bus that has gone: after
such a failure jobs start without a fence, and once a minute it is tried whether one can be made.

A user's manager ends with the last login, and all its scopes with it, unless it lingers.  A job
used to live on in the session it came from; so without lingering a user's own daemon that is not
itself run by the manager makes no scopes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import pwd
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from rlqd.fences import Enforcement, Fence, Limits, Means

log = logging.getLogger(__name__)

SLICE: Final = "rlq.slice"
#: In the order in which they are told.
CONTROLLERS: Final = ("cpuset", "memory", "pids", "io")
#: A file that is there when the controller is.
_FILE_OF: Final = {
    "cpuset": "cpuset.cpus",
    "memory": "memory.max",
    "pids": "pids.max",
    "io": "io.weight",
}
#: systemd may be busy, executing itself anew, say; a start that waits longer than this fails.
_BUS_TIMEOUT_S: Final = 5
_RETRY_S: Final = 60.0
#: Groups of our own: the daemon's, which moves there to make room, and the jobs'.
_DAEMON_GROUP: Final = "rlqd"
_JOBS_GROUP: Final = "rlq"

_PROBE: Final = 'cat /proc/self/cgroup; echo; ls "$0$(sed -n s/^0:://p /proc/self/cgroup)"'


class Fences:
    """Makes a `Fence` for each job.  `find` may run in any thread, the rest in the loop's."""

    def __init__(
        self,
        queue_id: str,
        *,
        enabled: bool = True,
        uid: int | None = None,
        proc_root: Path = Path("/proc"),
        booted: Path = Path("/run/systemd/system"),
        lingering: Path = Path("/var/lib/systemd/linger"),
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            queue_id: tells this daemon's jobs from those of others on this machine.
            booted: exists where systemd is the init (sd_booted(3)).
            lingering: has a file for each user whose manager outlives the last logout.
        """
        self._queue = queue_id[:8]
        self._enabled = enabled
        self._uid = os.geteuid() if uid is None else uid
        self._proc = proc_root
        self._booted = booted
        self._lingering = lingering
        self._environ = environ
        self._clock = clock
        self._probes = itertools.count()
        self._thread: threading.Thread | None = None
        self._retry_at = 0.0
        #: Why there are no scopes where there should be.
        self._lacking = ""
        #: Replaced as a whole.
        self.found = Enforcement(means=Means.AFFINITY, problem="not looked at yet")

    # ---- what is there -------------------------------------------------------------

    def find(self) -> Enforcement:
        """Look what can be enforced; takes some 20 ms, or a few seconds where systemd hangs."""
        lacking = ""
        if not self._enabled:
            found = Enforcement(means=Means.AFFINITY, problem="[enforce] mode is off")
        elif not self._booted.is_dir():
            found = self._own_groups()
        elif not self._outlives_logout():
            found = Enforcement(
                means=Means.AFFINITY,
                problem="your systemd manager ends what it runs when you log out;"
                " `loginctl enable-linger` keeps it",
            )
        else:
            found = self._try_scope()
            lacking = found.problem if found.means is Means.AFFINITY else ""
        self._retry_at = self._clock() + _RETRY_S
        self.found, self._lacking = found, lacking
        return found

    def failed(self, why: str) -> None:
        """A job's scope could not be made: until one can, jobs start without."""
        if self.found.means is Means.SCOPE:
            log.warning("%s; jobs start without limits until one can be made", why)
            self.found = replace(
                self.found, means=Means.AFFINITY, controllers=frozenset(), problem=why
            )
            self._lacking = why
            self._retry_at = self._clock() + _RETRY_S

    def lacking(self) -> str:
        """Why there are no scopes where there should be; "": nothing is amiss."""
        return self._lacking

    def look(self) -> None:
        """Call it now and then: tries again, in a thread, whether scopes can be made."""
        if self._clock() < self._retry_at or not self.lacking():
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._find_again, name="fences", daemon=True)
            self._thread.start()

    def _find_again(self) -> None:
        if self.find().means is not Means.AFFINITY:
            log.info("jobs that start now are held to their limits: %s", describe(self.found))

    # ---- for each job --------------------------------------------------------------

    def fence(self, job: int, attempt: int, limits: Limits) -> Fence | None:
        """None: the job is pinned to its cores, and that is all."""
        found = self.found
        name = f"{self._queue}-{job}-{attempt}"
        jobs = f"{found.cgroup_root}{found.cgroup}"
        match found.means:
            case Means.AFFINITY:
                return None
            case Means.SCOPE:
                unit = f"rlq-{name}.scope"
                scope = "" if found.cgroup is None else f"{jobs}/{unit}"
                return Fence(
                    wrapper=self._systemd_run(unit, f"rlq job {job}", limits),
                    wrapper_env=self._bus(),
                    cgroup=scope and f"{scope}/job",
                    limits=scope,
                )
            case Means.CGROUP:
                folder = f"{jobs}/{name}"
                files = {
                    file: text
                    for file, text in group_files(limits).items()
                    # Swap may not be accounted for, I/O have no weights.
                    if os.path.exists(f"{jobs}/{file}")
                }
                return Fence(cgroup=folder, limits=folder, files=files)

    # ---- systemd -------------------------------------------------------------------

    def _systemd_run(self, unit: str, description: str, limits: Limits) -> tuple[str, ...]:
        return (
            "systemd-run",
            *(() if self._uid == 0 else ("--user",)),
            *("--scope", "--quiet", "--collect", "--no-ask-password"),
            *(f"--slice={SLICE}", f"--unit={unit}", f"--description={description}"),
            "--property=Delegate=",
            # At a shutdown the daemon goes first: it would start others in the place of jobs that
            # are stopped.  A unit goes after those that it comes before.
            "--property=Before=rlqd.service",
            # And homes go last: jobs save what they have.
            "--property=After=local-fs.target remote-fs.target autofs.service",
            *(f"--property={name}={value}" for name, value in scope_properties(limits).items()),
            "--",
        )

    def _bus(self) -> dict[str, str]:
        """Where a user's manager is.  A daemon started by cron or su is not told."""
        env = {"SYSTEMD_BUS_TIMEOUT": f"{_BUS_TIMEOUT_S}s", "SYSTEMD_LOG_LEVEL": "err"}
        if self._uid != 0:
            runtime = self._environ.get("XDG_RUNTIME_DIR") or f"/run/user/{self._uid}"
            env["XDG_RUNTIME_DIR"] = runtime
            env["DBUS_SESSION_BUS_ADDRESS"] = (
                self._environ.get("DBUS_SESSION_BUS_ADDRESS") or f"unix:path={runtime}/bus"
            )
        return env

    def _outlives_logout(self) -> bool:
        """Whether the manager does: jobs of a daemon outside it must not end before the daemon,
        which a session that was left behind lets live on."""
        if self._uid == 0 or f"/user@{self._uid}.service/" in (_own_group(self._proc) or ""):
            return True
        try:
            return (self._lingering / pwd.getpwuid(self._uid).pw_name).exists()
        except KeyError:
            return False

    def _try_scope(self) -> Enforcement:
        root = _mount_of_version_2(self._proc)
        unit = f"rlq-{self._queue}-probe-{os.getpid()}-{next(self._probes)}.scope"
        every = Limits(
            cpus=tuple(sorted(os.sched_getaffinity(0))),
            mem_bytes_max=2**30,
            mem_bytes_high=2**30,
            tasks_max=64,
            io_weight=100,
        )
        if shutil.which("systemd-run", path=self._environ.get("PATH", os.defpath)) is None:
            return Enforcement(means=Means.AFFINITY, problem="systemd-run is not on PATH")
        argv = [*self._systemd_run(unit, "rlq looks what is enforced", every)]
        path = self._environ.get("PATH", os.defpath)
        try:
            done = subprocess.run(
                [*argv, "/bin/sh", "-c", _PROBE, str(root or "")],
                env={"PATH": path, "LC_ALL": "C.UTF-8", **self._bus()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=2 * _BUS_TIMEOUT_S,
                text=True,
                errors="replace",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            is_late = isinstance(error, subprocess.TimeoutExpired)
            why = "systemd does not answer" if is_late else str(error)
            return Enforcement(means=Means.AFFINITY, problem=f"no scope can be made: {why}")
        groups, _, names = done.stdout.partition("\n\n")
        own = [line[3:] for line in groups.splitlines() if line.startswith("0::")]
        if f"/{unit}" not in groups:
            said = " ".join(done.stderr.split()) or f"systemd-run ended with {done.returncode}"
            return Enforcement(means=Means.AFFINITY, problem=f"no scope can be made: {said}")
        cgroup = None
        if root is not None and own and own[0].endswith(f"/{unit}"):
            cgroup = own[0].removesuffix(f"/{unit}")
        files = set(names.split()) if cgroup is not None else set[str]()
        controllers = frozenset(c for c in CONTROLLERS if _FILE_OF[c] in files)
        problem = ""
        if missing := set(CONTROLLERS) - controllers:
            whose = "systemd" if self._uid == 0 else "your own systemd manager"
            words = ", ".join(c for c in CONTROLLERS if c in missing)
            problem = f"{whose} has no control-group controller (v2) for {words}"
        return Enforcement(
            means=Means.SCOPE,
            controllers=controllers,
            problem=problem,
            cgroup=cgroup,
            cgroup_root=str(root or "/sys/fs/cgroup"),
        )

    # ---- groups of our own ---------------------------------------------------------

    def _own_groups(self) -> Enforcement:
        root = _mount_of_version_2(self._proc)
        own = _own_group(self._proc)
        if root is None or own is None:
            return Enforcement(
                means=Means.AFFINITY, problem="neither systemd nor control groups version 2 here"
            )
        base = root / own.lstrip("/")
        if base.name == _DAEMON_GROUP and (base.parent / _JOBS_GROUP).is_dir():
            base = base.parent  # moved there by the daemon that started this one
        jobs = base / _JOBS_GROUP
        try:
            jobs.mkdir(exist_ok=True)
            if not os.access(jobs / "cgroup.procs", os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            return Enforcement(
                means=Means.AFFINITY,
                problem=f"systemd does not run, and no control group is delegated to rlqd"
                f" ({base}: {error.strerror})",
            )
        problem = self._enable(base, jobs)
        enabled = set(_words(jobs / "cgroup.subtree_control"))
        controllers = frozenset(c for c in CONTROLLERS if c in enabled)
        missing = [c for c in CONTROLLERS if c not in controllers]
        if missing and not problem:
            problem = f"{base} has no control-group controller for {', '.join(missing)}"
        return Enforcement(
            means=Means.CGROUP,
            controllers=controllers,
            problem=problem,
            cgroup=f"/{jobs.relative_to(root)}",
            cgroup_root=str(root),
        )

    def _enable(self, base: Path, jobs: Path) -> str:
        """Turn on what is available, down to the jobs' groups; why not, or ""."""
        wanted = [c for c in CONTROLLERS if c in _words(base / "cgroup.controllers")]
        switch = " ".join(f"+{c}" for c in wanted)
        if not wanted:
            return ""
        try:
            try:
                (base / "cgroup.subtree_control").write_text(switch)
            except OSError as error:
                # A group with controllers below it may hold no processes itself.
                if error.errno != errno.EBUSY or not self._leave(base):
                    raise
                (base / "cgroup.subtree_control").write_text(switch)
            (jobs / "cgroup.subtree_control").write_text(switch)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return f"other processes than rlqd are in {base}, so it can have no limits below"
            return f"the controllers of {base} cannot be turned on: {error.strerror}"
        return ""

    def _leave(self, base: Path) -> bool:
        """Move this daemon down if it is alone in `base`."""
        if set(_words(base / "cgroup.procs")) != {str(os.getpid())}:
            return False
        own = base / _DAEMON_GROUP
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text(str(os.getpid()))
        return True


def scope_properties(limits: Limits) -> dict[str, str]:
    """As systemd.resource-control(5) calls them.

    No CPUWeight: a job shares its cores with no other job.
    """
    found: dict[str, str] = {}
    if limits.cpus:
        found["AllowedCPUs"] = ",".join(map(str, limits.cpus))
    if limits.mem_bytes_max is not None:
        found["MemoryMax"] = str(limits.mem_bytes_max)
        found["MemorySwapMax"] = "0"
    if limits.mem_bytes_high is not None:
        found["MemoryHigh"] = str(limits.mem_bytes_high)
    if limits.tasks_max is not None:
        found["TasksMax"] = str(limits.tasks_max)
    if limits.io_weight is not None:
        found["IOWeight"] = str(limits.io_weight)
    return found


def group_files(limits: Limits) -> dict[str, str]:
    """As the kernel calls them (cgroup-v2)."""
    found: dict[str, str] = {}
    if limits.cpus:
        found["cpuset.cpus"] = ",".join(map(str, limits.cpus))
    if limits.mem_bytes_max is not None:
        found["memory.max"] = str(limits.mem_bytes_max)
        found["memory.swap.max"] = "0"
    if limits.mem_bytes_high is not None:
        found["memory.high"] = str(limits.mem_bytes_high)
    if limits.tasks_max is not None:
        found["pids.max"] = str(limits.tasks_max)
    if limits.io_weight is not None:
        found["io.weight"] = f"default {limits.io_weight}"
    return found


def describe(found: Enforcement) -> str:
    """One sentence, for the log and `rlq doctor`."""
    where = {
        Means.SCOPE: f"a systemd scope per job in {SLICE}",
        Means.CGROUP: "a control group per job",
        Means.AFFINITY: "none: jobs are pinned to their cores, and could widen that again",
    }[found.means]
    if found.means is Means.AFFINITY:
        return where
    words = {"cpuset": "cores", "memory": "memory", "pids": "processes", "io": "I/O weight"}
    held = [words[c] for c in CONTROLLERS if c in found.controllers]
    return f"{where}; enforced: {', '.join(held) or 'no limit, cores by affinity only'}"


def _mount_of_version_2(proc_root: Path) -> Path | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (proc_root / "self/mounts").read_text().splitlines():
            _, folder, kind, *_ = line.split()
            if kind == "cgroup2":
                return Path(folder)
    return None


def _own_group(proc_root: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (proc_root / "self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:]
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
