"""What goes wrong in a run: drawn from its seed, so that each run stresses something else."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Chances are per occasion; `*_per_s` are per second of virtual time."""

    launch_fails: float = 0.0
    exit_fails: float = 0.0
    ignores_sigterm: float = 0.0
    hangs: float = 0.0
    late_report: float = 0.0
    repeated_report: float = 0.0
    signal_lost: float = 0.0
    unreadable_share: float = 0.0
    #: Of the daemon, per step.
    crash: float = 0.0
    reboot_per_s: float = 0.0
    supervisor_killed_per_s: float = 0.0
    gpu_lost_per_s: float = 0.0
    nvml_fails_per_s: float = 0.0
    nvml_hangs_per_s: float = 0.0
    monitor_hangs_per_s: float = 0.0
    clock_jumps_per_s: float = 0.0
    drain_per_s: float = 0.0
    user_per_s: float = 0.0
    #: Per cent of each resource that outsiders may take at most.
    outsiders_pct: int = 0

    @classmethod
    def draw(cls, rng: random.Random) -> Faults:
        def chance(*values: float) -> float:
            return rng.choice((0.0, *values))

        return cls(
            launch_fails=chance(0.05, 0.3),
            exit_fails=chance(0.1, 0.5),
            ignores_sigterm=chance(0.2, 0.8),
            hangs=chance(0.0, 0.1),
            late_report=chance(0.1, 0.6),
            repeated_report=chance(0.1, 0.5),
            signal_lost=chance(0.1, 0.5),
            unreadable_share=chance(0.0, 0.1, 0.9),
            crash=chance(0.01, 0.06),
            reboot_per_s=chance(0.0, 0.01),
            supervisor_killed_per_s=chance(0.02),
            gpu_lost_per_s=chance(0.02),
            nvml_fails_per_s=chance(0.0, 0.02),
            nvml_hangs_per_s=chance(0.0, 0.05),
            monitor_hangs_per_s=chance(0.0, 0.03),
            clock_jumps_per_s=chance(0.0, 0.01),
            drain_per_s=chance(0.0, 0.03),
            user_per_s=chance(0.05, 0.4),
            outsiders_pct=rng.choice((0, 30, 100)),
        )
