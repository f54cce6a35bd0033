"""What a daemon that comes back makes of the rows, and of a clock that began anew."""

from __future__ import annotations

from dataclasses import replace

from tests.core.machines import EXACT, FACTS, A, Desk, gpu, spec

from rlqd.core import invariants
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    Freeze,
    Instant,
    Job,
    JobId,
    Launch,
    Pending,
    Running,
    Starting,
    Terminate,
)


def come_back(desk: Desk, *, clock: int | None = None) -> None:
    """The daemon dies and its successor reads the rows, at `clock` or right away."""
    rows = list(desk.core.jobs.values())
    desk.now = desk.now if clock is None else clock
    desk.core = Scheduler.restore(rows, EXACT, Instant(desk.now))


def test_nothing_starts_before_the_machine_has_been_read() -> None:
    desk = Desk()
    (job,) = desk.submit(spec(), held=True)
    come_back(desk)
    desk.release(job)
    assert job not in desk.launched
    desk.sample()
    assert job in desk.launched


def test_a_job_found_alive_runs_on_where_it_was() -> None:
    desk = Desk()
    (job,) = desk.run(spec(limit=60_000))
    before = desk.state(job)
    come_back(desk)
    desk.start(job, after=1_000)
    assert desk.core.jobs[desk.rows[job].id].state == before
    assert not any(isinstance(a, Launch) for a in desk.said)


def test_a_signal_that_may_have_been_lost_is_sent_again() -> None:
    desk = Desk()
    stopping, paused, resumed = desk.run(*[spec(grace=60_000)] * 3)
    desk.cancel(stopping)
    desk.pause(paused)
    desk.pause(resumed)
    desk.resume(resumed)
    come_back(desk)
    desk.tell(*(desk.started(job) for job in (stopping, paused, resumed)))
    assert [(a.job_id, a.on) for a in desk.said if isinstance(a, Freeze)] == [
        (paused, True),
        (resumed, False),
    ]
    assert [a.job_id for a in desk.said if isinstance(a, Terminate)] == [stopping]


def test_a_start_that_nobody_was_there_to_hear_of_is_not_late() -> None:
    desk = Desk()
    (job,) = desk.submit(spec())
    come_back(desk, clock=desk.now + 3_600_000)
    desk.tell()
    desk.start(job, after=10)
    assert isinstance(desk.state(job), Running)


def test_after_a_reboot_the_clock_begins_anew_and_nothing_waits_for_the_old_one() -> None:
    waiting, starting = spec(cores=8), spec(cores=1)
    rows = [
        Job(JobId(1), waiting, 0, Pending(Instant(9_999_000))),
        Job(JobId(2), starting, 1, Pending(Instant(9_999_000), not_before=Instant(10_004_000))),
    ]
    core = Scheduler.restore(rows, EXACT, Instant(5_000))
    core.step(Instant(5_000))
    invariants.check(core)
    wakeup = core.next_wakeup()
    assert wakeup is not None
    assert wakeup <= 5_000 + EXACT.launch_retry_delay_ms


def test_after_a_reboot_a_job_that_ran_is_lost_or_queued_again() -> None:
    desk = Desk()
    once, again = desk.run(spec(), spec(requeue=True))
    come_back(desk, clock=100)
    desk.tell(desk.lost(once), desk.lost(again), desk.reading())
    assert desk.outcome(once).value == "NODE_FAIL"
    assert isinstance(desk.state(again), Starting)
    assert desk.launched[again].attempt == 2


def test_a_reading_from_before_the_restart_offers_no_gpu() -> None:
    # Which jobs had left a GPU since is forgotten with the daemon that knew.
    desk = Desk(replace(FACTS, gpus=(gpu(A),)))
    (first,) = desk.run(spec(gpus=1, gpu_mem=20_000))
    before = desk.reading()
    desk.exit(first, after=100)
    come_back(desk, clock=desk.now + 100)
    (second,) = desk.submit(spec(gpus=1, gpu_mem=20_000))
    desk.tell(before)
    assert second not in desk.launched
    desk.sample()
    assert second in desk.launched
