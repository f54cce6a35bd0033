"""One tiny process per job.  It starts the command, signals its tree, and writes down its end.

It outlives the daemon: whatever happens to rlqd, the job runs on and its exit code is kept.
It is a program, not a module: `python -I -S supervisor.py`, with a JSON launch order on stdin.
It imports C modules only, no `signal`, `json` or `ctypes`: those cost 13 ms and 1.4 MB per job.

The attempt folder (rlqd.adapters.processes reads it):

    lock          flock'ed as long as the supervisor lives: certain, whatever pids are reused
    claim.json    who runs this attempt, and in which control group; made exclusively, so that
                  it runs once or never
    started.json  the command's pid
    exit.reserve  room for the exit record, taken while there was room on the disk
    exit.json     how it ended; appears whole or not at all
    crash.txt     a bug in this file, if ever

Signals from the daemon, each safe to repeat:

    SIGTERM  terminate: the command first; what it leaves behind when it has gone
    SIGUSR2  says whose a SIGTERM is: the daemon's.  Without it somebody else stops the job, as
             systemd does at a shutdown, and the exit record says so
    SIGUSR1  SIGKILL the whole tree, until nothing of it remains
    SIGTSTP  stop the whole tree         SIGCONT  let it go on

Exit status: 0 did what was asked, 3 unreadable order, 4 the attempt was voided, 70 a bug.
"""

# ruff: noqa: SIM105 - contextlib would be another import

import errno
import fcntl
import os
import resource
import select
import sys
import time

# typing is not imported: it would cost more than all of the above.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable
    from typing import Any, NoReturn
else:
    try:
        import _signal as signal
    except ImportError:
        import signal

#: What the command leaves running gets this long from SIGTERM to SIGKILL.
LINGER_S = 5.0
#: Re-parented processes are not announced by any signal: how often to look for them.
CASCADE_S = 0.25
#: Who stops a whole scope may have told the command first: how long to wait for our own SIGTERM.
SAME_SIGTERM_S = 0.5
GROUP_BUSY_S = 0.002
GROUP_BUSY_TRIES = 100
KILL_AGAIN_S = 0.02
KILL_AGAIN_S_MAX = 1.0
RECORD_BYTES = 4096
TAIL_BYTES = 64 * 1024
PUMP_BYTES = 64 * 1024
#: A pass over a tree that forks as fast as it is stopped must end some time.
STOP_PASSES_MAX = 200

BAD_ORDER, VOIDED, BUG = 3, 4, 70
PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: File types, as in the module stat.
TYPE_MASK, REGULAR, DEVICE = 0o170000, 0o100000, 0o020000
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CONTROLS = (
    signal.SIGCHLD,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGCONT,
)

GPU_OOM_TEXTS = (
    b"CUDA out of memory",
    b"HIP out of memory",
    b"torch.OutOfMemoryError",
    b"torch.cuda.OutOfMemoryError",
    b"CUDA error: out of memory",
    b"CUDA_ERROR_OUT_OF_MEMORY",
    b"cudaErrorMemoryAllocation",
    b"CUBLAS_STATUS_ALLOC_FAILED",
    b"CUDNN_STATUS_ALLOC_FAILED",
)
#: XLA says the same words for the GPU's memory and the host's.
XLA_OOM_TEXTS = (
    b"RESOURCE_EXHAUSTED: Out of memory",
    b"RESOURCE_EXHAUSTED: Failed to allocate request",
)
HOST_OOM_TEXTS = (
    b"DefaultCPUAllocator: can't allocate memory",
    b"DefaultCPUAllocator: not enough memory",
    b"std::bad_alloc",
)


