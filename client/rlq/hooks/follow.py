"""Inside a job: progress read from what the program writes anyway.

Two formats: SB3's progress.csv (a header, then a row for each log), and TensorBoard event files.
A thread looks at the newest such file once a second.  Standard library of Python 3.8; see the
rules in rlq/hooks.

A TensorBoard file is a sequence of TFRecords (length: 8 bytes, its checksum: 4, data, its
checksum: 4), each a protobuf `Event`.  Five of its fields are needed, so they are read here
rather than with a library that the job's Python need not have.  Checksums are not verified: a
record counts once all of it is there, and one that makes no sense ends the reading of its file.
"""

from __future__ import annotations

import csv
import io
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

LOOK_INTERVAL_S = 1.0
#: Read at most this much at a look; a backlog is caught up with over several.
READ_BYTES_MAX = 8 * 1024 * 1024
RECORD_BYTES_MAX = 64 * 1024 * 1024
#: The last row of a table is looked for in its last part.
TAIL_BYTES = 64 * 1024
FOLDERS_DEEP_MAX = 6

STEP_COLUMNS = (
    "time/total_timesteps",
    "total_timesteps",
    "num_timesteps",
    "timesteps_total",
    "global_step",
    "timesteps",
    "step",
    "steps",
)
#: By the last part of a column or tag.
REWARDS = ("ep_rew_mean", "episodic_return", "episode_reward", "episode_reward_mean")


def start(
    path: str,
    total: int | None,
    report: Callable[..., None],
    off: Callable[[object], None],
) -> None:
    """Follow `path`, a file or a folder, until the process ends."""
    begun_s = time.time() - 1.0  # file systems round times down
    path = os.path.abspath(path)  # before the program changes its working folder

    def run() -> None:
        follower = Follower(path, begun_s)
        try:
            while True:
                found = follower.look()
                if found is not None:
                    report(found[0], total, **found[1])
                time.sleep(LOOK_INTERVAL_S)
        except Exception as error:
            off(f"cannot follow {path}: {type(error).__name__}: {error}")

    threading.Thread(target=run, name="rlq-follow", daemon=True).start()


class Follower:
    """The newest file of those that were written to since `begun_s` (Unix seconds): a folder may
    hold earlier runs' files too."""

    def __init__(self, path: str, begun_s: float) -> None:
        self._path = path
        self._begun_s = begun_s
        self._file = ""
        self._events = EventReader("")
        self._seen: tuple[int, int] = (-1, -1)

    def look(self) -> tuple[int, dict[str, float]] | None:
        """(steps done, metrics) if there is something new."""
        try:
            file = self._newest()
            if file is None:
                return None
            if file != self._file:
                self._file, self._events, self._seen = file, EventReader(file), (-1, -1)
            if _is_events(file):
                return self._events.read()
            found = os.stat(file)
            seen = (found.st_mtime_ns, found.st_size)
            if seen == self._seen:
                return None
            self._seen = seen
            return last_row(file)
        except OSError:
            return None  # being replaced, or on a disk that is away: look again later

    def _newest(self) -> str | None:
        if os.path.isfile(self._path):
            return self._path if os.path.getmtime(self._path) >= self._begun_s else None
        newest: tuple[float, str] | None = None
        base_depth = self._path.rstrip("/").count("/")
        for folder, folders, names in os.walk(self._path):
            if folder.count("/") - base_depth >= FOLDERS_DEEP_MAX:
                folders.clear()
            for name in names:
                if not (name == "progress.csv" or _is_events(name)):
                    continue
                file = os.path.join(folder, name)
                try:
                    written_s = os.path.getmtime(file)
                except OSError:
                    continue
                if written_s >= self._begun_s and (newest is None or (written_s, file) > newest):
                    newest = (written_s, file)
        return None if newest is None else newest[1]


# ---- tables ------------------------------------------------------------------------


def last_row(file: str) -> tuple[int, dict[str, float]] | None:
    """The last whole row.  The header is read each time: SB3 writes the table anew when a
    column comes to it."""
    with open(file, "rb") as table:
        header = table.readline(TAIL_BYTES)
        begin = table.tell()
        size = table.seek(0, os.SEEK_END)
        table.seek(max(begin, size - TAIL_BYTES))
        tail = table.read(TAIL_BYTES)
    whole = tail[: tail.rfind(b"\n") + 1]
    if not header.endswith(b"\n") or not whole.strip():
        return None
    columns = _cells(header)
    row = dict(zip(columns, _cells(whole.splitlines()[-1])))  # noqa: B905  # Python 3.8
    for column in STEP_COLUMNS:
        step = _number(row.get(column))
        if step is not None and step >= 0:
            return int(step), _rewards(row)
    return None


