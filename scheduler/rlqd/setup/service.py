"""The service as systemd sees it, and the daemon that answers on its socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rlq import paths
from rlq.errors import (
    ProtocolError,
    RefusedError,
    RlqError,
    UnavailableError,
    UnreachableError,
    from_wire,
)
from rlq.protocol import messages as wire
from rlq.transport import Connection, is_answering

UNIT = "rlqd.service"
#: Starting recovers every job of a long queue; Type=notify makes systemctl wait for it.
START_TIMEOUT_S = 90
ANSWER_TIMEOUT_S = 10.0

R = TypeVar("R", bound=wire.Reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The system's rlqd, or one user's own."""

    user: bool
    unit_path: Path
    socket: Path
    #: Where the unit makes the daemon keep its state; a drop-in may name another place.
    state_dir: Path
    config_path: Path
    environ: dict[str, str] = field(repr=False)

    @property
    def drop_ins(self) -> list[Path]:
        """Changes that a person has made with `systemctl edit`."""
        return sorted(self.unit_path.with_name(f"{UNIT}.d").glob("*.conf"))

    @property
    def systemctl_line(self) -> str:
        return "systemctl --user" if self.user else "systemctl"

    @property
    def journal_line(self) -> str:
        return f"journalctl {'--user ' if self.user else ''}-u rlqd"

    # ---- systemd -------------------------------------------------------------------

    def require_systemd(self) -> None:
        """Raises: RefusedError."""
        alone = (
            "without it, `rlq` starts a daemon of your own by itself; for everybody, start rlqd as"
            " root from whatever starts services here"
        )
        if not os.path.isdir("/run/systemd/system") or shutil.which("systemctl") is None:
            raise RefusedError("this machine was not booted with systemd", hint=alone)
        if self.user and self._run("show-environment").returncode:
            raise RefusedError(
                "no systemd of your own answers (systemctl --user)",
                hint="log in as yourself, over ssh or at the machine: after su and sudo there is"
                " none, unless `loginctl enable-linger` keeps one running",
            )

    def systemctl(self, *args: str) -> str:
        """Raises: UnavailableError (with what systemctl said)."""
        done = self._run(*args)
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise UnavailableError(
                f"`{self.systemctl_line} {' '.join(args)}` failed: {said}",
                hint=f"`{self.systemctl_line} status rlqd` and `{self.journal_line}` say why",
            )
        return done.stdout.strip()

    def is_active(self) -> bool:
        return self._run("is-active", UNIT).stdout.strip() in ("active", "reloading")

    def is_enabled(self) -> bool:
        return self._run("is-enabled", UNIT).stdout.strip() == "enabled"

    def needs_reload(self) -> bool:
        """Whether there are files, or changes in them, that systemd has not read yet."""
        if self._show("NeedDaemonReload") == "yes":
            return True
        # That does not tell of the first drop-in in a folder that was not there before.
        known = self._show("DropInPaths").split()
        return not {str(path) for path in self.drop_ins} <= set(known)

    def _show(self, name: str) -> str:
        return self._run("show", "-p", name, "--value", UNIT).stdout.strip()

    def main_pid(self) -> int:
        """0: it does not run."""
        return int(self._show("MainPID") or 0)

    def last_words(self) -> str:
        """The end of its journal, "" if there is none."""
        scope = ["--user"] if self.user else []
        try:
            done = subprocess.run(
                ["journalctl", *scope, "-u", "rlqd", "-n", "8", "-o", "cat", "--no-pager"],
                env=self.environ,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip()

    def _run(self, *args: str) -> subprocess.CompletedProcess[str]:
        scope = ["--user"] if self.user else []
        try:
            return subprocess.run(
                ["systemctl", *scope, "--no-pager", *args],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"`{self.systemctl_line} {' '.join(args)}` has not ended in {START_TIMEOUT_S} s",
                hint=f"`{self.journal_line} -n 30` says why",
            ) from error

    # ---- the daemon ----------------------------------------------------------------

    def ask(self, request: wire.Request, reply_type: type[R]) -> R:
        """Raises: RlqError (nobody answers, another protocol, the daemon's refusal)."""
        if not is_answering(self.socket):
            raise UnreachableError(f"no daemon answers on {self.socket}")
        connection = Connection(self.socket)
        try:
            connection.send(b"1", request)
            answer = connection.receive(time.monotonic() + ANSWER_TIMEOUT_S)
        finally:
            connection.close()
        if answer is None:
            raise UnreachableError(f"the daemon on {self.socket} does not answer")
        reply = answer[1]
        if isinstance(reply, wire.Error):
            raise from_wire(reply.kind, reply.message, reply.hint)
        if not isinstance(reply, reply_type):
            raise ProtocolError(f"the daemon answered with a {type(reply).__name__}")
        return reply

    def version(self) -> str:
        """Of the daemon that answers; "" if none does, "another" if its protocol is."""
        try:
            return self.ask(wire.Ping(), wire.Pong).version
        except ProtocolError:
            return "another version"
        except RlqError:
            return ""

    def await_end(self) -> None:
        """Until nobody listens any more.  Raises: UnavailableError."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while is_answering(self.socket):
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"the daemon on {self.socket} was told to stop, and has not",
                    hint="`rlq daemon status` says which process it is",
                )
            time.sleep(0.02)


def system_service() -> Service:
    return Service(
        user=False,
        unit_path=Path("/etc/systemd/system") / UNIT,
        socket=paths.system_socket(),
        state_dir=Path("/var/lib/rlq"),
        config_path=paths.system_config(),
        environ={**os.environ, "SYSTEMD_COLORS": "0"},
    )


def user_service() -> Service:
    """This user's; with su, as with cron, the session's variables are missing: they are known."""
    runtime = f"/run/user/{os.geteuid()}"
    config = paths.user_config()
    return Service(
        user=True,
        unit_path=config.parents[1] / "systemd" / "user" / UNIT,
        socket=Path(runtime) / "rlq" / paths.SOCKET_NAME,
        state_dir=paths.user_state_dir(),
        config_path=config,
        environ={**os.environ, "XDG_RUNTIME_DIR": runtime, "SYSTEMD_COLORS": "0"},
    )
