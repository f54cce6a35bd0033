"""What `rlq run` puts in front of the command in its job: it joins the command to the caller.

It is a program, not a module: `python -I -S relay.py SOCKET tty|pipes COMMAND [ARG]...`, run by
the job's supervisor in place of the command, as the user, with the job's cores, devices and
folder.  It imports C modules only, for the reasons the supervisor has.  The caller listens on
SOCKET, in a folder that is closed to other users; rlq.terminal is its side, and takes the
frames' names from here.

A frame is its kind (one byte), the length of its content (four bytes, big-endian), the content:

    caller to job                            job to caller
    I  stdin                                 O  stdout, or all that a terminal shows
    C  no more stdin                         E  stderr
    W  the terminal's size: struct winsize   A  so many bytes of stdin were taken (4 bytes)
    S  a signal for the command (1 byte)     T  the job was asked to stop
                                             X  the command's exit code, or minus the signal

The caller has at most WINDOW_BYTES of stdin under way, so that a signal is never stuck behind
input that the command does not read.  When the caller goes, the command is hung up (SIGHUP), as
by a terminal that is closed; what stays all the same, the supervisor ends with this program.

Exit status: the command's, signals included; 129: the caller was gone.
"""

# ruff: noqa: SIM105 - contextlib would be another import

import _socket
import errno
import fcntl
import os
import resource
import select
import sys
import termios
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
else:
    try:
        import _signal as signal
    except ImportError:
        import signal

STDIN, NO_MORE, SIZE, SIGNAL = b"I", b"C", b"W", b"S"
STDOUT, STDERR, TAKEN, STOPPING, EXIT = b"O", b"E", b"A", b"T", b"X"

HEADER_BYTES = 5
FRAME_BYTES_MAX = 64 * 1024
WINDOW_BYTES = 256 * 1024
#: More output than this waits in the command, not here.
OUTPUT_BYTES_MAX = 256 * 1024
WINSIZE_BYTES = 8
#: Once hung up, the command has so long before what is left of the job is ended.
HANG_UP_S = 10.0
#: After SIGTERM: how often to see whether a shell has its terminal back.
LOOK_S = 0.25
#: When the command has ended while others hold its output open: it is all read after such a
#: pause.  A pipe has at once what was written.  A terminal's last output may be on its way through
#: the kernel for long on a busy machine; but its end comes for sure, for the kernel hangs it up.
QUIET_MS = 100
QUIET_TERMINAL_MS = 10_000
HUNG_UP = 128 + signal.SIGHUP
#: Erasing takes a whole UTF-8 character (asm-generic/termbits.h); not in Python 3.11's termios.
IUTF8 = 0o40000


def frame(kind: bytes, content: bytes = b"") -> bytes:
    return kind + len(content).to_bytes(4, "big") + content


class Frames:
    """Frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> "list[tuple[bytes, bytes]]":
        """Raises: ValueError (not such a stream)."""
        rest = self._rest
        rest += data
        found = []
        while len(rest) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(rest[1:HEADER_BYTES], "big")
            if end > HEADER_BYTES + FRAME_BYTES_MAX:
                raise ValueError("a frame is too long")
            if len(rest) < end:
                break
            found.append((bytes(rest[:1]), bytes(rest[HEADER_BYTES:end])))
            del rest[:end]
        return found


def peer_uid(connection: _socket.socket) -> int:
    """Who is at the other end, from the kernel."""
    ucred = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    return int.from_bytes(ucred[4:8], sys.byteorder)


def connect(path: str) -> _socket.socket:
    """Raises: OSError."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(path)
    if peer_uid(connection) != os.geteuid():
        raise PermissionError(errno.EPERM, "another user listens there")
    connection.setblocking(False)
    return connection


def execute(argv: "list[str]") -> "NoReturn":
    """As a shell would: 127 not found, 126 not to be run."""
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        number = error.errno
        if number == errno.ENOEXEC:
            try:
                os.execvp("/bin/sh", ["sh", *argv])
            except OSError:
                pass
        os.write(2, f"rlq run: cannot run {argv[0]}: {os.strerror(number or 0)}\n".encode())
    os._exit(127 if number == errno.ENOENT else 126)


