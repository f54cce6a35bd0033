"""Another machine's daemon: its name, its key, and one's own key (docs/remote.md).

Two files below the user's configuration folder: `key`, the secret half of one's own key pair,
mode 0600; and `known_hosts`, the servers' public keys, a line each: `HOST:PORT KEY`.  A server
is trusted by `rlq key trust` alone, never because it answered first.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from rlq import paths
from rlq.errors import UsageError
from rlq.protocol import keys

_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Remote:
    """A daemon on another machine, with all that is needed to talk to it."""

    host: str
    port: int
    server_key: bytes
    public: bytes
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        return show_host(self.host, self.port)


def chosen_host(
    socket: str | os.PathLike[str] | None = None, host: str | None = None
) -> str | None:
    """What was said first, and nearest: the arguments, RLQ_SOCKET, RLQ_HOST.  None: this machine.

    Raises:
        UsageError: both arguments are given.
    """
    if host is not None:
        if socket is not None:
            raise UsageError(
                "--socket is a daemon on this machine, --host one on another", hint="give one"
            )
        parse_host(host)
        return host
    if socket is not None or os.environ.get("RLQ_SOCKET"):
        return None
    return os.environ.get("RLQ_HOST") or None


def parse_host(text: str) -> tuple[str, int]:
    """`HOST`, `HOST:PORT`, `[IPV6]:PORT`.

    Raises:
        UsageError: something else.
    """
    hint = f"lab-gpu1, or lab-gpu1:{keys.PORT}"
    host, port = text, str(keys.PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not _HOST.fullmatch(host) or host.startswith("-"):
        raise UsageError(f"{text!r} is not a host", hint=hint)
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536):
        raise UsageError(f"{text!r}: {port!r} is not a port", hint=hint)
    return host.lower(), int(port)


def show_host(host: str, port: int) -> str:
    if port == keys.PORT:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find(text: str) -> Remote:
    """The daemon on host `text`.

    Raises:
        UsageError: no key of one's own, or of the server.
    """
    host, port = parse_host(text)
    shown = show_host(host, port)
    server_key = known_hosts().get((host, port))
    if server_key is None:
        raise UsageError(
            f"the key of {shown} is not known on this machine",
            hint=f"`rlq key server` on {host} prints it; then, here: rlq key trust {shown} KEY",
        )
    secret = load_secret()
    if secret is None:
        raise UsageError(
            "you have no key on this machine", hint="`rlq key` makes one, and says what to do"
        )
    return Remote(host, port, server_key, public_of(secret), secret)


# ---- one's own key -----------------------------------------------------------------


def key_path() -> Path:
    return paths.user_config().with_name("key")


def load_secret() -> bytes | None:
    """None: there is none yet.

    Raises:
        UsageError: others can read it, or it is not a key.
    """
    path = key_path()
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1000)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"others may read your secret key {path}",
            hint=f"chmod 600 {path}; if somebody may have seen it: rlq key --force",
        )
    try:
        return keys.parse_secret(text)
    except UsageError:
        raise UsageError(
            f"{path} holds no secret key", hint="`rlq key --force` makes a new one"
        ) from None


def make_secret() -> bytes:
    """Make a key pair and keep its secret half in place of any older one.

    Raises:
        UsageError: it cannot be written.
    """
    import zmq
    from zmq.utils import z85

    secret = z85.decode(zmq.curve_keypair()[1])
    _write(key_path(), keys.show_secret(secret) + "\n")
    return secret


def public_of(secret: bytes) -> bytes:
    import zmq
    from zmq.utils import z85

    return z85.decode(zmq.curve_public(z85.encode(secret)))


# ---- the servers' keys -------------------------------------------------------------


def known_hosts_path() -> Path:
    return paths.user_config().with_name("known_hosts")


def known_hosts() -> dict[tuple[str, int], bytes]:
    """
    Raises:
        UsageError: a line of the file cannot be read.
    """
    path = known_hosts_path()
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    found: dict[tuple[str, int], bytes] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            host, key = words
            found[parse_host(host)] = keys.parse_key(key)
        except (ValueError, UsageError):
            raise UsageError(
                f"{path}, line {number}: not a host and its key", hint="remove the line"
            ) from None
    return found


def trust(text: str, key: bytes, *, force: bool = False) -> bool:
    """Know the host by this key from now on.  False: it was already.

    Raises:
        UsageError: it is known by another key, and not `force`.
    """
    host, port = parse_host(text)
    known = known_hosts()
    before = known.get((host, port))
    if before == key:
        return False
    if before is not None and not force:
        raise UsageError(
            f"{show_host(host, port)} is known by another key: {keys.show_key(before)}",
            hint="if its administrator says that it has changed: the same with --force",
        )
    known[host, port] = key
    lines = [f"{show_host(*place)} {keys.show_key(one)}\n" for place, one in known.items()]
    _write(known_hosts_path(), "".join(lines))
    return True


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and readable by nobody else."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(part, flags, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
