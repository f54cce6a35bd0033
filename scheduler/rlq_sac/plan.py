"""What a training will need, said before it starts.

The replay buffer is the resource nobody sees coming: numpy's zeros take memory only as they are
filled, so that SB3's default buffer for Humanoid grows to gigabytes over hours. Its size follows
from the environment's spaces exactly; what the process needs beside it was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlq_sac.environments import Spaces, spaces_of
from rlq_sac.settings import BUFFER_SIZE_DEFAULT, Algo, Settings

#: Peak resident memory of a training on a CPU without its replay buffer, and of one worker of
#: SubprocVecEnv with its share of the fork server. `tests/sac/measure_memory.py` measures them:
#: Humanoid-v5, torch 2.13.0+cpu, jax 0.10.2 gave 402 to 404 MiB (sb3), 897 to 910 MiB (sbx, while
#: it compiles) and 261 MiB (a worker); rounded up by a tenth.
BASE_MIB: dict[Algo, int] = {"sb3": 450, "sbx": 1000}
WORKER_MIB = 300
#: A process that uses CUDA maps its libraries and pinned buffers into host memory besides. An
#: allowance, NOT measured: this was written on a machine without a GPU.
GPU_ALLOWANCE_MIB = 3072
CHECKPOINT_WARN_MIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    cores: int
    #: `base_mib` + `buffer_mib`.
    mem_mib: int
    #: None: the queue decides (`--device auto`).
    gpus: int | None
    #: The rows of the replay buffer that `steps` steps fill.
    buffer_mib: int
    #: The whole buffer, as allocated; untouched rows cost address space only.
    buffer_mib_allocated: int
    #: The process and its workers without the replay buffer.
    base_mib: int
    #: What the two checkpoints kept on disk come to, at the end.
    disk_mib: int
    warnings: tuple[str, ...] = ()


def plan(settings: Settings) -> Plan:
    """
    Raises:
        UsageError, UnavailableError: the environment cannot be used (see `spaces_of`).
    """
    spaces = spaces_of(settings.env)
    rows = buffer_rows(settings)
    filled = min(rows, steps_run(settings))
    per_row = row_bytes(spaces, settings.keywords.get("optimize_memory_usage", False))
    buffer_mib = math.ceil(filled * per_row / _MIB)
    allocated_mib = math.ceil(rows * per_row / _MIB)
    workers = settings.n_envs if settings.n_envs > 1 else 0
    base_mib = BASE_MIB[settings.algo] + workers * WORKER_MIB
    if settings.device == "cuda" or (settings.device == "auto" and _has_gpu()):
        base_mib += GPU_ALLOWANCE_MIB
    disk_mib = 2 * (buffer_mib if settings.save_buffer else 0)
    return Plan(
        cores=settings.n_envs,
        mem_mib=base_mib + buffer_mib,
        gpus={"cpu": 0, "cuda": 1, "auto": None}[settings.device],
        buffer_mib=buffer_mib,
        buffer_mib_allocated=allocated_mib,
        base_mib=base_mib,
        disk_mib=disk_mib,
        warnings=tuple(_warnings(settings, rows, disk_mib)),
    )


def buffer_rows(settings: Settings) -> int:
    """Transitions the replay buffer holds; SB3 rounds down to whole rows of all environments."""
    size: int = settings.keywords.get("buffer_size", BUFFER_SIZE_DEFAULT)
    return max(size // settings.n_envs, 1) * settings.n_envs


def steps_run(settings: Settings) -> int:
    """`steps`, rounded up to whole steps of all environments."""
    return -(-settings.steps // settings.n_envs) * settings.n_envs


def row_bytes(spaces: Spaces, optimize_memory_usage: bool) -> int:
    """Bytes of one transition in stable_baselines3.common.buffers.ReplayBuffer."""
    observation = math.prod(spaces.observation_shape) * _itemsize(spaces.observation_dtype)
    # SB3 stores float64 actions as float32.
    action_dtype = "float32" if spaces.action_dtype == "float64" else spaces.action_dtype
    action = spaces.action_dim * _itemsize(action_dtype)
    reward_done_timeout = 3 * 4
    return observation * (1 if optimize_memory_usage else 2) + action + reward_done_timeout


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _itemsize(dtype: str) -> int:
    import numpy

    return int(numpy.dtype(dtype).itemsize)


def _warnings(settings: Settings, rows: int, disk_mib: int) -> list[str]:
    warnings = []
    if steps_run(settings) != settings.steps:
        warnings.append(
            f"{settings.steps} steps are rounded up to {steps_run(settings)}: "
            f"each step is one of all {settings.n_envs} environments"
        )
    if disk_mib > CHECKPOINT_WARN_MIB:
        warnings.append(
            f"the checkpoints grow to {disk_mib / 1024:.1f} GiB on disk, as they hold the replay "
            "buffer; --no-save-buffer leaves it out (a resumed run then fills a new one)"
        )
    starts: int = settings.keywords.get("learning_starts", 100)
    if starts >= settings.steps:
        warnings.append(
            f"nothing is learned: learning_starts={starts} is not below {settings.steps} steps"
        )
    batch: Any = settings.keywords.get("batch_size", 256)
    if rows < batch:
        warnings.append(f"batch_size={batch} is larger than the replay buffer ({rows})")
    return warnings
