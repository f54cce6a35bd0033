"""Words to systemd, heard on a real notification socket; and the unit files."""

from __future__ import annotations

import configparser
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlqd.adapters.systemd import Notifier

UNITS = Path(__file__).parents[2] / "systemd"


class Manager:
    """systemd's end."""

    def __init__(self, address: str) -> None:
        self.environ = {"NOTIFY_SOCKET": address}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(20)
        self._socket.bind(address.replace("@", "\0", 1))

    def heard(self) -> list[str]:
        return self._socket.recv(4096).decode().split("\n")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    path = request.param == "path"
    made = Manager(str(tmp_path / "n") if path else f"@rlq-test-{secrets.token_hex(8)}")
    yield made
    made.close()


@pytest.fixture
def notifier(manager: Manager) -> Iterator[Notifier]:
    made = Notifier(manager.environ)
    yield made
    made.close()


def test_a_service_tells_its_life(manager: Manager, notifier: Notifier) -> None:
    assert notifier.active
    notifier.ready("serving")
    assert manager.heard() == ["READY=1", "STATUS=serving"]
    notifier.status("3 jobs run")
    assert manager.heard() == ["STATUS=3 jobs run"]
    notifier.watchdog()
    assert manager.heard() == ["WATCHDOG=1"]
    notifier.stopping()
    assert manager.heard()[0] == "STOPPING=1"


def test_reloading_carries_the_monotonic_clock(manager: Manager, notifier: Notifier) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    first, second = manager.heard()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert first == "RELOADING=1"
    assert before <= int(second.removeprefix("MONOTONIC_USEC=")) <= after


def test_a_status_cannot_smuggle_in_another_word(manager: Manager, notifier: Notifier) -> None:
    notifier.status("ok\nSTOPPING=1\r\nMAINPID=1")
    assert manager.heard() == ["STATUS=ok STOPPING=1 MAINPID=1"]


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "relative"}, {"NOTIFY_SOCKET": "@"}]
)
def test_without_systemd_nothing_happens(environ: dict[str, str]) -> None:
    notifier = Notifier(environ)
    notifier.ready("x")
    notifier.watchdog()
    assert notifier.watchdog_period_s() is None
    notifier.close()
    notifier.stopping()


def test_a_manager_that_is_gone_or_does_not_listen_stops_nothing(
    manager: Manager, notifier: Notifier
) -> None:
    for _ in range(5000):  # more than its queue holds
        notifier.watchdog()
    manager.close()
    notifier.watchdog()


@pytest.mark.parametrize(
    ("usec", "pid", "period"),
    [
        ("30000000", None, 15.0),
        ("30000000", "ours", 15.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("-5", None, None),
        ("soon", None, None),
    ],
)
def test_the_watchdog_is_fed_twice_as_often_as_asked(
    usec: str, pid: str | None, period: float | None
) -> None:
    environ = {"WATCHDOG_USEC": usec}
    if pid is not None:
        environ["WATCHDOG_PID"] = str(os.getpid()) if pid == "ours" else pid
    assert Notifier(environ).watchdog_period_s() == period


@pytest.mark.parametrize("name", ["rlqd.service", "rlqd-user.service"])
def test_stopping_the_unit_stops_no_job(name: str) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNITS / name)
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["KillMode"] == "process"
    assert "Delegate" not in service  # DESIGN fact 8
    assert float(service["WatchdogSec"]) >= 10
    if name == "rlqd.service":
        assert service["RuntimeDirectory"] == service["StateDirectory"] == "rlq"


#: A job inherits what these do to the daemon: see "Hardening" in docs/operations.md.
FELT_BY_JOBS = (
    *("Protect", "Private", "Restrict", "SystemCall", "NoNewPrivileges", "LockPersonality"),
    *("MemoryDeny", "Device", "IPAddress", "Root", "ReadOnly", "Inaccessible", "Bind"),
)

#: Of 10, as systemd-analyze rates it: lower is better.  What is not done is not done on purpose,
#: so this is high; it may only fall.
EXPOSURE_MAX = 9.3


def settings(name: str) -> list[str]:
    lines = (UNITS / name).read_text().splitlines()
    return [line.partition("=")[0] for line in lines if "=" in line and line[0] != "#"]


@pytest.mark.parametrize("name", ["rlqd.service", "rlqd-user.service"])
def test_no_hardening_reaches_a_job(name: str) -> None:
    assert [key for key in settings(name) if key.startswith(FELT_BY_JOBS)] == []


def test_the_hardening_that_there_is_does_not_get_less() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    version = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True)
    if int(version.stdout.split()[1]) < 250:
        pytest.skip("systemd-analyze security --offline came with systemd 250")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", UNITS / "rlqd.service"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level for rlqd.service: ([\d.]+)", rated.stdout)
    assert found is not None, rated.stdout
    assert float(found[1]) <= EXPOSURE_MAX


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("name", ["rlqd.service", "rlqd-user.service"])
def test_systemd_understands_the_unit(name: str, tmp_path: Path) -> None:
    text = (UNITS / name).read_text()
    # It checks that the program is there; ours need not be installed.
    (tmp_path / name).write_text(re.sub("(?m)^ExecStart=.*", "ExecStart=/bin/true", text))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in verified.stderr.splitlines() if name in line]
    assert complaints == []
