"""Progress read from what programs write: progress.csv and TensorBoard event files."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto import (  # type: ignore[import-untyped]
    event_pb2,
    summary_pb2,
    tensor_pb2,
)
from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
    RecordWriter,
)
from tests.hooks.conftest import Jobs
from tests.support.waiting import wait_until

from rlq.hooks import follow

HEADER = "rollout/ep_rew_mean,time/fps,time/total_timesteps,train/loss\n"


# ---- tables ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEADER + "1.5,100,4000,\n2.5,100,8000,0.1\n", (8000, {"ep_rew_mean": 2.5})),
        (HEADER + "1.5,100,4000,\n2.5,100,80", (4000, {"ep_rew_mean": 1.5})),  # being written
        (HEADER + ",100,4000\n", (4000, {})),  # SB3 pads old rows late
        (HEADER + "nan,100,4000,\n", (4000, {})),
        (HEADER + "1,1,4000,\n\x00\x00\n", None),
        ('step,note\n5,"a, b"\n', (5, {})),
        ("global_step,charts/episodic_return\n1e3,7\n", (1000, {"episodic_return": 7.0})),
        ("a,b\n1,2\n", None),
        (HEADER, None),
        (HEADER[:20], None),
        ("", None),
        ("\n\n\n", None),
        ("step\n-5\n", None),
    ],
)
def test_the_last_whole_row_counts(
    tmp_path: Path, text: str, expected: tuple[int, dict[str, float]] | None
) -> None:
    file = tmp_path / "progress.csv"
    file.write_text(text)
    assert follow.last_row(str(file)) == expected


def test_a_long_table_is_read_at_both_ends(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text(HEADER + "".join(f"1,2,{i},3\n" for i in range(50_000)))
    assert follow.last_row(str(file)) == (49_999, {"ep_rew_mean": 1.0})


# ---- TensorBoard -------------------------------------------------------------------


def write(file: Path, *events: event_pb2.Event) -> None:
    with open(file, "ab") as stream:
        writer = RecordWriter(stream)
        for event in events:
            writer.write(event.SerializeToString())
        writer.flush()


def scalar(step: int, tag: str, value: float) -> Any:
    entry = summary_pb2.Summary.Value(tag=tag, simple_value=value)
    return event_pb2.Event(wall_time=1.0, step=step, summary=summary_pb2.Summary(value=[entry]))


def tensor(step: int, tag: str, value: float, *, packed: bool) -> Any:
    content = tensor_pb2.TensorProto(dtype=1)
    if packed:
        content.tensor_content = struct.pack("<f", value)
    else:
        content.float_val.append(value)
    entry = summary_pb2.Summary.Value(tag=tag, tensor=content)
    return event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[entry]))


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events.out.tfevents.1700000000.host.1.0"


def test_events_are_followed_from_record_to_record(events: Path) -> None:
    reader = follow.EventReader(str(events))
    write(events, event_pb2.Event(wall_time=1.0, file_version="brain.Event:2"))
    assert reader.read() is None
    write(events, scalar(1000, "rollout/ep_rew_mean", 1.5), scalar(1000, "train/loss", 9.0))
    assert reader.read() == (1000, {"ep_rew_mean": 1.5})
    assert reader.read() is None
    write(events, scalar(2000, "train/loss", 8.0))
    assert reader.read() == (2000, {"ep_rew_mean": 1.5})
    write(events, scalar(1500, "train/loss", 8.0))
    assert reader.read() == (2000, {"ep_rew_mean": 1.5}), "another run's tag does not go back"


@pytest.mark.parametrize("packed", [True, False])
def test_scalars_of_tensorflow_2(events: Path, packed: bool) -> None:
    write(events, tensor(7, "episodic_return", 2.5, packed=packed))
    assert follow.EventReader(str(events)).read() == (7, {"episodic_return": 2.5})


def test_a_record_counts_once_all_of_it_is_there(events: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    write(whole, scalar(1, "a", 1.0), scalar(2, "a", 1.0))
    data = whole.read_bytes()
    reader = follow.EventReader(str(events))
    seen = []
    for byte in range(len(data)):
        with open(events, "ab") as stream:
            stream.write(data[byte : byte + 1])
        if (found := reader.read()) is not None:
            seen.append((byte + 1, found[0]))
    assert seen == [(len(data) // 2, 1), (len(data), 2)]


@pytest.mark.parametrize("size", [100, 5 * 2**20, 9 * 2**20, 30 * 2**20])
def test_an_image_between_is_passed_over(events: Path, size: int) -> None:
    write(events, scalar(1, "a", 1.0), event_pb2.Event(graph_def=b"x" * size))
    reader = follow.EventReader(str(events))
    reader.read()
    write(events, scalar(2, "a", 1.0))
    assert wait_until(reader.read, lambda found: found is not None) == (2, {})


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 100, struct.pack("<QI", 4, 0) + b"\xff" * 8, b"\x00" * 64]
)
def test_what_is_no_event_file_ends_its_reading(events: Path, garbage: bytes) -> None:
    write(events, scalar(1, "a", 1.0))
    with open(events, "ab") as stream:
        stream.write(garbage)
    reader = follow.EventReader(str(events))
    assert reader.read() == (1, {})
    assert reader.read() is None


# ---- which file --------------------------------------------------------------------


def aged(file: Path, seconds: float) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    step = int(seconds)
    if ".tfevents." in file.name:
        write(file, scalar(step, "a", 1.0))
    else:
        file.write_text(f"step\n{step}\n")
    os.utime(file, (seconds, seconds))
    return file


def test_the_newest_file_that_was_written_since_the_start(tmp_path: Path) -> None:
    follower = follow.Follower(str(tmp_path), begun_s=1000.0)
    aged(tmp_path / "SAC_1" / "progress.csv", 999)
    assert follower.look() is None, "an earlier run's"
    aged(tmp_path / "SAC_2" / "progress.csv", 1001)
    assert follower.look() == (1001, {})
    assert follower.look() is None, "told already"
    aged(tmp_path / "a" / "b" / "events.out.tfevents.1.host", 1002)
    assert follower.look() == (1002, {})
    aged(tmp_path / "other.csv", 1003)
    assert follower.look() is None
    aged(tmp_path / "SAC_2" / "progress.csv", 1004)
    assert follower.look() == (1004, {})


def test_a_file_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    follower = follow.Follower(str(file), begun_s=1000.0)
    assert follower.look() is None
    aged(file, 999)
    assert follower.look() is None
    aged(file, 1001)
    assert follower.look() == (1001, {})


# ---- in a job ----------------------------------------------------------------------


def test_a_job_is_followed_to_its_file(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    program = """
import os, sys
if len(sys.argv) == 1:  # a child is not followed a second time
    import subprocess
    child = subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.PIPE)
