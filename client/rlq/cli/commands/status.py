"""The daemon and the machine at a glance."""

from __future__ import annotations

import time

from rlq import __version__
from rlq.cli.app import App, verb, warn
from rlq.cli.commands.gpus import host_line
from rlq.cli.output import clean, plain, print_fields, print_json
from rlq.protocol.bookings import booked_words, quiet_words, what_words
from rlq.protocol.messages import DaemonStatus, Machine
from rlq.protocol.states import JobState
from rlq.protocol.units import format_duration


@verb("status", short_help="The daemon and the machine at a glance.")
def command(app: App) -> None:
    """The daemon and the machine at a glance."""
    with app.client() as client:
        status = client.status()
        if app.json:
            print_json(plain(status))
            return
        machine = client.devices()
    print_status(status, machine)
    for problem in status.problems:
        warn(clean(problem))
    if status.version != __version__:
        warn(f"rlqd is {status.version}, this rlq is {__version__}: restart rlqd after an upgrade")


def gpus_line(machine: Machine) -> str:
    if machine.nvml_absent:
        return "none (no NVIDIA driver here)"
    if machine.nvml_problem:
        return clean(machine.nvml_problem)
    failing = sum(bool(gpu.problem) for gpu in machine.gpus)
    found = str(len(machine.gpus) or "none")
    return f"{found}, {failing} of them with a problem" if failing else found


def all_booked(machine: Machine, now: float) -> list[str]:
    lines = [
        booked_words(one, now)
        if one.kind == "maintenance"
        else f"{what_words(one)}: {booked_words(one, now)}"
        for one in machine.bookings
    ]
    return lines if machine.quiet is None else [*lines, quiet_words(machine.quiet, now)]


def print_status(status: DaemonStatus, machine: Machine) -> None:
    jobs = [
        f"{status.counts[state]} {state.value}"
        for state in JobState
        if status.counts.get(state, 0)
    ]
    print_fields(
        [
            ("daemon", f"rlqd {clean(status.version)}, pid {status.pid}, uid {status.uid}"),
            ("up", format_duration(time.time() - status.started_at)),
            (
                "admission",
                "draining: nothing new starts (`rlq drain --off` ends it)"
                if status.draining
                else "open",
            ),
            ("jobs", ", ".join(jobs) or "none"),
            ("gpus", gpus_line(machine)),
            *(
                (line[:3].strip() or "together", line[6:])
                for line in host_line(machine.host).splitlines()
            ),
            ("limits", clean(status.enforcement.summary)),
            ("booked", "\n".join(map(clean, all_booked(machine, time.time())))),
            ("state", clean(status.state_dir)),
            ("socket", clean(status.socket)),
            ("config", clean(status.config_path) or "built-in defaults"),
            ("memory", f"{status.rss_mib} MiB" if status.rss_mib else ""),
        ]
    )
