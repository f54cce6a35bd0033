"""What can go wrong, split by whose doing it is.

RlqError                     exit  whose
├── UsageError                2    the caller: the words of the command or a value in them
├── RefusedError              3    the caller: a request this machine can never meet
├── NotFoundError             4    the caller: no such job
├── NotPermittedError         5    the caller: somebody else's job
├── UnreachableError          6    nobody answers on the socket
├── UnavailableError          7    the daemon cannot just now: draining, disk full
├── ProtocolError             8    the two sides speak different versions, or garbage
└── InternalError            70    ours: a bug in rlq

A message is one sentence; `hint` says what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class RlqError(Exception):
    """The root: catch this to catch everything rlq raises on purpose."""

    exit_code: ClassVar[int] = 70
    #: The name of this kind of error on the wire.
    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(RlqError):
    exit_code = 2
    kind = "usage"


class RefusedError(RlqError):
    exit_code = 3
    kind = "refused"


class NotFoundError(RlqError):
    exit_code = 4
    kind = "not-found"


class NotPermittedError(RlqError):
    exit_code = 5
    kind = "not-permitted"


class UnreachableError(RlqError):
    exit_code = 6
    kind = "unreachable"


class UnavailableError(RlqError):
    exit_code = 7
    kind = "unavailable"


class ProtocolError(RlqError):
    exit_code = 8
    kind = "protocol"


#: Of a ProtocolError.  Most often rlq was upgraded under a daemon that runs.
SAME_VERSION = (
    "run the same version of rlq and rlqd (`rlq status`, `rlq --version`); after an upgrade,"
    " restart rlqd: running jobs run on"
)


class InternalError(RlqError):
    exit_code = 70
    kind = "internal"


_BY_KIND: dict[str, type[RlqError]] = {
    error.kind: error
    for error in (
        UsageError,
        RefusedError,
        NotFoundError,
        NotPermittedError,
        UnreachableError,
        UnavailableError,
        ProtocolError,
        InternalError,
    )
}


def from_wire(kind: str, message: str, hint: str | None) -> RlqError:
    """Rebuild the error a daemon sent; a kind this side does not know is an RlqError."""
    if kind == ProtocolError.kind and hint is None:
        hint = SAME_VERSION  # an older daemon does not know the request
    return _BY_KIND.get(kind, RlqError)(message, hint=hint)