def start(argv: "list[str]", streams: "tuple[int, int, int]", *, is_terminal: bool) -> int:
    """Fork the command into a session of its own; its pid.  Raises: OSError."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        if is_terminal:
            fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        signal.set_wakeup_fd(-1)
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                pass  # SIGKILL, SIGSTOP, the C library's own
        execute(argv)
    finally:
        os._exit(126)


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal: an interactive shell does SIGTERM."""
    try:
        fd = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        text = os.read(fd, 65536)
    except OSError:
        return False
    finally:
        os.close(fd)
    for line in text.splitlines():
        if line.startswith(b"SigIgn:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def send_group(group: int, *numbers: int) -> None:
    for number in numbers:
        try:
            os.killpg(group, number)
        except OSError:
            return  # gone, or a set-user-ID program


class Relay:
    """The event loop, and all that it must remember."""

    def __init__(
        self, connection: _socket.socket, argv: "list[str]", *, is_terminal: bool
    ) -> None:
        """Start the command.  Raises: OSError."""
        self.connection: _socket.socket | None = connection
        self.frames = Frames()
        self.to_caller = bytearray()
        self.to_command = bytearray()
        self.no_more = False
        self.status: int | None = None
        self.stopping = False
        #: Process groups that were sent SIGTERM.
        self.told: set[int] = set()
        self.hung_up_at: float | None = None
        self.wake_in, self.wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self.wake_out, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self.is_terminal = is_terminal
        #: What the command's output is read from, and its name in frames.
        self.outputs: dict[int, bytes] = {}
        if is_terminal:
            master, slave = os.openpty()
            modes = termios.tcgetattr(slave)
            modes[0] |= IUTF8
            termios.tcsetattr(slave, termios.TCSANOW, modes)
            theirs = (slave, slave, slave)
            self.input, self.outputs[master] = master, STDOUT
        else:
            stdin, self.input = os.pipe2(os.O_CLOEXEC)
            out, stdout = os.pipe2(os.O_CLOEXEC)
            err, stderr = os.pipe2(os.O_CLOEXEC)
            theirs = (stdin, stdout, stderr)
            self.outputs[out], self.outputs[err] = STDOUT, STDERR
        for fd in (self.input, *self.outputs):
            os.set_blocking(fd, False)
        #: For a terminal the caller tells its size first: a program may look at once.
        self.argv: list[str] | None = argv
        self.theirs = theirs
        self.command = 0
        if not is_terminal:
            self._start()

    def run(self) -> int:
        """Until the command has ended, or was hung up and stays; its exit code, or minus the
        signal."""
        while self.status is None:
            ready = dict(self._poll(self._timeout_ms()))
            if self.wake_in in ready:
                self._obey(os.read(self.wake_in, 512))
            if self.connection is not None:
                events = ready.get(self.connection.fileno(), 0)
                if events & select.POLLOUT:
                    self._flush()
                if events & ~select.POLLOUT:
                    self._hear()
            if self.input in ready and self.to_command:
                self._feed()
            for fd in [fd for fd in self.outputs if fd in ready]:
                self._take(fd)
            if self.stopping:
                self._ask()
            if self.hung_up_at is not None and time.monotonic() >= self.hung_up_at + HANG_UP_S:
                return HUNG_UP
            if self.hung_up_at is not None and not self.command:
                return HUNG_UP
        code = os.waitstatus_to_exitcode(self.status)
        self._drain()
        self._put(frame(EXIT, code.to_bytes(4, "big", signed=True)))
        while self.connection is not None and self.to_caller:
            self._poll(None, last=True)
            self._flush()
        return HUNG_UP if self.hung_up_at is not None else code

    def _start(self) -> None:
        assert self.argv is not None
        self.command = start(self.argv, self.theirs, is_terminal=self.is_terminal)
        self.argv = None
        for fd in set(self.theirs):
            os.close(fd)

    def _timeout_ms(self) -> "float | None":
        if self.stopping:
            return LOOK_S * 1000
        if self.hung_up_at is not None:
            return max(0.0, self.hung_up_at + HANG_UP_S - time.monotonic()) * 1000
        return None

    def _poll(self, timeout_ms: "float | None", *, last: bool = False) -> "list[tuple[int, int]]":
        """`last`: the command has ended, and only its output is left to pass on."""
        poller = select.poll()
        wanted: dict[int, int] = {}
        if len(self.to_caller) < OUTPUT_BYTES_MAX:
            wanted = dict.fromkeys(self.outputs, select.POLLIN)
        if not last:
            wanted[self.wake_in] = select.POLLIN
            if self.to_command:
                wanted[self.input] = wanted.get(self.input, 0) | select.POLLOUT
        if self.connection is not None:
            wanted[self.connection.fileno()] = (0 if last else select.POLLIN) | (
                select.POLLOUT if self.to_caller else 0
            )
        for fd, events in wanted.items():
            poller.register(fd, events)
        return poller.poll(timeout_ms)

    # ---- the caller ----------------------------------------------------------------

    def _put(self, data: bytes) -> None:
        if self.connection is not None:
            self.to_caller += data

    def _flush(self) -> None:
        if self.connection is None:
            return
        try:
            sent = self.connection.send(self.to_caller[:FRAME_BYTES_MAX])
        except BlockingIOError:
            return
        except OSError:
            self._hang_up()
            return
        del self.to_caller[:sent]

    def _hear(self) -> None:
        if self.connection is None:
            return
        try:
            data = self.connection.recv(FRAME_BYTES_MAX)
            heard = self.frames.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, heard = b"", []
        if not data:
            self._hang_up()
            return
        for kind, content in heard:
            if kind == STDIN and not self.no_more:
                self.to_command += content
            elif kind == NO_MORE:
                self.no_more = True
                self._feed()
            elif kind == SIZE and self.is_terminal and len(content) == WINSIZE_BYTES:
                fcntl.ioctl(self.input, termios.TIOCSWINSZ, content)
                if not self.command:
                    self._start()
            elif kind == SIGNAL and self.command and len(content) == 1:
                send_group(self.command, content[0])

    def _hang_up(self) -> None:
        """The caller has gone: as if the terminal had been closed."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.to_caller.clear()
        self.to_command.clear()
        self.hung_up_at = time.monotonic()
        if self.command:
            for group in {self._foreground(), self.command}:
                send_group(group, signal.SIGHUP, signal.SIGCONT)
        for fd in {self.input, *self.outputs} - {-1}:
            os.close(fd)
        self.input = -1
        self.outputs.clear()

    # ---- the command ---------------------------------------------------------------

    def _foreground(self) -> int:
        """The process group that has the terminal; without one, the command's."""
        if self.is_terminal and self.input >= 0:
            try:
                return os.tcgetpgrp(self.input) or self.command
            except OSError:
                pass
        return self.command

    def _obey(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers and not self.stopping:
            self.stopping = True
            self._put(frame(STOPPING))
        if self.command:
            try:
                pid, status = os.waitpid(self.command, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.command, 0
            if pid:
                self.status = status

    def _ask(self) -> None:
        """SIGTERM to what has the terminal.  A shell that ignores it is hung up, but only once
        what it runs has ended: a training may save its state first."""
        if not self.command:
            self.status = signal.SIGTERM
            return
        if self.status is not None:
            return
        group = self._foreground()
        if group not in self.told:
            self.told.add(group)
            send_group(group, signal.SIGTERM, signal.SIGCONT)
        if self.is_terminal and group == self.command and ignores(group, signal.SIGTERM):
            send_group(group, signal.SIGHUP, signal.SIGCONT)

    def _feed(self) -> None:
        try:
            if self.to_command:
                written = os.write(self.input, self.to_command[:FRAME_BYTES_MAX])
                del self.to_command[:written]
                self._put(frame(TAKEN, written.to_bytes(4, "big")))
        except BlockingIOError:
            return
        except OSError:  # it has closed its stdin: what comes is taken and dropped
            self._put(frame(TAKEN, len(self.to_command).to_bytes(4, "big")))
            self.to_command.clear()
        if self.no_more and not self.to_command and not self.is_terminal and self.input >= 0:
            os.close(self.input)
            self.input = -1

    def _take(self, fd: int) -> None:
        """Pass on what the command has written."""
        try:
            data = os.read(fd, FRAME_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:  # EIO: nobody has the terminal open
            data = b""
        if data:
            self._put(frame(self.outputs[fd], data))
            return
        del self.outputs[fd]
        if fd != self.input:
            os.close(fd)

    def _drain(self) -> None:
        """What the command wrote before it ended; not what others go on to write."""
        while self.outputs and self.connection is not None:
            is_full = len(self.to_caller) >= OUTPUT_BYTES_MAX
            quiet_ms = QUIET_TERMINAL_MS if self.is_terminal else QUIET_MS
            ready = dict(self._poll(quiet_ms, last=True))
            if not ready and not is_full:
                return
            if ready.get(self.connection.fileno(), 0):
                self._flush()
            for fd in [fd for fd in self.outputs if fd in ready]:
                self._take(fd)


def end_as(code: int) -> "NoReturn":
    """With that exit code, or by that signal: the supervisor writes down how the command ended."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            signal.signal(-code, signal.SIG_DFL)
        except OSError:
            pass  # SIGKILL
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def main(words: "list[str]") -> "NoReturn":
    path, mode, *argv = words
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        connection = connect(path)
    except OSError as error:
        print(f"rlq run: whoever asked for this job is not there any more ({error.strerror})")
        sys.stdout.flush()
        os._exit(HUNG_UP)
    print("the output goes to whoever called `rlq run`, and is not kept here")
    sys.stdout.flush()
    end_as(Relay(connection, argv, is_terminal=mode == "tty").run())


if __name__ == "__main__":
    main(sys.argv[1:])
