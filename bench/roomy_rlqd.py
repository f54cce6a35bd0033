"""rlqd on a machine with 64 made-up cores, so that 50 jobs run at a time wherever it stands.

The real code but for two things: the cores it is told of, and that a job is not pinned (to a
core that is not there).
"""

from __future__ import annotations

from dataclasses import replace

from rlqd.__main__ import main
from rlqd.adapters import host, processes
from rlqd.fences import Fence
from rlqd.readings import Cpu

CORES = 64


def _cpus() -> tuple[Cpu, ...]:
    return tuple(Cpu(number=n, physical=n, numa_node=0) for n in range(CORES))


class _Unpinned(processes.Processes):
    def launch(self, order: processes.LaunchOrder) -> processes.Handle | processes.LaunchError:
        return super().launch(replace(order, cpus=(), fence=Fence()))


if __name__ == "__main__":
    # Both names are looked up when the daemon is put together, in main().
    setattr(host, "cpus", _cpus)  # noqa: B010
    setattr(processes, "Processes", _Unpinned)  # noqa: B010
    main()
