"""Checkpoints on disk: complete and proven, or not there at all.

    OUT/checkpoints/step-000012345/   model.zip  [replay_buffer.npz]  state.json

A checkpoint is written under a temporary name, fsynced, and renamed; `state.json` comes last and
holds the SHA-256 of the others. Reading takes the newest whose sums are right and steps over
the rest with a warning. The last two are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
KEEP = 2
_NAME = re.compile(r"step-(\d{9,})")
_TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    #: What `write` was given.
    state: dict[str, Any]

    def file(self, name: str) -> Path | None:
        path = self.path / name
        return path if path.exists() else None


def write(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    writers: Mapping[str, Callable[[Path], None]],
) -> Checkpoint:
    """Write a checkpoint; each writer creates the file it is given the path of.

    Checkpoints of later steps go: training resumed before them, as they were damaged.
    On any error nothing is left behind, the older checkpoints stand, and the error is raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:09d}"
    temporary = folder / f"{_TEMPORARY_PREFIX}{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        files = {}
        for name, writer in writers.items():
            path = temporary / name
            writer(path)
            _fsync(path)
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        document = {"format": FORMAT, "step": step, "files": files, "state": dict(state)}
        (temporary / "state.json").write_text(json.dumps(document), encoding="utf-8")
        _fsync(temporary / "state.json")
        _fsync(temporary)
        shutil.rmtree(final, ignore_errors=True)  # one that was found damaged
        temporary.rename(final)
        _fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(folder, step)
    return Checkpoint(final, step, dict(state))


def newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; `warn` is told of each one that is not."""
    for step, path in sorted(_all(folder), reverse=True):
        try:
            return _read(path, step)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warn(f"checkpoint {path.name} is damaged and not used: {error}")
    return None


def paths(folder: Path) -> list[Path]:
    """The checkpoints, the newest first, whole or not."""
    return [path for _, path in sorted(_all(folder), reverse=True)]


def _read(path: Path, step: int) -> Checkpoint:
    document = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if document["format"] != FORMAT:
        raise ValueError(f"its format is {document['format']!r}, not {FORMAT}")
    if document["step"] != step:
        raise ValueError(f"it says that it is of step {document['step']}")
    for name, facts in document["files"].items():
        size = (path / name).stat().st_size
        if size != facts["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {facts['bytes']}")
        if _sha256(path / name) != facts["sha256"]:
            raise ValueError(f"{name} does not match its SHA-256")
    return Checkpoint(path, step, dict(document["state"]))


def _all(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in matches if match]


def _prune(folder: Path, written: int) -> None:
    kept = sorted((step for step, _ in _all(folder) if step <= written), reverse=True)[:KEEP]
    for step, path in _all(folder):
        if step not in kept:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):  # of a process that was killed
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
