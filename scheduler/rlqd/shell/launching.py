"""What a job's process is given: its environment, its cores, its log.

Three sets of variables decide whether packed jobs help or hurt each other:

* threads.  Every numerical library starts as many threads as it sees cores; ten jobs with
  sixteen threads each spend their time waiting for one another.  The count is set to the job's
  own cores, and OMP_WAIT_POLICY=PASSIVE ends libgomp's busy waiting.
* devices.  CUDA_VISIBLE_DEVICES by UUID, because numbers mean different boards to different
  programs; empty for a job without GPU, so that it cannot take one by accident.
* memory.  JAX takes 75 % of a GPU at start unless told otherwise.  A job that declared its GPU
  memory is held to it where its framework's version can (docs/architecture.md, "Caps").

Inherited values of these are overridden; a value the user gave with --env never is.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from rlq import hooks
from rlq.protocol.messages import JobSpec, Submit
from rlqd.adapters.processes import LaunchOrder
from rlqd.adapters.sqlite import Row
from rlqd.config import Config
from rlqd.core.model import Launch, MachineFacts, Placement
from rlqd.fences import Fence
from rlqd.shell import rows
from rlqd.shell.rlimits import Rlimits, of_job

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "NPROC",  # XLA's thread pools on the CPU
)
#: Of a job that was submitted from another machine.
LOGIN_PATH = "/usr/local/bin:/usr/bin:/bin"
#: A CUDA context lies outside what the frameworks' own allocators count: some 0.5 GiB.
CUDA_CONTEXT_MIB = 512
#: The kernel's OOM killer should take a job before the daemon or a colleague's editor.
JOB_OOM_SCORE_ADJ = 300


@dataclass(frozen=True, slots=True)
class Account:
    """As whom a job runs.  `groups` None: no switch of user is needed."""

    uid: int
    gid: int
    groups: tuple[int, ...] | None


def account_of(uid: int) -> Account:
    """Raises KeyError if there is no such user."""
    if os.geteuid() != 0 or uid == 0:
        return Account(os.geteuid(), os.getegid(), None)
    user = pwd.getpwuid(uid)
    return Account(uid, user.pw_gid, tuple(os.getgrouplist(user.pw_name, user.pw_gid)))


def at_home(request: Submit, uid: int) -> Submit:
    """A submission from another machine, as if it had been made here right after a login: that
    machine's environment and folders mean nothing on this one.  `~/` is the user's home.

    Raises:
        KeyError: no such user.
    """
    user = pwd.getpwuid(uid)

    def here(path: str) -> str:
        is_below = path == "~" or path.startswith("~/")
        return os.path.normpath(user.pw_dir + path[1:]) if is_below else path

    return msgspec.structs.replace(
        request,
        jobs=tuple(
            msgspec.structs.replace(job, cwd=here(job.cwd), log_path=here(job.log_path))
            for job in request.jobs
        ),
        env={
            "PATH": LOGIN_PATH,
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "SHELL": user.pw_shell or "/bin/sh",
            **request.env,
        },
    )


def order(
    row: Row,
    launch: Launch,
    account: Account,
    *,
    submitted: Mapping[str, str],
    queue: Mapping[str, str],
    logs_dir: str,
    config: Config,
    facts: MachineFacts | None,
    rlimits: Rlimits,
    mps: Mapping[str, str | None] = MappingProxyType({}),
    fence: Fence | None = None,
) -> LaunchOrder:
    """What the supervisor is told: the submission, in the place the core gave it.

    Args:
        rlimits: the daemon's own, as it was started.
        mps: variables of CUDA MPS; None: unset.
    """
    spec = row.job_spec
    gpus = facts.gpus if facts is not None else ()
    totals = [
        g.mem_mib_total
        for g in gpus
        if g.id in launch.placement.gpus and g.mem_mib_total is not None
    ]
    return LaunchOrder(
        job=row.id,
        attempt=launch.attempt,
        argv=(*spec.via, *spec.argv),
        env=environment(
            spec,
            submitted,
            launch.placement,
            queue=queue,
            configured=config.environment,
            gpu_mem_mib_total=min(totals, default=None),
            machine_has_gpus=bool(gpus),
            mps=mps,
        ),
        cwd=spec.cwd,
        umask=spec.umask,
        uid=account.uid,
        gid=account.gid,
        groups=account.groups,
        cpus=launch.placement.cores,
        log_path=rows.load_detail(row.detail).log_path
        or log_path(spec, row.id, row.uid, logs_dir),
        log_mib_max=spec.log_mib_max or config.defaults.log_mib_max,
        rlimits=of_job(spec.rlimits, rlimits),
        oom_score_adj=JOB_OOM_SCORE_ADJ,
        fence=fence or Fence(),
    )


def environment(
    spec: JobSpec,
    submitted: Mapping[str, str],
    placement: Placement,
    *,
    queue: Mapping[str, str],
    configured: Mapping[str, str],
    gpu_mem_mib_total: int | None,
    machine_has_gpus: bool,
    mps: Mapping[str, str | None] = MappingProxyType({}),
) -> dict[str, str]:
    """The complete environment of a job.

    Args:
        submitted: the submitter's environment, the job's own variables on top.
        queue: what identifies the job to its children (RLQ_JOB_ID and so on).
        configured: the [environment] section of the configuration.
        gpu_mem_mib_total: of the smallest of its GPUs, if known.
        mps: as `order`.
    """
    env = {**configured, **submitted}
    ours = _threads(len(placement.cores)) | _devices(placement, machine_has_gpus)
    if placement.gpus:
        ours |= _memory(spec, env, gpu_mem_mib_total) | dict(mps)
    # Only ever a folder in front, so also where the user gave a PYTHONPATH of their own.
    hooked = spec.hooks and env.get("RLQ_HOOKS") != "0"
    ours |= {"PYTHONPATH": hooks.pythonpath(env.get("PYTHONPATH"), on=hooked)}
    for name, value in ours.items():
        if name in spec.env_given and name != "PYTHONPATH":
            continue
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env | dict(queue)


def _threads(cores: int) -> dict[str, str | None]:
    return {**dict.fromkeys(THREAD_VARIABLES, str(cores)), "OMP_WAIT_POLICY": "PASSIVE"}


def _devices(placement: Placement, machine_has_gpus: bool) -> dict[str, str | None]:
    if placement.gpus:
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(placement.gpus),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    if not machine_has_gpus:
        return {"CUDA_VISIBLE_DEVICES": ""}
    # JAX with its CUDA plugin fails at start when it finds no device it may use.
    return {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def _memory(
    spec: JobSpec, env: Mapping[str, str], gpu_mem_mib_total: int | None
) -> dict[str, str | None]:
    """None: unset.  Only a declared amount is a cap: a default is a guess, and killing a job
    for a guess would be worse than the crowding it prevents."""
    ours: dict[str, str | None] = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "RLQ_GPU_MEM_FRACTION": None,  # of the job that submitted this one
    }
    given = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(spec.env_given)
    declared_mib = spec.resources.gpu_mem_mib
    if declared_mib is None or gpu_mem_mib_total is None:
        return ours
    fraction = max(0.01, min(1.0, (declared_mib - CUDA_CONTEXT_MIB) / gpu_mem_mib_total))
    share = f"{fraction:.4f}"
    ours["RLQ_GPU_MEM_FRACTION"] = share  # for the hooks, where no variable does it
    jaxlib = _version(spec.frameworks.get("jaxlib"))
    if not given:
        # Set beside each other with different values they are an error, so one is unset.  The
        # old name is understood by every version so far; the new one only by recent ones.
        new, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
        name, other = (new, old) if jaxlib >= (0, 8) else (old, new)
        ours |= {name: share, other: None}
    if _version(spec.frameworks.get("torch")) >= (2, 10):
        # Older versions refuse to start with a key they do not know.
        before = env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        if "per_process_memory_fraction" not in before:
            key = f"per_process_memory_fraction:{share}"
            ours["PYTORCH_ALLOC_CONF"] = f"{before},{key}" if before else key
    return ours


def _version(text: str | None) -> tuple[int, int]:
    """(major, minor); (0, 0) if unknown."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", text or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


@functools.lru_cache(maxsize=256)
def _home_of(uid: int, minute: int) -> str | None:
    """Looked up once a minute: a directory service may take a while over each look."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return None


def log_path(spec: JobSpec, job_id: int, uid: int, logs_dir: str) -> str:
    """Where the job's output goes; `%j` is its id, `%x` its name, as in Slurm.

    Args:
        logs_dir: for the daemon's own user; another user's log is opened as that user, and so
            is kept in that user's home.
    """
    if uid != os.geteuid():
        home = _home_of(uid, int(time.monotonic() // 60))
        logs_dir = logs_dir if home is None else f"{home}/.local/state/rlq/logs"
    pattern = spec.log_path or f"{logs_dir}/%j.log"
    name = re.sub(r"[^\w.+-]", "_", spec.name) or str(job_id)
    return pattern.replace("%j", str(job_id)).replace("%x", name)
