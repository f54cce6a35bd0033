"""The guard packs up to the knee and no further, whatever the utilisation reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlqd.core.guard import ONE_JOB, Estimate, Guard, Mix, Occupant, antt
from rlqd.core.model import GuardPolicy, Instant, JobId

SECOND = 1000
A100 = "NVIDIA A100"


def stp_by_queueing(think_ms: float, serve_ms: float) -> Callable[[int], float]:
    """STP(k) of jobs that compute `think_ms` on their own cores and then queue for `serve_ms` of
    one GPU, step after step: exact mean value analysis of a closed network (Reiser and
    Lavenberg 1980)."""

    def throughput(k: int) -> float:
        queue = 0.0
        rate = 0.0
        for n in range(1, k + 1):
            response = serve_ms * (1 + queue)
            rate = n / (think_ms + response)
            queue = rate * response
        return rate

    return lambda k: throughput(k) / throughput(1) if k else 0.0


class Device:
    """One GPU in virtual time: rates follow a curve, jobs are added while the guard admits."""

    def __init__(self, stp: Callable[[int], float], *, solo_milli: int = 50_000) -> None:
        self.guard = Guard(GuardPolicy())
        self.stp = stp
        self.solo_milli = solo_milli
        self.now = 0
        self.jobs: list[tuple[JobId, int]] = []
        self._next = 1
        self.peak = 0

    def occupants(self, *, warm_up_ms: int = 5 * SECOND) -> list[Occupant]:
        rate = round(self.solo_milli * self.stp(len(self.jobs)) / max(1, len(self.jobs)))
        return [
            Occupant(
                job_id=job_id,
                signature="sac",
                since=Instant(since),
                steps_milli_per_s=None if self.now - since < warm_up_ms else rate,
            )
            for job_id, since in self.jobs
        ]

    def admits(self) -> bool:
        verdict = self.guard.judge(
            Instant(self.now), A100, self.occupants(), "sac", expects_linear=False
        )
        return verdict.admits

    def run(self, seconds: int, *, waiting: int = 100, end_every_s: int | None = None) -> None:
        for _ in range(seconds):
            self.now += SECOND
            if end_every_s and self.now % (end_every_s * SECOND) == 0 and self.jobs:
                self.jobs.pop(0)
            self.guard.observe(Instant(self.now), "gpu0", A100, self.occupants())
            while len(self.jobs) < waiting and self.admits():
                self.jobs.append((JobId(self._next), self.now))
                self._next += 1
            self.peak = max(self.peak, len(self.jobs))


def knee(stp: Callable[[int], float], threshold: float = 0.05) -> int:
    k = 1
    while stp(k + 1) - stp(k) >= threshold:
        k += 1
    return k


@pytest.mark.parametrize(
    ("think_ms", "serve_ms"), [(1.0, 1.0), (5.0, 1.0), (9.0, 1.0), (0.2, 1.0), (20.0, 1.0)]
)
def test_settles_at_the_knee(think_ms: float, serve_ms: float) -> None:
    stp = stp_by_queueing(think_ms, serve_ms)
    device = Device(stp)
    device.run(3000, end_every_s=120)
    assert abs(len(device.jobs) - knee(stp)) <= 1
    assert device.peak <= knee(stp) + max(2, knee(stp) // 2)


def test_jobs_that_take_turns_are_not_packed() -> None:
    device = Device(lambda k: 1.0 if k else 0.0)
    device.run(2000, end_every_s=300)
    assert len(device.jobs) == 1
    assert device.peak == 2, "one trial tells"


def test_a_gpu_that_gets_slower_by_sharing_is_backed_off_from() -> None:
    device = Device(lambda k: [0, 1.0, 1.6, 1.3, 1.0][min(k, 4)])
    device.run(3000, end_every_s=200)
    assert len(device.jobs) == 2


def test_undisturbed_jobs_are_doubled_rather_than_added_one_by_one() -> None:
    device = Device(lambda k: float(min(k, 32)))
    device.run(240)
    assert len(device.jobs) >= 16, "one by one, each measured for 15 s, gives at most 12"


def test_nothing_is_added_while_what_runs_is_still_warming_up() -> None:
    device = Device(lambda k: float(k))
    device.run(1)
    assert len(device.jobs) == 1
    device.run(4)  # still before the first gradient step
    assert len(device.jobs) == 1


def one(since: int = 0, *, reports: bool) -> Occupant:
    return Occupant(
        job_id=JobId(1),
        signature="x",
        since=Instant(since),
        steps_milli_per_s=None,
        reports=reports,
    )


def test_a_job_that_warms_up_is_waited_for_but_not_for_ever() -> None:
    guard = Guard(GuardPolicy(patience_ms=60_000))

    def admits(at: int) -> bool:
        warming = [one(reports=True)]
        return guard.judge(Instant(at), A100, warming, "x", expects_linear=False).admits

    assert not admits(59_000)
    assert admits(61_000)


def test_a_program_that_never_reports_is_waited_for_once_and_shortly() -> None:
    guard = Guard(GuardPolicy(first_report_ms=20_000))

    def admits(at: int, since: int) -> bool:
        mute = [one(since, reports=False)]
        guard.observe(Instant(at), "gpu0", A100, mute)
        return guard.judge(Instant(at), A100, mute, "x", expects_linear=False).admits

    assert not admits(at=19_000, since=0)
    assert admits(at=21_000, since=0)
    assert admits(at=30_000, since=29_000), "known by now"


def test_cores_of_their_own_need_no_trial_until_measured_otherwise() -> None:
    guard = Guard(GuardPolicy())
    two = [
        Occupant(job_id=JobId(i), signature="sac", since=Instant(0), steps_milli_per_s=None)
        for i in (1, 2)
    ]
    verdict = guard.judge(Instant(1), "cpu", two, "sac", expects_linear=True)
    assert (verdict.admits, verdict.because) == (True, "prior")
    # Memory bandwidth: measured, the second job added nothing.
    guard.observe(Instant(0), "cpu", "cpu", [])
    for t in range(40):
        alone = Occupant(
            job_id=JobId(1), signature="sac", since=Instant(0), steps_milli_per_s=50_000
        )
        guard.observe(Instant(t * SECOND), "cpu", "cpu", [alone])
    for t in range(40, 80):
        both = [
            Occupant(job_id=JobId(i), signature="sac", since=Instant(0), steps_milli_per_s=25_500)
            for i in (1, 2)
        ]
        guard.observe(Instant(t * SECOND), "cpu", "cpu", both)
    verdict = guard.judge(Instant(80 * SECOND), "cpu", two, "sac", expects_linear=True)
    assert (verdict.admits, verdict.because) == (False, "flat")


def test_what_was_learned_survives_a_restart_and_old_knowledge_does_not() -> None:
    device = Device(lambda k: min(float(k), 2.0))
    device.run(600)
    rows = device.guard.take_changes()
    assert rows
    assert device.guard.take_changes() == []
    fresh = Guard(GuardPolicy())
    fresh.load(rows, Instant(device.now))
    assert fresh.solo == device.guard.solo
    assert fresh.stp == device.guard.stp
    stale = Guard(GuardPolicy())
    stale.load(rows, Instant(device.now + stale.policy.forget_ms + 1))
    assert stale.solo == {}
    assert stale.stp == {}


def test_a_program_that_changed_under_its_name_is_learned_anew() -> None:
    guard = Guard(GuardPolicy())
    guard.load([], Instant(0))

    def alone(rate: int, start: int) -> None:
        for t in range(start, start + 60):
            one = Occupant(
                job_id=JobId(start), signature="s", since=Instant(0), steps_milli_per_s=rate
            )
            guard.observe(Instant(t * SECOND), "gpu0", A100, [one])

    alone(50_000, 0)
    guard.stp[Mix(A100, ("s",), 2)] = guard.solo[A100, "s"]
    alone(10_000, 100)
    assert guard.solo_of(A100, "s") == 10_000
    assert guard.stp == {}


def test_noise_does_not_move_the_estimate_far() -> None:
    device = Device(lambda k: min(float(k), 3.0))
    wobble = iter([0.93, 1.06, 1.0, 1.05, 0.96] * 10_000)
    plain = device.stp
    device.stp = lambda k: plain(k) * next(wobble)
    device.run(3000, end_every_s=400)
    assert 3 <= len(device.jobs) <= 4


def test_antt_is_the_mean_slowdown() -> None:
    assert antt({JobId(1): 50, JobId(2): 25}, {JobId(1): 100, JobId(2): 100}) == 3 * ONE_JOB
    assert antt({JobId(1): 50}, {}) is None


# ---- mixes ---------------------------------------------------------------------------


def knowing(curves: dict[tuple[str, ...], dict[int, float]], *, solo: float = 50.0) -> Guard:
    """STP by the number of jobs, for proportions of programs."""
    guard = Guard(GuardPolicy())
    for parts, points in curves.items():
        for one in parts:
            guard.solo[A100, one] = Estimate(round(1000 * solo), 3, Instant(0))
        for jobs, stp in points.items():
            guard.stp[Mix(A100, parts, jobs)] = Estimate(round(ONE_JOB * stp), 3, Instant(0))
    return guard


def beside(signatures: str, rate: int | None) -> list[Occupant]:
    return [
        Occupant(job_id=JobId(n), signature=one, since=Instant(0), steps_milli_per_s=rate)
        for n, one in enumerate(signatures, 1)
    ]


def test_proportions_never_seen_are_not_tried_where_all_others_gained_nothing() -> None:
    guard = knowing({("a", "b"): {3: 2.0, 4: 2.05, 5: 2.05, 6: 2.05}})
    here = beside("aaab", 25_000)
    guard.stp[Mix.of(A100, "aaab")] = Estimate(2_000, 1, Instant(0))
    verdict = guard.judge(Instant(1), A100, here, "a", expects_linear=False)
    assert (verdict.admits, verdict.because) == (False, "alike")


def test_proportions_never_seen_are_tried_where_others_gained() -> None:
    guard = knowing({("a", "b"): {2: 1.8, 4: 3.4, 6: 4.8}})
    here = beside("aaab", 40_000)
    guard.stp[Mix.of(A100, "aaab")] = Estimate(3_200, 1, Instant(0))
    assert guard.judge(Instant(1), A100, here, "a", expects_linear=False).admits


def test_what_is_known_of_the_proportions_themselves_counts_more() -> None:
    guard = knowing(
        {("a", "b"): {3: 2.0, 4: 2.05, 5: 2.05}, ("a", "a", "a", "b"): {4: 3.0, 5: 3.5}}
    )
    here = beside("aaab", 37_000)
    verdict = guard.judge(Instant(1), A100, here, "a", expects_linear=False)
    assert (verdict.admits, verdict.because) == (True, "known")


@pytest.mark.parametrize(("running", "admits"), [(6, True), (8, True), (9, False), (11, False)])
def test_jobs_that_come_one_by_one_do_not_pass_the_knee_for_ever(
    running: int, admits: bool
) -> None:
    """Each was the last when it came, and did no harm: there was no end to it."""
    flat = {n: min(n, 6) * 0.5 for n in range(2, 14)}
    guard = knowing({("a",): flat})
    here = beside("a" * running, 20_000)
    verdict = guard.judge(Instant(1), A100, here, "a", expects_linear=False, is_last=True)
    assert verdict.admits == admits


def test_a_rate_from_before_the_mix_changed_says_nothing_of_it() -> None:
    """An evaluation that spans the start of a neighbour: the rate of before was taken for one
    that it has beside the neighbour, and two jobs that take turns for two that do not."""
    guard = Guard(GuardPolicy(observe_ms=5_000))
    for t in range(20):
        guard.observe(Instant(t * SECOND), "gpu0", A100, beside("a", 50_000))
    for t in range(20, 40):
        evaluating, neighbour = beside("aa", 50_000)
        pausing = Occupant(
            job_id=evaluating.job_id,
            signature="a",
            since=evaluating.since,
            steps_milli_per_s=None,
        )
        guard.observe(Instant(t * SECOND), "gpu0", A100, [pausing, neighbour])
    assert guard.stp == {}
