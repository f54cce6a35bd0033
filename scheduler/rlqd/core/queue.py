"""The jobs that wait, grouped by equal specs.

Two jobs with equal specs are alike to the scheduler: when the older does not fit, neither does
the younger.  So a pass looks at one job per group however long the queue is, and 100,000 equal
jobs cost what one costs.

Within one user's jobs the order is simple and lasts: priority, then age.  Between users it is
by fair share (core/fairness.py), which moves with every job that starts: so each user's groups
are a heap, and the few users compete with their first jobs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rlqd.core.fairness import Ranking, Rate
from rlqd.core.model import JobId, JobSpec

#: Lower goes first.
Rank = tuple[int, JobId]
#: `ahead_of` plays through so many starts; whoever is further back is told by age.
PLAYED_MAX = 1_000


def rank_of(spec: JobSpec, job_id: JobId) -> Rank:
    """Among one user's jobs: highest priority first, then oldest."""
    return (-spec.priority, job_id)


@dataclass(slots=True)
class WaitingQueue:
    groups: dict[JobSpec, list[JobId]] = field(default_factory=dict[JobSpec, list[JobId]])
    size: int = 0
    #: How many groups each user has.
    _groups_of: Counter[int] = field(default_factory=Counter[int])

    def add(self, spec: JobSpec, job_id: JobId) -> None:
        ids = self.groups.setdefault(spec, [])
        if not ids:
            self._groups_of[spec.user] += 1
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
            self._groups_of[spec.user] -= 1
            if not self._groups_of[spec.user]:
                del self._groups_of[spec.user]

    def contains(self, spec: JobSpec, job_id: JobId) -> bool:
        ids = self.groups.get(spec, [])
        at = bisect_left(ids, job_id)
        return at < len(ids) and ids[at] == job_id

    def users(self) -> Iterable[int]:
        return self._groups_of.keys()

    @property
    def users_count(self) -> int:
        return len(self._groups_of)

    def ahead_of(
        self,
        spec: JobSpec,
        job_id: JobId,
        ranking: Ranking,
        rate_of: Callable[[JobSpec], Rate],
        promised: JobSpec | None = None,
    ) -> int:
        """How many jobs start before this one if there is room for one after the other.

        Between users that depends on what each is given meanwhile, so it is played through.
        """
        if self.users_count == 1:
            return self._older(spec, job_id)
        higher = sum(
            len(ids) for other, ids in self.groups.items() if other.priority > spec.priority
        )
        level = {s: ids for s, ids in self.groups.items() if s.priority == spec.priority}
        rates: dict[JobSpec, Rate] = {}
        walk = Walk(level, ranking, promised)
        for played, (other_id, other) in enumerate(walk):
            if other_id == job_id:
                return higher + played
            if played >= PLAYED_MAX:
                break
            if other not in rates:
                rates[other] = rate_of(other)
            walk.give(other.user, rates[other])
        return max(higher + PLAYED_MAX, self._older(spec, job_id))

    def _older(self, spec: JobSpec, job_id: JobId) -> int:
        """Jobs of higher priority, or of the same and older."""
        return sum(
            len(ids)
            if other.priority > spec.priority
            else bisect_left(ids, job_id)
            if other.priority == spec.priority
            else 0
            for other, ids in self.groups.items()
        )

    def in_order(self, ranking: Ranking, promised: JobSpec | None = None) -> Walk:
        """`promised`: one job of this group goes first among those of its priority, whoever
        else has a better claim by now.  Of one user alone it changes nothing."""
        return Walk(self.groups, ranking, promised)


class Walk:
    """The queue in rank order, a group at a time: `skip()` leaves the rest of a group out,
    `give()` tells that the current job starts.

    The queue must not change under it.
    """

    def __init__(
        self,
        groups: Mapping[JobSpec, list[JobId]],
        ranking: Ranking,
        promised: JobSpec | None = None,
    ) -> None:
        self._ranking = ranking
        self._groups = list(groups.items())
        self._positions = [0] * len(self._groups)
        self._current = -1
        #: Each user's groups by rank.
        self._heaps: dict[int, list[tuple[Rank, int]]] = {}
        for number, (spec, ids) in enumerate(self._groups):
            self._heaps.setdefault(spec.user, []).append((rank_of(spec, ids[0]), number))
        self._is_fair = len(self._heaps) > 1
        self._promised: int | None = None
        if self._is_fair and promised is not None and promised in groups:
            self._promised = next(
                n for n, (spec, _) in enumerate(self._groups) if spec == promised
            )
            self._heaps[promised.user].remove(
                (rank_of(promised, groups[promised][0]), self._promised)
            )
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._first: list[tuple[_Claim, int]] = []
        self._compare()

    def __iter__(self) -> Iterator[tuple[JobId, JobSpec]]:
        while (number := self._next()) is not None:
            spec, ids = self._groups[number]
            self._current = number
            yield ids[self._positions[number]], spec
            if self._current == number:
                self._positions[number] += 1
                self._push(number)
            if self._is_stale:
                self._compare()
            else:
                self._compete(spec.user)

    def skip(self) -> None:
        """Do not offer more of the current job's group."""
        self._current = -1

    def give(self, user: int, rate: Rate) -> None:
        """The current job, of this user, starts: all others' claims are better for it."""
        if self._is_fair:
            self._ranking.give(user, rate)
            self._is_stale = True

    def _next(self) -> int | None:
        if (at := self._promised) is not None:
            priority = self._groups[at][0].priority
            if not self._first or self._first[0][0][0] >= -priority:
                self._promised = None
                self._is_stale = True
                return at
        if not self._first:
            return None
        _, user = heapq.heappop(self._first)
        return heapq.heappop(self._heaps[user])[1]

    def _push(self, number: int) -> None:
        spec, ids = self._groups[number]
        if (at := self._positions[number]) < len(ids):
            heapq.heappush(self._heaps[spec.user], (rank_of(spec, ids[at]), number))

    def _compare(self) -> None:
        self._is_stale = False
        self._first.clear()
        for user in self._heaps:
            self._compete(user)

    def _compete(self, user: int) -> None:
        """Enter the user's first job into the competition."""
        if heap := self._heaps[user]:
            (priority, job_id), _ = heap[0]
            score, level = self._ranking.key(user, job_id) if self._is_fair else (0, 0)
            heapq.heappush(self._first, ((priority, score, level, job_id), user))


_Claim = tuple[int, int, int, JobId]