class Failure(Exception):
    """The command could not be started."""

    def __init__(self, stage: str, number: int, message: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.number = number

    def as_record(self) -> "dict[str, Any]":
        return {
            "stage": self.stage,
            "errno": self.number,
            "message": str(self),
            "passing": self.number in PASSING or self.stage == "cgroup",
        }


# ---- JSON without the json module --------------------------------------------------


def read_json(text: str) -> "Any":
    """Raises: ValueError (not JSON, or more than one value)."""
    try:
        from _json import make_scanner
    except ImportError:
        import json

        return json.loads(text)

    class Context:
        strict = True
        object_hook = None
        object_pairs_hook = None
        parse_float = float
        parse_int = int
        parse_constant = float
        memo: "dict[str, str]" = {}  # noqa: RUF012 - the C scanner reads it

    try:
        value, end = make_scanner(Context)(text, 0)  # type: ignore[arg-type]
    except (StopIteration, SystemError):  # how it reports an error without the json package
        end = 0
    if end == 0 or text[end:].strip():
        import json

        return json.loads(text)  # finds the words for what is wrong
    return value


def write_json(value: "Any") -> str:
    """Of None, bool, int, float, str and dicts of them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        members = ", ".join(f"{write_json(k)}: {write_json(v)}" for k, v in value.items())
        return "{" + members + "}"
    out = ['"']
    for char in str(value):
        point = ord(char)
        if char in '"\\':
            out.append("\\" + char)
        elif 32 <= point < 127:
            out.append(char)
        elif point < 0x10000:
            out.append(f"\\u{point:04x}")
        else:
            point -= 0x10000
            out.append(f"\\u{0xD800 + (point >> 10):04x}\\u{0xDC00 + (point & 0x3FF):04x}")
    out.append('"')
    return "".join(out)


def to_bytes(text: str) -> bytes:
    # Not os.fsencode: this interpreter's locale is not the user's.
    return text.encode("utf-8", "surrogateescape")


# ---- the kernel --------------------------------------------------------------------


def prctl(option: int, argument: int) -> None:
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        result = _ctypes.call_function(address, (option, argument, 0, 0, 0))
    except (ImportError, AttributeError):
        import ctypes

        result = ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
    if result != 0:
        raise OSError(errno.EINVAL, f"prctl({option}) failed")


def read_file(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Process:
    """A line of /proc/PID/stat.  Pid and start time together name a process for good."""

    __slots__ = ("parent", "pid", "start_time", "state")

    def __init__(self, pid: int) -> None:
        """Raises: OSError (gone)."""
        stat = read_file(f"/proc/{pid}/stat")
        # The name in parentheses may hold anything, parentheses and newlines too.
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.state = fields[0]
        self.parent = int(fields[1])
        self.start_time = int(fields[19])

    def key(self) -> "tuple[int, int]":
        return self.pid, self.start_time


def descendants() -> "list[Process]":
    """This process' descendants, parents before children, zombies left out."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                process = Process(int(name))
            except OSError:
                continue
            children.setdefault(process.parent, []).append(process)
    found = list(children.get(os.getpid(), ()))
    for process in found:  # grows as it goes
        found.extend(children.get(process.pid, ()))
    return [process for process in found if process.state not in (b"Z", b"X")]


def own_children() -> "list[int]":
    pid = os.getpid()
    try:
        return [int(word) for word in read_file(f"/proc/self/task/{pid}/children").split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [process.pid for process in descendants() if process.parent == pid]


def send(process: Process, number: int) -> None:
    """Signal this very process, never another one that got its pid since."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if Process(process.pid).start_time == process.start_time:
            signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass  # gone, or (a set-user-ID program) not ours to signal
    finally:
        os.close(pidfd)


def stop_tree() -> None:
    """SIGSTOP, parents first, until a look finds nothing new: a stopped process cannot fork."""
    seen: set[tuple[int, int]] = set()
    for _ in range(STOP_PASSES_MAX):
        fresh = [process for process in descendants() if process.key() not in seen]
        if not fresh:
            return
        for process in fresh:
            send(process, signal.SIGSTOP)
            seen.add(process.key())


def continue_tree(stopped_only: bool = False) -> None:
    """SIGCONT, children first: a parent finds its children at work."""
    for process in reversed(descendants()):
        if not stopped_only or process.state == b"T":
            send(process, signal.SIGCONT)


def kill_tree(group: "Group | None" = None) -> None:
    if group is not None:
        group.kill()
    stop_tree()  # so that nothing forks away between the look and the blow
    for process in descendants():
        send(process, signal.SIGKILL)


class Group:
    """The command's own control group (version 2): it is killed as one, at once."""

    def __init__(self, path: str, files: "dict[str, str]") -> None:
        """Make it, with these limits.  Raises: OSError."""
        self.path = path
        os.mkdir(path)
        try:
            os.chmod(path, 0o755)  # programs look there for how much they may use
            for name, text in files.items():
                self._write(name, text)
        except OSError:
            self.remove()
            raise

    def enter(self) -> None:
        """Move the process that calls.  Raises: OSError."""
        self._write("cgroup.procs", "0")

    def kill(self) -> None:
        """SIGKILL to all of it, programs of other users included; nothing can fork out of it."""
        try:
            self._write("cgroup.kill", "1")
        except OSError:
            pass  # before Linux 5.14

    def remove(self) -> None:
        for _ in range(GROUP_BUSY_TRIES):
            try:
                os.rmdir(self.path)
            except OSError as error:
                if error.errno == errno.EBUSY:  # for an instant after its last process
                    time.sleep(GROUP_BUSY_S)
                    continue
            return

    def _write(self, name: str, text: str) -> None:
        fd = os.open(f"{self.path}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def make_group(cgroup: "dict[str, Any] | None") -> "Group | None":
    """None: none is wanted, or it cannot be made; the daemon sees that in the claim."""
    if cgroup is None or not cgroup["path"]:
        return None
    try:
        return Group(cgroup["path"], cgroup["files"])
    except OSError:
        return None


class MemoryLimit:
    """The kernel's counts of the control group that limits this job's memory."""

    def __init__(self, folder: "str | None") -> None:
        self.folder = folder
        self.before = self._counts()

    def killed_mib(self) -> "int | None":
        """The limit in MiB, if the kernel has killed a process of the job for reaching it.

        A kill alone is not enough: the whole machine may have run out, this job within its due.
        """
        now = self._counts()
        if not all(now.get(name, 0) > self.before.get(name, 0) for name in (b"oom", b"oom_kill")):
            return None
        try:
            return int(read_file(f"{self.folder}/memory.max")) >> 20
        except (OSError, ValueError):
            return None

    def _counts(self) -> "dict[bytes, int]":
        if not self.folder:
            return {}
        try:
            lines = read_file(f"{self.folder}/memory.events").splitlines()
            return {name: int(count) for name, count in (line.split() for line in lines)}
        except (OSError, ValueError):
            return {}


def oom_kills() -> int:
    """The kernel's out-of-memory kills so far: machine-wide and in this control group."""
    count = 0
    paths = ["/proc/vmstat"]
    try:
        for line in read_file("/proc/self/cgroup").decode().splitlines():
            if line.startswith("0::"):  # control groups, version 2
                paths += [f"/sys/fs/cgroup{line[3:]}/memory.events"]
    except OSError:
        pass
    for path in paths:
        try:
            lines = read_file(path).splitlines()
        except OSError:
            continue
        count += sum(int(line[9:]) for line in lines if line.startswith(b"oom_kill "))
    return count


# ---- the attempt folder ------------------------------------------------------------


class Folder:
    def __init__(self, path: str) -> None:
        """Raises: OSError."""
        self.fd = os.open(to_bytes(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        os.fsync(parent)  # the folder itself is there after a power cut
        os.close(parent)

    def _create(self, name: str, flags: int = 0) -> int:
        flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self.fd)

    def lock(self) -> int:
        fd = self._create("lock")
        # Blocking: the daemon may be probing it just now, for an instant.
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def reserve(self) -> None:
        fd = self._create("exit.reserve")
        write_all(fd, b" " * RECORD_BYTES)
        os.fsync(fd)
        os.close(fd)

    def claim(self, cgroup: "str | None" = None) -> bool:
        """False: somebody has voided this attempt; it must not run."""
        me = Process(os.getpid())
        text = write_json(
            {
                "pid": me.pid,
                "start_time": me.start_time,
                "boot_id": read_file("/proc/sys/kernel/random/boot_id").decode().strip(),
                "cgroup": cgroup,
            }
        )
        temporary = f"claim.{me.pid}"
        fd = self._create(temporary, os.O_TRUNC)
        try:
            write_all(fd, text.encode())
            os.fsync(fd)
            os.link(temporary, "claim.json", src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except FileExistsError:
            return False
        finally:
            os.close(fd)
            os.unlink(temporary, dir_fd=self.fd)
        # Before exec: after a power cut, a command that ran is known to have run.
        os.fsync(self.fd)
        return True

    def note_started(self, command_pid: int) -> None:
        try:
            fd = self._create("started.tmp", os.O_TRUNC)
            write_all(fd, write_json({"command_pid": command_pid}).encode())
            os.close(fd)
            os.rename("started.tmp", "started.json", src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            pass  # good to know, not needed

    def write_record(self, record: "dict[str, Any]") -> None:
        data = write_json(record).encode().ljust(RECORD_BYTES)
        try:
            # Always in place, so that the way a full disk takes is the way always taken.
            fd = os.open("exit.reserve", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
            name = "exit.reserve"
            self._fill(fd, data)
        except OSError:  # removed by somebody, or a full file system that never writes in place
            fd = self._create("exit.tmp", os.O_TRUNC)
            name = "exit.tmp"
            self._fill(fd, data)
        os.rename(name, "exit.json", src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    @staticmethod
    def _fill(fd: int, data: bytes) -> None:
        try:
            if os.pwrite(fd, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)

    def note_crash(self, text: str) -> None:
        try:
            fd = self._create("crash.txt", os.O_TRUNC)
            write_all(fd, text.encode("utf-8", "replace"))
            os.close(fd)
        except OSError:
            pass


# ---- the log -----------------------------------------------------------------------


class AsUser:
    """Inside `with`, files are opened with the user's rights: links are the user's business."""

    def __init__(self, uid: int, gid: int, groups: "list[int] | None", umask: int) -> None:
        self.umask = umask
        self.switch = os.geteuid() == 0 and uid != 0
        self.uid = uid
        self.gid = gid
        self.groups = [gid] if groups is None else groups
        self.own_groups = os.getgroups()
        self.own_gid = os.getegid()

    def __enter__(self) -> None:
        if self.switch:
            os.setgroups(self.groups)
            os.setegid(self.gid)
            os.seteuid(self.uid)
        os.umask(self.umask)

    def __exit__(self, *_: object) -> None:
        os.umask(0o077)
        if self.switch:
            os.seteuid(0)
            os.setegid(self.own_gid)
            os.setgroups(self.own_groups)


def open_log(path: bytes) -> int:
    """Call it inside `with AsUser`.  Raises: OSError."""
    flags = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    folder = os.path.dirname(path)
    try:
        fd = os.open(path, flags | os.O_RDWR, 0o644)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
        fd = os.open(path, flags | os.O_RDWR, 0o644)
    except PermissionError:
        fd = os.open(path, flags | os.O_WRONLY, 0o644)  # one may write where one may not read
    # A file in /proc or /sys is no file.
    if os.fstat(fd).st_mode & TYPE_MASK not in (REGULAR, DEVICE) or os.readlink(
        b"/proc/self/fd/%d" % fd
    ).startswith((b"/proc/", b"/sys/")):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    os.set_blocking(fd, True)
    return fd


class Log:
    """Where output goes.  With `bytes_max`, this process writes it and keeps one older part."""

    def __init__(self, path: str, bytes_max: "int | None", user: AsUser) -> None:
        """Raises: OSError."""
        self.path = to_bytes(path)
        self.bytes_max = bytes_max
        self.user = user
        self.bytes_lost = 0
        self.older: int | None = None
        with user:
            self.fd = open_log(self.path)
        status = os.fstat(self.fd)
        #: Rotating /dev/null would rename it.
        self.rotates = status.st_mode & TYPE_MASK == REGULAR
        #: What was there before is not this job's output.
        self.begin = self.size = status.st_size
        self.pump_in = self.pump_out = -1
        if bytes_max is not None:
            self.pump_in, self.pump_out = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self.pump_in, False)

    def target(self) -> int:
        """What becomes the command's stdout and stderr."""
        return self.fd if self.bytes_max is None else self.pump_out

    def started(self) -> None:
        if self.pump_out >= 0:
            os.close(self.pump_out)
            self.pump_out = -1

    def pump(self) -> bool:
        """Move what is there into the log.  False: the last writer has gone."""
        assert self.bytes_max is not None
        try:
            data = os.read(self.pump_in, PUMP_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        if self.rotates and self.size and self.size + len(data) > self.bytes_max:
            self._rotate()
        view = memoryview(data)
        while view:
            try:
                # As the user too: root would write past their quota, into the part of the disk
                # that is kept for root, and what only root may into a file of /proc.
                with self.user:
                    written = os.write(self.fd, view)
            except OSError:
                # A full disk loses output, not the job.
                self.bytes_lost += len(view)
                break
            self.size += written
            view = view[written:]
        return True

    def drain(self) -> None:
        """What is still in the pipe; does not wait for writers outside the tree."""
        if self.bytes_max is None:
            return
        ready = select.poll()
        ready.register(self.pump_in, select.POLLIN)
        while ready.poll(0) and self.pump():
            pass

    def _rotate(self) -> None:
        try:
            with self.user:
                os.replace(self.path, self.path + b".1")
                fd = open_log(self.path)
        except OSError:
            return  # better one long log than none
        if self.older is not None:
            os.close(self.older)
        self.older, self.fd = self.fd, fd
        self.begin = 0
        self.size = os.fstat(fd).st_size

    def tail(self) -> bytes:
        """The last of this job's output, as far as it can be read."""
        parts: list[bytes] = []
        room = TAIL_BYTES
        for fd, begin in ((self.fd, self.begin), (self.older, 0)):
            if fd is None:
                continue
            try:
                size = os.fstat(fd).st_size
                start = max(begin if size >= begin else 0, size - room)
                part = os.pread(fd, size - start, start)
            except OSError:
                continue  # not readable, or a device
            parts.insert(0, part)
            room -= len(part)
        return b"".join(parts)


# ---- out of memory -----------------------------------------------------------------


def oom_in_output(tail: bytes, has_gpu: bool) -> "str | None":
    """ "gpu", "host" or None, by the last message of that kind."""
    gpu = max(tail.rfind(text) for text in GPU_OOM_TEXTS)
    host = max(tail.rfind(text) for text in HOST_OOM_TEXTS)
    xla = max(tail.rfind(text) for text in XLA_OOM_TEXTS)
    if has_gpu:
        gpu = max(gpu, xla)
    else:
        host = max(host, xla)
    host = max(host, _memory_error(tail))
    if gpu < 0 and host < 0:
        return None
    return "gpu" if gpu > host else "host"


def _memory_error(tail: bytes) -> int:
    """Where the last traceback ends in a MemoryError, else -1."""
    begin = tail.rfind(b"Traceback (most recent call last):")
    if begin < 0:
        return -1
    position = begin
    for row, line in enumerate(tail[begin:].splitlines(keepends=True)):
        if row > 0 and line[:1] not in b" \t\r\n":  # the exception's own line
            name = line.split(b":")[0].strip()
            is_host = name.endswith(b"MemoryError") and not name.endswith(b"OutOfMemoryError")
            return position if is_host else -1
        position += len(line)
    return -1


# ---- the command -------------------------------------------------------------------


def programs(name: str, path: str) -> "Iterable[str]":
    """Where execvp would look."""
    if "/" in name:
        return (name,)
    # An empty entry is the working directory.
    return [f"{folder}/{name}" if folder else f"./{name}" for folder in path.split(":")]


def is_binary(program: bytes) -> bool:
    try:
        fd = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # one may run what one may not read
        return True
    return b"\0" in os.read(fd, 256)


def execute(argv: "list[str]", env: "dict[str, str]") -> "NoReturn":
    """execvpe, with $PATH of the job.  Raises: Failure."""
    name = argv[0]
    if not name:
        raise Failure("exec", errno.ENOENT, "the command is an empty word")
    refused = False
    try:
        words = [to_bytes(word) for word in argv]
        variables = {to_bytes(key): to_bytes(value) for key, value in env.items()}
        for program in programs(name, env.get("PATH", os.defpath)):
            where = to_bytes(program)
            try:
                os.execve(where, words, variables)
            except (FileNotFoundError, NotADirectoryError) as error:
                if error.errno == errno.ENOENT and os.path.exists(where):
                    raise Failure(
                        "exec", errno.ENOENT, f"the interpreter of {program} does not exist"
                    ) from None
            except PermissionError:
                refused = True
            except OSError as error:
                if error.errno != errno.ENOEXEC:
                    raise
                if is_binary(where):
                    raise Failure(
                        "exec", errno.ENOEXEC, f"{program} is not a program for this machine"
                    ) from None
                os.execve(b"/bin/sh", [b"sh", where, *words[1:]], variables)
    except ValueError as error:  # NUL in a word, "=" in a variable's name
        raise Failure("exec", errno.EINVAL, f"cannot run {name}: {error}") from None
    except OSError as error:
        number = error.errno or 0
        if number == errno.E2BIG:
            size = sum(len(word) + 1 for word in words)
            size += sum(len(key) + len(value) + 2 for key, value in variables.items())
            message = f"the arguments and the environment are too long ({size} bytes)"
        else:
            message = f"cannot run {name}: {os.strerror(number)}"
        raise Failure("exec", number, message) from None
    if refused:
        message = f"cannot run {name}: permission denied (is it executable?)"
        if os.path.isdir(name):
            message = f"cannot run {name}: it is a folder"
        raise Failure("exec", errno.EACCES, message)
    raise Failure("exec", errno.ENOENT, f"command not found: {name}")


def become(
    order: "dict[str, Any]", output: int, supervisor: int, group: "Group | None"
) -> "NoReturn":
    """In the forked child: turn into the command.  Raises: Failure."""
    stage, what = "setup", "cannot set up the process"
    try:
        if group is not None:
            # As root still, and before the affinity: the group's cores come first.
            stage, what = "cgroup", f"cannot enter the control group {group.path}"
            group.enter()
            stage, what = "setup", "cannot set up the process"
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                pass  # SIGKILL, SIGSTOP, the C library's own
        stage, what = "affinity", f"cannot use the cores {order['cpus']}"
        if order["cpus"]:
            # Before exec: thread pools are sized by it.
            os.sched_setaffinity(0, order["cpus"])
        if order["oom_score_adj"] is not None:
            try:
                fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
                os.write(fd, str(order["oom_score_adj"]).encode())
                os.close(fd)
            except OSError:
                pass
        for name, (soft, hard) in order["rlimits"].items():
            stage, what = "rlimits", f"cannot set {name} to {soft}"
            resource.setrlimit(getattr(resource, name), (soft, hard))
        stage, what = "log", "cannot connect the output"
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        stage, what = "user", f"cannot become user {order['uid']}"
        if os.geteuid() == 0 and order["uid"] != 0:
            os.setgroups([order["gid"]] if order["groups"] is None else order["groups"])
            os.setgid(order["gid"])
            os.setuid(order["uid"])
        elif order["uid"] != os.geteuid():
            raise PermissionError(errno.EPERM, "only root may")
        # Last: a change of user clears it.  A command without its supervisor is lost, and a
        # lost job may be run again: it must not still be running then.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(127)
        os.umask(order["umask"])
        stage, what = "cwd", f"cannot enter the working directory {order['cwd']}"
        os.chdir(to_bytes(order["cwd"]))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        number = (isinstance(error, OSError) and error.errno) or errno.EINVAL
        if stage == "cwd" and number == errno.ENOENT:
            message = f"the working directory {order['cwd']} does not exist"
        else:
            message = f"{what}: {os.strerror(number)}"
        raise Failure(stage, number, message) from None
    execute(order["argv"], order["env"])


class Supervisor:
    """The event loop, and all that it must remember."""

    def __init__(
        self,
        folder: Folder,
        order: "dict[str, Any]",
        ready_fd: "int | None",
        group: "Group | None" = None,
    ) -> None:
        self.folder = folder
        self.ready_fd = ready_fd
        self.group = group
        self.limit = MemoryLimit((order.get("cgroup") or {}).get("limits"))
        env = order["env"]
        # "" and "-1" are how a job is kept off the GPUs.
        self.has_gpu = env.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
        self.oom_kills = oom_kills()
        self.command = 0
        self.status: int | None = None
        self.ended_at = 0.0
        #: A SIGKILL was seen that did not come from here.
        self.killed_by_others = False
        self.terminating = False
        #: The daemon has sent a SIGTERM; else it came from outside.
        self.asked_by_daemon = False
        self.killing = False
        self.frozen = False
        self.kill_again_s = KILL_AGAIN_S
        self.linger_until: float | None = None
        self.told: set[int] = set()
        self.childless = False
        self.poller = select.poll()
        self.wake_in, wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.poller.register(self.wake_in, select.POLLIN)
        for number in CONTROLS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        self.exec_in = -1
        self.failure: dict[str, Any] | None = None
        user = AsUser(order["uid"], order["gid"], order["groups"], order["umask"])
        mib = order["log_mib_max"]
        try:
            bytes_max = None if mib is None else mib * 1024 * 1024
            self.log = Log(order["log_path"], bytes_max, user)
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"cannot open the log {order['log_path']}: {reason}"
            raise Failure("log", error.errno or 0, message) from None

    def start(self, order: "dict[str, Any]", lock: int) -> None:
        """Fork.  Raises: Failure."""
        supervisor = os.getpid()
        try:
            self.exec_in, exec_out = os.pipe2(os.O_CLOEXEC)
            self.command = os.fork()
        except OSError as error:
            number = error.errno or 0
            message = f"cannot start a process: {os.strerror(number)}"
            raise Failure("fork", number, message) from None
        if self.command == 0:
            try:
                os.close(lock)
                become(order, self.log.target(), supervisor, self.group)
            except Failure as failure:
                write_all(exec_out, write_json(failure.as_record()).encode())
            except BaseException as error:
                record = Failure("setup", 0, f"cannot start the command: {error!r}").as_record()
                write_all(exec_out, write_json(record).encode())
            finally:
                os._exit(127)
        os.close(exec_out)
        os.set_blocking(self.exec_in, False)
        self.poller.register(self.exec_in, select.POLLIN)
        self.log.started()
        if self.log.bytes_max is not None:
            self.poller.register(self.log.pump_in, select.POLLIN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def run(self) -> None:
        """Until nothing of the tree is left."""
        self._reap()
        while not self.childless:
            for fd, _ in self.poller.poll(self._timeout_ms()):
                if fd == self.wake_in:
                    self._obey(os.read(self.wake_in, 512))
                elif fd == self.exec_in:
                    self._read_exec()
                elif not self.log.pump():
                    self.poller.unregister(fd)
            self._reap()
            if self.killing and not self.childless:
                kill_tree(self.group)
                self.kill_again_s = min(self.kill_again_s * 2, KILL_AGAIN_S_MAX)
            elif self.status is not None and not self.childless:
                self._clear_up()
        self._hear_late_signals()
        self.log.drain()

    def record(self) -> "dict[str, Any]":
        if self.failure is not None:
            return {"failed": self.failure}
        assert self.status is not None
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = os.waitstatus_to_exitcode(self.status)
        oom = self._oom(code)
        return {
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "oom": oom,
            "oom_limit_mib": self.limit.killed_mib() if oom == "host" else None,
            "stopped_by_others": self.terminating and not self.asked_by_daemon,
            "ended_at": self.ended_at,
            "utime_s": usage.ru_utime,
            "stime_s": usage.ru_stime,
            "maxrss_mib": usage.ru_maxrss // 1024,
            "log_lost_bytes": self.log.bytes_lost,
        }

    def tell(self, news: "dict[str, Any]") -> None:
        tell(self.ready_fd, news)
        self.ready_fd = None

    def _timeout_ms(self) -> "float | None":
        if self.killing:
            return self.kill_again_s * 1000
        if self.status is None:
            return None
        if self.linger_until is None:
            return CASCADE_S * 1000
        return max(0.0, min(CASCADE_S, self.linger_until - time.monotonic())) * 1000

    def _obey(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGTERM:
                if not self.terminating:
                    self.terminating = True
                    # The command only: a trainer needs its workers to save its state.
                    if self.status is None:
                        self._ask(self.command)
                # A stopped process hears nothing.  Just frozen, it may not show as stopped yet.
                continue_tree(stopped_only=not self.frozen)
                self.frozen = False
            elif number == signal.SIGUSR2:
                self.asked_by_daemon = True
            elif number == signal.SIGUSR1:
                self.killing = True
                self.kill_again_s = KILL_AGAIN_S
            elif number == signal.SIGTSTP:
                if not self.killing:
                    stop_tree()
                    self.frozen = True
            elif number == signal.SIGCONT and not self.killing:
                continue_tree()
                self.frozen = False

    def _hear_late_signals(self) -> None:
        """After the end: the command may have got its SIGTERM just before this process."""
        if self.status is None or self.terminating or self.killing:
            return
        code = os.waitstatus_to_exitcode(self.status)
        of_sigterm = code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        until = time.monotonic() + (SAME_SIGTERM_S if of_sigterm else 0.0)
        late = select.poll()
        late.register(self.wake_in, select.POLLIN)
        while not self.terminating and late.poll(max(0.0, until - time.monotonic()) * 1000):
            self._obey(os.read(self.wake_in, 512))

    def _ask(self, child: int) -> None:
        """SIGTERM, once per process: a second one means "at once" to many programs.

        `child` is our own and not waited for yet, so its pid is its own still.
        """
        if child not in self.told:
            self.told.add(child)
            os.kill(child, signal.SIGTERM)

    def _clear_up(self) -> None:
        """The command has gone and left something running, which would hold GPU memory."""
        if self.linger_until is None and not self.terminating:
            self.linger_until = time.monotonic() + LINGER_S
        if self.linger_until is not None and time.monotonic() >= self.linger_until:
            self.killing = True
            self.kill_again_s = KILL_AGAIN_S
            kill_tree(self.group)
            return
        # From the top, as parents go: `bash run.sh` dies and its trainer becomes our child,
        # which is asked then, while its own workers live.
        for child in own_children():
            if child not in self.told:
                try:
                    self._ask(child)
                    os.kill(child, signal.SIGCONT)
                except OSError:
                    pass  # a set-user-ID program

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            if pid == 0:
                return
            self.told.discard(pid)
            if pid == self.command:
                self.status = status
                self.ended_at = time.time()
                self._read_exec()
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.killed_by_others = self.killed_by_others or not self.killing

    def _read_exec(self) -> None:
        """EOF: exec has closed it, the command runs.  Anything else is why it does not."""
        if self.exec_in < 0:
            return
        parts = []
        try:
            while part := os.read(self.exec_in, 65536):
                parts.append(part)
        except BlockingIOError:
            if not parts:
                return
            # A message longer than a pipe holds does not exist; its rest comes at once.
            os.set_blocking(self.exec_in, True)
            while part := os.read(self.exec_in, 65536):
                parts.append(part)
        self.poller.unregister(self.exec_in)
        os.close(self.exec_in)
        self.exec_in = -1
        if parts:
            self.failure = read_json(b"".join(parts).decode())
            return
        self.folder.note_started(self.command)
        cgroup = None if self.group is None else self.group.path
        started = {"pid": os.getpid(), "command_pid": self.command, "cgroup": cgroup}
        self.tell({"started": started})

    def _oom(self, code: int) -> "str | None":
        if code == 0:
            return None
        if code < 0 and (self.killing or (self.terminating and -code == signal.SIGTERM)):
            return None  # we ended it
        if self.limit.killed_mib() is not None:
            return "host"  # a worker perhaps, of which its parent told in words of its own
        # 137 is a shell's word for a child that died of SIGKILL.
        if (self.killed_by_others or code == 137) and oom_kills() > self.oom_kills:
            return "host"
        return oom_in_output(self.log.tail(), self.has_gpu)


# ---- main --------------------------------------------------------------------------


def tell(ready_fd: "int | None", news: "dict[str, Any]") -> None:
    if ready_fd is None:
        return
    try:
        write_all(ready_fd, (write_json(news) + "\n").encode())
    except OSError:
        pass  # the daemon has gone; its successor reads the folder
    os.close(ready_fd)


def read_order() -> "dict[str, Any]":
    """Raises: ValueError, OSError."""
    parts = []
    while part := os.read(0, 1 << 20):
        parts.append(part)
    order = read_json(b"".join(parts).decode())
    kinds: dict[str, Any] = {
        "job": int,
        "attempt": int,
        "dir": str,
        "argv": list,
        "env": dict,
        "cwd": str,
        "umask": int,
        "uid": int,
        "gid": int,
        "groups": (list, type(None)),
        "cpus": list,
        "log_path": str,
        "log_mib_max": (int, type(None)),
        "rlimits": dict,
        "oom_score_adj": (int, type(None)),
        "cgroup": (dict, type(None)),
        "ready_fd": (int, type(None)),
    }
    if not isinstance(order, dict):
        raise ValueError("the order is not an object")
    for name, kind in kinds.items():
        if not isinstance(order.get(name), kind):
            raise ValueError(f"{name} is missing or of the wrong type")
    if not order["argv"] or not all(isinstance(word, str) for word in order["argv"]):
        raise ValueError("argv must be words")
    if not all(isinstance(value, str) for value in order["env"].values()):
        raise ValueError("env must be text")
    return order


def main() -> int:
    # The daemon starts us with our signals blocked: one that comes early waits, not kills.
    signal.pthread_sigmask(signal.SIG_BLOCK, CONTROLS)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    try:
        order = read_order()
    except (ValueError, OSError, RecursionError):
        return BAD_ORDER
    try:
        os.setsid()
    except PermissionError:
        pass  # a session of our own already
    ready_fd: int | None = order["ready_fd"]
    # Descriptors of libraries in the daemon that forgot to mark theirs close-on-exec.
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd != ready_fd:
            try:
                os.close(fd)
            except OSError:
                pass  # the listing's own
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)  # the order goes, with its secrets
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)
    os.umask(0o077)
    try:
        os.chdir("/")
        folder = Folder(order["dir"])
        lock = folder.lock()
        folder.reserve()
        group = make_group(order["cgroup"])
        if not folder.claim(None if group is None else group.path):
            if group is not None:
                group.remove()
            return VOIDED
    except OSError as error:
        code = error.errno or 0
        message = f"cannot write to {order['dir']}: {os.strerror(code)}"
        tell(ready_fd, {"failed": Failure("state", code, message).as_record()})
        return 0
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        supervisor = Supervisor(folder, order, ready_fd, group)
        supervisor.start(order, lock)
    except (Failure, OSError) as error:
        if isinstance(error, Failure):
            failed = error.as_record()
        else:
            message = f"cannot supervise the job: {error}"
            failed = Failure("setup", error.errno or 0, message).as_record()
        folder.write_record({"failed": failed})
        tell(ready_fd, {"failed": failed})
        if group is not None:
            group.remove()
        return 0
    order.clear()
    del order
    try:
        supervisor.run()
        folder.write_record(supervisor.record())
        if supervisor.failure is not None:
            supervisor.tell({"failed": supervisor.failure})
        if group is not None:
            group.remove()
    except BaseException as error:
        trace = error.__traceback__
        lines = []
        while trace is not None:
            lines.append(f"line {trace.tb_lineno}")
            trace = trace.tb_next
        folder.note_crash(f"{', '.join(lines)}: {error!r}\n")
        # An unsupervised tree would run on unseen.
        kill_tree(group)
        return BUG
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # no teardown: all that matters is on disk
