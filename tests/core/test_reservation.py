"""No starvation: small jobs may pass a big one that waits, but they do not hold it up.

EASY backfill (Lifka 1995), on a machine of one or two GPUs with 24,000 MiB each.
"""

from __future__ import annotations

from dataclasses import replace

from tests.core.machines import EXACT, FACTS, GPU_MIB, A, B, Desk, gpu, spec, used

from rlqd.core.guard import Estimate, Learned
from rlqd.core.model import Instant, JobId, JobSpec

ONE_GPU = replace(FACTS, gpus=(gpu(A),))
TWO_GPUS = replace(FACTS, gpus=(gpu(A), gpu(B)))
WHOLE = spec(gpus=1, gpu_mem=GPU_MIB)


def small(limit: int | None = None, *, grace: int = 0, mem: int = 4_000) -> JobSpec:
    return spec(gpus=1, gpu_mem=mem, limit=limit, grace=grace)


def reserved_for(desk: Desk) -> int | None:
    plan = desk.core.plan()
    assert plan is not None
    return plan.reservation.job_id if plan.reservation is not None else None


def test_small_jobs_pass_a_blocked_head_until_it_has_waited_long_enough() -> None:
    desk = Desk(ONE_GPU)
    desk.run(small())
    (whole,) = desk.submit(WHOLE)
    (early,) = desk.submit(small(), after=9_999)
    assert early in desk.launched
    assert reserved_for(desk) is None
    (late,) = desk.submit(small(), after=1)
    assert late not in desk.launched
    assert reserved_for(desk) == whole


def test_the_moment_a_reservation_falls_due_is_a_wakeup() -> None:
    desk = Desk(ONE_GPU)
    desk.run(small())
    desk.submit(WHOLE)
    assert desk.core.next_wakeup() == desk.now + EXACT.reserve_after_ms


def test_a_job_that_ends_in_time_passes_the_head() -> None:
    desk = Desk(ONE_GPU)
    desk.run(small(limit=60_000))
    desk.submit(WHOLE)
    desk.sample(after=10_000)
    in_time, too_long = desk.submit(small(limit=50_000), small(limit=50_001))
    assert in_time in desk.launched
    assert too_long not in desk.launched


def test_the_grace_of_a_job_counts_as_part_of_its_time() -> None:
    # It may ignore SIGTERM until SIGKILL, and the head would wait for it.
    desk = Desk(ONE_GPU)
    desk.run(small(limit=60_000))
    desk.submit(WHOLE)
    desk.sample(after=10_000)
    (job,) = desk.submit(small(limit=50_000, grace=1_000))
    assert job not in desk.launched


def test_a_job_that_fits_beside_the_head_too_passes_it() -> None:
    desk = Desk(ONE_GPU)
    desk.run(small(mem=10_000), small(mem=10_000))
    (head,) = desk.submit(small(mem=12_000))
    desk.sample(after=10_000)
    # When the first has gone, 14,000 are free: 12,000 for the head, 2,000 for others.
    beside, too_big = desk.submit(small(mem=2_000), small(mem=1_999))
    assert beside in desk.launched
    assert too_big not in desk.launched
    desk.exit(1)
    desk.sample(after=100)
    assert head in desk.launched


def test_a_stream_of_small_jobs_does_not_starve_one_that_needs_the_whole_gpu() -> None:
    desk = Desk(ONE_GPU)
    running = desk.run(*[small()] * 6)
    (whole,) = desk.submit(WHOLE)
    for second in range(1, 60):
        desk.submit(small())
        if second % 5 == 0 and running:  # one small job ends every 5 s
            desk.exit(running.pop(0))
        desk.sample(after=1_000)
        running += [j for j in desk.launched if j not in running and j > 6 and j != whole]
        for job in [j for j in running if type(desk.state(j)).__name__ == "Starting"]:
            desk.start(job)
        running = [j for j in running if JobId(j) in desk.core.jobs]
        if whole in desk.launched:
            # 6 before it, and those started in the 10 s before its reservation.
            assert second <= 50
            return
    raise AssertionError(f"never started; running: {running}")


def test_a_reservation_survives_the_moment_in_which_a_gpu_is_read_again() -> None:
    # Each end makes a GPU unknown until the next reading.  With no room to reckon with there
    # was no reservation in that moment, and the other GPU was filled up again: for ever.
    desk = Desk(TWO_GPUS)
    on_a, on_b = desk.run(small(mem=10_000), small(mem=10_000))
    (both,) = desk.submit(spec(gpus=2, gpu_mem=20_000))
    desk.sample(after=10_000)
    assert reserved_for(desk) == both
    waiting = desk.submit(*[small(mem=5_000)] * 3)
    desk.exit(on_a, after=100)
    assert reserved_for(desk) == both
    assert not set(waiting) & set(desk.launched)
    desk.exit(on_b, after=1)
    assert not set(waiting) & set(desk.launched)
    desk.sample(after=10)
    assert both in desk.launched


