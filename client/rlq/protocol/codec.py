"""Bytes on the wire.

A message is three frames: `b"rlq" + version byte`, the sender's request id (1 to 16 bytes,
echoed in the reply), and a msgpack body.  The header frame comes first so that a peer of
another version can be told so in words rather than by a decoding error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec

from rlq.errors import SAME_VERSION, ProtocolError
from rlq.protocol import PROTOCOL_VERSION
from rlq.protocol.messages import Error, Reply, Request

HEADER = b"rlq" + bytes([PROTOCOL_VERSION])
#: A submission of 100,000 jobs that share one environment fits; a memory bomb does not.
BODY_BYTES_MAX = 64 * 1024 * 1024
REQUEST_ID_BYTES_MAX = 16

_encoder = msgspec.msgpack.Encoder()


# Each side reads one of the two, and building a decoder takes a millisecond.


@cache
def _request_decoder() -> msgspec.msgpack.Decoder[Request]:
    return msgspec.msgpack.Decoder(Request)


@cache
def _reply_decoder() -> msgspec.msgpack.Decoder[Reply]:
    return msgspec.msgpack.Decoder(Reply)


def encode(request_id: bytes, message: Request | Reply) -> list[bytes]:
    return [HEADER, request_id, _encoder.encode(message)]


def decode_request(frames: Sequence[bytes]) -> tuple[bytes, Request]:
    """The request id and the request.

    Raises:
        ProtocolError: the frames are not a request of this version.
    """
    request_id, body = _open(frames)
    try:
        return request_id, _request_decoder().decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"cannot read the request: {error}") from error


def decode_reply(frames: Sequence[bytes]) -> tuple[bytes, Reply]:
    """The request id and the reply.

    Raises:
        ProtocolError: the frames are not a reply of this version.
    """
    request_id, body = _open(frames)
    try:
        return request_id, _reply_decoder().decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"cannot read the reply: {error}") from error


def request_id_of(frames: Sequence[bytes]) -> bytes:
    """The request id of a message that could not be read, as far as it can be made out."""
    return frames[1][:REQUEST_ID_BYTES_MAX] if len(frames) > 1 else b""


def error_reply(error: Exception) -> Error:
    kind = getattr(error, "kind", "internal")
    return Error(
        kind=kind,
        message=str(error) or type(error).__name__,
        hint=getattr(error, "hint", None),
    )


def _open(frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    if len(frames) != 3:
        raise ProtocolError(f"a message has 3 frames, this one has {len(frames)}")
    header, request_id, body = frames
    if header != HEADER:
        if len(header) == len(HEADER) and header.startswith(b"rlq"):
            raise ProtocolError(
                f"the other side speaks protocol {header[3]}, this one {PROTOCOL_VERSION}",
                hint=SAME_VERSION,
            )
        raise ProtocolError("this is not an rlq message")
    if not 1 <= len(request_id) <= REQUEST_ID_BYTES_MAX:
        raise ProtocolError(f"a request id has 1 to {REQUEST_ID_BYTES_MAX} bytes")
    if len(body) > BODY_BYTES_MAX:
        raise ProtocolError(f"a message has at most {BODY_BYTES_MAX} bytes, this one {len(body)}")
    return request_id, body
