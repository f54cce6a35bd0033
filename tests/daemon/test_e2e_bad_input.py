"""Whatever arrives at its sockets, the daemon lives, answers everybody else, and stays small.

Seeded; a failing seed is printed: RLQ_E2E_SEED=… replays it.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import string
import struct
import time
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
import zmq
from tests.support.rlqd import Rlqd
from tests.support.waiting import wait_until

from rlq.errors import RlqError
from rlq.protocol import PROTOCOL_VERSION, codec
from rlq.protocol import messages as m
from rlq.protocol.states import JobState

SEED = int(os.environ.get("RLQ_E2E_SEED", "20261130"))
RSS_MIB_MAX = 250


@pytest.fixture
def rng() -> random.Random:
    print(f"RLQ_E2E_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture
def d(tmp_path: Path) -> Iterator[Rlqd]:
    with Rlqd(tmp_path, gpus=[{}]) as daemon:
        yield daemon


def assert_unharmed(d: Rlqd) -> None:
    """It is the same process, answers at once, still runs jobs, has not logged a traceback."""
    assert d.process is not None
    assert d.process.poll() is None, d.log()
    client = d.client()
    assert client.ping().pid == d.process.pid
    job = client.submit(["true"], gpus=0)
    d.until_state(client, job, JobState.COMPLETED)
    assert client.status().rss_mib < RSS_MIB_MAX
    assert "Traceback" not in d.log(), d.log()


# ---- below ZeroMQ ------------------------------------------------------------------

GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(1) + bytes(31)
)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HANDSHAKE = GREETING + bytes([4, len(READY)]) + READY


def frame(body: bytes, *, more: bool = False) -> bytes:
    if len(body) < 256:
        return bytes([more, len(body)]) + body
    return bytes([more | 2]) + struct.pack(">Q", len(body)) + body


def a_message(request: m.Request) -> bytes:
    frames = codec.encode(b"1", request)
    return b"".join(frame(f, more=f is not frames[-1]) for f in frames)


def pour(d: Rlqd, data: bytes) -> None:
    """As much of it as the daemon takes before it hangs up."""
    with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
        raw.settimeout(2)
        raw.connect(str(d.socket))
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass


def test_random_bytes_do_no_harm(d: Rlqd, rng: random.Random) -> None:
    for _ in range(60):
        start = rng.choice([b"", GREETING[: rng.randrange(64)], GREETING, HANDSHAKE])
        pour(d, start + rng.randbytes(rng.choice([0, 1, 10, 1000, 50_000])))
    assert_unharmed(d)


def test_a_message_cut_off_anywhere_does_no_harm(d: Rlqd, rng: random.Random) -> None:
    whole = HANDSHAKE + a_message(m.Submit(jobs=(m.JobSpec(argv=("true",), cwd="/"),)))
    for end in sorted(rng.sample(range(len(whole)), 60)):
        pour(d, whole[:end])
    assert d.client().list() == [], "half a submission was taken"
    assert_unharmed(d)


def test_flipped_bits_do_no_harm(d: Rlqd, rng: random.Random) -> None:
    whole = a_message(m.Submit(jobs=(m.JobSpec(argv=("/nonexistent",), cwd="/"),), env={"A": "b"}))
    for _ in range(80):
        broken = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        pour(d, HANDSHAKE + bytes(broken))
    assert_unharmed(d)


def test_announced_sizes_are_not_believed(d: Rlqd) -> None:
    for size in (2**31, 2**40, 2**63 - 1, 2**64 - 1, 65 * 2**20):
        pour(d, HANDSHAKE + bytes([2]) + struct.pack(">Q", size) + bytes(1000))
        pour(d, HANDSHAKE + frame(b"rlq\x01", more=True) + bytes([3]) + struct.pack(">Q", size))
    assert_unharmed(d)


def test_silent_connections_keep_nobody_waiting(d: Rlqd) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(100):
            raw = stack.enter_context(socket.socket(socket.AF_UNIX))
            raw.connect(str(d.socket))
            raw.sendall(HANDSHAKE[: number % len(HANDSHAKE)])
        assert_unharmed(d)


# ---- below the protocol ------------------------------------------------------------


@contextlib.contextmanager
def dealer(d: Rlqd) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.set(zmq.LINGER, 0)
    made.connect(f"ipc://{d.socket}")
    try:
        yield made
    finally:
        made.close()
        context.term()


def reply_to(asked: zmq.Socket[bytes], frames: list[bytes]) -> m.Reply:
    asked.send_multipart(frames)
    assert asked.poll(10_000), f"no answer to {frames!r:.200}"
    return codec.decode_reply(asked.recv_multipart())[1]


def test_another_version_is_told_so(d: Rlqd) -> None:
    with dealer(d) as asked:
        for version in (0, PROTOCOL_VERSION + 1, 255):
            _, request_id, body = codec.encode(b"7", m.Ping())
            reply = reply_to(asked, [b"rlq" + bytes([version]), request_id, body])
            assert isinstance(reply, m.Error)
            assert reply.kind == "protocol"
            assert f"protocol {version}" in reply.message
            assert reply.hint
    assert_unharmed(d)


def test_what_is_no_request_is_answered_with_an_error(d: Rlqd, rng: random.Random) -> None:
    encode = msgspec.msgpack.encode
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    bodies = [
        b"",
        b"\xc1",
        encode(None),
        encode([]),
        encode({}),
        encode({"type": "Nothing"}),
        encode({"type": "Pong", "version": "1", "protocol": 1, "pid": 1}),
        encode({"type": "Submit"}),
        encode({"type": "Submit", "jobs": "true"}),
        encode({"type": "Submit", "jobs": [{"argv": ["true"]}]}),
        encode({"type": "Submit", "jobs": [{"argv": [1], "cwd": "/"}]}),
        encode({"type": "Why", "id": 2**64 - 1}),
        encode({"type": "Why", "id": "1"}),
        encode({"type": "Cancel", "selection": {"states": ["NO_SUCH"]}}),
        encode({"type": "Cancel", "selection": {"ids": [[1]]}}),
        encode({"type": "List", "selection": {"ids": deep}}),
        b"\x81\xa4type\xa6\xff\xfe\xfd\xfc\xfb\xfa",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000 + b"\xc0",
        *(rng.randbytes(rng.randrange(1, 200)) for _ in range(100)),
    ]
    with dealer(d) as asked:
        for body in bodies:
            reply = reply_to(asked, [codec.HEADER, b"1", body])
            assert isinstance(reply, m.Error), body
            assert reply.kind in ("protocol", "usage", "not-found"), (body, reply)
        for frames in ([b"x"], [codec.HEADER], [codec.HEADER, b"1"], [b"", b"", b""]):
            assert isinstance(reply_to(asked, frames), m.Error)
        for number in (4, 7):
            assert isinstance(reply_to(asked, [codec.HEADER] * number), m.Error)
        asked.send_multipart([b"x"] * 500)  # too many even for an answer
    assert_unharmed(d)


def test_a_message_over_the_limit_ends_its_connection_only(d: Rlqd) -> None:
    with dealer(d) as asked:
        asked.send_multipart([codec.HEADER, b"1", bytes(65 * 2**20)])
        assert_unharmed(d)


def test_who_never_reads_answers_does_not_fill_the_memory(d: Rlqd) -> None:
    client = d.client()
    client.submit_many(
        [m.JobSpec(argv=("x" * 5000,), cwd="/", held=True) for _ in range(200)], env={}
    )
    with dealer(d) as greedy:
        for number in range(3000):
            with contextlib.suppress(zmq.Again):
                request = m.List(limit=20)
                greedy.send_multipart(codec.encode(b"%d" % number, request), zmq.NOBLOCK)
        assert_unharmed(d)


# ---- hostile values in well-formed requests -----------------------------------------

TEXTS = (
    *("", " ", "a", "x" * 300, "a\nb", "\x1b[2J", "%j%x%s", "../../x", "/", "é", "\u202e", "💥"),
    *("\0", "a\0b", "-1", "--now", "*", "[", "[!", "?" * 150, "' OR 1=1 --", "%" * 90),
)
NUMBERS = (0, 1, -1, 2, 7, 100, 101, 2**16, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63))


def hostile(kind: Any, rng: random.Random, name: str, folder: Path) -> Any:
    """Some value of this type, the stranger the likelier.  Nothing that would run for real."""
    origin, inner = get_origin(kind), get_args(kind)
    if name == "argv":
        # Never a program that exists: what is fuzzed here is the daemon.
        return tuple("/nonexistent/" + rng.choice(TEXTS) for _ in range(rng.randrange(3)))
    if name in ("log_path", "cwd"):
        return rng.choice(["", "x", "/nonexistent/x", str(folder / "log-%j-%x"), "/" + "x" * 5000])
    if origin in (typing.Union, types.UnionType):
        return hostile(rng.choice(inner), rng, name, folder)
    if kind is type(None):
        return None
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            count = rng.choice([0, 1, 2, 3])
            return tuple(hostile(inner[0], rng, name, folder) for _ in range(count))
        return tuple(hostile(part, rng, name, folder) for part in inner)
    if origin is dict:
        return {
            hostile(inner[0], rng, name, folder): hostile(inner[1], rng, name, folder)
            for _ in range(rng.randrange(3))
        }
    if kind is str:
        return rng.choice(TEXTS) + rng.choice(["", rng.choice(string.printable)])
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.choice(NUMBERS)
    if kind is float:
        soon = time.time() + 60
        return rng.choice([0.0, -1.0, soon, soon + 60, 1e300, math.inf, -math.inf, math.nan])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return rng.choice([*kind])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return a_struct(kind, rng, folder)
    raise AssertionError(f"{name}: {kind}")


def a_struct(kind: type[msgspec.Struct], rng: random.Random, folder: Path) -> Any:
    hints = get_type_hints(kind)
    fields = {
        field.name: hostile(hints[field.name], rng, field.name, folder)
        for field in msgspec.structs.fields(kind)
        if field.required or rng.random() < 0.5
    }
    return kind(**fields)


def test_hostile_values_are_refused_or_harmless(
    d: Rlqd, rng: random.Random, tmp_path: Path
) -> None:
    kinds = [kind for kind in get_args(m.Request) if kind is not m.Stop]
    client = d.client()
    mine = client.submit(["sleep", "600"], gpus=0, name="untouchable", priority=1000)
    d.until_state(client, mine, JobState.RUNNING)
    seen: set[str] = set()
    with dealer(d) as asked:
        for _ in range(1500):
            request = a_struct(rng.choice(kinds), rng, tmp_path)
            if isinstance(request, m.Wait):
                request = msgspec.structs.replace(request, timeout_ms=rng.choice([-5, 0, 3]))
            elif isinstance(request, m.Submit) and rng.random() < 0.5:
                # One hostile value at a time gets further in.
                good = m.JobSpec(argv=("/nonexistent/x",), cwd="/")
                bad = a_struct(m.JobSpec, rng, tmp_path)
                field = rng.choice(msgspec.structs.fields(m.JobSpec)).name
                request = m.Submit(
                    jobs=(msgspec.structs.replace(good, **{field: getattr(bad, field)}),)
                )
            reply = reply_to(asked, codec.encode(b"1", request))
            seen.add(type(reply).__name__)
            if isinstance(reply, m.Error):
                seen.add(reply.kind)
                assert reply.kind != "internal", (request, reply)
                assert reply.message, request
    assert {"Submitted", "Jobs", "Changed", "Waited", "Explanation", "usage"} <= seen, seen
    client.drain(False)
    for booking in client.bookings().bookings:
        client.unbook(booking.name)
    everything = client.list()
    assert mine in {job.id for job in everything}
    # What was let in has a place in every view.
    for job in everything[:50]:
        client.why(job.id)
    for verb in ("list", "history", "status", "gpus"):
        d.rlq(verb)
    with contextlib.suppress(RlqError):
        client.cancel(m.Selection(all=True), now=True)
    assert_unharmed(d)
    # And a restart can read all of it.
    d.kill9()
    d.start()
    assert len(d.client().list()) >= len(everything)


# ---- the report socket -------------------------------------------------------------


def test_hostile_reports_are_dropped(d: Rlqd, rng: random.Random) -> None:
    client = d.client()
    job = client.submit(["sleep", "600"], gpus=0)
    d.until_state(client, job, JobState.RUNNING)
    path = str(d.socket.with_name(f"{d.socket.stem}-report.sock"))
    good = b'{"v":1,"job":%d,"attempt":1,"t":1.0,"step":5,"total":10,"metrics":{}}' % job
    texts = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'"x"',
        b"[" * 5000,
        b'{"a":' * 1000,
        good.replace(b'"step":5', b'"step":-5'),
        good.replace(b'"step":5', b'"step":1e400'),
        good.replace(b'"step":5', b'"step":99999999999999999999999999'),
        good.replace(b'"step":5', b'"step":NaN'),
        good.replace(b'"total":10', b'"total":0'),
        good.replace(b'"total":10', b'"total":"ten"'),
        good.replace(b'"t":1.0', b'"t":Infinity'),
        good.replace(b'"attempt":1', b'"attempt":99'),
        good.replace(b'"metrics":{}', b'"metrics":{"x":NaN,"y":"z","":1}'),
        good.replace(b'"metrics":{}', b'"metrics":[1,2]'),
        good.replace(b'"job":%d' % job, b'"job":999'),
        good.replace(b'"job":%d' % job, b'"job":18446744073709551616'),
        b"\xff\xfe" + good,
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
        raw.settimeout(5)
        raw.connect(path)
        for _ in range(3):
            for text in texts:
                raw.send(text)
        for _ in range(500):
            broken = bytearray(good)
            for _ in range(rng.randrange(1, 8)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            raw.send(bytes(broken[: rng.randrange(1, len(broken) + 1)]))
        with contextlib.suppress(OSError):
            raw.send(bytes(200_000))
        raw.send(good.replace(b'"t":1.0', b'"t":1e12').replace(b'"step":5', b'"step":7'))
    shown = wait_until(
        lambda: client.get(job).progress, lambda p: p is not None and p.step in (5, 7)
    )
    assert shown is not None
    d.rlq("show", str(job))
    d.rlq("list")
    assert_unharmed(d)
