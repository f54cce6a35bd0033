"""The request socket, with real clients, strangers, and peers that speak no ZeroMQ at all."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import select
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from rlq.errors import UnavailableError
from rlqd.adapters.zeromq import (
    FRAMES_MAX,
    REPLIES_UNREAD_MIN,
    Peer,
    Received,
    Server,
    check_peer_address,
)

US = Peer(os.geteuid(), os.getegid(), os.getpid())
STRANGER = 12345
T = TypeVar("T")

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BODY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY


def frame(body: bytes, more: bool = False) -> bytes:
    if len(body) < 256:
        return bytes([more, len(body)]) + body
    return bytes([2 | more]) + struct.pack(">Q", len(body)) + body


@pytest.fixture
def path() -> Iterator[Path]:
    # pytest's own folders are closed to strangers and may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="rlq-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder) / "q.sock"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    with Server(path, mode=0o666, message_bytes_max=100_000) as made:
        yield made


@pytest.fixture
def dial() -> Iterator[Callable[[Path], zmq.Socket[bytes]]]:
    context = zmq.Context()
    dealers: list[zmq.Socket[bytes]] = []

    def connect(path: Path) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        dealers.append(dealer)
        dealer.connect(f"ipc://{path}")
        return dealer

    yield connect
    for dealer in dealers:
        dealer.close(linger=0)
    context.term()


def wait_until(look: Callable[[], T], what: str, seconds: float = 20) -> T:
    end = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < end, f"{what}: last saw {seen!r}"
        threading.Event().wait(0.005)
    return seen


def receive(server: Server, count: int = 1) -> list[Received]:
    got: list[Received] = []

    def enough() -> list[Received] | None:
        server.socket.poll(50)
        got.extend(server.receive())
        return got if len(got) >= count else None

    wait_until(enough, f"{count} messages; so far {got}")
    return got


def raw(path: Path, *parts: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    try:
        connection.connect(str(path))
        connection.sendall(b"".join(parts))
    except OSError:
        connection.close()
        raise
    return connection


def shaken(path: Path, *parts: bytes) -> socket.socket:
    """A peer that keeps to ZMTP until it is connected, and then sends `parts`."""
    connection = raw(path, GREETING)
    answer = b""
    while b"READY" not in answer:  # libzmq hangs up on one who does not wait for it
        answer += connection.recv(4096)
    connection.sendall(READY + b"".join(parts))
    return connection


def closed_by_server(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def as_stranger(act: Callable[[], None]) -> None:
    """Run in a thread whose effective user is another: Linux keeps credentials by thread."""
    number = {"x86_64": 117, "aarch64": 147}.get(platform.machine())
    if os.geteuid() != 0 or number is None:
        pytest.skip("needs root to become somebody else")
    failures: list[BaseException] = []

    def run() -> None:
        try:
            syscall = ctypes.CDLL(None, use_errno=True).syscall
            assert syscall(number, -1, STRANGER, -1) == 0
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_a_request_comes_with_the_kernels_word_and_the_reply_finds_its_way(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    first, second = dial(server.path), dial(server.path)
    first.send_multipart([b"h", b"1", b"body"])
    second.send_multipart([b"h", b"2", b"body"])
    by_id = {got.frames[1]: got for got in receive(server, 2)}
    assert {got.peer for got in by_id.values()} == {US}
    assert by_id[b"1"].frames == [b"h", b"1", b"body"]
    for id, got in by_id.items():
        assert server.send(got.route, [b"re", id])
    assert first.recv_multipart() == [b"re", b"1"]
    assert second.recv_multipart() == [b"re", b"2"]


def test_a_stranger_is_known_as_a_stranger(server: Server) -> None:
    connections: list[socket.socket] = []
    as_stranger(lambda: connections.append(shaken(server.path, frame(b"hello"))))
    [got] = receive(server)
    assert got.frames == [b"hello"]
    assert got.peer is not None
    assert (got.peer.uid, got.peer.pid) == (STRANGER, os.getpid())
    connections[0].close()


def test_a_private_socket_lets_no_stranger_connect(path: Path) -> None:
    def attempt() -> None:
        with pytest.raises(PermissionError):
            raw(path)

    with Server(path, mode=0o600):
        as_stranger(attempt)
        raw(path).close()


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
@pytest.mark.parametrize("umask", [0, 0o077])
def test_the_socket_has_its_mode_whatever_the_umask(path: Path, mode: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        with Server(path, mode=mode):
            assert path.stat().st_mode & 0o777 == mode
            assert os.umask(umask) == umask
    finally:
        os.umask(before)


def test_this_libzmq_tells_who_speaks() -> None:
    assert check_peer_address()


@pytest.mark.parametrize(
    "spoken",
    [
        # ZMTP 1.0: greeting, then length and flags before each frame; 2.0: a signature, then
        # flags and length.  Neither has a place for metadata, so libzmq names no peer.
        b"\x01\x00" + b"\x03\x01hi" + b"\x04\x00you",
        b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + b"\x01\x02hi" + b"\x00\x03you",
    ],
    ids=["ZMTP 1.0", "ZMTP 2.0"],
)
def test_whom_the_kernel_does_not_name_is_not_served(server: Server, spoken: bytes) -> None:
    # An old handshake made anybody the daemon's own user.
    connection = raw(server.path, spoken)
    try:
        wait_until(lambda: server.receive() or server.dropped, "the message's fate")
        assert (server.receive(), server.dropped) == ([], 1)
    finally:
        connection.close()


def test_a_peer_address_that_a_handshake_claims_is_not_believed(server: Server) -> None:
    def property(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    claims = b"".join(
        property(name, value)
        for name, value in (
            (b"Peer-Address", b"localhost:0:0:1"),
            (b"User-Id", b"root"),
            (b"peer-address", b"localhost:0:0:1"),
        )
    )
    connections: list[socket.socket] = []

    def claim() -> None:
        connection = raw(server.path, GREETING)
        connections.append(connection)
        answer = b""
        while b"READY" not in answer:
            answer += connection.recv(4096)
        body = READY_BODY + claims
        connection.sendall(b"\x04" + bytes([len(body)]) + body + frame(b"I am root"))

    if os.geteuid() == 0:
        as_stranger(claim)
    else:
        claim()
    [got] = receive(server)
    assert got.peer is not None
    assert got.peer.uid == (STRANGER if os.geteuid() == 0 else os.geteuid())
    connections[0].close()


def test_nothing_waiting_is_an_empty_list(server: Server) -> None:
    assert server.receive() == []


def test_one_round_takes_at_most_the_limit_and_loses_nothing(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    client = dial(server.path)
    for n in range(500):
        client.send(b"%d" % n)
    got: list[bytes] = []

    def drain() -> bool:
        server.socket.poll(50)
        one_round = server.receive(10)
        assert len(one_round) <= 10
        got.extend(message.frames[0] for message in one_round)
        return len(got) == 500

    wait_until(drain, "500 messages")
    assert got == [b"%d" % n for n in range(500)]


def test_a_flood_from_one_client_does_not_keep_another_waiting(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    flood, other = dial(server.path), dial(server.path)
    sent = 0
    with suppress(zmq.Again):  # once every queue on the way is full
        while sent < 2000:
            flood.send(b"flood", zmq.NOBLOCK)
            sent += 1
    wait_until(lambda: server.receive(1), "the flood has begun")
    other.send(b"other")
    seen: list[bytes] = []

    def look() -> bool:
        server.socket.poll(50)
        seen.extend(message.frames[0] for message in server.receive(5))
        return b"other" in seen

    wait_until(look, "the other client")
    # It came while the flood was far from drained.
    assert len(seen) < sent * 3 // 4


def test_a_client_with_many_requests_under_way_loses_no_reply(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    client = dial(server.path)
    for turn in range(8):
        for n in range(REPLIES_UNREAD_MIN):
            client.send(b"%d" % n)
        # One group commit, one burst of replies.
        for got in receive(server, REPLIES_UNREAD_MIN):
            assert server.send(got.route, got.frames), turn
        for n in range(REPLIES_UNREAD_MIN):
            assert client.poll(20_000), (turn, n)
            assert client.recv() == b"%d" % n


def test_a_reply_to_a_client_that_is_gone_is_dropped(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    client = dial(server.path)
    client.send(b"x")
    [got] = receive(server)
    client.close(linger=0)
    wait_until(lambda: not server.send(got.route, [b"late"]), "the server notices")
    assert server.dropped >= 1
    assert not server.send(b"nobody", [b"x"])


def test_a_client_that_does_not_read_never_blocks_the_server(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    lazy = shaken(server.path, frame(b"x"))
    [got] = receive(server)
    sent = 0
    while server.send(got.route, [b"y" * 10_000]):
        sent += 1
        assert sent < 10_000, "replies pile up without bound"
    client = dial(server.path)
    client.send(b"still there?")
    [served] = receive(server)
    assert server.send(served.route, [b"yes"])
    assert client.recv() == b"yes"
    lazy.close()


def test_the_bytes_that_wait_for_one_reader_are_bounded_over_all_their_connections(
    path: Path,
) -> None:
    with Server(path, unread_bytes_max=1_000_000) as server:
        lazy = [shaken(path, frame(b"x")) for _ in range(3)]
        routes = [got.route for got in receive(server, 3)]
        sent = 0
        for route in routes:
            while server.send(route, [b"y" * 100_000], STRANGER):
                sent += 100_000
                assert sent < 20_000_000, "replies pile up without bound"
        # Somebody else's count by themselves, and one reply of any size may wait.
        assert server.send(routes[0], [b"y" * 2_000_000], STRANGER + 1)
        assert not server.send(routes[0], [b"y" * 2_000_000], STRANGER + 1)
        # What can be read by nobody any more waits no longer, nor does what was read.
        lazy[0].close()
        wait_until(lambda: sends(server, routes[1]), "there is room")
        assert not server.send(routes[2], [b"y" * 900_000], STRANGER)
        left = 900_000
        while left > 0:
            left -= len(lazy[1].recv(65536))
        wait_until(lambda: sends(server, routes[2]), "it was read")
        for connection in lazy[1:]:
            connection.close()


def test_a_user_has_only_so_many_connections_and_others_do_not_notice(
    path: Path, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    with Server(path, mode=0o666, connections_per_user_max=10) as server:
        connections: list[socket.socket] = []
        as_stranger(lambda: connections.extend(raw(path) for _ in range(30)))
        for connection in connections:
            connection.setblocking(False)

        def hung_up_on() -> int:
            server.tend()
            return sum(poll_closed(connection) for connection in connections)

        wait_until(lambda: hung_up_on() == 20, "all but ten are hung up on")
        ours = [dial(path) for _ in range(8)]
        for client in ours:
            client.send(b"x")
        receive(server, 8)
        for connection in connections:
            connection.close()
        wait_until(lambda: connections_of(server) == 8, "they are gone")
        as_stranger(lambda: connections.append(shaken(path, frame(b"again"))))
        assert receive(server)[0].frames == [b"again"]
        connections[-1].close()


def connections_of(server: Server) -> int:
    server.tend()
    return len(server.connections)


def sends(server: Server, route: bytes) -> bool:
    server.receive()  # as in each turn: what has gone is noticed
    return server.send(route, [b"y" * 900_000], STRANGER)


def poll_closed(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLHUP)
    return bool(poller.poll(0))


def assert_serves(server: Server, dial: Callable[[Path], zmq.Socket[bytes]]) -> None:
    client = dial(server.path)
    client.send(b"sane")

    def look() -> list[Received]:
        server.socket.poll(50)
        return [message for message in server.receive() if message.frames == [b"sane"]]

    [got] = wait_until(look, "a sane client is heard")
    assert server.send(got.route, [b"yes"])
    assert client.recv() == b"yes"
    client.close(linger=0)


def test_too_large_a_frame_disconnects_its_sender_only(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    # Its header alone is enough: no byte of the body is waited for, or room made for it.
    for claim in (100_001, 2**40, 2**63 - 1, 2**64 - 1):
        with shaken(server.path, b"\x02" + struct.pack(">Q", claim)) as connection:
            assert closed_by_server(connection), claim
    assert_serves(server, dial)


def test_a_frame_of_the_largest_size_passes(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    client = dial(server.path)
    client.send(b"x" * 100_000)
    [got] = receive(server)
    assert len(got.frames[0]) == 100_000


def test_too_many_frames_are_dropped(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    client = dial(server.path)
    client.send_multipart([b"x"] * (FRAMES_MAX + 1))
    client.send_multipart([b"y"] * FRAMES_MAX)
    [got] = receive(server)
    assert got.frames == [b"y"] * FRAMES_MAX
    assert server.dropped == 1


def test_garbage_on_the_socket_harms_nobody(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    chance = random.Random(7)
    connections = []
    whole = GREETING + READY + frame(b"a", more=True) + frame(b"b")
    for n in range(300):
        match n % 4:
            case 0:  # noise
                data = chance.randbytes(chance.randrange(200))
            case 1:  # cut off anywhere
                data = whole[: chance.randrange(len(whole))]
            case 2:  # a few bytes wrong
                mutable = bytearray(whole)
                for _ in range(chance.randrange(1, 6)):
                    mutable[chance.randrange(len(mutable))] = chance.randrange(256)
                data = bytes(mutable)
            case _:  # a fair handshake, then noise
                data = chance.randbytes(chance.randrange(300))
        try:
            connection = (shaken if n % 4 == 3 else raw)(server.path, data)
        except (BrokenPipeError, ConnectionResetError):
            continue  # thrown out while still talking
        if chance.random() < 0.5:
            connection.close()
        else:
            connections.append(connection)
        server.receive()
    assert_serves(server, dial)
    for connection in connections:
        connection.close()


def test_a_socket_that_answers_is_not_taken_over(
    server: Server, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    with pytest.raises(UnavailableError, match="another daemon answers"):
        Server(server.path)
    assert_serves(server, dial)
    assert server.listening()


def test_a_socket_left_by_a_dead_daemon_is_replaced(
    path: Path, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert stat.S_ISSOCK(path.lstat().st_mode)
    with Server(path) as server:
        assert_serves(server, dial)
    assert not path.exists()


def test_a_file_in_the_way_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(UnavailableError, match="not a socket"):
        Server(path)
    assert path.read_text() == "precious"


def test_a_folder_that_is_not_there_is_named(path: Path) -> None:
    before = os.umask(0o022)
    with pytest.raises(UnavailableError, match=r"cannot listen on .*none/q\.sock"):
        Server(path.parent / "none" / "q.sock")
    assert os.umask(before) == 0o022


def test_a_removed_socket_file_is_noticed(server: Server) -> None:
    assert server.listening()
    server.path.unlink()
    assert not server.listening()


def test_a_removed_socket_file_is_put_back_and_who_is_connected_stays(
    path: Path, dial: Callable[[Path], zmq.Socket[bytes]]
) -> None:
    folder = path.parent / "run"
    folder.mkdir()
    with Server(folder / "q.sock") as server:

        def heard() -> Received:
            assert server.socket.poll(20_000)
            [message] = server.receive()
            return message

        early = dial(server.path)
        early.send(b"before")
        route = heard().route
        assert not server.listen_again()
        shutil.rmtree(folder)
        assert server.listen_again()
        assert server.listening()
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        early.send(b"after")
        assert heard().route == route
        assert_serves(server, dial)
    assert not server.path.exists()


def test_what_somebody_else_put_in_a_removed_sockets_place_is_left_alone(server: Server) -> None:
    server.path.unlink()
    server.path.write_text("precious")
    assert not server.listen_again()
    assert not server.listening()
    assert server.path.read_text() == "precious"
