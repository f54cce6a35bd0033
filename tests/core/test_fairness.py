"""Fair share: who has had less of the machine goes first, at once and over time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import EXACT, FACTS, GPU_MIB, A, B, Desk, gpu, spec

from rlqd.core.fairness import HELD_COUNTS_AS_MS, TELL_EVERY_MS, Accounted, Capacity, Use
from rlqd.core.machine import Scheduler
from rlqd.core.model import (
    Account,
    Charge,
    Exit,
    Instant,
    JobId,
    MachineSampled,
    ProcessExited,
    ProcessLost,
    ProcessStarted,
    SharePolicy,
)

ADA, BOB, EVE = 1001, 1002, 1003
DAY_MS = 86_400_000
ONE_GPU = replace(FACTS, gpus=(gpu(A),))
TWO_GPUS = replace(FACTS, gpus=(gpu(A), gpu(B)))
CAPACITY = Capacity(cores=10, mem_mib=1_000, gpus={A: 100, B: 100})


def charge(cores: int = 1, mem: int = 1, gpu_mem: int = 0, sm: int = 0) -> Charge:
    return Charge(cores=cores, mem_mib=mem, gpu_mem_mib=gpu_mem, sm_pct=sm)


# ---- what a job takes --------------------------------------------------------------


def test_a_job_takes_the_largest_of_its_shares_of_the_machine() -> None:
    assert CAPACITY.rate(charge(cores=5), [], exclusive=False).machine == 0.5
    assert CAPACITY.rate(charge(mem=700), [], exclusive=False).machine == 0.7
    one_of_two = CAPACITY.rate(charge(gpu_mem=80, sm=10), [A], exclusive=False)
    assert (one_of_two.machine, one_of_two.gpus) == (0.4, 0.8)


def test_of_a_gpu_it_takes_the_larger_of_memory_and_sm() -> None:
    assert CAPACITY.rate(charge(gpu_mem=10, sm=60), [A, B], exclusive=False).gpus == 1.2


def test_an_exclusive_job_takes_its_whole_gpu_or_without_one_the_machine() -> None:
    assert CAPACITY.rate(charge(gpu_mem=1, sm=1), [A], exclusive=True).gpus == 1.0
    assert CAPACITY.rate(charge(), [], exclusive=True).machine == 1.0


def test_of_a_gpu_whose_memory_cannot_be_read_the_sm_counts() -> None:
    blind = Capacity(cores=10, mem_mib=1_000, gpus={A: None})
    assert blind.rate(charge(gpu_mem=90, sm=30), [A], exclusive=False).gpus == 0.3


# ---- at once -----------------------------------------------------------------------


def user_of(desk: Desk, job_id: int) -> int:
    return desk.rows[job_id].spec.user


def running_of(desk: Desk, user: int) -> int:
    return sum(user_of(desk, job_id) == user for job_id in desk.running())


def next_one(desk: Desk) -> int:
    """The only job there is ends, and this one starts."""
    (running,) = desk.running()
    desk.exit(running, after=100)
    (following,) = desk.running()
    return following


def users_in_order(desk: Desk, jobs: int) -> list[int]:
    """Whose jobs start as one after the other ends."""
    return [user_of(desk, next_one(desk)) for _ in range(jobs)]


def test_on_an_empty_history_the_second_user_goes_before_the_firsts_second_job() -> None:
    desk = Desk()
    ada = desk.submit(*[spec(user=ADA)] * 20)
    assert len(desk.running()) == 8, "the machine is hers while nobody else wants it"
    (bob,) = desk.submit(spec(user=BOB))
    desk.exit(ada[0])
    assert bob in desk.running()


def test_what_is_given_within_one_pass_counts() -> None:
    desk = Desk()
    (eve,) = desk.run(spec(user=EVE, cores=8))
    desk.submit(*[spec(user=ADA)] * 20)
    desk.submit(*[spec(user=BOB)] * 20)
    desk.exit(eve)
    assert running_of(desk, ADA) == running_of(desk, BOB) == 4


def test_shares_divide_the_machine() -> None:
    desk = Desk()
    desk.core.fairness.policy = SharePolicy(shares=((ADA, 3),))
    (eve,) = desk.run(spec(user=EVE, cores=8))
    desk.submit(*[spec(user=ADA)] * 20)
    desk.submit(*[spec(user=BOB)] * 20)
    desk.exit(eve)
    assert (running_of(desk, ADA), running_of(desk, BOB)) == (6, 2)


def test_big_jobs_count_for_more_than_small_ones() -> None:
    desk = Desk()
    (eve,) = desk.run(spec(user=EVE, cores=8))
    desk.submit(*[spec(user=ADA, cores=3)] * 5)
    desk.submit(*[spec(user=BOB)] * 20)
    desk.exit(eve)
    assert (running_of(desk, ADA), running_of(desk, BOB)) == (1, 5)


def test_of_one_user_the_order_is_priority_then_age_whatever_was_used() -> None:
    desk = Desk()
    desk.run(spec(cores=8))
    old, young, urgent = desk.submit(spec(cores=8), spec(cores=8), spec(cores=8, priority=1))
    assert [next_one(desk) for _ in range(3)] == [urgent, old, young]


def test_priority_decides_before_fair_share_and_a_negative_one_goes_last() -> None:
    desk = Desk()
    desk.core.fairness.load([Accounted(ADA, Use(machine_ms=1e12))], Instant(0))
    desk.run(spec(user=EVE, cores=8))
    desk.submit(
        spec(user=BOB, cores=8, priority=-1),
        spec(user=BOB, cores=8),
        spec(user=ADA, cores=8, priority=1),
    )
    assert users_in_order(desk, 3) == [ADA, BOB, BOB]


# ---- over time ---------------------------------------------------------------------


def test_who_has_used_more_goes_last() -> None:
    desk = Desk()
    desk.run(spec(user=EVE, cores=8))
    desk.core.fairness.load([Accounted(ADA, Use(machine_ms=10.0 * DAY_MS))], Instant(0))
    desk.submit(*[spec(user=ADA, cores=8)] * 2)
    desk.submit(*[spec(user=BOB, cores=8)] * 2)
    assert users_in_order(desk, 4) == [BOB, BOB, ADA, ADA]


def test_use_halves_with_the_half_life() -> None:
    desk = Desk()
    desk.core.fairness.load([Accounted(ADA, Use(machine_ms=8e6, gpu_ms=4e6))], Instant(0))
    desk.sample(after=2 * desk.core.fairness.policy.half_life_ms)
    use = desk.core.fairness.uses[ADA]
    assert (use.machine_ms, use.gpu_ms) == pytest.approx((2e6, 1e6), rel=1e-3)


def test_a_job_is_charged_for_what_it_declared_while_it_runs() -> None:
    desk = Desk(TWO_GPUS)
    (job,) = desk.run(spec(user=ADA, gpus=1, gpu_mem=GPU_MIB // 2, sm=10, cores=2))
    for _ in range(60):
        desk.sample(after=1_000)
    desk.exit(job, after=500)
    use = desk.core.fairness.uses[ADA]
    assert use.gpu_ms == pytest.approx(0.5 * 60_500, rel=1e-3)
    assert use.core_ms == pytest.approx(2 * 60_500, rel=1e-3)
    # A quarter of two GPUs, a quarter of eight cores.
    assert use.machine_ms == pytest.approx(0.25 * 60_500, rel=1e-3)


def test_a_paused_job_is_charged_too_for_it_keeps_what_it_holds() -> None:
    desk = Desk()
    (job,) = desk.run(spec(user=ADA, cores=4))
    desk.pause(job)
    desk.sample(after=10_000)
    assert desk.core.fairness.uses[ADA].core_ms == pytest.approx(40_000, rel=1e-3)


def test_age_lets_a_job_pass_one_whose_user_has_had_a_little_less() -> None:
    desk = Desk()
    policy = desk.core.fairness.policy
    desk.run(spec(user=EVE, cores=8))
    desk.submit(spec(user=ADA, cores=8))
    desk.sample(after=policy.age_max_ms)
    uses = [Accounted(ADA, Use(machine_ms=1.05e9)), Accounted(BOB, Use(machine_ms=1e9))]
    desk.core.fairness.load(uses, Instant(desk.now))
    desk.submit(spec(user=BOB, cores=8))
    assert users_in_order(desk, 2) == [ADA, BOB]


def test_without_a_weight_for_shares_the_oldest_goes_first() -> None:
    desk = Desk()
    desk.core.fairness.policy = SharePolicy(share_weight=0)
    desk.run(spec(user=EVE, cores=8))
    desk.core.fairness.load([Accounted(ADA, Use(machine_ms=1e9))], Instant(0))
    desk.submit(spec(user=ADA, cores=8), spec(user=BOB, cores=8))
    assert users_in_order(desk, 2) == [ADA, BOB]


# ---- the books ---------------------------------------------------------------------


def told(desk: Desk) -> list[dict[int, Use]]:
    return [{one.user: one.use for one in a.users} for a in desk.said if isinstance(a, Account)]


def test_use_is_written_down_when_a_job_leaves_and_once_a_minute() -> None:
    desk = Desk()
    (first,) = desk.run(spec(user=ADA))
    desk.run(spec(user=BOB))
    desk.sample(after=TELL_EVERY_MS - 1)
    desk.exit(first, after=500)
    assert [set(uses) for uses in told(desk)] == [{ADA, BOB}]
    written = 0
    for _ in range(120):
        desk.sample(after=1_000)
        written += len(told(desk))
    assert written == 2


def test_where_nobody_runs_nothing_is_written() -> None:
    desk = Desk()
    (job,) = desk.run(spec(user=ADA))
    desk.exit(job, after=5_000)
    desk.sample(after=2 * TELL_EVERY_MS)
    assert told(desk) == []


def restarted(desk: Desk, *, down_ms: int, written_ago_ms: int) -> Scheduler:
    """A daemon that takes over after `down_ms`; the last one wrote its books before it died."""
    core = desk.core
    now = Instant(desk.now + down_ms)
    restored = Scheduler.restore(list(core.jobs.values()), EXACT, now)
    rows = [Accounted(user, use) for user, use in core.fairness.uses.items()]
    restored.fairness.load(rows, Instant(desk.now - written_ago_ms))
    return restored


def core_s(core: Scheduler, user: int) -> float:
    return core.fairness.uses[user].core_ms / 1_000


def test_a_job_that_runs_on_while_no_daemon_is_there_pays_for_it() -> None:
    desk = Desk()
    (job,) = desk.run(spec(user=ADA))
    desk.sample(after=10_000)
    core = restarted(desk, down_ms=3_600_000, written_ago_ms=0)
    core.step(
        core.now, [ProcessStarted(core.now, JobId(job), 1, 1), MachineSampled(core.now, FACTS)]
    )
    assert core_s(core, ADA) == pytest.approx(3_610, rel=0.01)


def test_one_that_ended_meanwhile_pays_till_its_end() -> None:
    desk = Desk()
    (job,) = desk.run(spec(user=ADA))
    desk.sample(after=10_000)
    core = restarted(desk, down_ms=3_600_000, written_ago_ms=0)
    ended = ProcessExited(core.now, JobId(job), 1, Exit(code=0), ago_ms=3_500_000)
    core.step(core.now, [ended, MachineSampled(core.now, FACTS)])
    assert core_s(core, ADA) == pytest.approx(110, rel=0.01)


def test_what_a_reboot_took_is_not_charged_for_the_time_the_machine_was_off() -> None:
    desk = Desk()
    (job,) = desk.run(spec(user=ADA))
    desk.sample(after=10_000)
    core = restarted(desk, down_ms=3_600_000, written_ago_ms=0)
    lost = ProcessLost(core.now, JobId(job), 1, "the machine was restarted")
    core.step(core.now, [lost, MachineSampled(core.now, FACTS)])
    assert core_s(core, ADA) == pytest.approx(10, rel=0.01)


def test_a_job_that_began_after_the_books_were_written_pays_from_its_start() -> None:
    desk = Desk()
    desk.sample(after=10_000)
    (job,) = desk.run(spec(user=ADA))
    core = restarted(desk, down_ms=20_000, written_ago_ms=9_000)
    core.step(
        core.now, [ProcessStarted(core.now, JobId(job), 1, 1), MachineSampled(core.now, FACTS)]
    )
    assert core_s(core, ADA) == pytest.approx(20, rel=0.01)


# ---- the reservation ---------------------------------------------------------------


def reserved_for(desk: Desk) -> JobId | None:
    plan = desk.core.plan()
    assert plan is not None
    return plan.reservation.job_id if plan.reservation is not None else None


def test_a_reservation_stays_though_another_user_has_had_less_by_now() -> None:
    # While room is kept for Ada's big job, Bob's jobs end one by one.  Soon he holds less than
    # she does, and by fair share alone his next ones would go before it, again and again.
    desk = Desk()
    desk.run(spec(user=ADA, cores=3))
    bobs = desk.run(*[spec(user=BOB, limit=600_000)] * 5)
    (big,) = desk.submit(spec(user=ADA, cores=5))
    desk.submit(*[spec(user=BOB, cores=2)] * 50)
    desk.sample(after=EXACT.reserve_after_ms)
    assert reserved_for(desk) == big
    for job in bobs:
        desk.exit(job, after=1_000)
        desk.sample(after=1_000)
    assert big in desk.running()


def test_a_higher_priority_takes_the_reservation() -> None:
    desk = Desk()
    desk.run(spec(user=EVE, cores=2))
    (big,) = desk.submit(spec(user=ADA, cores=8))
    desk.submit(spec(user=BOB, cores=8))
    desk.sample(after=EXACT.reserve_after_ms)
    assert reserved_for(desk) == big
    (urgent,) = desk.submit(spec(user=BOB, cores=8, priority=1))
    desk.sample(after=EXACT.reserve_after_ms)
    assert reserved_for(desk) == urgent


def test_a_reservation_that_was_used_is_not_had_again() -> None:
    desk = Desk()
    (eve,) = desk.run(spec(user=EVE, cores=2))
    (big,) = desk.submit(spec(user=ADA, cores=8))
    desk.sample(after=EXACT.reserve_after_ms)
    assert reserved_for(desk) == big
    desk.exit(eve)
    desk.sample()
    desk.start(big)
    desk.sample(after=DAY_MS)
    (bobs,) = desk.submit(spec(user=BOB, cores=8))
    desk.requeue(big)
    desk.exit(big)
    desk.sample()
    assert bobs in desk.running()


def test_who_holds_a_job_gives_up_its_reservation() -> None:
    desk = Desk()
    desk.run(spec(user=EVE, cores=2))
    (big,) = desk.submit(spec(user=ADA, cores=8))
    desk.sample(after=EXACT.reserve_after_ms)
    desk.hold(big)
    assert desk.core.promised is None


# ---- how many are ahead ------------------------------------------------------------


def test_jobs_ahead_are_those_that_start_before_it_by_turns() -> None:
    desk = Desk()
    desk.run(spec(user=EVE, cores=8))
    ada = desk.submit(*[spec(user=ADA, cores=8)] * 50)
    bob = desk.submit(*[spec(user=BOB, cores=8)] * 3)
    ahead = [desk.core.jobs_ahead(desk.rows[j]) for j in (ada[0], *bob, ada[1], ada[49])]
    assert ahead == [0, 1, 3, 5, 2, 52]
    order = [next_one(desk) for _ in range(53)]
    assert order[:5] == [ada[0], bob[0], ada[1], bob[1], ada[2]]
    assert order.index(ada[49]) == 52


def test_what_is_held_counts_as_an_hour_of_it() -> None:
    desk = Desk()
    desk.run(spec(user=ADA, cores=4))
    ranking = desk.core.ranking()
    assert ranking is not None
    assert ranking.counted_ms(ADA) == pytest.approx(HELD_COUNTS_AS_MS / 2)
