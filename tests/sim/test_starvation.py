"""Nobody starves, on a make-believe machine in virtual time: long queues against single jobs.

The world here is as plain as can be (no faults: those are in sim/world.py), so that what is
demanded can be told from starts and ends alone.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace

from tests.core.machines import FACTS, GPU_MIB, A, gpu, spec

from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    Event,
    Exit,
    Instant,
    JobId,
    JobSpec,
    Launch,
    MachineSampled,
    Policy,
    ProcessExited,
    ProcessStarted,
    Submitted,
)

ADA, BOB = 1001, 1002
MINUTE = 60_000
LOOK_MS = 10_000
ONE_GPU = replace(FACTS, gpus=(gpu(A),))


@dataclass
class Lab:
    """Each job runs for as long as was said when it was submitted."""

    core: Scheduler = field(default_factory=lambda: Scheduler(policy=Policy(stale_ms=10**9)))
    now: int = 0
    lasts: dict[JobId, int] = field(default_factory=dict[JobId, int])
    user: dict[JobId, int] = field(default_factory=dict[JobId, int])
    started: dict[JobId, int] = field(default_factory=dict[JobId, int])
    ended: dict[JobId, int] = field(default_factory=dict[JobId, int])
    _due: list[tuple[int, int, Event]] = field(default_factory=list[tuple[int, int, Event]])
    _n: int = 0

    def __post_init__(self) -> None:
        self._look()

    def submit(self, one: JobSpec, lasts: list[int]) -> list[JobId]:
        first = len(self.lasts) + 1
        ids = [JobId(first + n) for n in range(len(lasts))]
        self.lasts |= dict(zip(ids, lasts, strict=True))
        self.user |= dict.fromkeys(ids, one.user)
        self._n += 1
        self._step(Submitted(Instant(self.now), self._n, tuple((i, one) for i in ids)))
        return ids

    def run(self, until: int) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, event = heapq.heappop(self._due)
            if isinstance(event, MachineSampled):
                self._look()
                continue
            assert isinstance(event, ProcessExited)
            self.ended[event.job_id] = self.now
            # A GPU that was left admits nothing until it was read again.
            self._step(event, self._reading())

    def use_s(self, user: int, since: int, until: int) -> float:
        """Job-seconds of a user in this time: all jobs of the tests that ask have one size."""
        return sum(
            max(0, min(self.ended.get(job_id, until), until) - max(at, since)) / 1000
            for job_id, at in self.started.items()
            if self.user[job_id] == user
        )

    def _look(self) -> None:
        self._step(self._reading())
        self._push(self.now + LOOK_MS, self._reading())

    def _reading(self) -> MachineSampled:
        now = Instant(self.now)
        return MachineSampled(now, replace(ONE_GPU, taken_at=now, gpus_taken_at=now))

    def _step(self, *events: Event) -> None:
        now = Instant(self.now)
        actions = self.core.step(now, [replace(event, now=now) for event in events])
        launches = [action for action in actions if isinstance(action, Launch)]
        for launch in launches:
            job_id = launch.job_id
            self.started[job_id] = self.now
            ended = ProcessExited(now, job_id, launch.attempt, Exit(code=0))
            self._push(self.now + self.lasts[job_id], ended)
        if launches:
            self.core.step(
                now, [ProcessStarted(now, a.job_id, a.attempt, a.job_id) for a in launches]
            )

    def _push(self, at: int, event: Event) -> None:
        self._n += 1
        heapq.heappush(self._due, (at, self._n, event))


def test_one_job_beside_another_users_5_000_starts_once_two_of_them_have_ended() -> None:
    lab = Lab()
    lengths = random.Random(1)
    lab.submit(spec(user=ADA), [lengths.randint(5 * MINUTE, 15 * MINUTE) for _ in range(5_000)])
    lab.run(until=60 * MINUTE)
    (bobs,) = lab.submit(spec(user=BOB), [MINUTE])
    lab.run(until=75 * MINUTE)
    # The room of the first was promised to Ada's next job while she was alone.
    _, second, *_ = sorted(at for at in lab.ended.values() if at >= 60 * MINUTE)
    assert lab.started[bobs] == second


def test_a_job_for_the_whole_gpu_starts_when_those_that_ran_before_it_have_ended() -> None:
    lab = Lab()
    lengths = random.Random(2)
    small = spec(user=ADA, gpus=1, gpu_mem=GPU_MIB // 6, sm=10)
    lab.submit(small, [lengths.randint(5 * MINUTE, 15 * MINUTE) for _ in range(1_000)])
    lab.run(until=60 * MINUTE)
    (whole,) = lab.submit(spec(user=BOB, gpus=1, gpu_mem=GPU_MIB - 600), [MINUTE])
    lab.run(until=62 * MINUTE)
    before = [i for i, at in lab.started.items() if at <= 61 * MINUTE and i not in lab.ended]
    lab.run(until=100 * MINUTE)
    assert lab.started[whole] == max(lab.ended[job_id] for job_id in before)


def test_and_so_it_is_where_both_are_one_users_and_another_one_has_small_jobs_too() -> None:
    # Ada's small jobs and her big one; Bob's small ones outrank it whenever she holds more.
    lab = Lab()
    lengths = random.Random(3)
    for user in (ADA, BOB):
        small = spec(user=user, gpus=1, gpu_mem=GPU_MIB // 6, sm=10)
        lab.submit(small, [lengths.randint(5 * MINUTE, 15 * MINUTE) for _ in range(15)])
    (whole,) = lab.submit(spec(user=ADA, gpus=1, gpu_mem=GPU_MIB - 600), [MINUTE])
    small = spec(user=BOB, gpus=1, gpu_mem=GPU_MIB // 6, sm=10)
    lab.submit(small, [lengths.randint(5 * MINUTE, 15 * MINUTE) for _ in range(500)])
    lab.run(until=240 * MINUTE)
    assert whole in lab.started


def test_two_users_with_long_queues_have_used_the_same_in_the_end() -> None:
    lab = Lab()
    lengths = random.Random(4)

    def minutes(least: int, most: int, jobs: int) -> list[int]:
        return [lengths.randint(least * MINUTE, most * MINUTE) for _ in range(jobs)]

    # Bob's jobs are four times as long, and he comes later.
    lab.submit(spec(user=ADA), minutes(5, 15, 1_000))
    lab.run(until=120 * MINUTE)
    lab.submit(spec(user=BOB), minutes(20, 60, 250))
    end = 12 * 60 * MINUTE
    lab.run(until=end)
    ada, bob = lab.use_s(ADA, 0, end), lab.use_s(BOB, 0, end)
    assert lab.use_s(ADA, 0, 120 * MINUTE) > 0.9 * 8 * 7_200, "the machine was hers at first"
    assert abs(ada - bob) < 0.05 * (ada + bob)
