"""One daemon per state folder.

The lock is flock(2) on an open file: the kernel lets go of it when the daemon dies, however
it dies, so there is no stale lock to clean up.  The pid in the file is for people only; the
socket's path on its second line is for clients that look elsewhere (`rlq.paths`).  The file is
never removed: somebody may be waiting on the one that is there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from rlq.errors import UnavailableError


class Lock:
    """Held until `release`, or until the process ends; not passed on to programs it starts."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def release(self) -> None:
        """Safe to repeat."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # a disk that has turned read-only under it
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(path: Path, *, serves: Path | None = None) -> Lock:
    """Take the lock without waiting.  `serves`: the socket on which the holder answers.

    Raises:
        UnavailableError: another process holds it (the message names its pid), or the file
            cannot be opened or locked at all.
    """
    while True:
        fd = _open(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 300, 0).decode(errors="replace").split()
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _held(path, holder) from error
            raise UnavailableError(
                f"cannot lock {path}: {error.strerror}",
                hint="choose a state folder on a local disk with --state-dir",
            ) from error
        if _is(path, fd):
            break
        os.close(fd)  # the file was removed and perhaps made anew since we opened it
    os.ftruncate(fd, 0)
    with contextlib.suppress(OSError):  # a full disk: the lock itself is held, and needs no room
        # The host's name is for state folders that several machines mount.
        note = f"{os.getpid()} {socket.gethostname()}\n"
        os.pwrite(fd, note.encode() + (os.fsencode(serves) + b"\n" if serves else b""), 0)
    return Lock(path, fd)


def _open(path: Path) -> int:
    try:
        # NFS knows flock as a byte-range lock, which wants a file open for writing.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UnavailableError(
            f"cannot open {path}: {error.strerror}",
            hint="choose another state folder with --state-dir",
        ) from error


def _is(path: Path, fd: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def _held(path: Path, holder: list[str]) -> UnavailableError:
    pid = holder[0] if holder else "unknown"
    host = holder[1] if len(holder) > 1 else ""
    where = f" on {host}" if host and host != socket.gethostname() else ""
    return UnavailableError(
        f"an rlqd already runs on the state folder {path.parent} (pid {pid}{where})",
        hint=f"use it, stop it with `rlq daemon stop` (should it not answer: `kill {pid}`; running"
        " jobs run on), or choose another folder with --state-dir",
    )
