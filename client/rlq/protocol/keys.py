"""Keys of Curve25519 as people see them: 52 small letters and digits (base32), easy to paste.

libzmq's own writing (Z85) is full of characters that a shell takes for its own.
"""

from __future__ import annotations

import base64
import binascii

from rlq.errors import UsageError

KEY_BYTES = 32
KEY_CHARS = 52
#: What a secret key begins with: nobody takes it for a public one.
SECRET_PREFIX = "SECRET-"
#: Where a remote client looks for rlqd unless told otherwise.  IANA has assigned it to nobody.
PORT = 7757


def show_key(key: bytes) -> str:
    assert len(key) == KEY_BYTES
    return base64.b32encode(key).decode().rstrip("=").lower()


def parse_key(text: str) -> bytes:
    """A public key.

    Raises:
        UsageError: it is none, or a secret one.
    """
    if text.strip().upper().startswith(SECRET_PREFIX):
        raise UsageError(
            "this is a secret key, which nobody but its owner is to see",
            hint="make another with `rlq key --force`, and pass on the public one that it prints",
        )
    return _decode(text.strip(), f"{text!r} is not a public key")


def show_secret(key: bytes) -> str:
    return SECRET_PREFIX + show_key(key).upper()


def parse_secret(text: str) -> bytes:
    """
    Raises:
        UsageError: not a secret key.  The text is not in it.
    """
    text = text.strip()
    if not text.startswith(SECRET_PREFIX):
        raise UsageError("this is not a secret key")
    return _decode(text.removeprefix(SECRET_PREFIX).lower(), "this is not a secret key")


def _decode(text: str, refusal: str) -> bytes:
    hint = f"a key has {KEY_CHARS} small letters and digits, as `rlq key` prints it"
    if len(text) != KEY_CHARS or text != text.lower():
        raise UsageError(refusal, hint=hint)
    try:
        key = base64.b32decode(text.upper() + "====")
    except (binascii.Error, ValueError):
        raise UsageError(refusal, hint=hint) from None
    if show_key(key) != text:  # the last character has bits to spare
        raise UsageError(refusal, hint=hint)
    return key
