"""What different rules of packing make of the same workloads, in virtual time.

Run: python bench/policies.py [--only TEXT] [--series N] [--processes N]
                              [--history FILE --gpus N --cores N]

Every rule drives the same machine (scheduler/rlqd/sim/contention.py) through the same workloads
(workloads.py).  The figures of the programs are assumptions, so what counts is how the rules
compare, not the seconds.  One seed is one result: nothing here depends on this machine.

    serial    one job per GPU
    N=…       so many per GPU, whatever they do
    memory    as many as fit by declared GPU memory, 4 GiB where nothing is declared
    sm        one more every 15 s while NVML's utilisation reads under 80 %, and 4 GiB are free
    rlq       the real core, knowing nothing at the start
    rlq warm  the real core, having seen this workload before
    oracle    knows the model: the best, in hindsight, of all the rules above that are not rlq
              and of twelve that start jobs by their true gain

All keep a core for each job, as if they pinned.  Jobs lost to a full memory start again.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlqd.sim.contention import (
    CoreRun,
    Hardware,
    Load,
    Machine,
    Outcome,
    Rule,
    Task,
    Workload,
    alone_per_s,
    load_of,
    run_rule,
)
from rlqd.sim.workloads import from_history, generated

SLOTS = (2, 3, 4, 6, 8, 10)
DEFAULT_MIB = 4_096
SM_LIMIT = 0.80
SM_WAIT_S = 15.0
#: The daemon reads every second; half as often takes half as long here.
READING_S = 2


# ---- rules -------------------------------------------------------------------------


def _free_cores(machine: Machine) -> int:
    return machine.hardware.cores - machine.cores_used()


def _fifo(
    has_room: Callable[[Task, Machine, int], bool],
) -> Rule:
    """The first that fits, on the GPU with the fewest jobs."""

    def rule(waiting: Sequence[Task], machine: Machine) -> tuple[Task, int | None] | None:
        if _free_cores(machine) < 1:
            return None
        seen: set[str] = set()
        for task in waiting:
            if task.program.signature in seen:
                continue
            seen.add(task.program.signature)
            if task.program.gpu_ms == 0:
                return task, None
            for gpu in sorted(range(machine.hardware.gpus), key=lambda g: len(machine.on(g))):
                if has_room(task, machine, gpu):
                    return task, gpu
        return None

    return rule


def slots(n: int) -> Rule:
    return _fifo(lambda _, machine, gpu: len(machine.on(gpu)) < n)


def by_memory() -> Rule:
    def has_room(task: Task, machine: Machine, gpu: int) -> bool:
        held = sum(r.task.spec.gpu_mem_mib or DEFAULT_MIB for r in machine.on(gpu))
        return held + (task.spec.gpu_mem_mib or DEFAULT_MIB) <= machine.hardware.gpu_mem_mib

    return _fifo(has_room)


def by_sm() -> Rule:
    def has_room(task: Task, machine: Machine, gpu: int) -> bool:
        last = max((r.started_s for r in machine.on(gpu)), default=-math.inf)
        free = machine.hardware.gpu_mem_mib - machine.gpu_mem_mib_used(gpu)
        return (
            machine.now - last >= SM_WAIT_S
            and machine.seen[gpu] < SM_LIMIT
            and free >= (task.spec.gpu_mem_mib or DEFAULT_MIB)
        )

    return _fifo(has_room)


@dataclass(slots=True)
class Oracle:
    """Starts what adds most by the model's own figures, while it adds more than `least`."""

    least: float
    #: "gain": whatever adds most; "fifo": the oldest that adds enough; "long": the longest.
    order: str

    def __call__(
        self, waiting: Sequence[Task], machine: Machine
    ) -> tuple[Task, int | None] | None:
        if _free_cores(machine) < 1:
            return None
        firsts: dict[str, Task] = {}
        for task in waiting:
            known = firsts.get(task.program.signature)
            if known is None or (self.order == "long" and task.steps > known.steps):
                firsts[task.program.signature] = task
        kinds = list(firsts.values())
        if self.order == "long":
            kinds.sort(key=lambda t: -t.steps / alone_per_s(t.program))
        best: tuple[float, Task, int | None] | None = None
        for task in kinds:
            grown = task.program.mem_mib + task.program.mem_mib_grows
            full = sum(
                r.task.program.mem_mib + r.task.program.mem_mib_grows
                for r in machine.runs.values()
            )
            if full + grown + 4_096 > machine.hardware.mem_mib:
                continue
            if task.program.gpu_ms == 0:
                return task, None
            for gpu in range(machine.hardware.gpus):
                gain = self._gain(task, machine, gpu)
                if gain > self.least and (best is None or gain > best[0] + 1e-9):
                    best = (gain, task, gpu)
            if best is not None and self.order != "gain":
                break
        return None if best is None else (best[1], best[2])

    @staticmethod
    def _gain(task: Task, machine: Machine, gpu: int) -> float:
        here = machine.on(gpu)
        guests = [o.program for o in machine.visitors(gpu)]
        mem = sum(r.task.program.gpu_mem_mib for r in here) + task.program.gpu_mem_mib + 400
        if mem + sum(p.gpu_mem_mib for p in guests) > machine.hardware.gpu_mem_mib:
            return -math.inf
        loads = [load_of(r.task.program, late=r.is_late) for r in here]
        alone = [alone_per_s(r.task.program, late=r.is_late) for r in here]
        outside = [load_of(p) for p in guests]

        def stp(loads: list[Load], alone: list[float]) -> float:
            rates = machine.rates((*loads, *outside))
            return sum(rate / one for rate, one in zip(rates, alone, strict=False))

        before = stp(loads, alone)
        loads, alone = [*loads, load_of(task.program)], [*alone, alone_per_s(task.program)]
        return stp(loads, alone) - before


