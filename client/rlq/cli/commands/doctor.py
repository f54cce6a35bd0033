"""Look for what is wrong, and say what to do.  Starts nothing, changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click
import msgspec

from rlq import __version__, paths
from rlq.cli.app import App, verb
from rlq.cli.output import clean, folded, print_json
from rlq.errors import RlqError, UnreachableError
from rlq.protocol import PROTOCOL_VERSION
from rlq.protocol.messages import DaemonStatus, Enforcement
from rlq.protocol.units import format_mib

#: Where details begin.
INDENT = 16
DISK_MIB_FAIL = 100
DISK_MIB_WARN = 1024
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NPROC",
)


class Check(msgspec.Struct, frozen=True):
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    hint: str = ""


@verb("doctor", short_help="Look for what is wrong, and say what to do.")
def command(app: App) -> None:
    """Look for what is wrong, and say what to do. Starts nothing. Exit code 1 if a check fails."""
    checks = list(run_checks(app))
    failed = any(check.status == "fail" for check in checks)
    if app.json:
        print_json({"ok": not failed, "checks": checks})
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in checks:
            word = click.style(f"{check.status:<4}", fg=colours[check.status], bold=True)
            if os.environ.get("NO_COLOR"):
                word = click.unstyle(word)
            said = [check.detail, *([f"hint: {check.hint}"] if check.hint else [])]
            lines = [line for text in said for line in folded(clean(text), INDENT)]
            click.echo(f"{word}  {check.name:<9} {lines[0]}")
            for line in lines[1:]:
                click.echo(f"{'':<{INDENT}}{line}")
    if failed:
        raise click.exceptions.Exit(1)


def run_checks(app: App) -> Iterator[Check]:
    yield check_python()
    yield check_path()
    found: list[DaemonStatus] = []
    yield from check_daemon(app, found)
    yield check_nvml()
    yield check_mps()
    told = found[0].enforcement if found else Enforcement()
    yield check_enforcement(told) if told.means else check_cgroups()
    yield check_disk()
    yield from check_variables()


def check_python() -> Check:
    detail = f"Python {platform.python_version()}, rlq {__version__}, {sys.executable}"
    return Check("python", "ok", detail)


def check_path() -> Check:
    found = shutil.which("rlq")
    here = Path(sys.executable).parent / "rlq"
    if found is None:
        return Check(
            "path",
            "warn",
            "rlq is not on PATH",
            f"add {here.parent} to PATH",
        )
    if here.exists() and not os.path.samefile(found, here):
        return Check("path", "warn", f"`rlq` is {found}, not this one ({here})", "check PATH")
    return Check("path", "ok", found)


def check_daemon(app: App, found: list[DaemonStatus]) -> Iterator[Check]:
    """`found` takes what the daemon says of itself."""
    try:
        with app.client(autostart=False, timeout_s=5.0) as client:
            pong = client.ping()
            status = client.status()
            machine = client.devices()
            where = client.address
    except UnreachableError as error:
        own = app.socket is None and "RLQ_SOCKET" not in os.environ and not app.remote_host
        if own and not paths.system_socket().exists():
            yield Check("daemon", "ok", "none runs; the next `rlq` command starts your own")
        else:
            yield Check("daemon", "fail", error.message, error.hint or "")
        return
    except RlqError as error:
        yield Check("daemon", "fail", error.message, error.hint or "")
        return
    found.append(status)
    yield Check("daemon", "ok", f"rlqd {pong.version}, pid {pong.pid}, on {where}")
    yield check_versions(pong.version, pong.protocol)
    yield from check_status(status)
    if machine.nvml_problem and not machine.nvml_absent and has_nvidia_driver():
        yield Check("daemon", "warn", machine.nvml_problem, "see the nvml check below")
    for gpu in machine.gpus:
        if gpu.problem:
            yield Check(
                "gpu",
                "fail",
                f"gpu{gpu.index}: {gpu.problem}",
                "see `nvidia-smi` and `dmesg`",
            )


def check_versions(version: str, protocol: int) -> Check:
    if protocol != PROTOCOL_VERSION:
        return Check(
            "version",
            "fail",
            f"rlqd speaks protocol {protocol}, this rlq {PROTOCOL_VERSION}",
            "run the same version of both: restart rlqd after an upgrade",
        )
    if version != __version__:
        return Check(
            "version",
            "warn",
            f"rlqd is {version}, this rlq is {__version__}",
            "restart rlqd after an upgrade: `rlq daemon stop` loses no job",
        )
    return Check("version", "ok", f"rlq and rlqd are both {version}")


def check_status(status: DaemonStatus) -> Iterator[Check]:
    for problem in status.problems:
        yield Check("daemon", "warn", problem)
    if status.draining:
        yield Check("drain", "warn", "draining: nothing new starts", "`rlq drain --off` ends it")


def has_nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


def check_nvml() -> Check:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError as error:
        return Check("nvml", "fail", f"cannot import pynvml: {error}", "pip install nvidia-ml-py")
    except pynvml.NVMLError as error:
        if not has_nvidia_driver():
            return Check("nvml", "ok", "no NVIDIA driver: jobs run on the CPU")
        return Check(
            "nvml",
            "fail",
            f"the NVIDIA driver is there, but NVML fails: {error}",
            "does `nvidia-smi` work? After a driver upgrade, reboot",
        )
    try:
        found = pynvml.nvmlDeviceGetCount()
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return Check("nvml", "warn", f"NVML answers, but not everything: {error}", "`nvidia-smi`")
    finally:
        pynvml.nvmlShutdown()
    return Check("nvml", "ok", f"{found} GPU{'' if found == 1 else 's'}, driver {driver}")


def check_mps() -> Check:
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if os.path.exists(os.path.join(pipe, "control")):
        return Check(
            "mps",
            "ok",
            f"an MPS control daemon has its pipes in {pipe}",
            'rlqd looks after jobs on it only with mode = "use" in [mps] (docs/mps.md)',
        )
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        return Check(
            "mps",
            "warn",
            f"CUDA_MPS_PIPE_DIRECTORY is {pipe}, but there is no control daemon",
            "jobs would run without MPS: start nvidia-cuda-mps-control, or unset it",
        )
    return Check("mps", "ok", "not in use")


def check_enforcement(told: Enforcement) -> Check:
    """As the daemon has found it, for its own jobs."""
    if not told.problem:
        return Check("limits", "ok", told.summary)
    hint = 'docs/operations.md, "Enforcement"'
    return Check("limits", "warn", f"{told.summary} ({told.problem})", hint)


def check_cgroups() -> Check:
    """What a daemon would find; none runs."""
    fence = "jobs are pinned, but nothing keeps one from widening its own affinity or memory"
    if not os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        return Check("cgroup", "warn", f"no cgroup v2: {fence}", "boot with the unified hierarchy")
    if not os.path.isdir("/run/systemd/system"):
        return Check("cgroup", "warn", f"systemd does not run here: {fence}")
    uid = os.getuid()
    user = Path(f"/sys/fs/cgroup/user.slice/user-{uid}.slice/user@{uid}.service")
    controllers = _read(user / "cgroup.controllers").split()
    if uid != 0 and "cpuset" not in controllers:
        return Check(
            "cgroup",
            "warn",
            f"your own daemon gets no cpuset controller from systemd: {fence}",
            "use the system's daemon, or add Delegate=cpu cpuset memory to user@.service",
        )
    return Check("cgroup", "ok", "cgroup v2 with systemd")


def check_disk() -> Check:
    folder = paths.daemon_paths().state_dir
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free_mib = shutil.disk_usage(existing).free // 2**20
    detail = f"{format_mib(free_mib)} free for {folder}"
    if free_mib < DISK_MIB_FAIL:
        return Check("disk", "fail", detail, "make room: logs and the queue's database live there")
    if free_mib < DISK_MIB_WARN:
        return Check("disk", "warn", detail, "logs of long trainings can be large")
    if not os.access(existing, os.W_OK):
        return Check("disk", "fail", f"you may not write to {existing}", "set RLQ_STATE_DIR")
    return Check("disk", "ok", detail)


def check_variables() -> Iterator[Check]:
    exported = [name for name in THREAD_VARIABLES if name in os.environ]
    if exported:
        yield Check(
            "threads",
            "warn",
            f"your shell exports {', '.join(exported)}; jobs get their number of cores instead",
            f"unset it, or give it on purpose: rlq submit --env {exported[0]} -- …",
        )
    else:
        yield Check("threads", "ok", "your shell exports no thread counts")
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        yield Check(
            "gpu env",
            "warn",
            "your shell exports CUDA_VISIBLE_DEVICES; jobs see the GPU they were given",
            "unset CUDA_VISIBLE_DEVICES",
        )
    both = {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & os.environ.keys()
    if both:
        yield Check(
            "gpu env",
            "warn",
            f"your shell exports {', '.join(sorted(both))}; two of them that differ stop JAX",
            f"unset {' '.join(sorted(both))}",
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