def _cells(line: bytes) -> list[str]:
    return next(csv.reader(io.StringIO(line.decode("utf-8", "replace"))), [])


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _rewards(values: dict[str, Any]) -> dict[str, float]:
    rewards: dict[str, float] = {}
    for tag, value in values.items():
        name = tag.rsplit("/", 1)[-1]
        number = value if isinstance(value, float) else _number(value)
        if name in REWARDS and number is not None and math.isfinite(number):
            rewards["ep_rew_mean" if name == "ep_rew_mean" else name] = number
    return rewards


# ---- TensorBoard -------------------------------------------------------------------


def _is_events(name: str) -> bool:
    return ".tfevents." in os.path.basename(name)


class EventReader:
    """What was appended to one event file since the last `read`."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._offset = 0
        self._step = -1
        self._values: dict[str, float] = {}
        self._is_broken = False

    def read(self) -> tuple[int, dict[str, float]] | None:
        """(the highest step so far, metrics) if a record came."""
        if self._is_broken:
            return None
        with open(self._file, "rb") as events:
            events.seek(self._offset)
            data = events.read(READ_BYTES_MAX)
            at, has_come = 0, False
            while at + 12 <= len(data):
                (length,) = struct.unpack_from("<Q", data, at)
                if length > RECORD_BYTES_MAX:
                    self._is_broken = True
                    break
                end = at + 12 + length + 4
                if end > len(data):
                    if length > READ_BYTES_MAX // 2 and at == 0:
                        # Larger than a look: an image or a graph.  Skipped, once it is there.
                        if os.fstat(events.fileno()).st_size < self._offset + end:
                            break
                        at = end
                    break
                try:
                    has_come |= self._take(data[at + 12 : end - 4])
                except (IndexError, ValueError, struct.error):
                    self._is_broken = True
                    break
                at = end
            self._offset += at
        if not has_come:
            return None
        return self._step, _rewards(self._values)

    def _take(self, record: bytes) -> bool:
        step, values = event(record)
        if not values:
            return False
        self._step = max(self._step, step)
        self._values.update(values)
        return True


def event(record: bytes) -> tuple[int, dict[str, float]]:
    """(step, scalars by tag) of one `Event`.

    Raises:
        IndexError, ValueError, struct.error: it is none.
    """
    step, values = 0, {}
    for number, value in _fields(record):
        if number == 2 and isinstance(value, int):
            step = value if value < 2**63 else 0
        elif number == 5 and isinstance(value, bytes):  # Summary
            for kind, entry in _fields(value):
                if kind == 1 and isinstance(entry, bytes):
                    tag, scalar = _scalar(entry)
                    if tag and scalar is not None:
                        values[tag] = scalar
    return step, values


def _scalar(entry: bytes) -> tuple[str, float | None]:
    """A Summary.Value: a simple_value (torch, SB3), or a tensor of one float (TensorFlow 2)."""
    tag, scalar = "", None
    for number, value in _fields(entry):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, float):
            scalar = value
        elif number == 8 and isinstance(value, bytes):
            scalar = _tensor(value)
    return tag, scalar


def _tensor(tensor: bytes) -> float | None:
    fields = dict(_fields(tensor))
    if fields.get(1) != 1:  # dtype: DT_FLOAT
        return None
    for number in (4, 5):  # tensor_content, float_val
        packed = fields.get(number)
        if isinstance(packed, bytes) and len(packed) == 4:
            return float(struct.unpack("<f", packed)[0])
    single = fields.get(5)
    return single if isinstance(single, float) else None


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Field numbers and values of a protobuf message; a 32-bit value is taken for a float."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            number, at = _varint(message, at)
            yield key >> 3, number
        elif wire == 1:
            yield key >> 3, struct.unpack_from("<d", message, at)[0]
            at += 8
        elif wire == 2:
            length, at = _varint(message, at)
            if at + length > len(message):
                raise ValueError("a field is longer than its message")
            yield key >> 3, message[at : at + length]
            at += length
        elif wire == 5:
            yield key >> 3, struct.unpack_from("<f", message, at)[0]
            at += 4
        else:
            raise ValueError(f"wire type {wire}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than ten bytes")