ORACLES = [
    Oracle(least, order) for order in ("gain", "fifo", "long") for least in (0.0, 0.03, 0.08, 0.2)
]

# ---- running -----------------------------------------------------------------------

NAMES = ("serial", *(f"N={n}" for n in SLOTS), "memory", "sm", "rlq", "rlq warm", "oracle")


def fixed(workload: Workload) -> dict[str, Outcome]:
    """The rules that learn nothing."""
    found = {"serial": run_rule(workload, slots(1))}
    found |= {f"N={n}": run_rule(workload, slots(n)) for n in SLOTS}
    found["memory"] = run_rule(workload, by_memory())
    found["sm"] = run_rule(workload, by_sm())
    return found


def rlq(workload: Workload) -> dict[str, Outcome]:
    cold = CoreRun(workload, reading_s=READING_S)
    first = cold.run()
    warm = CoreRun(workload, reading_s=READING_S, learned=cold.learned)
    return {"rlq": first, "rlq warm": warm.run()}


def study(workload: Workload) -> dict[str, Outcome]:
    found = fixed(workload)
    hindsight = [*found.values(), *(run_rule(workload, rule) for rule in ORACLES)]
    found |= rlq(workload)
    found["oracle"] = min(hindsight, key=lambda outcome: outcome.makespan_s)
    return found


def best_slots(found: dict[str, Outcome]) -> str:
    names = ("serial", *(f"N={n}" for n in SLOTS))
    return min(names, key=lambda name: found[name].makespan_s)


# ---- reporting ---------------------------------------------------------------------


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<29}" + "".join(f"{cell:>9}" for cell in cells)


def report(workloads: Sequence[Workload], results: Sequence[dict[str, Outcome]]) -> None:
    print("Makespan, as a multiple of the oracle's (last column: minutes)")
    print(_row("", NAMES))
    for workload, found in zip(workloads, results, strict=True):
        oracle = found["oracle"].makespan_s
        cells = [f"{found[n].makespan_s / oracle:.2f}" for n in NAMES[:-1]]
        print(_row(workload.name, [*cells, f"{oracle / 60:.0f}"]))
    measures: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
        ("makespan", lambda o: o.makespan_s),
        ("mean completion time", lambda o: o.mean_s),
        ("p95 completion time", lambda o: o.p95_s),
        ("STP", lambda o: o.stp),
        ("ANTT", lambda o: o.antt),
    )
    print("\nGeometric means of the ratios to the oracle")
    print(_row("", NAMES))
    for label, measure in measures:
        means = [
            geometric_mean([measure(f[n]) / measure(f["oracle"]) for f in results]) for n in NAMES
        ]
        print(_row(label, [f"{m:.3f}" for m in means]))
    worst = [max(f[n].makespan_s / f["oracle"].makespan_s for f in results) for n in NAMES]
    print(_row("makespan, the worst", [f"{w:.3f}" for w in worst]))
    print(_row("runs lost to full memory", [str(sum(f[n].lost for f in results)) for n in NAMES]))
    for name in ("rlq", "rlq warm"):
        print(f"\n{name}")
        print(
            f"{'':<29}{'makespan':>9}{'mean':>7}{'p95':>7}{'STP':>6}{'ANTT':>6}{'lost':>6}"
            "   against the best N"
        )
        for workload, found in zip(workloads, results, strict=True):
            mine, best = found[name], best_slots(found)
            print(
                f"{workload.name:<29}{mine.makespan_s / 60:>8.0f}m{mine.mean_s / 60:>6.0f}m"
                f"{mine.p95_s / 60:>6.0f}m{mine.stp:>6.2f}{mine.antt:>6.2f}{mine.lost:>6}"
                f"   {mine.makespan_s / found[best].makespan_s:.3f} ({best})"
            )
        over = [f[name].makespan_s / f[best_slots(f)].makespan_s for f in results]
        print(
            f"against the best N of each: geometric mean {geometric_mean(over):.3f},"
            f" worst {max(over):.3f}, above 1.15 in {sum(o > 1.15 for o in over)} of {len(over)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads with this in them")
    parser.add_argument("--series", type=int, default=0, help="other draws of each workload")
    parser.add_argument("--history", type=Path, help="also `rlq history --json` from this file")
    parser.add_argument("--gpus", type=int, default=1, help="of the machine under --history")
    parser.add_argument("--cores", type=int, default=16, help="of the machine under --history")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    workloads = [w for w in generated(asked.series) if asked.only in w.name]
    if asked.history is not None:
        hardware = Hardware(gpus=asked.gpus, cores=asked.cores)
        try:
            workloads.append(from_history(asked.history.read_text(), hardware))
        except (OSError, ValueError) as error:
            parser.error(f"{asked.history}: {error}")
    if not workloads:
        parser.error(f"no workload has {asked.only!r} in its name")
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        results = pool.map(study, workloads, chunksize=1)
    report(workloads, results)
    print(f"took {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
