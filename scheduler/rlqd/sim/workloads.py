"""Workloads for policy studies: generated from seeds, or read from a recorded history.

The figures of the programs are ASSUMPTIONS, not measurements: no GPU was at hand.  They start from
what is public of SAC on Humanoid with an A100 (SB3 makes some 100 steps a second there, SBX 250 to
300, and both are bound by launches from one core, the GPU idle most of the time), and each
workload draws its own around them, so that a rule must not depend on any of them being right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rlqd.core.model import JobSpec
from rlqd.sim.contention import Hardware, Outsider, Program, Task, Workload, alone_per_s

SB3 = Program(
    signature="sb3 sac Humanoid",
    cpu_ms=7.0,
    gpu_ms=2.2,
    sm_share=0.15,
    switches=4.0,
    gpu_mem_mib=900,
    mem_mib=2_200,
    mem_bytes_per_step=6_200,
    mem_mib_grows=6_000,
    startup_s=12.0,
    warmup_steps=10_000,
    warmup_ms=1.2,
)
SBX = Program(
    signature="sbx sac Humanoid",
    cpu_ms=2.6,
    gpu_ms=0.9,
    sm_share=0.2,
    switches=1.0,
    gpu_mem_mib=1_400,
    mem_mib=1_900,
    mem_bytes_per_step=6_200,
    mem_mib_grows=6_000,
    jit_s=15.0,
    warmup_steps=10_000,
    warmup_ms=0.9,
)
#: A network of images: the GPU is what it waits for.
CNN = Program(
    signature="cnn",
    cpu_ms=4.0,
    gpu_ms=60.0,
    sm_share=0.9,
    switches=2.0,
    spread=1.0,
    gpu_mem_mib=11_000,
    mem_mib=5_000,
    gb_per_s=4.0,
    startup_s=30.0,
)
#: Small networks: hardly any GPU.
TINY = Program(
    signature="sb3 sac Pendulum",
    cpu_ms=5.0,
    gpu_ms=0.5,
    sm_share=0.05,
    switches=3.0,
    gpu_mem_mib=700,
    mem_mib=1_500,
    startup_s=8.0,
    warmup_steps=100,
    warmup_ms=0.3,
)
CPU_ONLY = Program(
    signature="sb3 sac cpu",
    cpu_ms=30.0,
    gpu_ms=0.0,
    mem_mib=1_800,
    mem_bytes_per_step=6_200,
    mem_mib_grows=6_000,
    gb_per_s=3.0,
    startup_s=8.0,
    warmup_steps=1_000,
    warmup_ms=1.2,
)


#: Of all lengths below: real trainings take hours, and virtual hours take real seconds.
SHORTER = 0.6


class _Draw:
    """Tasks of one workload, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tasks: list[Task] = []

    def around(self, program: Program, spread: float = 0.35) -> Program:
        """The same kind of program with other figures."""

        def factor() -> float:
            return float(2 ** self.random.uniform(-spread * 2, spread * 2))

        return replace(
            program,
            cpu_ms=program.cpu_ms * factor(),
            gpu_ms=program.gpu_ms * factor(),
            switches=program.switches * factor(),
        )

    def add(
        self,
        program: Program,
        jobs: int,
        minutes: float,
        *,
        arrives_s: Callable[[int], float] = lambda _: 0.0,
        declared: bool = False,
        user: int = 1000,
        vary: float = 0.1,
    ) -> None:
        """`minutes`: of training, alone."""
        spec = JobSpec(
            user=user,
            signature=program.signature,
            cores=1,
            gpus=1 if program.gpu_ms else 0,
            gpu_mem_mib=_rounded_up(program.gpu_mem_mib) if declared and program.gpu_ms else None,
            mem_mib=_rounded_up(program.mem_mib + program.mem_mib_grows) if declared else None,
        )
        for n in range(jobs):
            length = SHORTER * minutes * 60 * self.random.uniform(1 - vary, 1 + vary)
            steps = max(100, round(length * alone_per_s(program)))
            self.tasks.append(
                Task(
                    id=len(self.tasks) + 1,
                    program=program,
                    steps=steps,
                    spec=spec,
                    arrives_s=arrives_s(n),
                )
            )

    def shuffled(self) -> tuple[Task, ...]:
        """As if submitted in any order; ids ascend with arrival, as the shell's do."""
        mixed = list(self.tasks)
        self.random.shuffle(mixed)
        mixed.sort(key=lambda t: t.arrives_s)
        return tuple(replace(task, id=n) for n, task in enumerate(mixed, 1))

    def in_order(self) -> tuple[Task, ...]:
        ordered = sorted(self.tasks, key=lambda t: (t.arrives_s, t.id))
        return tuple(replace(task, id=n) for n, task in enumerate(ordered, 1))

    def over_hours(self, hours: float) -> Callable[[int], float]:
        return lambda _: self.random.uniform(0, hours * 3600)


