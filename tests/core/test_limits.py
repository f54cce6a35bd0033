"""Limits per user and group: the tightest holds, and nobody else waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import EXACT, FACTS, A, B, Desk, gpu, spec, used

from rlqd.core import limits
from rlqd.core.model import Accept, Instant, JobId, JobSpec, Limit, Refuse, Submitted

ALICE, BOB, CAROL = 1, 2, 3
TWO_GPUS = replace(FACTS, gpus=(gpu(A), gpu(B)))


def desk(**of: tuple[Limit, ...]) -> Desk:
    found = Desk(TWO_GPUS)
    uids = {"alice": ALICE, "bob": BOB, "carol": CAROL}
    found.core.limits = {uids[name]: mine for name, mine in of.items()}
    return found


def refusal(d: Desk, *specs: JobSpec) -> Refuse:
    d.submit(*specs)
    [answer] = [a for a in d.said if isinstance(a, Accept | Refuse)]
    assert isinstance(answer, Refuse), answer
    return answer


def why(d: Desk, job_id: int) -> str:
    plan = d.core.plan()
    assert plan is not None
    at = plan.blocked[d.core.jobs[JobId(job_id)].spec].at_limits
    return "; ".join(limits.in_words(one) for one in at)


ALICES = Limit(whose="user alice", max_jobs=2)
STUDENTS = Limit(whose="group students", max_jobs=3)


def test_no_more_jobs_run_than_their_user_may_have() -> None:
    d = desk(alice=(ALICES,))
    ids = d.submit(*[spec(user=ALICE)] * 4)
    assert d.running() == set(ids[:2]), "jobs that start in one pass count for each other"
    d.start(ids[0])
    d.exit(ids[0])
    assert d.running() == set(ids[1:3])
    assert why(d, ids[3]) == "user alice has 2 of at most 2 running jobs"


def test_a_limit_holds_up_nobody_else() -> None:
    d = desk(alice=(ALICES,))
    d.submit(*[spec(user=ALICE)] * 9)
    [other] = d.submit(spec(user=BOB))
    assert other in d.running()


def test_a_job_at_its_limit_gets_no_reservation() -> None:
    """Or alice's jobs would keep a machine empty that she may not use."""
    d = desk(alice=(ALICES,))
    d.run(*[spec(user=ALICE)] * 2)
    d.submit(spec(user=ALICE, cores=8))
    d.sample(after=100_000)
    # Without a known end it would be kept out by any reservation for eight cores.
    [other] = d.submit(spec(user=BOB, cores=6))
    assert other in d.running()
    plan = d.core.plan()
    assert plan is not None
    assert plan.reservation is None
    assert plan.head is None


def test_jobs_behind_a_reserved_one_do_not_take_its_place_in_the_limit() -> None:
    """Or a member's stream of small jobs would starve another member's big one."""
    two = Limit(whose="group students", max_jobs=2)
    d = desk(alice=(two,), bob=(two,))
    [outside] = d.run(spec(user=CAROL, cores=6))
    [first] = d.run(spec(user=BOB, limit=60_000))
    [big] = d.submit(spec(user=ALICE, cores=6))
    d.sample(after=EXACT.reserve_after_ms)
    plan = d.core.plan()
    assert plan is not None
    assert plan.reservation is not None
    assert plan.reservation.job_id == big
    d.exit(first)
    [small] = d.submit(spec(user=BOB, limit=1_000))
    assert small in d.running(), "one place is big's, the other is free"
    [next_] = d.submit(spec(user=BOB, limit=1_000))
    assert next_ not in d.running(), "there is room beside big, and no place"
    d.exit(outside)
    assert big in d.running()


