"""SB3's replay buffer on disk: the rows in use, nothing else.

SB3 pickles the whole buffer, its untouched zeros too: 6 GB for a Humanoid run that has just
begun.  Here a zip of numpy arrays holds what was filled, and reading goes by small pieces straight
into the model's buffer, so that a resume needs no more memory than the run did.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer

_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
_PIECE_BYTES = 16 * 1024 * 1024


def save(buffer: ReplayBuffer, path: Path) -> None:
    # One row beyond `pos`: with optimize_memory_usage it is the last next_observation.
    rows = buffer.buffer_size if buffer.full else min(buffer.pos + 1, buffer.buffer_size)
    arrays = {n: getattr(buffer, n)[:rows] for n in _ARRAYS if hasattr(buffer, n)}
    with path.open("wb") as file:
        np.savez(file, pos=np.array(buffer.pos), full=np.array(buffer.full), **arrays)


def load(buffer: ReplayBuffer, path: Path) -> None:
    """Fill `buffer`, which must be as large as the saved one was.

    Raises:
        ValueError: the file is of a buffer of another shape or type.
    """
    with np.load(path, allow_pickle=False) as archive:
        pos, full = int(archive["pos"]), bool(archive["full"])
    names = [name for name in _ARRAYS if hasattr(buffer, name)]
    with zipfile.ZipFile(path) as archive_file:
        for name in names:
            _fill(getattr(buffer, name), archive_file, f"{name}.npy")
    buffer.pos, buffer.full = pos, full


def _fill(target: np.ndarray, archive: zipfile.ZipFile, member: str) -> None:
    with archive.open(member) as file:
        np.lib.format.read_magic(file)
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        fits = shape[1:] == target.shape[1:] and shape[0] <= target.shape[0]
        if fortran_order or dtype != target.dtype or not fits:
            raise ValueError(f"{member} has shape {shape} and type {dtype}, not the buffer's")
        rest = target[: shape[0]].data.cast("B")
        while len(rest):
            piece = file.read(min(_PIECE_BYTES, len(rest)))
            if not piece:
                raise ValueError(f"{member} ends early")
            rest[: len(piece)] = piece
            rest = rest[len(piece) :]
