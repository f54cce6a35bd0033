"""`rlq update --priority`: a job's rank may change as long as it has not ended."""

from __future__ import annotations

from tests.core.machines import EXACT, Desk, spec

from rlqd.core.machine import Scheduler
from rlqd.core.model import Accept, Instant, JobId, PrioritySet


def prioritize(desk: Desk, job_id: int, priority: int) -> None:
    event = PrioritySet(Instant(0), 1_000 + job_id, JobId(job_id), priority)
    assert [type(a) for a in desk.tell(event) if isinstance(a, Accept)] == [Accept]


def test_who_is_raised_goes_first() -> None:
    desk = Desk()
    (running,) = desk.run(spec(cores=8))
    older, younger = desk.submit(spec(cores=8), spec(cores=8))
    prioritize(desk, younger, 1)
    desk.exit(running)
    desk.sample()
    assert desk.running() == {younger}
    prioritize(desk, older, -5)
    assert desk.rows[older].spec.priority == -5


def test_a_running_job_runs_on() -> None:
    desk = Desk()
    (job,) = desk.run(spec(limit=60_000))
    before = desk.state(job)
    prioritize(desk, job, -5)
    assert desk.state(job) == before
    assert desk.effects() == []


def test_it_survives_a_restart() -> None:
    desk = Desk()
    desk.run(spec(cores=8))
    older, younger = desk.submit(spec(cores=8), spec(cores=8))
    prioritize(desk, older, -1)
    desk.core = Scheduler.restore([*desk.core.jobs.values()], EXACT, Instant(desk.now))
    desk.sample()
    assert desk.core.jobs_ahead(desk.core.jobs[JobId(older)]) == 1
    assert desk.core.jobs_ahead(desk.core.jobs[JobId(younger)]) == 0
