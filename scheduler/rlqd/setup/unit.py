"""The text of the unit file that `rlqd install` writes; telling it from an edited one.

The first lines of the file are ours: who wrote it, and the digest of all that follows.  Where the
digest is right nobody has edited the file, and it may be replaced.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rlq.errors import RefusedError

_DIGEST = "# sha256: "
#: Of a path in ExecStart=, what systemd takes as it stands: no blank, quote, %, $ or backslash.
_PLAIN = re.compile(r"[\w@+.,/:=~-]+", re.ASCII)


def template(*, user: bool) -> str:
    """The unit file as it is shipped."""
    name = "rlqd-user.service" if user else "rlqd.service"
    for place in _places(name):
        if place.is_file():
            return place.read_text()
    raise AssertionError(f"{name} is missing from this installation of rlq")


def _places(name: str) -> Iterator[Path]:
    yield Path(__file__).parents[3] / "systemd" / name  # a clone
    shared = f"share/rlq/systemd/{name}"
    yield Path(sys.prefix) / shared
    # Where pip was told of another place: --user, --target.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("rlq") or ():
            if file.as_posix().endswith(shared):
                yield Path(str(file.locate()))


def render(shipped: str, program: tuple[str, ...], *, version: str, edit: str) -> str:
    """The file to write: `shipped` with `program` as its ExecStart=.  `edit`: how to change it.

    Raises:
        RefusedError: the program's path cannot stand in a unit file as it is.
    """
    for word in program:
        if not _PLAIN.fullmatch(word):
            raise RefusedError(
                f"the path {word!r} has characters that mean something else in a unit file",
                hint="install rlq into a folder with a plain name, such as /opt/rlq",
            )
    command = " ".join(program)
    body, count = re.subn(r"(?m)^ExecStart=.*$", lambda _: f"ExecStart={command}", shipped)
    assert count == 1, "a shipped unit has one ExecStart="
    return (
        f"# Written by `rlqd install` of rlq {version}, which leaves it alone once it is edited:\n"
        f"# change it with `{edit}`, which upgrades keep.\n"
        f"{_DIGEST}{_digest(body)}\n"
        f"{body}"
    )


def is_ours(text: str) -> bool:
    """Whether `rlqd install` wrote it, and nobody has edited it since."""
    before, mark, after = text.partition(_DIGEST)
    digest, _, body = after.partition("\n")
    return (
        bool(mark)
        and before.startswith("# Written by `rlqd install`")
        and (digest == _digest(body))
    )


def changes(old: str, new: str) -> list[str]:
    """The settings that differ, as "-Key=old" and "+Key=new"; comments are left out."""
    before, after = _settings(old), _settings(new)
    return [
        line
        for line in difflib.unified_diff(before, after, lineterm="", n=0)
        if line[0] in "+-" and not line.startswith(("+++", "---"))
    ]


def exec_start(text: str) -> str:
    """What a unit file starts, "" if it does not say."""
    found = re.findall(r"(?m)^ExecStart=(.*)$", text)
    return found[-1] if found else ""


def _settings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:32]
