"""The jobs that wait, grouped by equal specs.

Two jobs with equal specs are alike to the scheduler: when the older does not fit, neither does
the younger.  So a pass looks at one job per group however long the queue is, and 100,000 equal
jobs cost what one costs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlqd.core.model import JobId, JobSpec

#: Lower goes first.
Rank = tuple[int, JobId]


def rank_of(spec: JobSpec, job_id: JobId) -> Rank:
    """Highest priority first, then oldest."""
    return (-spec.priority, job_id)


@dataclass(slots=True)
class WaitingQueue:
    groups: dict[JobSpec, list[JobId]] = field(default_factory=dict[JobSpec, list[JobId]])
    size: int = 0

    def add(self, spec: JobSpec, job_id: JobId) -> None:
        ids = self.groups.setdefault(spec, [])
        if ids and ids[-1] > job_id:
            insort(ids, job_id)
        else:
            ids.append(job_id)
        self.size += 1

    def remove(self, spec: JobSpec, job_id: JobId) -> None:
        ids = self.groups[spec]
        at = bisect_left(ids, job_id)
        assert ids[at] == job_id
        del ids[at]
        self.size -= 1
        if not ids:
            del self.groups[spec]

    def contains(self, spec: JobSpec, job_id: JobId) -> bool:
        ids = self.groups.get(spec, [])
        at = bisect_left(ids, job_id)
        return at < len(ids) and ids[at] == job_id

    def ahead_of(self, spec: JobSpec, job_id: JobId) -> int:
        """How many jobs rank before this one."""
        return sum(
            len(ids)
            if other.priority > spec.priority
            else bisect_left(ids, job_id)
            if other.priority == spec.priority
            else 0
            for other, ids in self.groups.items()
        )

    def in_order(self) -> Walk:
        return Walk(self)


class Walk:
    """The queue in rank order, a group at a time: `skip()` leaves the rest of a group out.

    The queue must not change under it.
    """

    def __init__(self, queue: WaitingQueue) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._groups = list(queue.groups.items())
        self._positions = [0] * len(self._groups)
        self._current = -1
        for number in range(len(self._groups)):
            self._push(number)

    def __iter__(self) -> Iterator[tuple[JobId, JobSpec]]:
        while self._heap:
            _, number = heapq.heappop(self._heap)
            spec, ids = self._groups[number]
            self._current = number
            yield ids[self._positions[number]], spec
            if self._current == number:
                self._positions[number] += 1
                self._push(number)

    def skip(self) -> None:
        """Do not offer more of the current job's group."""
        self._current = -1

    def _push(self, number: int) -> None:
        spec, ids = self._groups[number]
        if (at := self._positions[number]) < len(ids):
            heapq.heappush(self._heap, (rank_of(spec, ids[at]), number))