def test_room_on_another_gpu_is_used_while_the_head_waits_for_its_own() -> None:
    # The emptiest GPU is preferred, which is just the one that is kept for the head.
    desk = Desk(replace(TWO_GPUS, gpus=(gpu(A), gpu(B, free=20_000, total=20_000))))
    desk.run(small(mem=4_000), small(mem=4_000), small(mem=4_000))
    assert sorted(desk.place(j).gpus for j in (1, 2, 3)) == [(A,), (A,), (B,)]
    desk.submit(WHOLE)
    desk.sample(after=10_000)
    desk.exit(next(j for j in (1, 2, 3) if desk.place(j).gpus == (A,)))
    desk.sample(after=10)
    desk.exit(next(j for j in (1, 2, 3) if desk.place(j).gpus == (B,)))
    desk.submit(small(mem=4_000), small(mem=4_000))
    desk.sample(after=10)
    assert [desk.place(j).gpus for j in (5, 6)] == [(B,), (B,)]


def test_the_head_of_the_highest_priority_gets_the_reservation() -> None:
    desk = Desk(ONE_GPU)
    desk.run(small())
    desk.submit(WHOLE)
    (urgent,) = desk.submit(replace(WHOLE, priority=5))
    desk.sample(after=10_000)
    assert reserved_for(desk) == urgent


def test_a_head_that_outsiders_block_reserves_nothing() -> None:
    desk = Desk(replace(FACTS, gpus=(gpu(A, free=12_000),)))
    desk.run(small())
    desk.submit(spec(gpus=1, gpu_mem=20_000))
    desk.sample(after=10_000)
    (job,) = desk.submit(small())
    assert job in desk.launched


def test_an_exclusive_head_gets_its_gpu_to_itself() -> None:
    desk = Desk(ONE_GPU)
    (first,) = desk.run(small())
    (alone,) = desk.submit(replace(small(), exclusive=True))
    desk.sample(after=10_000)
    (after,) = desk.submit(small())
    assert after not in desk.launched
    desk.exit(first)
    desk.sample(after=10)
    assert desk.running() == {alone}


def test_an_exclusive_job_without_a_gpu_gets_the_machine_to_itself() -> None:
    desk = Desk()
    (first,) = desk.run(spec(cores=1))
    (alone,) = desk.submit(spec(cores=1, exclusive=True))
    desk.sample(after=10_000)
    (after,) = desk.submit(spec(cores=1))
    assert desk.running() == {first}
    desk.exit(first)
    assert desk.running() == {alone}
    desk.exit(alone)
    assert desk.running() == {after}


def test_cores_are_reserved_like_gpus() -> None:
    desk = Desk()
    desk.run(spec(cores=4, limit=60_000))
    (wide,) = desk.submit(spec(cores=8))
    desk.sample(after=10_000)
    short, long = desk.submit(spec(cores=2, limit=10_000), spec(cores=2, limit=600_000))
    assert short in desk.launched
    assert long not in desk.launched
    assert reserved_for(desk) == wide


def test_a_waiting_head_keeps_its_turn_while_its_gpu_fills_and_empties() -> None:
    desk = Desk(ONE_GPU)
    (first,) = desk.run(small())
    (whole,) = desk.submit(WHOLE)
    grown = replace(ONE_GPU, gpus=(gpu(A, free=14_000),))
    job_facts = used(0, gpus=[A], gpu_mem=10_000)  # more than it said
    desk.sample(replace(grown, jobs=((JobId(first), job_facts),)), after=10_000)
    assert reserved_for(desk) == whole
    desk.exit(first)
    desk.sample(ONE_GPU, after=100)
    assert whole in desk.launched


def test_the_limit_of_jobs_per_gpu_leaves_a_place_for_the_head() -> None:
    # With memory and SM to spare beside the head, a job took the place that it needed.
    desk = Desk(TWO_GPUS, policy=replace(EXACT, jobs_per_gpu_max=2))
    on_a, on_b = desk.run(small(mem=10_000, limit=60_000), small(mem=1_000, limit=600_000))
    (both,) = desk.submit(spec(gpus=2, gpu_mem=15_000))
    desk.sample(after=10_000)
    assert reserved_for(desk) == both
    assert desk.place(on_b).gpus == (B,)
    where_one_ends, nowhere = desk.submit(small(mem=1_000), small(mem=1_001))
    assert desk.place(where_one_ends).gpus == (A,)
    assert nowhere not in desk.launched
    desk.exit(on_a)
    desk.sample(after=10)
    assert both in desk.launched


def test_who_need_not_leave_for_the_head_is_reckoned_to_stay() -> None:
    # It waits for a job of unknown end, which may end at once: then the short one is still
    # there, and what it has is no room for others beside the head.
    desk = Desk(replace(FACTS, gpus=(gpu(A),), mem_mib_available=50_000))
    desk.run(small(mem=14_000))  # nobody knows for how long
    (head,) = desk.submit(spec(gpus=1, gpu_mem=14_000))
    (short,) = desk.run(small(mem=6_000, limit=30_000))
    desk.sample(after=10_000)
    assert reserved_for(desk) == head
    beside, too_big = desk.submit(small(mem=4_000), small(mem=3_999))
    assert beside in desk.launched  # 14,000 + 6,000 + 4,000
    assert too_big not in desk.launched
    desk.exit(1)
    desk.sample(after=10)
    assert {head, short, beside} <= desk.running()


