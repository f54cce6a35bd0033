"""What a job printed.

The log is a file of the job's user on this machine: it is read directly, so that a slow terminal
is nobody's trouble.  The daemon only says where it is and whether the job still lives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO, Self

import click

from rlq.cli.app import App, Parsed, is_terminal, note, shows_escapes, verb, whole
from rlq.cli.commands.wait import ending
from rlq.cli.output import clean, print_json
from rlq.cli.selections import id_argument
from rlq.client import Client, select
from rlq.errors import NotFoundError, NotPermittedError, UnavailableError, UsageError
from rlq.protocol.messages import Job, Wait, Waited
from rlq.protocol.states import JobState

if TYPE_CHECKING:
    from rlq.cli.live import Bars

BLOCK = 64 * 1024
#: The file is looked at this often: a person cannot tell it from at once.
POLL_MS = 200


@verb("logs", short_help="What a job printed; -f follows it.")
@id_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option(
    "-n",
    "--lines",
    metavar="N",
    type=Parsed("lines", whole("a number of lines", 0, 10**9)),
    help="Only the last N lines.",
)
def command(app: App, job: int, follow: bool, lines: int | None) -> None:
    """What a job printed, stdout and stderr together. -f follows it until it ends."""
    if follow and app.json:
        raise UsageError("--follow and --json exclude each other", hint="leave out one of them")
    app.require_here(
        "a log is a file of the machine that ran the job,", f"rlq logs {'-f ' * follow}{job}"
    )
    with app.client() as client:
        found = client.get(job)
        if not follow:
            show(app, found, lines)
            return
        with ExitStack() as stack:
            follow_log(client, found, lines, stack)


def show(app: App, job: Job, lines: int | None) -> None:
    with open_log(job) as log:
        content = tail(log, job.log_path, lines) if lines is not None else None
        if app.json:
            text = (log.read() if content is None else content).decode(errors="replace")
            print_json({"id": job.id, "log_path": job.log_path, "lines": text.splitlines()})
            return
        write(content or b"")
        if content is None:
            while block := log.read(BLOCK):
                write(block)
    sys.stdout.flush()


def open_log(job: Job) -> BinaryIO:
    """Raises:
    NotFoundError: it has none yet, or none any more.
    NotPermittedError: it is somebody else's.
    """
    if not job.log_path:
        raise NotFoundError(f"job {job.id} has no log", hint=f"`rlq show {job.id}`")
    try:
        return open(job.log_path, "rb")
    except FileNotFoundError:
        if job.attempt == 0 and not job.state.is_final:
            raise NotFoundError(
                f"job {job.id} has not started yet, so it has printed nothing",
                hint=f"`rlq why {job.id}` says what it waits for; `rlq logs -f {job.id}` waits",
            ) from None
        if job.attempt == 0:
            ended = "was cancelled" if job.state is JobState.CANCELLED else "ended"
            raise NotFoundError(
                f"job {job.id} {ended} before it started, so it has printed nothing",
                hint=f"`rlq requeue {job.id}` queues it again",
            ) from None
        raise NotFoundError(
            f"the log of job {job.id} is gone: {clean(job.log_path)}",
            hint="somebody has moved or removed it",
        ) from None
    except PermissionError:
        raise NotPermittedError(
            f"the log of job {job.id} is {job.user}'s to read: {clean(job.log_path)}",
            hint=f"ask {job.user}",
        ) from None
    except OSError as error:
        raise UnavailableError(f"cannot read {clean(job.log_path)}: {error.strerror}") from error


def tail(log: BinaryIO, path: str, lines: int) -> bytes:
    """The last `lines` lines; the file is left at its end.  The older part of a log that was
    rotated fills up what the newer one lacks."""
    found = last_lines(log, lines)
    lacking = lines - found.count(b"\n") - (not found.endswith(b"\n") and found != b"")
    if lacking > 0:
        try:
            with open(f"{path}.1", "rb") as older:
                found = last_lines(older, lacking) + found
        except OSError:
            pass  # it was never rotated
    return found


def last_lines(log: BinaryIO, lines: int) -> bytes:
    end = log.seek(0, os.SEEK_END)
    if lines <= 0:
        return b""
    content = b""
    position = end
    while position > 0 and content.rstrip(b"\n").count(b"\n") < lines:
        size = min(BLOCK, position)
        position -= size
        log.seek(position)
        content = log.read(size) + content
    log.seek(end)
    return b"".join(content.splitlines(keepends=True)[-lines:]) if content else b""


def follow_log(client: Client, job: Job, lines: int | None, stack: ExitStack) -> None:
    """Until the job has ended and all it printed is shown."""
    told = ""
    bars: Bars | None = None
    wants_bars = shows_escapes(sys.stdout) and is_terminal(sys.stderr)
    log: FollowedLog | None = None
    partial = b""
    while True:
        # The state first, the file second: what is printed before the end is never missed.
        ended = job.state.is_final
        if log is None and (ended or os.path.exists(job.log_path)):
            log = stack.enter_context(FollowedLog(job))
            if lines is not None:
                write(log.tail(lines))
        if log is not None:
            for block in log.read_new():
                if bars is None:
                    write(block)
                else:
                    *whole_lines, partial = (partial + block).split(b"\n")
                    for line in whole_lines:
                        bars.print(shown(line))
            sys.stdout.flush()
        if ended:
            break
        if log is None:
            waiting = clean(job.reason) or job.state.value.lower()
            if waiting != told:
                note(f"job {job.id} has not started yet: {waiting}")
                told = waiting
        elif wants_bars and bars is None and job.progress is not None:
            from rlq.cli.live import Bars

            bars = stack.enter_context(Bars(total=1, stderr=False))
        if bars is not None:
            bars.update([job])
        job = later(client, job)
    if bars is not None and partial:
        bars.print(shown(partial))
    stack.close()
    if is_terminal(sys.stderr):
        note(f"job {job.id} ({clean(job.name)}): {ending(job)}")


def later(client: Client, job: Job) -> Job:
    """The job when it has ended, or after POLL_MS."""
    waited = client.request(Wait(selection=select(job.id), timeout_ms=POLL_MS))
    assert isinstance(waited, Waited)
    if not waited.jobs:
        raise NotFoundError(f"job {job.id} is gone", hint="its history was removed meanwhile")
    return waited.jobs[0]


class FollowedLog:
    """A log that is being written, cut off or rotated meanwhile."""

    def __init__(self, job: Job) -> None:
        self._path = job.log_path
        self._log = open_log(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def tail(self, lines: int) -> bytes:
        return tail(self._log, self._path, lines)

    def read_new(self) -> Iterator[bytes]:
        """What was written since the last call."""
        while True:
            yield from self._rest()
            try:
                now = os.stat(self._path)
            except OSError:
                return  # between two files, or removed: what is open stays readable
            here = os.fstat(self._log.fileno())
            if (now.st_dev, now.st_ino) != (here.st_dev, here.st_ino):
                # Whatever was written to the old file between the last read and the rename.
                yield from self._rest()
                try:
                    newer = open(self._path, "rb")  # noqa: SIM115  # closed by __exit__
                except OSError:
                    return
                self._log.close()
                self._log = newer
            elif now.st_size < self._log.tell():
                self._log.seek(0)  # it was truncated
            else:
                return

    def _rest(self) -> Iterator[bytes]:
        while block := self._log.read(BLOCK):
            yield block


def shown(line: bytes) -> str:
    """A line as it looks in the end: tqdm draws over it with carriage returns."""
    text = line.decode(errors="replace").rstrip("\r")
    return text.rsplit("\r", 1)[-1]


def write(block: bytes) -> None:
    if not block:
        return
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:
        sys.stdout.write(block.decode(errors="replace"))
    else:
        binary.write(block)
