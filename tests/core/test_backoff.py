"""Opt-in: where fewer jobs were faster, the youngest is paused; nobody for long, and never one
that a user wants to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from tests.core.machines import EXACT, FACTS, A, Desk, gpu, spec

from rlqd.core.backoff import Candidate, going_on, next_to_pause
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    Accept,
    BackedOff,
    Completing,
    GpuShare,
    GuardPolicy,
    Instant,
    JobFacts,
    JobId,
    JobSpec,
    Outcome,
    Running,
    Suspended,
)

SECOND = 1_000
TURN = 60 * SECOND
SOLO = 50_000
#: STP: three jobs are slower than two.
FALLS = (0.0, 1.0, 1.6, 1.2, 1.0, 0.9)


def sac(**more: object) -> JobSpec:
    one = replace(spec(gpus=1, gpu_mem=1_000), signature="sac")
    return replace(one, **more)  # type: ignore[arg-type]


@dataclass
class Lab(Desk):
    """A desk whose jobs share GPU A by a curve, and which is read once a second."""

    curve: tuple[float, ...] = FALLS
    guard: GuardPolicy = field(
        default_factory=lambda: GuardPolicy(
            observe_ms=5_000, pause_youngest=True, pause_turn_ms=TURN
        )
    )

    def __post_init__(self) -> None:
        self.facts = replace(FACTS, gpus=(gpu(A),))
        self.core = Scheduler(policy=self.policy)
        self.core.guard.policy = self.guard
        self.sample()

    def at_work(self) -> list[int]:
        return [i for i in sorted(self.rows) if isinstance(self.state(i), Running)]

    def paused(self) -> list[int]:
        return [i for i in sorted(self.rows) if isinstance(self.state(i), Suspended)]

    def read(self) -> None:
        rate = round(SOLO * self.curve[len(self.at_work())] / max(1, len(self.at_work())))
        share = ((A, GpuShare(mem_mib=1_000, sm_pct=30)),)

        def one(job_id: int) -> JobFacts:
            steps = rate if job_id in self.at_work() else None
            return JobFacts(
                cpu_millicores=900, mem_mib=1, gpus=share, steps_milli_per_s=steps, reports=True
            )

        live = [*self.at_work(), *self.paused()]
        jobs = tuple((JobId(i), one(i)) for i in sorted(live))
        self.sample(replace(self.facts, jobs=jobs), after=SECOND)
        self.tell(*(self.started(i) for i in self.launched if self._is_starting(i)))

    def _is_starting(self, job_id: int) -> bool:
        return type(self.state(job_id)).__name__ == "Starting"

    def watch(self, seconds: int) -> None:
        for _ in range(seconds):
            self.read()

    def crowded(self, *specs: JobSpec) -> list[int]:
        """One after the other, each with time to be measured: more than are good."""
        ids: list[int] = []
        for one in specs:
            # As if the guard had yet to find out.
            ids += self.submit(replace(one, unguarded=True))
            self.watch(1)
            job = self.core.jobs[JobId(ids[-1])]
            self.core._leave(job)
            self.core._enter(replace(job, spec=one))
            self.rows[ids[-1]] = self.core.jobs[job.id]
            self.watch(15)
        return ids

    def reason(self, job_id: int) -> BackedOff:
        state = self.state(job_id)
        assert isinstance(state, Suspended), state
        assert state.backed_off is not None
        return state.backed_off


def test_the_youngest_is_paused_where_fewer_were_faster() -> None:
    lab = Lab()
    first, second, third = lab.crowded(sac(), sac(), sac())
    assert lab.at_work() == [first, second]
    assert (lab.reason(third).jobs, lab.reason(third).better) == (3, 2)


def test_without_the_option_nobody_is_paused() -> None:
    lab = Lab(guard=GuardPolicy(observe_ms=5_000))
    ids = lab.crowded(sac(), sac(), sac())
    lab.watch(100)
    assert lab.at_work() == ids


def test_jobs_that_merely_gain_nothing_are_left_alone() -> None:
    lab = Lab(curve=(0.0, 1.0, 1.6, 1.58))
    ids = lab.crowded(sac(), sac(), sac())
    lab.watch(100)
    assert lab.at_work() == ids


def test_a_paused_job_goes_on_when_another_leaves() -> None:
    lab = Lab()
    first, second, third = lab.crowded(sac(), sac(), sac())
    lab.exit(first)
    assert lab.at_work() == [second, third]
    assert "Freeze" in lab.effects()


def test_nobody_is_paused_while_one_leaves_anyway() -> None:
    lab = Lab(guard=GuardPolicy(observe_ms=5_000))
    first, *rest = lab.crowded(sac(grace_ms=3_600_000), sac(), sac())
    lab.cancel(first)
    lab.core.guard.policy = Lab().guard
    lab.watch(30)
    assert lab.at_work() == rest


def test_a_paused_job_goes_on_when_a_user_pauses_another() -> None:
    lab = Lab()
    first, second, third = lab.crowded(sac(), sac(), sac())
    lab.pause(first)
    assert lab.at_work() == [second, third]


def test_nobody_is_paused_for_longer_than_a_turn_and_everybody_in_turn() -> None:
    lab = Lab()
    ids = lab.crowded(sac(), sac(), sac())
    paused_s = dict.fromkeys(ids, 0)
    turns = 6
    for _ in range(turns * TURN // SECOND):
        lab.read()
        (one,) = lab.paused()
        paused_s[one] += 1
        assert lab.reason(one).until <= lab.now + TURN
    assert set(paused_s.values()) == {turns * TURN // SECOND // 3}


def test_of_two_that_are_slower_than_one_each_gets_half() -> None:
    lab = Lab(curve=(0.0, 1.0, 0.8))
    ids = lab.crowded(sac(), sac())
    worked_s = dict.fromkeys(ids, 0)
    for _ in range(4 * TURN // SECOND):
        lab.read()
        for one in lab.at_work():
            worked_s[one] += 1
    assert set(worked_s.values()) == {2 * TURN // SECOND}


def test_a_time_limit_stands_still_meanwhile() -> None:
    lab = Lab()
    *_, third = lab.crowded(sac(), sac(), sac(time_limit_ms=40 * SECOND))
    state = lab.state(third)
    assert isinstance(state, Suspended)
    assert state.left_ms == 40 * SECOND - state.ran_ms
    lab.watch(50)
    assert lab.paused() == [third], "past what would have been its end"
    lab.resume(third)
    lab.watch(state.left_ms // SECOND)
    assert isinstance(lab.state(third), Completing)
    lab.exit(third)
    assert lab.outcome(third) is Outcome.TIMEOUT


def test_nothing_new_starts_where_a_job_is_paused() -> None:
    lab = Lab()
    lab.crowded(sac(), sac(), sac())
    (late,) = lab.submit(sac(signature="other"))
    lab.watch(20)
    assert late not in lab.running()
    plan = lab.core.plan()
    assert plan is not None
    no_room = plan.blocked[lab.core.jobs[JobId(late)].spec].no_room
    assert no_room is not None
    verdict = no_room.alternatives[0][0].verdict
    assert verdict is not None
    assert (verdict.because, verdict.jobs, verdict.better) == ("paused", 3, 2)


def test_what_rlqd_paused_makes_way_for_a_higher_priority() -> None:
    lab = Lab(policy=replace(EXACT, preemption=True))
    ids = lab.crowded(*[sac(preemptible=True)] * 3)
    assert lab.paused() == ids[2:]
    (urgent,) = lab.submit(sac(exclusive=True, priority=1))
    assert [i for i in ids if isinstance(lab.state(i), Completing)] == ids
    for job_id in ids:
        lab.exit(job_id)
    lab.watch(1)
    assert urgent in lab.at_work()


def test_what_a_user_paused_makes_way_for_nobody() -> None:
    lab = Lab(policy=replace(EXACT, preemption=True))
    (job,) = lab.run(sac(preemptible=True))
    lab.pause(job)
    lab.submit(sac(exclusive=True, priority=1))
    assert isinstance(lab.state(job), Suspended)


def test_a_user_who_lets_it_go_on_is_obeyed_for_good() -> None:
    lab = Lab()
    *_, third = lab.crowded(sac(), sac(), sac())
    assert isinstance(lab.resume(third), Accept)
    assert third in lab.at_work()
    for _ in range(4 * TURN // SECOND):
        lab.read()
        assert third in lab.at_work()
    assert lab.paused(), "one of the others is"


def test_a_user_who_pauses_a_paused_job_has_it_paused() -> None:
    lab = Lab()
    first, second, third = lab.crowded(sac(), sac(), sac())
    assert isinstance(lab.pause(third), Accept)
    lab.exit(first)
    lab.watch(2 * TURN // SECOND)
    assert lab.paused() == [third]
    lab.resume(third)
    assert lab.at_work() == [second, third]


def test_a_job_that_somebody_sits_in_front_of_is_never_paused() -> None:
    lab = Lab(curve=(0.0, 1.0, 0.8))
    first, second = lab.crowded(sac(), sac(interactive=True))
    assert lab.paused() == [first], "the other one"
    for _ in range(2 * TURN // SECOND):
        lab.read()
        assert second in lab.at_work()


def test_who_measures_is_not_disturbed() -> None:
    lab = Lab()
    ids = lab.crowded(sac(), sac())
    ids += lab.submit(sac(unguarded=True))
    lab.watch(60)
    assert lab.at_work() == ids


def test_the_lowest_priority_is_paused_first() -> None:
    lab = Lab()
    first, *others = lab.crowded(sac(priority=-1), sac(), sac())
    assert lab.paused() == [first]
    lab.watch(3 * TURN // SECOND)
    assert set(others) <= set(lab.at_work())


def test_a_pause_that_was_no_use_ends() -> None:
    lab = Lab()
    *_, third = lab.crowded(sac(), sac(), sac())
    assert lab.paused() == [third]
    # Something else has changed: two are no faster now than three were.
    lab.curve = (0.0, 1.0, 1.0, 1.2)
    lab.watch(55)
    assert lab.paused() == []


def test_switched_off_everybody_goes_on() -> None:
    lab = Lab()
    ids = lab.crowded(sac(), sac(), sac())
    lab.core.guard.policy = GuardPolicy()
    lab.read()
    assert lab.at_work() == ids


def test_it_survives_a_restart_of_the_daemon() -> None:
    lab = Lab()
    *_, third = lab.crowded(sac(), sac(), sac())
    jobs = list(lab.core.jobs.values())
    guard = lab.core.guard
    lab.core = Scheduler.restore(jobs, EXACT, Instant(lab.now))
    lab.core.guard = guard
    lab.tell(*(lab.started(i) for i in (1, 2, 3)))
    until = lab.reason(third).until
    lab.watch((until - lab.now) // SECOND - 1)
    assert lab.paused() == [third]
    lab.watch(1)
    assert third in lab.at_work()


# ---- who -----------------------------------------------------------------------------


def candidates(*rows: tuple[int, int, int | None]) -> Iterable[Candidate]:
    """(id, since, rested at)"""
    for job_id, since, rested_at in rows:
        yield Candidate(
            job_id=JobId(job_id),
            priority=0,
            since=Instant(since),
            rested_at=None if rested_at is None else Instant(rested_at),
        )


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([(1, 0, None), (2, 5, None)], 2),
        ([(1, 0, None), (2, 5, 90)], 1),
        ([(1, 0, 10), (2, 5, 20)], 1),
        ([(1, 0, 95), (2, 5, 99)], None),
        ([], None),
    ],
)
def test_who_is_next(rows: list[tuple[int, int, int | None]], chosen: int | None) -> None:
    found = next_to_pause(candidates(*rows), Instant(100), turn_ms=50)
    assert (None if found is None else found.job_id) == chosen


def test_the_smallest_number_that_was_too_many_counts() -> None:
    def why(jobs: int, until: int) -> BackedOff:
        return BackedOff(jobs=jobs, better=jobs - 1, stp=1_000, until=Instant(until))

    paused = [(JobId(7), why(7, 10)), (JobId(6), why(6, 20))]
    assert going_on(paused, running=5) == []
    assert going_on(paused, running=4) == [7]
    assert going_on(paused, running=3) == [7, 6]
