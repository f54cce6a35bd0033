"""Where things are: sockets, the daemon's state folder, configuration files.

Everything is computed from the environment at the call; nothing but `user_socket` (with
`make`) and `DaemonPaths.make` touches the disk for writing.  Imports are cheap: this is on
the way of every `rlq` command and of every reporting job.

The socket, first match: the argument, RLQ_SOCKET, RUNTIME_DIRECTORY (daemon side: systemd),
the state folder where one was chosen by hand, $XDG_RUNTIME_DIR/rlq, /tmp/rlq-UID.
The state folder, first match: the argument, RLQ_STATE_DIR, STATE_DIRECTORY (systemd),
$XDG_STATE_HOME/rlq, ~/.local/state/rlq.

cron, su and some tmux sessions have no XDG_RUNTIME_DIR, so a client may look in another place
than the daemon was started with: it then finds the daemon by the state folder, whose lock
tells the socket.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from rlq.errors import UsageError

SOCKET_NAME = "rlqd.sock"
CONFIG_NAME = "rlqd.toml"
LOCK_NAME = "rlqd.lock"
#: sun_path holds 108 bytes, the last of them NUL.
SOCKET_PATH_BYTES_MAX = 107


class DaemonPaths(NamedTuple):
    """All the files of one daemon.  One state folder, one daemon (`lock`)."""

    socket: Path
    state_dir: Path
    #: Datagrams of `rlq.job.report`; beside `socket`.
    report_socket: Path
    database: Path
    #: One folder per attempt of a job; on the state folder, so that exit records outlive a reboot.
    run_dir: Path
    lock: Path
    #: Logs of jobs that named none.
    logs_dir: Path

    def make(self, *, shared: bool = False) -> None:
        """Make the folders.  `shared`: other users' jobs reach through them, listing nothing.

        Raises:
            UsageError: one cannot be made or is not a folder.
        """
        mode = 0o711 if shared else 0o700
        for folder in (self.state_dir, self.run_dir, self.logs_dir):
            _make_folder(folder, mode)
        if not self.socket.parent.exists():
            _make_folder(self.socket.parent, 0o755 if shared else 0o700)


def system_socket() -> Path:
    return Path("/run/rlq") / SOCKET_NAME


def user_socket(*, make: bool = True) -> Path:
    """The socket of this user's own daemon, in a folder that only this user can write to.

    `make`: make the folder where it is missing.

    Raises:
        UsageError: the folder is a link, somebody else's, or cannot be made; or the path is
            too long for a socket.
    """
    folder = _user_runtime_dir()
    if make:
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise UsageError(
                f"cannot make the folder {folder}: {error.strerror}",
                hint="set RLQ_SOCKET to a path in a folder of yours",
            ) from error
    _check_private(folder, tighten=make)
    return check_socket_path(folder / SOCKET_NAME)


def user_state_dir() -> Path:
    return _xdg("XDG_STATE_HOME", ".local/state") / "rlq"


def user_config() -> Path:
    return _xdg("XDG_CONFIG_HOME", ".config") / "rlq" / CONFIG_NAME


def system_config() -> Path:
    return Path("/etc/rlq") / CONFIG_NAME


def daemon_config() -> Path | None:
    """The configuration file a daemon reads when none is named; None: there is none.

    systemd's CONFIGURATION_DIRECTORY alone if set; else the user's own; for root then /etc's.
    """
    if folder := _systemd_dir("CONFIGURATION_DIRECTORY"):
        places = [folder / CONFIG_NAME]
    else:
        places = [user_config()]
        if os.geteuid() == 0:
            places.append(system_config())
    return next((place for place in places if place.exists()), None)


def daemon_paths(
    state_dir: str | os.PathLike[str] | None = None,
    socket: str | os.PathLike[str] | None = None,
) -> DaemonPaths:
    """The files of the daemon that is being started (or that a client is about to start).

    Raises:
        UsageError: the socket's path is too long, or its default folder is not safe.
    """
    chosen = state_dir or os.environ.get("RLQ_STATE_DIR")
    state = _absolute(chosen) if chosen else _systemd_dir("STATE_DIRECTORY") or user_state_dir()
    named = socket or os.environ.get("RLQ_SOCKET")
    if named:
        listen = _absolute(named)
    elif runtime := _systemd_dir("RUNTIME_DIRECTORY"):
        listen = runtime / SOCKET_NAME
    elif chosen:
        # A daemon with a state folder of its own must not take the default daemon's socket.
        listen = state / SOCKET_NAME
    else:
        listen = user_socket()
    check_socket_path(listen)
    return DaemonPaths(
        socket=listen,
        state_dir=state,
        report_socket=check_socket_path(report_socket(listen)),
        database=state / "rlq.db",
        run_dir=state / "run",
        lock=state / LOCK_NAME,
        logs_dir=state / "logs",
    )


def report_socket(socket: Path) -> Path:
    """The report socket of the daemon that listens on `socket`."""
    return socket.with_name(f"{socket.stem}-report.sock")


def candidate_sockets() -> list[Path]:
    """Where a client looks for a daemon, in this order.

    RLQ_SOCKET alone if set; else RLQ_STATE_DIR's socket alone if set; else the system's
    daemon, then the user's; then where the daemon of the user's state folder says it is.

    Raises:
        UsageError: a path is too long, or the user's folder is not safe to talk through and
            there is no system daemon.
    """
    if named := os.environ.get("RLQ_SOCKET"):
        return [check_socket_path(_absolute(named))]
    if chosen := os.environ.get("RLQ_STATE_DIR"):
        return [check_socket_path(_absolute(chosen) / SOCKET_NAME)]
    system = system_socket()
    try:
        own = user_socket(make=False)
        told = _told_socket(user_state_dir() / LOCK_NAME)
        return [system, own] if told is None or told == own else [system, own, told]
    except UsageError:
        if system.exists():
            return [system]
        raise


def _told_socket(lock: Path) -> Path | None:
    """What the lock of a state folder says of the daemon that holds it, or held it last.

    None: nothing, or nothing to rely on: it is another machine's (a home folder on NFS), or
    others could have put a socket there.
    """
    try:
        if lock.lstat().st_uid != os.geteuid():
            return None
        first, told = lock.read_bytes().split(b"\n")[:2]
    except (OSError, ValueError):
        return None
    path = Path(os.fsdecode(told))
    if first.split()[1:] != [os.fsencode(os.uname().nodename)] or not path.is_absolute():
        return None
    try:
        _check_private(path.parent, tighten=False)
        return check_socket_path(path)
    except UsageError:
        return None


def check_socket_path(path: Path) -> Path:
    """`path` itself.

    Raises:
        UsageError: longer than a Unix socket's address can be.
    """
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise UsageError(
            f"the socket path {path} has {length} bytes, and the system allows"
            f" {SOCKET_PATH_BYTES_MAX}",
            hint="set RLQ_SOCKET (or --socket) to a shorter path, such as /tmp/NAME/rlqd.sock"
            " in a folder of yours",
        )
    return path


def _user_runtime_dir() -> Path:
    # After `su`, XDG_RUNTIME_DIR is often still the other user's; then it is not for us.
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        try:
            found = os.stat(runtime)
        except OSError:
            pass
        else:
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                return Path(runtime) / "rlq"
    return Path(f"/tmp/rlq-{os.geteuid()}")


def _check_private(folder: Path, *, tighten: bool) -> None:
    """A stranger who owns the folder could answer in the daemon's place: /tmp is everybody's."""
    hint = "remove it, or set RLQ_SOCKET to a path in a folder of yours"
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot look at {folder}: {error.strerror}", hint=hint) from error
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{folder} is not a folder, and must be one for the socket", hint=hint)
    if found.st_uid != os.geteuid():
        raise UsageError(f"{folder} belongs to another user (uid {found.st_uid})", hint=hint)
    if found.st_mode & 0o022:
        # Whoever could write to it may have left a socket there already.
        raise UsageError(f"other users can write to {folder}", hint=f"{hint}; or chmod 700 it")
    if tighten and found.st_mode & 0o077:
        os.chmod(folder, 0o700)


def _make_folder(folder: Path, mode: int) -> None:
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)  # the mode of mkdir passes through the umask
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {folder}: {error.strerror}",
            hint="choose another with --state-dir or RLQ_STATE_DIR",
        ) from error


def _systemd_dir(variable: str) -> Path | None:
    """The first folder of systemd's colon-separated list."""
    first = os.environ.get(variable, "").split(":")[0]
    return Path(first) if first.startswith("/") else None


def _xdg(variable: str, default: str) -> Path:
    # The XDG specification: a relative path in these variables is to be ignored.
    value = os.environ.get(variable, "")
    if value.startswith("/"):
        return Path(value)
    try:
        return Path.home() / default
    except RuntimeError as error:
        raise UsageError(
            "your home folder is not known", hint="set HOME, or RLQ_STATE_DIR and RLQ_SOCKET"
        ) from error


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))
