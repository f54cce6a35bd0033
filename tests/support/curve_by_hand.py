"""A CurveZMQ client (RFC 26) by hand, which says in its handshake what libzmq's would never say.

libzmq's own libsodium does the boxes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

import pytest
import zmq

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
MAC_BYTES = 16


def sodium() -> ctypes.CDLL:
    bundled = Path(zmq.__file__).parents[1] / "pyzmq.libs"
    for name in [*map(str, bundled.glob("libsodium*")), "libsodium.so.23"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("no libsodium")


class CurveByHand:
    """Connected, with `metadata` in its INITIATE; `send` sends a message of one frame."""

    def __init__(
        self,
        address: tuple[str, int],
        server_key: bytes,
        public: bytes,
        secret: bytes,
        metadata: dict[bytes, bytes],
    ) -> None:
        self._lib = sodium()
        self._nonces = 0
        short_public, self._short_secret = self._pair()
        self.socket = socket.create_connection(address, timeout=20)
        self.socket.sendall(GREETING)
        self._exactly(64)
        number = self._number()
        hello = self._box(bytes(64), b"CurveZMQHELLO---" + number, server_key, self._short_secret)
        self._command(b"\x05HELLO\x01\x00" + bytes(72) + short_public + number + hello)
        welcome = self._read_frame()
        assert welcome.startswith(b"\x07WELCOME"), welcome
        nonce, box = b"WELCOME-" + welcome[8:24], welcome[24:]
        opened = self._open(box, nonce, server_key, self._short_secret)
        self._server_short, cookie = opened[:32], opened[32:]
        tail = os.urandom(16)
        vouch = self._box(
            short_public + server_key, b"VOUCH---" + tail, self._server_short, secret
        )
        said = b"".join(
            bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
            for name, value in metadata.items()
        )
        number = self._number()
        initiate = self._box(
            public + tail + vouch + said,
            b"CurveZMQINITIATE" + number,
            self._server_short,
            self._short_secret,
        )
        self._command(b"\x08INITIATE" + cookie + number + initiate)

    def ready(self) -> bytes:
        """What the server answers to the handshake (it has to be tended meanwhile)."""
        return self._read_frame()

    def send(self, body: bytes) -> None:
        number = self._number()
        box = self._box(
            b"\0" + body, b"CurveZMQMESSAGEC" + number, self._server_short, self._short_secret
        )
        message = b"\x07MESSAGE" + number + box
        self.socket.sendall(bytes([0, len(message)]) + message)

    def close(self) -> None:
        self.socket.close()

    def _number(self) -> bytes:
        self._nonces += 1
        return struct.pack(">Q", self._nonces)

    def _pair(self) -> tuple[bytes, bytes]:
        public, secret = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
        assert self._lib.crypto_box_keypair(public, secret) == 0
        return public.raw, secret.raw

    def _box(self, text: bytes, nonce: bytes, to: bytes, secret: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(text) + MAC_BYTES)
        size = ctypes.c_ulonglong(len(text))
        assert self._lib.crypto_box_easy(out, text, size, nonce, to, secret) == 0
        return out.raw

    def _open(self, box: bytes, nonce: bytes, of: bytes, secret: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(box) - MAC_BYTES)
        size = ctypes.c_ulonglong(len(box))
        assert self._lib.crypto_box_open_easy(out, box, size, nonce, of, secret) == 0
        return out.raw

    def _command(self, body: bytes) -> None:
        size = bytes([4, len(body)]) if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body))
        self.socket.sendall(size + body)

    def _read_frame(self) -> bytes:
        flags = self._exactly(1)[0]
        size = struct.unpack(">Q", self._exactly(8))[0] if flags & 2 else self._exactly(1)[0]
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            part = self.socket.recv(size - len(got))
            assert part, "the server hung up"
            got += part
        return got
