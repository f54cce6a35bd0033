"""The contention model keeps its books, and the real guard, above it, packs about as well as one
who knew the best number beforehand.  Virtual time throughout: one seed is one result."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bench.policies import NAMES, best_slots, by_sm, fixed, slots
from hypothesis import given, settings
from hypothesis import strategies as st

from rlqd.core.guard import Guard, Occupant, Verdict
from rlqd.core.model import GuardPolicy, Instant, JobSpec, Policy
from rlqd.sim.contention import (
    CoreRun,
    Hardware,
    Load,
    Machine,
    Outcome,
    Program,
    Task,
    Workload,
    alone_s,
    load_of,
    rates_per_s,
    run_rule,
)
from rlqd.sim.workloads import CNN, SB3, SBX, from_history, generated

ROOT = Path(__file__).parents[2]

LOADS = st.lists(
    st.builds(
        Load,
        cpu_ms=st.floats(0.1, 50),
        gpu_ms=st.floats(0.05, 80),
        sm_share=st.floats(0.02, 1),
        switches=st.floats(0, 8),
    ),
    min_size=1,
    max_size=24,
)


def task(program: Program, steps: int, id_: int = 1) -> Task:
    spec = JobSpec(user=1, signature=program.signature, cores=1, gpus=1 if program.gpu_ms else 0)
    return Task(id=id_, program=program, steps=steps, spec=spec)


def sweep(program: Program, jobs: int, steps: int, hardware: Hardware | None = None) -> Workload:
    tasks = tuple(task(program, steps, n) for n in range(1, jobs + 1))
    return Workload(name="sweep", seed=5, hardware=hardware or Hardware(), tasks=tasks)


def with_rlq(workload: Workload, guard: Guard | None = None) -> Outcome:
    return CoreRun(workload, guard=guard or Guard(), reading_s=2).run()


# ---- the model ---------------------------------------------------------------------


@settings(deadline=None)
@given(LOADS, st.booleans())
def test_nobody_gets_more_of_a_gpu_than_there_is(loads: list[Load], mps: bool) -> None:
    rates = rates_per_s(loads, Hardware(mps=mps))
    used = sum(
        rate * load.gpu_ms * (load.sm_share if mps else 1.0)
        for rate, load in zip(rates, loads, strict=True)
    )
    assert used <= 1000 * 1.001
    for rate, load in zip(rates, loads, strict=True):
        assert 0 < rate <= 1000 / (load.cpu_ms + load.gpu_ms) * 1.001, "faster than alone"


@settings(deadline=None)
@given(LOADS, st.booleans())
def test_one_more_process_makes_nobody_faster(loads: list[Load], mps: bool) -> None:
    hardware = Hardware(mps=mps)
    more = rates_per_s([*loads, loads[0]], hardware)
    for before, after in zip(rates_per_s(loads, hardware), more, strict=False):
        assert after <= before * 1.001


def test_total_throughput_has_a_knee_and_falls_behind_it() -> None:
    def stp(k: int) -> float:
        rates = rates_per_s([load_of(SB3)] * k, Hardware())
        return sum(rates) / rates_per_s([load_of(SB3)], Hardware())[0]

    assert stp(2) > 1.7
    assert stp(8) - stp(7) < 0.05
    assert stp(16) < stp(8) * 0.97


def test_utilisation_reads_full_before_the_knee() -> None:
    machine = Machine(Hardware())
    program = replace(SB3, startup_s=0.0, warmup_steps=0)
    for n in range(1, 5):
        machine.start(task(program, 10_000, n), 0)
    machine.advance_to(10.0)
    machine.refresh()
    assert machine.seen[0] > 0.9
    rates = [rates_per_s([load_of(SB3)] * k, Hardware()) for k in (4, 6)]
    assert sum(rates[1]) > 1.08 * sum(rates[0]), "two more still help"


def test_a_run_makes_all_its_steps_through_evaluations_and_phases() -> None:
    program = replace(SBX, eval_every=1_000, eval_s=7.0, phase_at=0.35, phase_gpu=2.0)
    one = task(program, 4_321)
    machine = Machine(Hardware())
    run = machine.start(one, 0)
    assert machine.advance_to_end(1e9) is run
    assert run.steps_done == 4_321
    assert run.warmup_done == pytest.approx(program.warmup_steps)
    assert machine.now == pytest.approx(alone_s(one))


def test_steps_are_kept_when_neighbours_come_and_go() -> None:
    program = replace(SB3, startup_s=1.0, warmup_steps=0)
    machine = Machine(Hardware())
    machine.start(task(program, 5_000, 1), 0)
    machine.advance_to(20.0)
    machine.start(task(program, 500, 2), 0)
    ended = machine.advance_to(1e4)
    assert [run.task.id for run in ended] == [2, 1]
    assert [run.steps_done for run in ended] == [500, 5_000]


def test_what_does_not_fit_into_memory_is_lost_and_starts_again() -> None:
    big = replace(CNN, gpu_mem_mib=15_000)
    outcome = run_rule(sweep(big, 3, 500), slots(3))
    assert outcome.lost > 0, "three times 15 GB on 40"
    assert sorted(d.task.id for d in outcome.done) == [1, 2, 3]


# ---- the real core above it --------------------------------------------------------

CHOSEN = (
    "10 SB3, 16 cores",
    "60 SB3 of 4 minutes",
    "20 SBX, dear switches",
    "SBX and tiny, 2 GPUs",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_rlq_finds_a_number_about_as_good_as_the_best(name: str) -> None:
    (workload,) = (w for w in generated() if w.name == name)
    found = fixed(workload)
    mine = with_rlq(workload)
    assert sorted(d.task.id for d in mine.done) == sorted(t.id for t in workload.tasks)
    best = found[best_slots(found)]
    assert mine.makespan_s <= 1.15 * best.makespan_s


def test_the_same_seed_is_the_same_run() -> None:
    workload = sweep(SBX, 12, 60_000)
    assert with_rlq(workload) == with_rlq(workload)


class Tampered(Guard):
    """The real guard, with one rule taken out."""

    def judge(
        self,
        now: Instant,
        kind: str,
        occupants: Sequence[Occupant],
        signature: str,
        *,
        expects_linear: bool,
        is_last: bool = False,
    ) -> Verdict:
        found = super().judge(
            now, kind, occupants, signature, expects_linear=expects_linear, is_last=is_last
        )
        return self.tamper(found)

    def tamper(self, found: Verdict) -> Verdict:
        raise NotImplementedError


class NeverExplores(Tampered):
    def tamper(self, found: Verdict) -> Verdict:
        return replace(found, admits=found.admits and found.because in ("free", "known"))


class NeverBacksOff(Tampered):
    def tamper(self, found: Verdict) -> Verdict:
        return replace(found, admits=True, because="explore")


#: Where sharing costs most: the best number is two or three, and ten are slower than one.
DEAR = sweep(replace(SBX, switches=10.0), 14, 100_000)


def test_a_guard_that_never_explores_is_much_worse() -> None:
    workload = sweep(SB3, 12, 60_000)
    real, planted = with_rlq(workload), with_rlq(workload, NeverExplores())
    assert planted.makespan_s > 1.5 * real.makespan_s


def test_a_guard_that_never_backs_off_is_much_worse() -> None:
    real, planted = with_rlq(DEAR), with_rlq(DEAR, NeverBacksOff())
    assert planted.makespan_s > 1.2 * real.makespan_s


def test_trust_in_utilisation_is_much_worse() -> None:
    workload = sweep(SB3, 20, 60_000, Hardware(mps=True))
    assert run_rule(workload, by_sm()).makespan_s > 2 * with_rlq(workload).makespan_s


def test_an_import_that_takes_long_is_not_a_program_that_never_reports() -> None:
    """Seed with a story: taken for mute after 20 s, six were started at once, none was ever
    alone, and the GPU ran with two jobs for an hour."""
    slow = sweep(replace(SBX, startup_s=40.0), 12, 100_000)
    quick = sweep(replace(SBX, startup_s=5.0), 12, 100_000)
    hasty = with_rlq(slow, Guard(GuardPolicy(first_report_ms=20_000)))
    assert hasty.makespan_s < 1.25 * with_rlq(quick).makespan_s


def test_a_job_that_evaluates_does_not_open_the_door() -> None:
    """Seed with a story: three minutes after its start, a job that evaluated was taken for one
    that never trains, and the GPU was filled by memory."""
    program = replace(SBX, switches=10.0, eval_every=20_000, eval_s=15.0)
    outcome = with_rlq(sweep(program, 16, 60_000))
    assert max(k for _, _, _, k in outcome.starts) <= 6


def test_what_was_learned_is_used_the_next_time() -> None:
    workload = sweep(SB3, 12, 60_000)
    cold = CoreRun(workload, reading_s=2)
    cold.run()
    warm = CoreRun(workload, reading_s=2, learned=cold.learned).run()
    assert sum(at < 60 for at, _, _, _ in warm.starts) >= 5, "no need to feel its way"


def test_the_study_prints_every_rule_and_the_same_each_time() -> None:
    command = [sys.executable, "bench/policies.py", "--only", "60 SB3", "--processes", "1"]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    for name in NAMES:
        assert name in first.splitlines()[1]
    assert "60 SB3 of 4 minutes" in first


# ---- cores -------------------------------------------------------------------------

#: It runs on the CPU, and most of its time divides over cores.
SCALES = replace(SB3, signature="scales", gpu_ms=0.0, cpu_parallel=0.8, warmup_steps=0)
STUBBORN = replace(SCALES, signature="stubborn", cpu_parallel=0.0)


def one_by_one(program: Program, jobs: int, gap_s: float) -> Workload:
    """Nothing declared, each when the one before has long ended."""
    spec = JobSpec(user=1, signature=program.signature, gpus=0)
    tasks = tuple(
        Task(id=n, program=program, steps=20_000, spec=spec, arrives_s=gap_s * n)
        for n in range(1, jobs + 1)
    )
    return Workload(name="one by one", seed=5, hardware=Hardware(), tasks=tasks)


def with_cores(workload: Workload, most: int) -> Outcome:
    return CoreRun(workload, policy=Policy(cores_most=most), reading_s=2).run()


def test_idle_cores_go_to_a_program_that_uses_them() -> None:
    workload = one_by_one(SCALES, jobs=6, gap_s=400.0)
    took = [d.ended_s - d.started_s for d in with_cores(workload, 4).done]
    assert took[1] < 0.75 * took[0], "the second tries two"
    assert took[-1] < 0.55 * took[0], "the last has four"


def test_a_program_that_does_not_use_them_is_no_worse_off() -> None:
    workload = one_by_one(STUBBORN, jobs=6, gap_s=400.0)
    assert with_cores(workload, 4).mean_s <= 1.01 * with_cores(workload, 1).mean_s


@pytest.mark.parametrize("program", [SCALES, STUBBORN], ids=["scales", "stubborn"])
def test_a_full_queue_loses_nothing_to_it(program: Program) -> None:
    workload = one_by_one(program, jobs=40, gap_s=0.0)
    assert with_cores(workload, 4).makespan_s <= 1.01 * with_cores(workload, 1).makespan_s


# ---- recorded histories ------------------------------------------------------------


def record(**more: object) -> dict[str, object]:
    return {
        "argv": ["python", "sbx_train.py"],
        "uid": 1001,
        "submitted_at": 1_000.0,
        "started_at": 1_010.0,
        "ended_at": 1_610.0,
        "placement": {"gpus": ["GPU-x"]},
    } | more


def test_a_history_is_read_as_one_document_or_a_job_a_line() -> None:
    jobs = [
        record(submitted_at=1_060.0),
        record(placement={"gpus": []}),
        record(started_at=None),
    ]
    whole = from_history(json.dumps({"jobs": jobs, "total": 3}), Hardware())
    lines = from_history("\n".join(json.dumps(job) for job in jobs), Hardware())
    assert whole == lines
    assert [(t.arrives_s, t.spec.gpus) for t in whole.tasks] == [(0.0, 0), (60.0, 1)]
    assert alone_s(whole.tasks[1]) > 600


@pytest.mark.parametrize("text", ["{", '{"jobs": [{"argv": []}]}', '{"jobs": []}', "no json"])
def test_what_is_no_history_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"histor|job"):
        from_history(text, Hardware())