# ---- predicted ends ----------------------------------------------------------------


def told(desk: Desk, left_ms: dict[int, int | None], *, after: int = 0) -> None:
    """A reading in which running jobs tell how long they still run."""
    jobs = tuple(
        (JobId(i), replace(used(gpus=desk.place(i).gpus), left_ms=ms)) for i, ms in left_ms.items()
    )
    desk.sample(replace(desk.facts, jobs=jobs), after=after)


def test_a_running_job_that_tells_its_end_lets_others_pass_before_it() -> None:
    desk = Desk(ONE_GPU)
    (first,) = desk.run(small())  # without a time limit
    (head,) = desk.submit(WHOLE)
    told(desk, {first: 100_000}, after=10_000)
    plan = desk.core.plan()
    assert plan is not None
    assert plan.reservation is not None
    assert plan.reservation.job_id == head
    assert (plan.reservation.after, plan.reservation.is_predicted) == (first, True)
    # People are told the late edge of what is a guess, and others pass by its early edge.
    assert plan.reservation.starts_at == desk.now + 110_000
    in_time, too_long, endless = desk.submit(small(90_000), small(90_001), small())
    assert in_time in desk.launched
    assert not {too_long, endless} & desk.launched.keys()


def test_a_job_that_is_said_to_be_short_does_not_pass_by_that() -> None:
    # Only what is enforced bounds the wait of the head: a job that has told nothing yet, or one
    # that lies, would hold it up for as long as it likes.
    desk = Desk(ONE_GPU)
    first, other = desk.run(small(60_000), small(mem=1_000))
    desk.submit(WHOLE)
    told(desk, {first: 50_000, other: 1_000}, after=10_000)
    (job,) = desk.submit(small(mem=1_000))
    assert job not in desk.launched


def test_a_job_that_outlives_its_prediction_lets_nobody_pass() -> None:
    desk = Desk(ONE_GPU)
    (first,) = desk.run(small())
    desk.submit(WHOLE)
    told(desk, {first: 0}, after=10_000)
    (short,) = desk.submit(small(1_000))
    assert short not in desk.launched


def test_when_a_prediction_was_too_late_the_head_waits_for_those_let_past_and_no_others() -> None:
    desk = Desk(ONE_GPU)
    (liar,) = desk.run(small())
    (head,) = desk.submit(WHOLE)
    told(desk, {liar: 1_000_000}, after=10_000)
    (passed,) = desk.submit(small(60_000))
    assert passed in desk.launched
    desk.start(passed)
    desk.exit(liar)
    desk.sample(after=10)
    assert head not in desk.launched
    (late,) = desk.submit(small(60_001))
    assert late not in desk.launched
    desk.exit(passed)
    desk.sample(after=10)
    assert head in desk.launched


def test_a_time_limit_ends_a_job_that_says_it_has_longer() -> None:
    desk = Desk(ONE_GPU)
    (first,) = desk.run(small(60_000))
    desk.submit(WHOLE)
    told(desk, {first: 10_000_000}, after=10_000)
    plan = desk.core.plan()
    assert plan is not None
    assert plan.reservation is not None
    assert (plan.reservation.starts_at, plan.reservation.is_predicted) == (60_000, False)


# ---- room, but no use --------------------------------------------------------------


def test_a_job_kept_waiting_by_the_guard_alone_is_not_passed_for_ever() -> None:
    # One "slow" beside another is of no use, one "quick" beside it is: always another one came.
    kinds = replace(ONE_GPU, gpus=(replace(gpu(A), kind="A100"),))
    desk = Desk(kinds, policy=replace(EXACT, throughput_patience_ms=60_000))
    rows = [
        Learned("A100", mix, jobs, Estimate(value, 1, Instant(0)))
        for mix, jobs, value in (
            (("slow",), 0, 50_000),
            (("quick",), 0, 50_000),
            (("slow",), 2, 1_000),
            (("quick", "slow"), 2, 1_900),
            (("quick", "slow", "slow", "slow"), 3, 1_900),
            (("quick",), 2, 1_900),
        )
    ]
    desk.core.guard.load(rows, Instant(0))
    slow, quick = (replace(small(mem=1_000), signature=name) for name in ("slow", "quick"))
    (first,) = desk.run(slow)
    head, *_ = desk.submit(*[slow] * 4)
    desk.sample(after=59_000)
    assert head not in desk.launched
    (passes,) = desk.run(quick)
    desk.exit(passes)
    desk.sample(after=1_000)
    (late,) = desk.submit(quick)
    assert late not in desk.launched
    desk.exit(first)
    desk.sample(after=10)
    assert head in desk.launched
