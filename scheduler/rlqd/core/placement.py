"""Where one job goes in a given room: which GPUs, which cores; or what is short.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlqd.core.charge import Need
from rlqd.core.guard import Verdict
from rlqd.core.model import Booking, GpuId, Placement, Policy, Quiet
from rlqd.core.room import GpuRoom, Room


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """One resource of which there is not enough."""

    #: "gpu memory", "gpu sm", "gpu", "jobs", "cores", "host memory", "machine"; "throughput":
    #: there is room, but one more job would not help, and `verdict` says why.
    resource: str
    unit: str
    need: int
    free: int
    total: int
    gpu: GpuId | None = None
    note: str = ""
    verdict: Verdict | None = None
    #: There is enough, but it is kept: for somebody else, or from the queue.
    kept: Booking | Quiet | None = None


#: What the throughput guard says of one more such job on a GPU (None: on the CPU).
Judge = Callable[[GpuId | None], Verdict]


def admit_all(_: GpuId | None) -> Verdict:
    return Verdict(admits=True, because="unjudged")


@dataclass(frozen=True, slots=True)
class NoRoom:
    """What was tried, the nearest to fitting first.  One alternative is one set of shortages:
    remove them all and the job starts."""

    alternatives: tuple[tuple[Shortage, ...], ...]


def place(need: Need, room: Room, policy: Policy, judge: Judge = admit_all) -> Placement | NoRoom:
    amounts = host_amounts_short(need.charge.cores, need.charge.mem_mib, room)
    host = [*amounts, *_host_taken(need, room)]
    if need.gpus == 0:
        short = host or _throughput(judge(None), None)
        if short:
            return NoRoom((tuple(short),))
        return Placement(gpus=(), cores=pick_cores(need.charge.cores, room), charge=need.charge)
    tried = [
        (gpu, _gpu_shortages(need, gpu, policy, judge(id_))) for id_, gpu in room.gpus.items()
    ]
    fitting = sorted((gpu for gpu, short in tried if not short), key=_spread)
    if len(fitting) < need.gpus or host:
        short_gpus = sorted((s for _, s in tried if s), key=len)
        if len(fitting) >= need.gpus:
            return NoRoom((tuple(host),))
        if len(tried) < need.gpus:
            # Some have gone since it was submitted: room on those that are left is no help.
            gone = Shortage(
                resource="gpu",
                unit="GPUs",
                need=need.gpus,
                free=len(fitting),
                total=len(tried),
                note="the other GPUs cannot be read" if tried else "no GPU can be read",
            )
            return NoRoom(((*host, gone),))
        return NoRoom(tuple((*short, *host) for short in short_gpus))
    chosen = fitting[: need.gpus]
    near = frozenset(c for gpu in chosen for c in gpu.facts.cores_near)
    return Placement(
        gpus=tuple(gpu.facts.id for gpu in chosen),
        cores=pick_cores(need.charge.cores, room, near),
        charge=need.charge,
    )


def _spread(gpu: GpuRoom) -> tuple[int, int, int, int]:
    """Emptiest first: jobs on different devices do not slow each other down."""
    assert gpu.mem_mib is not None
    assert gpu.sm_pct is not None
    return (gpu.jobs, -gpu.sm_pct, -gpu.mem_mib, gpu.facts.index)


def _throughput(verdict: Verdict, gpu: GpuId | None) -> list[Shortage]:
    if verdict.admits:
        return []
    return [
        Shortage(
            resource="throughput",
            unit="jobs",
            need=1,
            free=0,
            total=verdict.jobs,
            gpu=gpu,
            verdict=verdict,
        )
    ]


def host_amounts_short(cores: int, mem_mib: int, room: Room) -> list[Shortage]:
    """Cores and host memory of which there is not enough: then no device can help."""
    short: list[Shortage] = []
    cores_free = max(0, min(room.cores_usable, len(room.cores_free)))
    if cores > cores_free:
        short.append(
            Shortage(
                resource="cores",
                unit="cores",
                need=cores,
                free=cores_free,
                total=len(room.cores),
                kept=room.cores_kept,
            )
        )
    if mem_mib > room.mem_mib:
        short.append(
            Shortage(
                resource="host memory",
                unit="MiB",
                need=mem_mib,
                free=max(0, room.mem_mib),
                total=room.mem_mib_total,
                kept=room.mem_kept,
            )
        )
    return short


def _host_taken(need: Need, room: Room) -> list[Shortage]:
    alone = need.exclusive and need.gpus == 0
    if (booked := room.booked or (room.shared_with if alone else None)) is not None:
        return [Shortage(resource="machine", unit="", need=1, free=0, total=1, kept=booked)]
    if not (room.is_exclusive or (alone and room.jobs)):
        return []
    note = "a job has the machine to itself" if room.is_exclusive else "wants it to itself"
    return [Shortage(resource="jobs", unit="jobs", need=0, free=0, total=room.jobs, note=note)]


def _gpu_shortages(
    need: Need, gpu: GpuRoom, policy: Policy, verdict: Verdict
) -> tuple[Shortage, ...]:
    facts = gpu.facts
    if gpu.kept is not None:
        return (
            Shortage(
                resource="gpu",
                unit="GPUs",
                need=1,
                free=0,
                total=1,
                gpu=facts.id,
                kept=gpu.kept,
            ),
        )
    if gpu.mem_mib is None or gpu.sm_pct is None:
        unknown = Shortage(
            resource="gpu",
            unit="GPUs",
            need=1,
            free=0,
            total=1,
            gpu=facts.id,
            note=gpu.why_unknown,
        )
        return (unknown,)
    short: list[Shortage] = []
    if need.charge.gpu_mem_mib > gpu.mem_mib:
        short.append(
            Shortage(
                resource="gpu memory",
                unit="MiB",
                need=need.charge.gpu_mem_mib,
                free=max(0, gpu.mem_mib),
                total=facts.mem_mib_total or 0,
                gpu=facts.id,
            )
        )
    # Where the jobs' own speed is known, nobody goes by a guess about the share of time.
    if need.charge.sm_pct > gpu.sm_pct and not (need.sm_is_guessed and verdict.is_judged):
        short.append(
            Shortage(
                resource="gpu sm",
                unit="%",
                need=need.charge.sm_pct,
                free=max(0, gpu.sm_pct),
                total=policy.sm_pct_limit,
                gpu=facts.id,
                kept=gpu.sm_kept,
            )
        )
    is_full = 0 < policy.jobs_per_gpu_max <= gpu.jobs
    if is_full or gpu.is_exclusive or (need.exclusive and gpu.jobs):
        note = (
            "a job has it to itself"
            if gpu.is_exclusive
            else "the limit of jobs per GPU"
            if is_full
            else "wants it to itself"
        )
        short.append(
            Shortage(
                resource="jobs",
                unit="jobs",
                need=0,
                free=0,
                total=gpu.jobs,
                gpu=facts.id,
                note=note,
            )
        )
    return tuple(short) or tuple(_throughput(verdict, facts.id))


#: A core that outsiders keep busier than this is given out last.
HOT_PERMILLE = 500


def pick_cores(count: int, room: Room, near: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """`count` of the free cores: physical cores of their own before hyperthread siblings, one
    NUMA node (the GPU's, if it has one) before several, cold before hot, low before high."""
    assert count <= len(room.cores_free)
    taken = {room.cores[c].physical for c in room.cores.keys() - room.cores_free}
    node = _node(count, room, near, taken)
    chosen: list[int] = []
    free = set(room.cores_free)
    while len(chosen) < count:
        best = min(
            free,
            key=lambda c: (
                room.cores[c].physical in taken,
                bool(near) and c not in near,
                room.cores[c].numa_node != node,
                room.cores_busy.get(c, 0) >= HOT_PERMILLE,
                c,
            ),
        )
        chosen.append(best)
        free.remove(best)
        taken.add(room.cores[best].physical)
    return tuple(sorted(chosen))


def _node(count: int, room: Room, near: frozenset[int], taken: set[int]) -> int:
    """The NUMA node that can give most of `count` whole cores, near the GPU if it can; among
    equals the one with the fewest to spare, so that a large set stays whole for a large job."""

    def rank(node: int) -> tuple[int, int, int, int]:
        here = [c for c in room.cores_free if room.cores[c].numa_node == node]
        whole = len({room.cores[c].physical for c in here} - taken)
        is_near = bool(near.intersection(here))
        return (-min(whole, count), -is_near, whole, node)

    return min(_nodes(room), key=rank)


def _nodes(room: Room) -> Iterable[int]:
    return {room.cores[c].numa_node for c in room.cores_free}