def _rounded_up(mib: int) -> int:
    """As people declare: whole GiB, and one more."""
    return (mib // 1024 + 2) * 1024


def generated(series: int = 0) -> list[Workload]:
    """Every workload of the study, the same each time; another series, other draws of each."""
    return [make(n + 100 * series) for n, make in enumerate(_MAKERS, 1)]


def _sweep(
    program: Program,
    jobs: int,
    minutes: float,
    hardware: Hardware,
    name: str,
    *,
    exact: bool = False,
) -> Callable[[int], Workload]:
    def make(seed: int) -> Workload:
        draw = _Draw(seed)
        draw.add(program if exact else draw.around(program), jobs, minutes)
        return Workload(name=name, seed=seed, hardware=hardware, tasks=draw.in_order())

    return make


def _mixed(
    parts: Iterable[tuple[Program, int, float]],
    hardware: Hardware,
    name: str,
    *,
    hours: float = 0.0,
    declared: bool = False,
    in_order: bool = False,
    outside: bool = False,
    noise: float = 0.04,
) -> Callable[[int], Workload]:
    parts = tuple(parts)

    def make(seed: int) -> Workload:
        draw = _Draw(seed)
        for user, (program, jobs, minutes) in enumerate(parts, 1000):
            draw.add(
                draw.around(program, 0.25),
                jobs,
                minutes,
                user=user,
                declared=declared,
                arrives_s=draw.over_hours(hours) if hours else lambda _: 0.0,
                vary=0.3,
            )
        guests: tuple[Outsider, ...] = ()
        if outside:
            guests = (
                Outsider(gpu=0, program=replace(CNN, gpu_ms=20.0), from_s=1_800.0, to_s=4_500.0),
            )
        return Workload(
            name=name,
            seed=seed,
            hardware=hardware,
            tasks=draw.in_order() if in_order else draw.shuffled(),
            outsiders=guests,
            noise=noise,
        )

    return make


_ONE = Hardware(gpus=1, cores=16)
_MPS = Hardware(gpus=1, cores=32, mps=True)
_TWO = Hardware(gpus=2, cores=32)
_FOUR = Hardware(gpus=4, cores=64, mem_mib=512 * 1024)
_EVALUATES = replace(SB3, eval_every=20_000, eval_s=20.0)
_CHANGES = replace(SB3, phase_at=0.4, phase_cpu=0.7, phase_gpu=1.8)

_MAKERS: tuple[Callable[[int], Workload], ...] = (
    _sweep(SB3, 10, 60, _ONE, "10 SB3, 16 cores", exact=True),
    _sweep(SBX, 20, 30, _ONE, "20 SBX, 16 cores", exact=True),
    _sweep(SB3, 20, 40, _ONE, "20 SB3, other figures"),
    _sweep(replace(SBX, startup_s=40.0), 40, 20, _ONE, "40 SBX, slow imports"),
    _sweep(TINY, 30, 30, _ONE, "30 tiny, 16 cores"),
    _sweep(SB3, 40, 40, _MPS, "40 SB3, MPS, 32 cores"),
    _sweep(SBX, 40, 30, _MPS, "40 SBX, MPS, 32 cores"),
    _sweep(CNN, 8, 40, _ONE, "8 CNN"),
    _sweep(SB3, 40, 60, _FOUR, "40 SB3, 4 GPUs"),
    _sweep(SBX, 32, 40, _TWO, "32 SBX, 2 GPUs"),
    _sweep(_EVALUATES, 20, 40, _ONE, "20 SB3 that evaluate"),
    _sweep(_CHANGES, 20, 40, _ONE, "20 SB3 that change phase"),
    _sweep(replace(SBX, switches=6.0), 20, 30, _ONE, "20 SBX, dear switches"),
    _sweep(SB3, 60, 4, _ONE, "60 SB3 of 4 minutes"),
    _mixed([(SB3, 10, 40), (SBX, 10, 40)], _ONE, "SB3 and SBX, shuffled"),
    _mixed([(SB3, 10, 40), (SBX, 10, 40)], _ONE, "SB3, then SBX", in_order=True),
    _mixed([(SBX, 16, 30), (TINY, 16, 30)], _TWO, "SBX and tiny, 2 GPUs"),
    _mixed([(SB3, 14, 40), (CNN, 3, 40)], _ONE, "SB3 and some CNN"),
    _mixed([(SBX, 16, 40), (CNN, 6, 40)], _TWO, "SBX and CNN, 2 GPUs"),
    _mixed([(SB3, 12, 40), (CPU_ONLY, 12, 40)], _ONE, "SB3 and CPU jobs"),
    _mixed([(SB3, 12, 40), (SBX, 12, 30), (TINY, 8, 20)], _ONE, "3 users over 3 hours", hours=3),
    _mixed(
        [(SB3, 16, 60), (SBX, 16, 40), (CNN, 6, 60), (TINY, 12, 20)],
        _FOUR,
        "4 users over 4 hours, 4 GPUs",
        hours=4,
        declared=True,
    ),
    _mixed([(SB3, 20, 40)], _ONE, "20 SB3 beside an outsider", outside=True),
    _mixed([(SB3, 20, 40)], replace(_ONE, mem_mib=64 * 1024), "20 SB3, 64 GB, undeclared"),
    _mixed(
        [(SB3, 20, 40)], replace(_ONE, mem_mib=64 * 1024), "20 SB3, 64 GB, declared", declared=True
    ),
    _mixed([(SBX, 24, 30)], _ONE, "24 SBX, noisy rates", noise=0.10),
)


def from_history(text: str, hardware: Hardware, *, name: str = "history") -> Workload:
    """A recorded history: what `rlq history --limit 0 --json` prints, or one such job a line.

    A record tells when a job came and how long it ran, but not how its steps divide between core
    and GPU: that is taken from the program it names (SBX, SB3, else tiny), as if it had run
    alone.  So the arrivals and the lengths are real, the contention is assumed.

    Raises:
        ValueError: it is not such a history, or nothing in it ever ran.
    """
    tasks = [task for n, job in enumerate(_records(text), 1) if (task := _task(n, job))]
    if not tasks:
        raise ValueError("no job in this history has run")
    first = min(task.arrives_s for task in tasks)
    tasks.sort(key=lambda t: (t.arrives_s, t.id))
    ordered = tuple(
        replace(t, id=n, arrives_s=t.arrives_s - first) for n, t in enumerate(tasks, 1)
    )
    return Workload(name=name, seed=1, hardware=hardware, tasks=ordered)


def _records(text: str) -> list[Any]:
    try:
        document = json.loads(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise ValueError(f"this is no history, nor one job a line: {error}") from error
    found = document["jobs"] if isinstance(document, dict) and "jobs" in document else [document]
    return list(found)


def _task(number: int, job: Any) -> Task | None:
    """None: it never ran."""
    try:
        if job["started_at"] is None or job["ended_at"] is None:
            return None
        seconds = float(job["ended_at"]) - float(job["started_at"])
        arrives_s = float(job["submitted_at"])
        told = str(job.get("signature") or " ".join(str(word) for word in job["argv"]))
        user = int(job["uid"])
        has_gpu = bool(job["placement"] and job["placement"]["gpus"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"job {number} is no job of `rlq history --json`: {error!r}") from error
    words = told.lower()
    model = SBX if "sbx" in words else SB3 if "sac" in words or "sb3" in words else TINY
    program = replace(model if has_gpu else CPU_ONLY, signature=told)
    spec = JobSpec(user=user, signature=told, cores=1, gpus=1 if has_gpu else 0)
    steps = max(100, round(seconds * alone_per_s(program)))
    return Task(id=number, program=program, steps=steps, spec=spec, arrives_s=arrives_s)
