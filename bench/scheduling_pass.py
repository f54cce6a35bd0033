"""One scheduling pass of the core, in process, with a long queue on a full machine.

Run: python bench/scheduling_pass.py [--sizes 1000,10000,100000] [--shapes 1,1000] [--times 20]
A shape is what a job asks for: jobs of one shape are considered once per pass.  Two passes are
timed: new readings arrive and nothing fits; and a job ends and the next one starts.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import print_machine
from bench.report import tell
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    Action,
    Core,
    Event,
    Exit,
    GpuFacts,
    GpuId,
    Instant,
    JobId,
    JobSpec,
    Launch,
    MachineFacts,
    MachineSampled,
    Policy,
    ProcessExited,
    ProcessStarted,
    Submitted,
)

CORES = 32
GPUS = tuple(GpuId(f"GPU-{n}") for n in range(4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,10000,100000", help="queue lengths")
    parser.add_argument("--shapes", default="1,1000", help="different requests in the queue")
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    print_machine()
    for shapes in (int(n) for n in options.shapes.split(",")):
        for size in (int(n) for n in options.sizes.split(",")):
            desk = Desk(size, shapes)
            readings = [desk.read_again_ms() for _ in range(options.times)]
            ends = [desk.end_one_ms() for _ in range(options.times)]
            queue = f"{size:,} queued of {min(shapes, size):,} shape{'s' * (shapes > 1)}"
            tell(f"pass, new readings, nothing fits, {queue}", readings, "ms", at_most=50)
            tell(f"pass, one ends and the next starts, {queue}", ends, "ms", at_most=50)


def shape(number: int) -> JobSpec:
    """Half of them want a GPU, as on the machine this is for."""
    return JobSpec(
        user=1000 + number % 7,
        gpus=number % 2,
        gpu_mem_mib=4000 + number if number % 2 else None,
        cores=1,
        mem_mib=1000 + number,
    )


class Desk:
    """A scheduler on a machine with `CORES` cores and four GPUs, all cores given to jobs."""

    def __init__(self, queued: int, shapes: int) -> None:
        self.now = 0
        self.core = Scheduler(policy=Policy())
        self.running: list[tuple[JobId, int]] = []
        self.read_again_ms()
        specs = [shape(n) for n in range(shapes)]
        jobs = tuple((JobId(n + 1), specs[n % shapes]) for n in range(queued + CORES))
        self._started(self._step(Submitted(Instant(0), 1, jobs))[1])
        assert len(self.running) == CORES, f"{len(self.running)} jobs run"
        # Long enough for the head of the queue to hold a reservation from now on.
        self.now += 2 * Policy().reserve_after_ms

    def read_again_ms(self) -> float:
        return self._step(MachineSampled(Instant(0), FACTS))[0]

    def end_one_ms(self) -> float:
        job_id, attempt = self.running.pop(0)
        # As in the daemon: a GPU that was left admits nothing until it has been read again.
        ended = ProcessExited(Instant(0), job_id, attempt, Exit(code=0))
        spent_ms, actions = self._step(ended, MachineSampled(Instant(0), FACTS))
        self._started(actions)
        return spent_ms

    def _started(self, actions: list[Action]) -> None:
        launches = [a for a in actions if isinstance(a, Launch)]
        self._step(
            *(ProcessStarted(Instant(0), a.job_id, a.attempt, 1000 + a.job_id) for a in launches)
        )
        self.running += [(a.job_id, a.attempt) for a in launches]

    def _step(self, *events: Event) -> tuple[float, list[Action]]:
        self.now += 1000
        now = Instant(self.now)
        dated: list[Event] = []
        for event in events:
            if isinstance(event, MachineSampled):
                facts = replace(event.facts, taken_at=now, gpus_taken_at=now)
                event = replace(event, facts=facts)
            dated.append(replace(event, now=now))
        began = time.perf_counter()
        actions = self.core.step(now, dated)
        self.core.next_wakeup()
        return (time.perf_counter() - began) * 1e3, actions


FACTS = MachineFacts(
    taken_at=Instant(0),
    gpus_taken_at=Instant(0),
    cores=tuple(Core(number=n, physical=n, numa_node=n % 2) for n in range(CORES)),
    mem_mib_total=1_000_000,
    mem_mib_available=1_000_000,
    gpus=tuple(
        GpuFacts(id=gpu, index=n, mem_mib_total=80_000, mem_mib_free=80_000, sm_pct=0)
        for n, gpu in enumerate(GPUS)
    ),
)

if __name__ == "__main__":
    main()
