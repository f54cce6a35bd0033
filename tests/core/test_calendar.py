"""What is booked is for those it is booked for, and nobody is stopped for it.

Two GPUs, eight cores; user 1000 is a stranger to every booking of ALICE.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.machines import FACTS, GPU_MIB, A, B, Desk, gpu, spec

from rlqd.core.model import Booking, CalendarSet, Instant, JobSpec, Quiet, Refuse
from rlqd.core.placement import Shortage
from rlqd.core.policy import shortest

HOUR = 3_600_000
ALICE = 7
TWO_GPUS = replace(FACTS, gpus=(gpu(A), gpu(B)))


def at(hours: float) -> Instant:
    return Instant(round(hours * HOUR))


def booking(
    starts: float = 0,
    ends: float = 2,
    *,
    users: frozenset[int] = frozenset({ALICE}),
    gpus: frozenset[str] = frozenset(),
    cores: int = 0,
    mem: int = 0,
    whole: bool = False,
) -> Booking:
    return Booking(
        id=1,
        starts_at=at(starts),
        ends_at=at(ends),
        users=users,
        gpus=frozenset(g for g in (A, B) if g in gpus),
        cores=cores,
        mem_mib=mem,
        whole=whole,
    )


def desk_with(*windows: Booking | Quiet) -> Desk:
    desk = Desk(TWO_GPUS)
    tell(desk, *windows)
    return desk


def tell(desk: Desk, *windows: Booking | Quiet) -> None:
    desk.tell(
        CalendarSet(
            Instant(0),
            tuple(w for w in windows if isinstance(w, Booking)),
            tuple(w for w in windows if isinstance(w, Quiet)),
        )
    )


def on_gpu(*, limit: float | None = None, gpus: int = 1, user: int = 1000) -> JobSpec:
    ms = None if limit is None else round(limit * HOUR) - 1_000
    return spec(gpus=gpus, gpu_mem=1_000, limit=ms, grace=1_000, user=user)


def on_cpu(cores: int, *, limit: float | None = None, user: int = 1000, mem: int = 1) -> JobSpec:
    ms = None if limit is None else round(limit * HOUR) - 1_000
    return spec(cores=cores, mem=mem, limit=ms, grace=1_000, user=user)


def why(desk: Desk, job: int) -> tuple[Shortage, ...]:
    plan = desk.core.plan()
    assert plan is not None
    blocked = plan.blocked[desk.rows[job].spec]
    assert blocked.no_room is not None
    return shortest(blocked.no_room)


def starts(desk: Desk, one: JobSpec) -> bool:
    (job,) = desk.submit(one)
    return job in desk.launched


# ---- while it lasts ----------------------------------------------------------------


def test_a_booked_gpu_is_for_those_it_is_booked_for() -> None:
    desk = desk_with(booking(gpus=frozenset({A, B})))
    (stranger,) = desk.submit(on_gpu())
    assert stranger not in desk.launched
    assert starts(desk, on_gpu(user=ALICE))


def test_others_take_the_gpu_that_nobody_has_booked() -> None:
    desk = desk_with(booking(gpus=frozenset({A})))
    for _ in range(3):
        (job,) = desk.submit(on_gpu())
        assert desk.place(job).gpus == (B,)


def test_a_booking_for_nobody_keeps_everybody_away() -> None:
    desk = desk_with(booking(gpus=frozenset({A}), users=frozenset()))
    assert not starts(desk, on_gpu(gpus=2, user=ALICE))


def test_the_wait_names_the_booking() -> None:
    claim = booking(gpus=frozenset({A, B}), users=frozenset())
    desk = desk_with(claim)
    (job,) = desk.submit(on_gpu())
    (short,) = why(desk, job)
    assert (short.resource, short.gpu, short.kept) == ("gpu", A, claim)


def test_what_runs_at_the_start_runs_on() -> None:
    desk = desk_with()
    (job,) = desk.run(on_gpu())
    tell(desk, booking(gpus=frozenset({A, B})))
    desk.sample(after=HOUR)
    assert desk.effects() == []
    assert job in desk.running()


def test_maintenance_is_all_of_the_machine() -> None:
    maintenance = booking(1, 2, users=frozenset(), whole=True)
    desk = desk_with(maintenance)
    assert starts(desk, on_cpu(1, limit=1))
    (job,) = desk.submit(on_cpu(1))
    assert job not in desk.launched
    (short,) = why(desk, job)
    assert (short.resource, short.kept) == ("machine", maintenance)


def test_nobody_has_a_machine_to_himself_of_which_a_part_is_booked() -> None:
    desk = desk_with(booking(cores=1))
    alone = replace(on_cpu(1), exclusive=True)
    assert not starts(desk, alone)
    assert starts(desk, replace(alone, user=ALICE))


# ---- before it starts --------------------------------------------------------------


@pytest.mark.parametrize(("limit", "may"), [(1.0, True), (1.01, False), (None, False)])
def test_before_it_only_what_is_sure_to_end_in_time_starts(limit: float | None, may: bool) -> None:
    desk = desk_with(booking(1, 3, gpus=frozenset({A, B})))
    assert starts(desk, on_gpu(limit=limit)) == may


def test_the_grace_is_part_of_a_jobs_time() -> None:
    desk = desk_with(booking(1, 3, gpus=frozenset({A, B})))
    assert not starts(desk, replace(on_gpu(limit=1), grace_ms=1_001))


def test_the_end_is_a_wakeup_and_opens_what_was_booked() -> None:
    desk = desk_with(booking(1, 3, gpus=frozenset({A, B})))
    (job,) = desk.submit(on_gpu())
    desk.sample(after=at(2.99))
    assert desk.core.next_wakeup() == at(3)
    assert job not in desk.launched
    desk.sample(after=at(3) - desk.now)
    assert job in desk.launched


def test_a_window_that_is_told_anew_counts_from_then() -> None:
    # The wall clock was put forward: the booking is over sooner by the core's clock.
    desk = desk_with(booking(1, 3, gpus=frozenset({A, B})))
    (job,) = desk.submit(on_gpu())
    tell(desk, booking(-2, 0, gpus=frozenset({A, B})))
    assert job in desk.launched


# ---- cores and host memory ---------------------------------------------------------


def test_a_job_without_a_known_end_starts_beside_a_booking_if_enough_is_left() -> None:
    desk = desk_with(booking(1, 3, cores=5))
    assert not starts(desk, on_cpu(4))
    assert starts(desk, on_cpu(3))
    assert not starts(desk, on_cpu(1))
    assert starts(desk, on_cpu(5, limit=1))


def test_what_ends_before_it_frees_its_cores_for_it() -> None:
    # Eight cores: 3 are in use for half an hour; at one o'clock 4 are left for strangers.
    desk = desk_with(booking(1, 3, cores=4))
    desk.run(on_cpu(3, limit=0.5))
    assert starts(desk, on_cpu(4))
    assert not starts(desk, on_cpu(1))


def test_cores_that_its_users_hold_already_are_not_kept_twice() -> None:
    desk = desk_with(booking(0, 3, cores=6))
    desk.run(on_cpu(5, user=ALICE))
    assert starts(desk, on_cpu(2))
    assert not starts(desk, on_cpu(1))
    assert starts(desk, on_cpu(1, user=ALICE))


def test_one_job_fills_one_booking() -> None:
    other = replace(booking(0, 3, cores=3), id=2)
    desk = desk_with(booking(0, 3, cores=3), other)
    desk.run(on_cpu(3, user=ALICE))
    assert starts(desk, on_cpu(2))
    assert not starts(desk, on_cpu(1))


def test_bookings_of_different_times_are_not_added_up() -> None:
    later = replace(booking(4, 5, cores=5), id=2)
    desk = desk_with(booking(1, 2, cores=5), later)
    assert starts(desk, on_cpu(3))


def test_host_memory_is_kept_likewise() -> None:
    desk = desk_with(booking(1, 3, mem=60_000))
    assert not starts(desk, on_cpu(1, mem=4_001))
    assert starts(desk, on_cpu(1, mem=4_001, limit=1))
    assert starts(desk, on_cpu(1, mem=4_000))


def test_the_shortage_of_cores_names_the_booking() -> None:
    desk = desk_with(only := booking(1, 3, cores=5))
    (job,) = desk.submit(on_cpu(4))
    (short,) = why(desk, job)
    assert (short.resource, short.need, short.free, short.kept) == ("cores", 4, 3, only)


# ---- the reservation of a blocked head ---------------------------------------------


def reserved(desk: Desk) -> tuple[int, Instant | None] | None:
    plan = desk.core.plan()
    assert plan is not None
    kept = plan.reservation
    return None if kept is None else (kept.job_id, kept.starts_at)


def test_its_promised_start_is_not_inside_a_booking() -> None:
    desk = desk_with(booking(0.25, 0.75, gpus=frozenset({A, B})))
    desk.run(replace(on_gpu(limit=0.2, gpus=2), gpu_mem_mib=GPU_MIB))
    (head,) = desk.submit(replace(on_gpu(limit=0.5, gpus=2), gpu_mem_mib=GPU_MIB))
    desk.sample(after=20_000)
    assert reserved(desk) == (head, at(0.75))


def test_one_that_ends_before_the_booking_is_promised_the_time_before_it() -> None:
    desk = desk_with(booking(0.5, 0.75, gpus=frozenset({A, B})))
    desk.run(replace(on_gpu(limit=0.2, gpus=2), gpu_mem_mib=GPU_MIB))
    (head,) = desk.submit(replace(on_gpu(limit=0.25, gpus=2), gpu_mem_mib=GPU_MIB))
    desk.sample(after=20_000)
    assert reserved(desk) == (head, at(0.2))


def test_what_waits_for_a_booking_to_end_is_not_held_up_by_what_comes_after_it() -> None:
    desk = desk_with(booking(0, 0.5, gpus=frozenset({A})))
    (head,) = desk.submit(on_gpu(gpus=2))
    desk.sample(after=20_000)
    assert reserved(desk) == (head, at(0.5))
    fits = replace(on_gpu(), gpu_mem_mib=GPU_MIB - 1_000)
    assert starts(desk, fits)
    assert not starts(desk, on_gpu())
    assert starts(desk, on_gpu(limit=0.4))


def test_nothing_is_kept_for_what_a_booking_keeps_waiting_for_hours() -> None:
    desk = desk_with(booking(0, 8, gpus=frozenset({A})))
    desk.submit(on_gpu(gpus=2))
    desk.sample(after=20_000)
    assert reserved(desk) is None
    assert starts(desk, replace(on_gpu(), gpu_mem_mib=GPU_MIB))


def test_those_who_booked_are_not_held_up_by_a_head_that_runs_beside_it() -> None:
    # Alice has 4 of 8 cores from now on; the head, a stranger, waits for the other 4.
    desk = desk_with(booking(0, 5, cores=4))
    desk.run(on_cpu(2, limit=0.5))
    (head,) = desk.submit(on_cpu(4))
    desk.sample(after=20_000)
    assert reserved(desk) == (head, at(0.5))
    assert not starts(desk, on_cpu(2))
    assert starts(desk, on_cpu(4, user=ALICE))


# ---- quiet hours -------------------------------------------------------------------


def quiet(ends: float | None = 2, **share: int) -> Quiet:
    return Quiet(starts_at=at(0), ends_at=None if ends is None else at(ends), **share)


def test_in_quiet_hours_the_queue_uses_its_first_gpus() -> None:
    desk = desk_with(hours := quiet(gpus=1))
    places = [desk.place(job).gpus for job in desk.submit(on_gpu(), on_gpu())]
    assert places == [(A,), (A,)]
    (both,) = desk.submit(on_gpu(gpus=2))
    (short,) = why(desk, both)
    assert (short.gpu, short.kept) == (B, hours)


def test_in_quiet_hours_the_queue_uses_so_many_cores() -> None:
    desk = desk_with(quiet(cores=3))
    assert starts(desk, on_cpu(2))
    assert not starts(desk, on_cpu(2))
    assert starts(desk, on_cpu(1))


def test_in_quiet_hours_the_queue_uses_so_much_of_each_gpu() -> None:
    desk = desk_with(quiet(sm_pct=50))
    first, second = desk.submit(*[replace(on_gpu(), sm_pct=40)] * 2)
    assert {desk.place(first).gpus, desk.place(second).gpus} == {(A,), (B,)}
    assert not starts(desk, replace(on_gpu(), sm_pct=20))


def test_what_starts_before_quiet_hours_need_not_end_before() -> None:
    desk = desk_with(replace(quiet(cores=1), starts_at=at(1)))
    assert starts(desk, on_cpu(8))
    desk.sample(after=HOUR)
    assert desk.effects() == []


def test_quiet_hours_end_by_themselves() -> None:
    desk = desk_with(quiet(cores=1))
    (job,) = desk.submit(on_cpu(2))
    assert desk.core.next_wakeup() is not None
    desk.sample(after=at(2))
    assert job in desk.launched


@pytest.mark.parametrize(
    ("share", "job"),
    [
        ({"gpus": 1}, on_gpu(gpus=2)),
        ({"cores": 3}, on_cpu(4)),
        ({"sm_pct": 30}, replace(on_gpu(), sm_pct=31)),
    ],
)
def test_what_quiet_hours_at_all_times_forbid_is_refused_at_once(
    share: dict[str, int], job: JobSpec
) -> None:
    desk = desk_with(quiet(None, **share))
    desk.submit(job)
    (refusal,) = [a for a in desk.said if isinstance(a, Refuse)]
    assert refusal.impossible
    assert "at any time" in refusal.message
    assert not desk.rows
    tell(desk, quiet(2, **share))
    (waits,) = desk.submit(job)
    assert waits in desk.rows
