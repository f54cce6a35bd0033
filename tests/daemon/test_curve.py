"""The request socket for other machines: who is let in, as whom, and what strangers can do."""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from tests.support.curve_by_hand import CurveByHand
from tests.support.waiting import wait_until
from zmq.utils import z85

from rlq.errors import UnavailableError
from rlq.protocol import keys
from rlqd.adapters import curve
from rlqd.adapters.curve import CurveServer, Received
from rlqd.adapters.zeromq import Server

SECRET = curve.make_secret()
KNOWN, UNKNOWN = curve.make_secret(), curve.make_secret()
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"%s" + b"\x00" + bytes(31)
ME = os.geteuid()
Dial = Callable[..., zmq.Socket[bytes]]


def greeting(mechanism: bytes) -> bytes:
    return GREETING.replace(b"%s", mechanism.ljust(20, b"\0"))


@pytest.fixture
def known() -> set[bytes]:
    return {curve.public_of(KNOWN)}


@pytest.fixture
def server(known: set[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[CurveServer]:
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 500)
    with CurveServer(
        "127.0.0.1",
        0,
        SECRET,
        knows=known.__contains__,
        connections_max=20,
        message_bytes_max=100_000,
    ) as made:
        yield made


@pytest.fixture
def dial(server: CurveServer) -> Iterator[Dial]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealers: list[zmq.Socket[bytes]] = []

    def connect(
        secret: bytes | None = KNOWN, server_key: bytes = server.public
    ) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealers.append(dealer)
        if secret is not None:
            dealer.curve_secretkey = z85.encode(secret)
            dealer.curve_publickey = zmq.curve_public(z85.encode(secret))
            dealer.curve_serverkey = z85.encode(server_key)
        dealer.connect(server.endpoint)
        return dealer

    yield connect
    for dealer in dealers:
        dealer.close(linger=0)
    context.destroy(linger=0)


def raw(server: CurveServer, *parts: bytes) -> socket.socket:
    connection = socket.create_connection(
        ("127.0.0.1", int(server.endpoint.rpartition(":")[2])), timeout=20
    )
    connection.sendall(b"".join(parts))
    return connection


def receive(server: CurveServer, count: int = 1) -> list[Received]:
    got: list[Received] = []

    def look() -> list[Received]:
        server.socket.poll(5)
        server.tend()
        got.extend(server.receive())
        return got

    return wait_until(look, lambda seen: len(seen) >= count)


def closed_by_server(server: CurveServer, connection: socket.socket) -> bytes:
    """What it said before it hung up."""
    said = b""
    connection.settimeout(0.01)

    def look() -> bool:
        nonlocal said
        server.tend()
        assert server.receive() == []
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        said += part
        return not part

    wait_until(look, bool)
    return said


def tended(server: CurveServer) -> CurveServer:
    server.tend()
    return server


def assert_serves(server: CurveServer, dial: Dial) -> None:
    client = dial()
    client.send(b"sane")
    [got] = receive(server)
    assert (got.key, got.frames) == (curve.public_of(KNOWN), [b"sane"])
    assert server.send(got.route, [b"yes"], ME)
    assert client.poll(20_000)
    assert client.recv() == b"yes"


# ---- who is let in, as whom --------------------------------------------------------


def test_a_message_comes_with_the_key_that_was_proved_and_the_reply_finds_its_way(
    server: CurveServer, dial: Dial, known: set[bytes]
) -> None:
    other = curve.make_secret()
    known.add(curve.public_of(other))
    first, second = dial(), dial(other)
    first.send_multipart([b"h", b"1", b"I am root"])
    second.send_multipart([b"h", b"2", curve.public_of(KNOWN)])
    by_id = {got.frames[1]: got for got in receive(server, 2)}
    assert by_id[b"1"].key == curve.public_of(KNOWN)
    assert by_id[b"2"].key == curve.public_of(other)
    for id, got in by_id.items():
        assert server.send(got.route, [b"re", id], ME)
    assert first.recv_multipart() == [b"re", b"1"]
    assert second.recv_multipart() == [b"re", b"2"]


@pytest.mark.parametrize(
    ("secret", "server_key", "reaches_us"),
    [
        (UNKNOWN, curve.public_of(SECRET), True),
        (KNOWN, curve.public_of(UNKNOWN), False),
        (None, b"", False),
    ],
    ids=["a key that is not enrolled", "another server's key", "no key"],
)
def test_whom_we_do_not_know_gets_silence(
    server: CurveServer, dial: Dial, secret: bytes | None, server_key: bytes, reaches_us: bool
) -> None:
    stranger = dial(secret, server_key)
    monitor = stranger.get_monitor_socket(zmq.EVENT_ALL)
    stranger.send(b"let me in")
    events: set[int] = set()

    def look() -> set[int]:
        server.tend()
        assert server.receive() == []
        while monitor.poll(0):
            events.add(struct.unpack_from("=H", monitor.recv_multipart()[0])[0])
        return events

    wait_until(look, lambda seen: zmq.EVENT_DISCONNECTED in seen)
    stranger.disable_monitor()
    monitor.close()
    assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
    # An ERROR of the server, which would tell, is an event of its own.
    assert zmq.EVENT_HANDSHAKE_FAILED_AUTH not in events
    assert not stranger.poll(0)
    assert bool(server.refused) is reaches_us
    assert_serves(server, dial)


@pytest.mark.parametrize(
    "spoken",
    [
        b"\x01\x00" + b"\x03\x01hi" + b"\x04\x00you",
        b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + b"\x01\x02hi" + b"\x00\x03you",
        greeting(b"NULL") + b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
        greeting(b"PLAIN") + b"\x04\x10\x05HELLO\x04root\x04root",
        greeting(b"CURVE") + b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
        greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
        b"GET / HTTP/1.1\r\nHost: lab-gpu1\r\n\r\n",
    ],
    ids=[
        "ZMTP 1",
        "ZMTP 2",
        "no mechanism",
        "PLAIN",
        "READY too soon",
        "a hello of noughts",
        "web",
    ],
)
def test_who_does_not_prove_a_key_is_thrown_out(
    server: CurveServer, dial: Dial, spoken: bytes
) -> None:
    with raw(server, spoken) as stranger:
        said = closed_by_server(server, stranger)
    # Not a word but the greeting, which ZMTP's server sends to everybody.
    assert len(said) <= 64
    assert_serves(server, dial)


def test_a_user_that_a_handshake_claims_is_not_believed(server: CurveServer) -> None:
    """Its key is enrolled and proved; what else it says of itself in the handshake is its own."""
    other = keys.show_key(curve.public_of(UNKNOWN)).encode()
    client = CurveByHand(
        ("127.0.0.1", int(server.endpoint.rpartition(":")[2])),
        server.public,
        curve.public_of(KNOWN),
        KNOWN,
        {b"Socket-Type": b"DEALER", b"User-Id": other, b"user-id": other, b"X-User-Id": other},
    )
    wait_until(lambda: tended(server).connections, lambda n: n == 1)
    wait_until(lambda: ready(server, client), bool)
    client.send(b"I am the other")
    [got] = receive(server)
    assert (got.key, got.frames) == (curve.public_of(KNOWN), [b"I am the other"])
    client.close()


def ready(server: CurveServer, client: CurveByHand) -> bool:
    server.tend()
    return bool(select.select([client.socket], [], [], 0.01)[0]) and b"READY" in client.ready()


def test_a_key_is_let_in_no_longer_once_it_is_not_known(
    server: CurveServer, dial: Dial, known: set[bytes]
) -> None:
    assert_serves(server, dial)
    known.clear()
    late = dial()
    late.send(b"x")
    wait_until(lambda: tended(server).refused, bool)
    assert server.receive() == []


def test_who_cannot_tell_lets_nobody_in_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([RuntimeError("the directory is down")])

    def knows(key: bytes) -> bool:
        for failure in answers:
            raise failure
        return key == curve.public_of(KNOWN)

    monkeypatch.setattr(curve, "HANDSHAKE_MS", 500)
    with CurveServer("127.0.0.1", 0, SECRET, knows=knows) as server:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.curve_secretkey = z85.encode(KNOWN)
            dealer.curve_publickey = zmq.curve_public(z85.encode(KNOWN))
            dealer.curve_serverkey = z85.encode(server.public)
            dealer.connect(server.endpoint)
            dealer.send(b"x")
            # ZeroMQ tries again by itself, and the second time it can tell.
            assert receive(server)[0].frames == [b"x"]
            assert server.refused == 1
        context.destroy(linger=0)


# ---- what strangers can do ---------------------------------------------------------


def test_a_frame_that_claims_too_much_is_not_waited_for_before_the_handshake(
    server: CurveServer, dial: Dial
) -> None:
    for claim in (100_001, 2**40, 2**63 - 1, 2**64 - 1):
        with raw(server, greeting(b"CURVE"), b"\x06" + struct.pack(">Q", claim)) as stranger:
            closed_by_server(server, stranger)
    assert_serves(server, dial)


def test_who_says_nothing_is_hung_up_on(server: CurveServer, dial: Dial) -> None:
    with raw(server) as silent, raw(server, greeting(b"CURVE")) as half:
        closed_by_server(server, silent)
        closed_by_server(server, half)
    wait_until(lambda: tended(server).connections, lambda n: n == 0)
    assert_serves(server, dial)


def test_a_flood_of_connections_is_held_off_and_the_local_socket_does_not_notice(
    server: CurveServer, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    flood = 1000
    if hard < 4 * flood:
        pytest.skip(f"only {hard} descriptors may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * flood, hard))
    address = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
    with tempfile.TemporaryDirectory(prefix="rlq-") as folder, ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        local = stack.enter_context(Server(Path(folder) / "q.sock"))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        client = context.socket(zmq.DEALER)
        client.connect(f"ipc://{local.path}")
        strangers = [socket.socket() for _ in range(flood)]
        for stranger in strangers:
            stack.callback(stranger.close)
            stranger.setblocking(False)
            stranger.connect_ex(address)
        wait_until(lambda: tended(server).accepting, lambda accepting: not accepting)
        assert server.connections >= 20
        client.send(b"still there?")
        got = wait_until(lambda: (local.socket.poll(5), local.receive())[1], bool)
        assert local.send(got[0].route, [b"yes"])
        assert client.recv() == b"yes"
        for stranger in strangers:
            stranger.close()
        wait_until(lambda: tended(server).accepting, bool)
    assert_serves(server, dial)


def test_connections_at_the_limit_are_served_and_one_more_waits_for_its_turn(
    server: CurveServer, dial: Dial
) -> None:
    clients = [dial() for _ in range(20)]
    for client in clients:
        client.send(b"x")
    receive(server, 20)
    wait_until(lambda: tended(server).accepting, lambda accepting: not accepting)
    late = dial()
    late.send(b"late")
    for client in clients[:10]:
        client.close(linger=0)
    [got] = receive(server)
    assert got.frames == [b"late"]
    assert server.send(got.route, [b"yes"], ME)
    assert late.recv() == b"yes"


def test_a_client_that_does_not_read_never_blocks_the_server(
    server: CurveServer, dial: Dial
) -> None:
    lazy = dial()
    lazy.set(zmq.RCVHWM, 1)
    lazy.send(b"x")
    [got] = receive(server)
    sent = 0
    while server.send(got.route, [b"y" * 50_000], ME):
        sent += 50_000
        assert sent < curve.UNREAD_BYTES_MAX + 50_000, "replies pile up without bound"
    assert_serves(server, dial)


def test_too_many_frames_are_dropped(server: CurveServer, dial: Dial) -> None:
    client = dial()
    client.send_multipart([b"x"] * (curve.FRAMES_MAX + 1))
    client.send_multipart([b"y"] * curve.FRAMES_MAX)
    [got] = receive(server)
    assert got.frames == [b"y"] * curve.FRAMES_MAX
    assert server.dropped == 1


def test_a_port_that_is_taken_is_named(server: CurveServer) -> None:
    port = int(server.endpoint.rpartition(":")[2])
    with pytest.raises(UnavailableError, match=f"cannot listen on 127.0.0.1, port {port}"):
        CurveServer("127.0.0.1", port, SECRET, knows=lambda _: True)


# ---- the server's own key ----------------------------------------------------------


def test_the_secret_key_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    before = os.umask(0)
    try:
        secret = curve.load_secret(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert curve.load_secret(path) == secret
    assert keys.show_secret(secret) + "\n" == path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["server.key"]


def test_a_secret_key_that_is_damaged_or_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    path.write_text(keys.show_key(curve.public_of(SECRET)))
    with pytest.raises(UnavailableError, match="holds no secret key") as refused:
        curve.load_secret(path)
    assert refused.value.hint is not None
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError, match="cannot read"):
        curve.load_secret(path)
