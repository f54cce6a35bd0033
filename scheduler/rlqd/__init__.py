"""rlqd: the daemon.

core/       decides: facts in, commands out, nothing else
shell/      carries out: event -> step -> commit -> effects
adapters/   touches the world: ZeroMQ, SQLite, processes, NVML, psutil, systemd
sim/        a make-believe machine under the real core
readings.py what the monitors read, as plain values
hours.py    hours of the week, laid out on the calendar
supervisor.py  one tiny process per job, which outlives the daemon
"""

from __future__ import annotations
