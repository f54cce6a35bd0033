"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlq_sac import checkpoints


def write(folder: Path, step: int, content: bytes = b"weights") -> checkpoints.Checkpoint:
    return checkpoints.write(
        folder, step, {"at": step}, {"model.zip": lambda path: void(path.write_bytes(content))}
    )


def void(_: object) -> None:
    return None


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(folder: Path) -> tuple[int | None, list[str]]:
    warnings: list[str] = []
    found = checkpoints.newest(folder, warnings.append)
    return (None if found is None else found.step), warnings


def test_what_is_written_is_found(tmp_path: Path) -> None:
    written = write(tmp_path / "c", 12345)
    assert written.path.name == "step-000012345"
    found = checkpoints.newest(tmp_path / "c", pytest.fail)
    assert found == written
    assert found.state == {"at": 12345}
    model = found.file("model.zip")
    assert model is not None
    assert model.read_bytes() == b"weights"
    assert found.file("replay_buffer.npz") is None


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path / "none", pytest.fail) is None


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 20, 100, 1_000_000_000):
        write(tmp_path, step)
    assert steps(tmp_path) == ["step-000000100", "step-1000000000"]
    assert read(tmp_path) == (1_000_000_000, [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.zip").unlink(),
        lambda path: (path / "model.zip").write_bytes(b"weighty"),
        lambda path: (path / "model.zip").write_bytes(b"weight"),
        lambda path: (path / "state.json").unlink(),
        lambda path: (path / "state.json").write_text('{"format": 1, "st'),
        lambda path: (path / "state.json").write_bytes(b"\xff\xfe"),
        lambda path: (path / "state.json").write_text("[]"),
        lambda path: (path / "state.json").write_text('{"format": 2}'),
        lambda path: (path / "state.json").write_text(
            json.dumps({"format": 1, "step": 7, "files": {}, "state": {}})
        ),
        lambda path: (path / "model.zip").rename(path.parent / "model.zip"),
    ],
)
def test_a_damaged_one_is_stepped_over_with_a_warning(tmp_path: Path, damage: object) -> None:
    write(tmp_path, 10)
    assert callable(damage)
    damage(write(tmp_path, 20).path)
    step, warnings = read(tmp_path)
    assert step == 10
    assert len(warnings) == 1
    assert "step-000000020 is damaged" in warnings[0]


def test_a_damaged_later_one_does_not_outlive_the_next(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 90).path / "model.zip").write_bytes(b"")
    write(tmp_path, 50)  # resumed from 10
    assert steps(tmp_path) == ["step-000000010", "step-000000050"]


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (write(tmp_path, 10).path / "model.zip").write_bytes(b"")
    write(tmp_path, 10)
    assert read(tmp_path) == (10, [])


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """A real write that really fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_older_one_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 10)
    with files_at_most(1 << 20), pytest.raises(OSError, match="large"):
        write(tmp_path, 20, b"x" * (2 << 20))
    assert steps(tmp_path) == ["step-000000010"]
    assert read(tmp_path) == (10, [])


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-000000005").mkdir(parents=True)
    assert read(tmp_path) == (None, [])
    write(tmp_path, 10)
    assert steps(tmp_path) == ["step-000000010"]
