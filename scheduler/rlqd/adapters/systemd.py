"""Words to systemd (sd_notify(3)), when systemd started us; otherwise nothing happens.

None of this ever raises at run time: a deaf service manager must not stop the queue.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Speaks to the service manager that `environ` names (NOTIFY_SOCKET), if it names one."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self._address.startswith(("/", "\0")):
            self._socket = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )
        self._watchdog_period_s = _watchdog_period_s(environ)

    @property
    def active(self) -> bool:
        return self._socket is not None

    def ready(self, status: str) -> None:
        """The daemon serves; also ends a reload."""
        self._send("READY=1", _status(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(_status(text))

    def reloading(self) -> None:
        """SIGHUP was heard; `ready` must follow."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={microseconds}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=stopping")

    def watchdog(self) -> None:
        """The loop is alive.  Call it from the loop, every `watchdog_period_s`."""
        self._send("WATCHDOG=1")

    def watchdog_period_s(self) -> float | None:
        """How often to call `watchdog`: half the time systemd allows.  None: it asks for none."""
        return self._watchdog_period_s

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *assignments: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address)
        except OSError:
            # Full or gone: there is nobody to tell, and the next word comes soon.
            return


def _status(text: str) -> str:
    # A newline would begin another assignment.
    return "STATUS=" + " ".join(text.split())


def _watchdog_period_s(environ: Mapping[str, str]) -> float | None:
    pid = environ.get("WATCHDOG_PID", "")
    if pid and pid != str(os.getpid()):
        return None  # meant for a parent of ours
    allowed = environ.get("WATCHDOG_USEC", "")
    if not (allowed.isascii() and allowed.isdigit() and int(allowed) > 0):
        return None
    return int(allowed) / 2 / 1_000_000
