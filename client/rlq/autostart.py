"""Starting a daemon of one's own, once, however many clients want it at the same time."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from rlq import paths
from rlq.errors import UnavailableError, UnreachableError, UsageError
from rlq.transport import is_answering

START_TIMEOUT_S = 15.0
#: Longer than a daemon takes to notice that its socket was removed, and to put it back.
REFUSED_GRACE_S = 4.0
LOG_NAME = "rlqd.log"
#: What rlqd begins the sentence with that says why it ends.
ERROR_PREFIX = "rlqd: error: "
#: Kept, so that nobody is warned of a child that still runs: it is meant to.
_started: list[subprocess.Popen[bytes]] = []


def start_daemon(*, timeout_s: float = START_TIMEOUT_S) -> Path:
    """Start this user's daemon unless one answers by now; its socket.

    Raises:
        UnreachableError: it did not come up; the message says what it said.
        UnavailableError: it says that it cannot just now, as on a full disk.
        UsageError: its folders cannot be used, or this is a job: what a job starts ends with it.
    """
    if job := os.environ.get("RLQ_JOB_ID"):
        raise UsageError(
            f"no daemon is started from within a job (this is job {job}): it would end with it",
            hint="set RLQ_SOCKET to the queue's own socket, as every job finds it, or start one"
            " outside: rlq daemon start",
        )
    where = paths.daemon_paths()
    where.make()
    deadline = time.monotonic() + timeout_s
    lock = os.open(
        where.state_dir / "autostart.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        _take(lock, deadline)
        # The one before us in the queue for the lock has just started it.
        if not is_answering(where.socket):
            _start(where, deadline)
    finally:
        os.close(lock)
    return where.socket


def _take(lock: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    "another rlq has been starting the daemon for too long",
                    hint="`rlq doctor` looks for what is wrong",
                ) from None
            time.sleep(0.02)
        else:
            return


def _start(where: paths.DaemonPaths, deadline: float) -> None:
    log_path = where.state_dir / LOG_NAME
    ready_read, ready_write = os.pipe()
    try:
        with open(log_path, "ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlqd", "--ready-fd", str(ready_write)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(where),
                start_new_session=True,
                pass_fds=(ready_write,),
            )
        _started.append(process)
        os.close(ready_write)
        ready_write = -1
        said = _read_line(ready_read, deadline)
    except OSError as error:
        raise UnreachableError(
            f"cannot start the daemon: {error}", hint="`rlq doctor` looks for what is wrong"
        ) from error
    finally:
        os.close(ready_read)
        if ready_write >= 0:
            os.close(ready_write)
    if said == "ready":
        return
    hint = f"its log is {log_path}"
    if said is None:
        raise UnreachableError(
            f"the daemon (pid {process.pid}) was started but is not ready yet", hint=hint
        )
    # Somebody may have started one by hand in the same moment: then it refused, rightly.
    patience = min(deadline, time.monotonic() + REFUSED_GRACE_S)
    while not is_answering(where.socket):
        # After its last word it has only to exit; that code tells whose fault it is.
        ended = process.poll()
        if (not said and ended is not None) or time.monotonic() >= patience:
            kind = UnavailableError if ended == UnavailableError.exit_code else UnreachableError
            message, its_hint = _last_words(said, _read_from(log_path, log_start))
            raise kind(
                f"the daemon did not start: {message}",
                hint=f"{its_hint}; {hint}" if its_hint else hint,
            )
        time.sleep(0.05)


def _environment(where: paths.DaemonPaths) -> dict[str, str]:
    """This process's, with nothing that means another place when read from "/"."""
    absolute = {"RLQ_STATE_DIR": where.state_dir, "RLQ_SOCKET": where.socket}
    named = {key: str(path) for key, path in absolute.items() if os.environ.get(key)}
    return {**os.environ, **named}


def _read_line(fd: int, deadline: float) -> str | None:
    """What the daemon said on the ready pipe, "" if it died in silence; None: nothing in time."""
    said = b""
    while b"\n" not in said:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            return None
        chunk = os.read(fd, 4096)
        if not chunk:
            break
        said += chunk
    return said.decode(errors="replace").strip()


def _read_from(log_path: Path, start: int) -> str:
    try:
        with open(log_path, "rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def _last_words(said: str, logged: str) -> tuple[str, str | None]:
    """Why it ended, in its own words, and its hint: from the ready pipe, else from its log."""
    lines = (said or logged).splitlines()
    errors = [i for i, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
    if said:
        at = 0
    elif errors:
        at = errors[-1]
    else:
        # A traceback ends with what went wrong; its indented lines say where.
        words = [line for line in lines if line.strip() and not line[0].isspace()]
        return (words[-1] if words else "it ended without a word"), None
    hint = lines[at + 1].removeprefix("hint: ") if lines[at + 1 : at + 2] else None
    hinted = hint is not None and lines[at + 1].startswith("hint: ")
    return lines[at].removeprefix(ERROR_PREFIX), hint if hinted else None
