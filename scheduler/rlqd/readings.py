"""What the monitors read, as plain values: made by adapters, read by the shell.

One unreadable field is None; one lost GPU is one lost GPU with a `problem`.
Memory in MiB, shares in per cent, `taken_at_ms` on CLOCK_MONOTONIC just before reading.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A logical CPU that this daemon may use."""

    number: int
    #: Logical CPUs with the same value are hyperthread siblings on one physical core.
    physical: int
    numa_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcessReading:
    pid: int
    mem_mib: int | None
    #: Clamped to 0..100; None: no sample since the last reading.
    sm_pct: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    uuid: str
    #: As nvidia-smi numbers it.
    index: int
    name: str
    #: "" or what is wrong with this device, for people: "lost (fell off the bus)".
    problem: str = ""
    mem_mib_total: int | None = None
    mem_mib_free: int | None = None
    mem_mib_reserved: int | None = None
    #: Share of time in which any kernel ran (NVML "utilization.gpu").
    sm_pct: int | None = None
    temperature_c: int | None = None
    power_w: int | None = None
    mig: bool | None = None
    #: Logical CPUs on the GPU's NUMA node; empty: not readable.
    cores_near: tuple[int, ...] = ()
    processes: tuple[GpuProcessReading, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusReading:
    taken_at_ms: int
    #: "": NVML works. Otherwise why it cannot be used, for people.
    problem: str = ""
    #: There is no NVIDIA driver here at all (as against one that fails).
    absent: bool = False
    gpus: tuple[GpuReading, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeReading:
    """One job's whole process tree: the supervisor's descendants, itself left out."""

    pids: tuple[int, ...]
    #: CPU time used since the last reading, per second of wall time: cores' worth of work.
    #: None at the first reading.
    cpu_cores: float | None
    #: Proportional where cheap to read, else resident.
    mem_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    taken_at_ms: int
    #: Busy share of each logical CPU since the last reading, 0.0 to 1.0; key: its number.
    busy: dict[int, float]
    #: Cores' worth of work by processes that belong to no job, smoothed over some 10 s.
    cores_outside: float
    mem_mib_total: int
    mem_mib_available: int
    #: Key: the supervisor's pid as given to the monitor.
    trees: dict[int, TreeReading]