def test_a_groups_limit_is_the_sum_over_its_members() -> None:
    d = desk(alice=(ALICES, STUDENTS), bob=(STUDENTS,))
    d.run(*[spec(user=ALICE)] * 2, spec(user=BOB))
    [bobs] = d.submit(spec(user=BOB))
    assert bobs not in d.running()
    assert why(d, bobs) == "group students has 3 of at most 3 running jobs"
    [carols] = d.submit(spec(user=CAROL))
    assert carols in d.running(), "she is no member"


def test_the_tightest_limit_holds_and_all_that_hold_are_named() -> None:
    d = desk(alice=(ALICES, Limit(whose="group students", max_jobs=2, cores=2)))
    d.run(*[spec(user=ALICE)] * 2)
    [waits] = d.submit(spec(user=ALICE))
    assert why(d, waits) == (
        "user alice has 2 of at most 2 running jobs;"
        " group students has 2 of at most 2 running jobs;"
        " group students has 2 of at most 2 cores, and this takes 1 more"
    )


@pytest.mark.parametrize(
    ("limit", "one", "fits", "words"),
    [
        (
            Limit(whose="user alice", cores=4),
            spec(user=ALICE, cores=2),
            2,
            "user alice has 4 of at most 4 cores, and this takes 2 more",
        ),
        (
            Limit(whose="user alice", gpus=3),
            spec(user=ALICE, gpus=1, gpu_mem=1_000),
            3,
            "user alice has 3 of at most 3 GPUs, and this takes 1 more",
        ),
        (
            Limit(whose="user alice", gpus=3),
            spec(user=ALICE, gpus=2, gpu_mem=1_000),
            1,
            "user alice has 2 of at most 3 GPUs, and this takes 2 more",
        ),
        (
            Limit(whose="user alice", gpu_mem_mib=10 * 1024),
            spec(user=ALICE, gpus=1, gpu_mem=4 * 1024),
            2,
            "user alice has 8 GiB of at most 10 GiB of GPU memory, and this takes 4 GiB more",
        ),
        (
            Limit(whose="user alice", gpu_mem_mib=10 * 1024),
            spec(user=ALICE, gpus=2, gpu_mem=4 * 1024),
            1,
            "user alice has 8 GiB of at most 10 GiB of GPU memory, and this takes 8 GiB more",
        ),
    ],
)
def test_each_resource_has_its_limit(limit: Limit, one: JobSpec, fits: int, words: str) -> None:
    d = desk(alice=(limit,))
    ids = d.submit(*[one] * (fits + 1))
    assert len(d.running()) == fits
    assert why(d, ids[-1]) == words


def test_a_job_that_takes_none_of_a_resource_is_not_held_up_by_its_limit() -> None:
    d = desk(alice=(Limit(whose="user alice", gpus=0, gpu_mem_mib=0),))
    [on_cpu] = d.submit(spec(user=ALICE, gpus=0))
    assert on_cpu in d.running()


def test_what_jobs_are_measured_at_counts() -> None:
    """Once a job has settled, the limit goes by what it takes, as the room does."""
    d = desk(alice=(Limit(whose="user alice", gpu_mem_mib=5_000),))
    small = spec(user=ALICE, gpus=1)  # undeclared: 4,096 MiB until it is known better
    [first] = d.run(small)
    [second] = d.submit(small)
    on = d.place(first).gpus
    for _ in range(8):
        taken = used(100, gpus=on, gpu_mem=500)
        facts = replace(TWO_GPUS, jobs=((JobId(first), taken),))
        d.sample(facts, after=1_000)
    assert second in d.running()


def test_without_limits_nothing_is_limited() -> None:
    d = desk(alice=(Limit(whose="user alice"),))
    assert len(d.run(*[spec(user=ALICE)] * 8)) == 8


# ---- at submission -----------------------------------------------------------------


