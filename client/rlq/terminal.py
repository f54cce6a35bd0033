"""The caller's side of `rlq run`: the socket it is found by, and its terminal or pipes.

The job connects to the caller, not the caller to the job: when the caller has gone, or ends
later, there is nobody to connect to or the connection ends, and so does the job (rlq.relay).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import signal
import socket
import struct
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from rlq import paths, relay

#: For the last frames of a job that is killed at once.
BYTES_AT_ONCE = 64 * 1024
#: What somebody at a terminal sends to a command without one.
PASSED_ON = (signal.SIGINT,)
#: What ends the caller, and so the job.
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Door:
    """A socket in a folder that only this user can reach, for one job to connect to."""

    def __init__(self) -> None:
        """
        Raises:
            UsageError: there is no safe place for it.
        """
        folder = paths.user_socket().parent
        _sweep(folder)
        name = f"run-{os.getpid()}-{secrets.token_hex(4)}.sock"
        self.path = paths.check_socket_path(folder / name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(self.path))
        self._socket.listen(4)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """The job's connection, once it is there; other users' are closed unheard."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", ucred)
        if uid != os.geteuid():
            connection.close()
            return None
        return connection

    def wait(self, timeout_s: float) -> socket.socket | None:
        """`accept`, or None after `timeout_s`."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return self.accept() if poller.poll(timeout_s * 1000) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Sockets of callers that were killed."""
    for left in folder.glob("run-*.sock"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            left.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Ended:
    """How it went.  `code`: the command's exit code, or minus the signal; None: the job's end of
    the connection went away without a word."""

    code: int | None
    was_stopped: bool


class CallerEndedError(Exception):
    """This process was told to end (`number`: by which signal)."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP as CallerEndedError inside: a job is cancelled, a terminal restored."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise CallerEndedError(number)

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raw(fd: int) -> Iterator[None]:
    """The terminal as a program that draws on it wants it; as it was afterwards."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield
    finally:
        with suppress(termios.error):  # it has been closed
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def size_of(fd: int) -> bytes:
    """struct winsize; of zeros where there is none."""
    empty = bytes(relay.WINSIZE_BYTES)
    try:
        return fcntl.ioctl(fd, termios.TIOCGWINSZ, empty)
    except OSError:
        return empty


class Line:
    """One job's connection, relayed to and from this process's stdin, stdout and stderr."""

    def __init__(self, connection: socket.socket, *, is_terminal: bool) -> None:
        self.connection = connection
        self.is_terminal = is_terminal
        self._frames = relay.Frames()
        self._out = bytearray()
        #: Bytes of stdin that the command has not taken yet.
        self._under_way = 0
        self._stdin: int | None = 0
        self._code: int | None = None
        self._was_stopped = False
        self._lost = False

    def run(self) -> Ended:
        """Until the command has ended or the job is gone.

        Raises:
            CallerEndedError: a signal told this process to end, or its terminal was closed.
            BrokenPipeError: nobody reads what the command prints.
        """
        self.connection.setblocking(False)
        with self.connection, ending_by_signal():
            if not self.is_terminal:
                return self._relay()
            with raw(0):
                return self._relay()

    def _relay(self) -> Ended:
        wake_in, wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        noticed = (signal.SIGWINCH,) if self.is_terminal else PASSED_ON
        before = {number: signal.signal(number, _no_more_than_wake) for number in noticed}
        woken = signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        try:
            if self.is_terminal:
                self._out += relay.frame(relay.SIZE, size_of(0))
            while self._code is None and not self._lost:
                self._turn(wake_in)
            return Ended(self._code, self._was_stopped)
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_in)
            os.close(wake_out)

    def _turn(self, wake_in: int) -> None:
        poller = select.poll()
        poller.register(wake_in, select.POLLIN)
        poller.register(self.connection, select.POLLIN | (select.POLLOUT if self._out else 0))
        if self._stdin is not None and self._under_way < relay.WINDOW_BYTES:
            poller.register(self._stdin, select.POLLIN)
        ready = dict(poller.poll())
        if wake_in in ready:
            self._signalled(os.read(wake_in, 512))
        if self._stdin is not None and self._stdin in ready:
            self._read_stdin()
        events = ready.get(self.connection.fileno(), 0)
        if events & select.POLLOUT:
            self._send()
        if events & ~select.POLLOUT:
            self._receive()

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGWINCH and self.is_terminal:
                self._out += relay.frame(relay.SIZE, size_of(0))
            elif number in PASSED_ON and not self.is_terminal:
                self._out += relay.frame(relay.SIGNAL, bytes([number]))

    def _read_stdin(self) -> None:
        assert self._stdin is not None
        try:
            data = os.read(self._stdin, BYTES_AT_ONCE)
        except OSError:
            data = b""  # closed, or EIO: the terminal is gone
        if data:
            self._under_way += len(data)
            self._out += relay.frame(relay.STDIN, data)
            return
        if self.is_terminal:
            raise CallerEndedError(signal.SIGHUP)
        self._stdin = None
        self._out += relay.frame(relay.NO_MORE)

    def _send(self) -> None:
        try:
            sent = self.connection.send(self._out[:BYTES_AT_ONCE])
        except BlockingIOError:
            return
        except OSError:
            # It has ended; how, is still to be read.
            self._out.clear()
            self._stdin = None
            return
        del self._out[:sent]

    def _receive(self) -> None:
        try:
            data = self.connection.recv(BYTES_AT_ONCE)
            heard = self._frames.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, heard = b"", []
        if not data:
            self._lost = True
        for kind, content in heard:
            if kind == relay.STDOUT:
                _write_all(1, content)
            elif kind == relay.STDERR:
                _write_all(2, content)
            elif kind == relay.TAKEN:
                self._under_way -= int.from_bytes(content, "big")
            elif kind == relay.STOPPING:
                self._was_stopped = True
                self.told_to_stop()
            elif kind == relay.EXIT:
                self._code = int.from_bytes(content, "big", signed=True)

    def told_to_stop(self) -> None:
        """The job was asked to stop.  For whoever wants to say so."""


def _no_more_than_wake(_number: int, _frame: FrameType | None) -> None:
    """The number is in the wakeup pipe."""


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # a terminal shared with a program that left it so
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll()