os.chdir("/")
for line in sys.stdin:
    pass
if len(sys.argv) == 1:
    child.communicate()
"""
    script = tmp_path / "train.py"
    script.write_text(program)
    inbox = jobs.open_inbox()
    env = jobs.environment(
        (),
        {
            "RLQ_REPORT_SOCKET": str(inbox.path),
            "RLQ_PROGRESS_FROM": "runs",
            "RLQ_PROGRESS_TOTAL": "9000",
        },
    )
    with subprocess.Popen(
        [sys.executable, str(script)], env=env, cwd=tmp_path, stdin=subprocess.PIPE
    ) as job:
        try:
            (tmp_path / "runs" / "progress.csv").write_text(HEADER + "1.5,100,4000,\n")
            wait_until(lambda: list(inbox.reports), lambda reports: len(reports) == 1)
            (tmp_path / "runs" / "progress.csv").write_text(HEADER + "1.5,1,8000,\n")
            wait_until(lambda: list(inbox.reports), lambda reports: len(reports) == 2)
        finally:
            job.communicate()
            inbox.close()
    assert job.returncode == 0
    assert [(r["step"], r["total"], r["metrics"]) for r in inbox.reports] == [
        (4000, 9000, {"ep_rew_mean": 1.5}),
        (8000, 9000, {"ep_rew_mean": 1.5}),
    ]


def test_a_named_file_is_preferred_to_learn(jobs: Jobs, tmp_path: Path) -> None:
    program = """
from stable_baselines3.common.base_class import BaseAlgorithm
BaseAlgorithm().learn(5)
"""
    run = jobs(program, env={"RLQ_PROGRESS_FROM": str(tmp_path / "missing")})
    assert (run.code, run.err, run.reports) == (0, "", [])