def test_more_jobs_than_may_be_queued_are_refused_all_or_none() -> None:
    d = desk(alice=(Limit(whose="user alice", max_submit_jobs=3),))
    d.submit(*[spec(user=ALICE, cores=8)] * 2)
    said = refusal(d, *[spec(user=ALICE)] * 2)
    assert said.message == (
        "user alice has 2 of at most 3 jobs that wait or run, and 2 more would be too many"
    )
    assert not said.impossible, "it is a matter of time"
    assert len(d.core.jobs) == 2
    [third] = d.submit(spec(user=ALICE))
    assert isinstance(d.cancel(third), Accept)
    d.submit(spec(user=ALICE))
    assert len(d.core.jobs) == 3, "a job that has ended counts no more"


def test_a_groups_queue_is_its_members_together() -> None:
    group = Limit(whose="group students", max_submit_jobs=3)
    d = desk(alice=(group,), bob=(group,))
    d.submit(*[spec(user=ALICE)] * 2)
    d.submit(*[spec(user=CAROL)] * 9)
    d.submit(spec(user=BOB))
    assert "group students has 3" in refusal(d, spec(user=BOB)).message


def test_held_jobs_count_as_queued_and_not_as_running() -> None:
    d = desk(alice=(Limit(whose="user alice", max_jobs=1, max_submit_jobs=2),))
    d.submit(spec(user=ALICE), held=True)
    [runs] = d.submit(spec(user=ALICE))
    assert runs in d.running()
    assert "2 of at most 2" in refusal(d, spec(user=ALICE)).message


def test_a_requeued_job_is_a_submission() -> None:
    d = desk(alice=(Limit(whose="user alice", max_submit_jobs=1),))
    [ended] = d.run(spec(user=ALICE))
    d.exit(ended)
    d.submit(spec(user=ALICE))
    answer = d.requeue(ended)
    assert isinstance(answer, Refuse)
    assert "1 of at most 1 jobs" in answer.message


@pytest.mark.parametrize(
    ("limit", "one", "words"),
    [
        (
            Limit(whose="user alice", gpus=1),
            spec(user=ALICE, gpus=2, gpu_mem=1),
            "user alice may have at most 1 GPU, and this takes 2",
        ),
        (
            Limit(whose="group students", cores=2),
            spec(user=ALICE, cores=4),
            "group students may have at most 2 cores, and this takes 4",
        ),
        (
            Limit(whose="user alice", gpu_mem_mib=2048),
            spec(user=ALICE, gpus=1, gpu_mem=4096),
            "user alice may have at most 2 GiB of GPU memory, and this takes 4 GiB",
        ),
        (Limit(whose="user alice", max_jobs=0), spec(user=ALICE), "user alice may run no jobs"),
        (
            Limit(whose="user alice", gpus=0),
            spec(user=ALICE, gpus=None),
            "user alice may have at most 0 GPUs, and this takes 1",
        ),
    ],
)
def test_a_job_that_breaks_a_limit_by_itself_is_refused(
    limit: Limit, one: JobSpec, words: str
) -> None:
    d = desk(alice=(limit,))
    said = refusal(d, one)
    assert said.impossible
    assert words in said.message


def test_after_a_restart_what_waits_and_runs_counts() -> None:
    d = desk(alice=(Limit(whose="user alice", max_jobs=1, max_submit_jobs=2),))
    d.run(spec(user=ALICE))
    d.submit(spec(user=ALICE))
    rows = [row for row in d.rows.values() if JobId(row.id) in d.core.jobs]
    again = type(d.core).restore(rows, d.policy, Instant(d.now))
    again.limits = d.core.limits
    actions = again.step(
        Instant(d.now), [Submitted(Instant(d.now), 99, ((JobId(77), spec(user=ALICE)),))]
    )
    assert any(isinstance(a, Refuse) and "2 of at most 2" in a.message for a in actions)


def test_a_limit_that_is_lifted_lets_jobs_start() -> None:
    d = desk(alice=(ALICES,))
    ids = d.submit(*[spec(user=ALICE)] * 4)
    d.core.limits = {}
    d.sample()
    assert d.running() == set(ids)
