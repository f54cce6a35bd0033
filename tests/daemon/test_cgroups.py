"""How jobs are held to limits: what is found on a machine, and what each job is given."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.waiting import wait_until

from rlq.protocol.messages import JobSpec, Resources
from rlqd.adapters.cgroups import Fences, describe, group_files, scope_properties
from rlqd.config import Enforce
from rlqd.core.model import Charge, Placement
from rlqd.fences import Limits, Means
from rlqd.shell.enforcing import limits_of

QUEUE = "0123abcd-0000-4000-8000-000000000000"
MIB = 2**20
ALL = Limits(
    cpus=(0, 5),
    mem_bytes_max=1000 * MIB,
    mem_bytes_high=980 * MIB,
    tasks_max=64,
    io_weight=50,
)
#: Stands for systemd-run: writes down how it was called, then behaves as the file `mood` says.
FAKE = """#!/bin/sh
here=$(dirname "$0")
for word; do echo "$word"; done > "$here/asked"
env > "$here/env"
[ ! -e "$here/complaint" ] || { cat "$here/complaint" >&2; exit 1; }
for word; do case $word in --unit=*) unit=${word#--unit=};; esac; done
printf '0::/rlq.slice/%s\\n\\n' "$unit"
cat "$here/files"
"""


class Machine:
    """A made-up machine: systemd or not, groups of version 2 or not."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.booted = folder / "systemd"
        self.proc = folder / "proc"
        self.root = folder / "cgroup"
        for place in (self.bin, self.proc / "self", self.root):
            place.mkdir(parents=True)
        #: Of whoever runs the tests.
        self.lingering = folder / "linger"
        self.lingering.mkdir()
        self.now = 0.0
        (self.proc / "self/mounts").write_text(f"cgroup2 {self.root} cgroup2 rw 0 0\n")
        (self.proc / "self/cgroup").write_text("1:cpu:/\n0::/box\n")

    def boot_systemd(self, *files: str, complaint: str = "") -> None:
        self.booted.mkdir(exist_ok=True)
        (self.bin / "files").write_text("\n".join(files))
        self.complain(complaint)
        tool = self.bin / "systemd-run"
        tool.write_text(FAKE)
        tool.chmod(0o755)

    def complain(self, text: str) -> None:
        (self.bin / "complaint").unlink(missing_ok=True)
        if text:
            (self.bin / "complaint").write_text(text)

    def run_by_the_manager_of(self, uid: int) -> None:
        own = f"/user.slice/user-{uid}.slice/user@{uid}.service/app.slice/rlqd.service"
        (self.proc / "self/cgroup").write_text(f"0::{own}\n")

    def group(self, path: str, *controllers: str) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        words = " ".join(controllers)
        for name in ("cgroup.controllers", "cgroup.subtree_control", "cgroup.procs"):
            (folder / name).write_text("" if name == "cgroup.procs" else words)
        return folder

    def fences(self, uid: int = 0, *, enabled: bool = True) -> Fences:
        return Fences(
            QUEUE,
            enabled=enabled,
            uid=uid,
            proc_root=self.proc,
            booted=self.booted,
            lingering=self.lingering,
            environ={"PATH": f"{self.bin}:{os.environ['PATH']}"},
            clock=lambda: self.now,
        )

    def asked(self) -> list[str]:
        return (self.bin / "asked").read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---- limits ------------------------------------------------------------------------


def spec(mem_mib: int | None) -> JobSpec:
    return JobSpec(argv=("true",), cwd="/", resources=Resources(mem_mib=mem_mib))


PLACE = Placement(gpus=(), cores=(3, 4), charge=Charge(cores=2, mem_mib=2048))


def test_declared_memory_is_a_limit_with_a_margin_and_room_for_the_supervisor() -> None:
    limits = limits_of(spec(1000), PLACE, Enforce())
    assert limits.mem_bytes_max == (1000 + 100 + 16) * MIB
    assert limits.mem_bytes_high is not None
    assert limits.mem_bytes_max * 0.97 < limits.mem_bytes_high < limits.mem_bytes_max
    assert limits_of(spec(1000), PLACE, Enforce(mem_pct_margin=0)).mem_bytes_max == 1016 * MIB


def test_memory_that_was_only_guessed_is_no_limit() -> None:
    limits = limits_of(spec(None), PLACE, Enforce())
    assert (limits.mem_bytes_max, limits.mem_bytes_high) == (None, None)
    assert limits.cpus == (3, 4)


def test_no_limit_on_processes_is_nought_in_the_configuration() -> None:
    assert limits_of(spec(None), PLACE, Enforce()).tasks_max == 4096
    assert limits_of(spec(None), PLACE, Enforce(tasks_max=0)).tasks_max is None


def test_limits_by_the_names_that_systemd_and_the_kernel_have_for_them() -> None:
    assert scope_properties(ALL) == {
        "AllowedCPUs": "0,5",
        "MemoryMax": str(1000 * MIB),
        "MemorySwapMax": "0",
        "MemoryHigh": str(980 * MIB),
        "TasksMax": "64",
        "IOWeight": "50",
    }
    assert group_files(ALL) == {
        "cpuset.cpus": "0,5",
        "memory.max": str(1000 * MIB),
        "memory.swap.max": "0",
        "memory.high": str(980 * MIB),
        "pids.max": "64",
        "io.weight": "default 50",
    }
    assert scope_properties(Limits()) == group_files(Limits()) == {}


# ---- systemd -----------------------------------------------------------------------


def test_each_job_of_root_s_daemon_gets_a_scope_of_the_system_s_manager(machine: Machine) -> None:
    machine.boot_systemd("cpuset.cpus", "memory.max", "pids.max", "io.weight")
    fences = machine.fences()
    found = fences.find()
    assert (found.means, found.problem) == (Means.SCOPE, "")
    assert found.controllers == {"cpuset", "memory", "pids", "io"}
    assert (found.cgroup, found.cgroup_root) == ("/rlq.slice", str(machine.root))
    fence = fences.fence(7, 2, ALL)
    assert fence is not None
    assert fence.wrapper == (
        *("systemd-run", "--scope", "--quiet", "--collect", "--no-ask-password"),
        *("--slice=rlq.slice", "--unit=rlq-0123abcd-7-2.scope", "--description=rlq job 7"),
        "--property=Delegate=",
        "--property=Before=rlqd.service",
        "--property=After=local-fs.target remote-fs.target autofs.service",
        *(f"--property={name}={value}" for name, value in scope_properties(ALL).items()),
        "--",
    )
    assert fence.limits == f"{machine.root}/rlq.slice/rlq-0123abcd-7-2.scope"
    assert fence.cgroup == f"{fence.limits}/job"
    assert not fence.files, "systemd sets the limits"
    assert describe(found).endswith("enforced: cores, memory, processes, I/O weight")


def test_a_user_s_own_daemon_speaks_to_the_user_s_manager(machine: Machine) -> None:
    machine.boot_systemd("memory.max", "pids.max")
    machine.run_by_the_manager_of(1234)
    fences = machine.fences(uid=1234)
    assert fences.find().means is Means.SCOPE
    assert "--user" in machine.asked()
    seen = (machine.bin / "env").read_text().splitlines()
    assert "XDG_RUNTIME_DIR=/run/user/1234" in seen
    assert "DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1234/bus" in seen
    fence = fences.fence(1, 1, Limits())
    assert fence is not None
    assert "--user" in fence.wrapper
    assert fence.wrapper_env["XDG_RUNTIME_DIR"] == "/run/user/1234"


def test_no_job_of_a_user_s_own_daemon_ends_with_the_login(machine: Machine) -> None:
    # The manager stops with the last session, and with it every scope that it has made.
    machine.boot_systemd("memory.max")
    own = "/user.slice/user-1.slice/session-3.scope"
    (machine.proc / "self/cgroup").write_text(f"0::{own}\n")
    fences = machine.fences(uid=1)
    assert fences.find().means is Means.AFFINITY
    assert "loginctl enable-linger" in fences.found.problem
    assert fences.lacking() == "", "it is as it was before, and nothing is amiss"
    (machine.lingering / pwd.getpwuid(1).pw_name).touch()
    assert fences.find().means is Means.SCOPE


def test_what_systemd_accepts_and_does_not_enforce_is_told(machine: Machine) -> None:
    machine.boot_systemd("memory.max", "pids.max")
    machine.run_by_the_manager_of(1234)
    found = machine.fences(uid=1234).find()
    assert found.controllers == {"memory", "pids"}
    missing = "your own systemd manager has no control-group controller (v2) for cpuset, io"
    assert found.problem == missing
    assert describe(found).endswith("enforced: memory, processes")


def test_scopes_without_any_group_of_version_2_still_outlive_the_daemon(machine: Machine) -> None:
    machine.boot_systemd()
    (machine.proc / "self/mounts").write_text("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n")
    fences = machine.fences()
    found = fences.find()
    assert (found.means, found.controllers, found.cgroup) == (Means.SCOPE, frozenset(), None)
    assert "no limit" in describe(found)
    fence = fences.fence(7, 1, ALL)
    assert fence is not None
    assert (fence.wrapper[0], fence.cgroup, fence.limits) == ("systemd-run", "", "")


def test_where_no_scope_can_be_made_jobs_are_pinned_and_the_reason_is_told(
    machine: Machine,
) -> None:
    machine.boot_systemd(complaint="Failed to connect to bus:\nConnection refused\n")
    machine.group("box", "memory")
    fences = machine.fences()
    found = fences.find()
    said = "no scope can be made: Failed to connect to bus: Connection refused"
    assert (found.means, found.problem, fences.lacking()) == (Means.AFFINITY, said, said)
    assert fences.fence(1, 1, ALL) is None
    assert not (machine.root / "box/rlq").exists(), "under systemd the tree is systemd's"


def test_without_systemd_run_jobs_are_pinned(machine: Machine) -> None:
    machine.booted.mkdir()
    fences = Fences(
        QUEUE, proc_root=machine.proc, booted=machine.booted, environ={"PATH": str(machine.bin)}
    )
    assert fences.find().problem == "systemd-run is not on PATH"


def after_a_failure(machine: Machine) -> Fences:
    machine.boot_systemd("memory.max")
    fences = machine.fences()
    fences.find()
    fences.failed("no scope could be made for it: bus gone")
    return fences


def test_after_a_scope_that_failed_jobs_start_without(machine: Machine) -> None:
    fences = after_a_failure(machine)
    assert fences.fence(1, 1, ALL) is None
    assert fences.lacking() == "no scope could be made for it: bus gone"
    assert fences.found.cgroup == "/rlq.slice", "where earlier jobs still are"


def test_a_minute_later_scopes_are_tried_again(machine: Machine) -> None:
    fences = after_a_failure(machine)
    (machine.bin / "asked").unlink()
    machine.now = 59.0
    fences.look()
    assert fences.fence(1, 1, ALL) is None
    machine.now = 60.0
    fences.look()
    wait_until(lambda: fences.found.means, lambda means: means is Means.SCOPE)
    assert fences.fence(2, 1, ALL) is not None
    assert fences.lacking() == ""


def test_nothing_is_tried_again_while_scopes_are_made(machine: Machine) -> None:
    machine.boot_systemd("memory.max")
    fences = machine.fences()
    fences.find()
    machine.now = 1000.0
    (machine.bin / "asked").unlink()
    fences.look()
    assert not (machine.bin / "asked").exists()


def test_turned_off_nothing_is_tried(machine: Machine) -> None:
    machine.boot_systemd("memory.max")
    fences = machine.fences(enabled=False)
    assert fences.find().means is Means.AFFINITY
    assert (fences.lacking(), fences.fence(1, 1, ALL)) == ("", None)
    assert not (machine.bin / "asked").exists()


# ---- groups of our own -------------------------------------------------------------


def test_without_systemd_each_job_gets_a_group_below_the_daemon_s(machine: Machine) -> None:
    machine.group("box", "cpuset", "memory", "pids")
    jobs = machine.group("box/rlq")
    for file in ("cpuset.cpus", "memory.max", "memory.high", "pids.max"):
        (jobs / file).write_text("")
    fences = machine.fences()
    found = fences.find()
    assert (found.means, found.cgroup) == (Means.CGROUP, "/box/rlq")
    assert (machine.root / "box/cgroup.subtree_control").read_text() == "+cpuset +memory +pids"
    assert (jobs / "cgroup.subtree_control").read_text() == "+cpuset +memory +pids"
    fence = fences.fence(7, 2, ALL)
    assert fence is not None
    assert fence.wrapper == ()
    assert fence.cgroup == fence.limits == f"{jobs}/0123abcd-7-2"
    # No swap is accounted for here, and I/O has no weights: a file that is not there stops none.
    assert set(fence.files) == {"cpuset.cpus", "memory.max", "memory.high", "pids.max"}


def test_a_group_without_controllers_still_kills_as_one(machine: Machine) -> None:
    machine.group("box")
    machine.group("box/rlq")
    fences = machine.fences()
    found = fences.find()
    assert (found.means, found.controllers) == (Means.CGROUP, frozenset())
    assert "has no control-group controller for cpuset, memory, pids, io" in found.problem
    fence = fences.fence(1, 1, ALL)
    assert fence is not None
    assert not fence.files


def test_a_daemon_started_again_from_its_own_group_uses_the_same_place(machine: Machine) -> None:
    machine.group("box")
    machine.group("box/rlq")
    machine.group("box/rlqd")
    (machine.proc / "self/cgroup").write_text("0::/box/rlqd\n")
    assert machine.fences().find().cgroup == "/box/rlq"


def test_without_a_group_that_the_daemon_may_write_to_jobs_are_pinned(machine: Machine) -> None:
    found = machine.fences().find()  # the group it is said to be in is not there
    assert found.means is Means.AFFINITY
    assert "no control group is delegated to rlqd" in found.problem


@pytest.mark.parametrize(
    "forget",
    [
        lambda machine: (machine.proc / "self/mounts").write_text(""),
        lambda machine: (machine.proc / "self/cgroup").write_text("1:cpu:/\n"),
    ],
)
def test_without_groups_of_version_2_jobs_are_pinned(
    machine: Machine, forget: Callable[[Machine], object]
) -> None:
    forget(machine)
    fences = machine.fences()
    assert fences.find().problem == "neither systemd nor control groups version 2 here"
    assert fences.lacking() == "", "nothing is wrong, this machine just has none"
