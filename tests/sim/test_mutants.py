"""Bugs planted in the core, each of which the simulator or Hypothesis has to catch.

A checker that catches nothing passes every test but this one.  Each mutant is one small edit of
a copy of the core; a mutant whose text is no longer there must be brought up to date.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import rlqd

ROOT = Path(__file__).parents[2]
PACKAGE = Path(rlqd.__file__).parent
#: Far fewer seeds than `make test` runs anyway: bugs that are hard to find would hide here.
SEEDS = 200
#: What catches a bug that the simulator is not there for.
TESTS = {
    "hypothesis": "tests/core/test_scheduler_properties.py",
    "fairness": "tests/core/test_fairness.py",
    "reservation": "tests/core/test_reservation.py",
    "preemption": "tests/core/test_preemption.py",
    "backoff": "tests/core/test_backoff.py",
}


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    by: str = "sim"  # or one of TESTS


MUTANTS = [
    Mutant(
        "a job whose cancel was confirmed is queued again",
        "machine.py",
        "                self._to(job, Finished(Outcome.CANCELLED, exit_, reason))\n",
        "                self._to(job, Pending(self.now))\n",
    ),
    Mutant(
        "a job starts though what it follows has failed",
        "machine.py",
        "if outcome is Outcome.COMPLETED or job.state.after.any_end:",
        "if True:",
    ),
    Mutant(
        "a follower starts with the first that ends",
        "machine.py",
        "left = tuple(i for i in job.state.after.job_ids if i != ended)",
        "left = ()",
    ),
    Mutant(
        "a launch that fails is tried for ever",
        "machine.py",
        "if passing and failures <= self.policy.launch_retries:",
        "if passing:",
    ),
    Mutant(
        "news of an older attempt is believed",
        "machine.py",
        "return job if job is not None and job.attempt == event.attempt else None",
        "return job",
    ),
    Mutant(
        "a second launch of the same attempt",
        "machine.py",
        "begun = replace(job, attempt=job.attempt + 1)",
        "begun = replace(job, attempt=max(1, job.attempt))",
    ),
    Mutant(
        "SIGKILL at once, always",
        "machine.py",
        "grace_ms = 0 if at_once else job.spec.grace_ms",
        "grace_ms = 0",
    ),
    Mutant(
        "SIGKILL is not repeated when it was lost",
        "machine.py",
        "kill_again_at = Instant(self.now + KILL_AGAIN_MS)",
        "kill_again_at = Instant(self.now + 10**9)",
    ),
    Mutant(
        "a kill that is due with the time limit waits for the next event",
        "machine.py",
        "if isinstance(job.state, Completing) and self._is_due(job):",
        "if False:",
    ),
    Mutant(
        "a GPU is offered again before it was read",
        "room.py",
        "if facts.gpus_taken_at < fresh_after.get(gpu.id, 0):",
        "if False:",
    ),
    Mutant(
        "an old reading is as good as a new one",
        "room.py",
        "if now - facts.gpus_taken_at > policy.stale_ms:",
        "if False:",
    ),
    Mutant(
        "a lost GPU is still used",
        "room.py",
        """    if gpu.problem:
        return gpu.problem
    if gpu.mem_mib_free is None or gpu.mem_mib_total is None:
        return "its memory cannot be read"
    if gpu.sm_pct is None:
        return "its utilisation cannot be read"
""",
        "",
    ),
    Mutant(
        "host memory that jobs will still grow into is given away",
        "room.py",
        "mem_mib=facts.mem_mib_available - policy.mem_mib_reserve - growth_mib,",
        "mem_mib=facts.mem_mib_available - policy.mem_mib_reserve,",
    ),
    Mutant(
        "GPU memory that jobs will still grow into is given away",
        "room.py",
        "gpu.mem_mib = gpu.facts.mem_mib_free - policy.gpu_mem_mib_reserve - growth_mib",
        "gpu.mem_mib = gpu.facts.mem_mib_free - policy.gpu_mem_mib_reserve",
    ),
    Mutant(
        "outsiders' share of the SM is forgotten",
        "room.py",
        "gpu.sm_pct = policy.sm_pct_limit - sm_pct_outside - sm_pct_charged",
        "gpu.sm_pct = policy.sm_pct_limit - sm_pct_charged",
    ),
    Mutant(
        "the load that was there before is taken for the job's",
        "room.py",
        "        if holding.job_id in uses:\n            # A share",
        "        if True:\n            # A share",
    ),
    Mutant(
        "a job counts for what it uses, not for what it declared",
        "charge.py",
        "return max(_with_margin(peak, policy), declared or 0)",
        "return _with_margin(peak, policy)",
    ),
    Mutant(
        "no margin on what was measured",
        "charge.py",
        "return amount + -(-amount * policy.margin_pct // 100)",
        "return amount",
    ),
    Mutant(
        "a core is given to two jobs",
        "room.py",
        "self.cores_free = self.cores_free | known if sign > 0 else self.cores_free - known",
        "self.cores_free = self.cores_free | known",
    ),
    Mutant(
        "exclusive means nothing",
        "placement.py",
        "if is_full or gpu.is_exclusive or (need.exclusive and gpu.jobs):",
        "if is_full:",
    ),
    Mutant(
        "no reservation: a stream of small jobs starves a big one",
        "policy.py",
        "        if kept is not None and not kept.admits(spec.user, need, found, ends_at):",
        "        if False:",
    ),
    Mutant(
        "jobs that start in one pass do not count for each other's limits",
        "policy.py",
        "        standing.add(spec.user, amounts_of(need))\n        walk",
        "        walk",
    ),
    Mutant(
        "what runs already does not count for limits",
        "limits.py",
        "standing.add(user, amounts_held(holding))",
        "pass",
    ),
    Mutant(
        "more jobs wait than their user may have",
        "limits.py",
        "if used + more > limit.max_submit_jobs:",
        "if used > limit.max_submit_jobs:",
    ),
    Mutant(
        "a job that may run for ever passes the head before a predicted end",
        "policy.py",
        "return self.shadow is not None and ends_at is not None and ends_at <= self.shadow",
        "return self.shadow is not None and (ends_at is None or ends_at <= self.shadow)",
    ),
    Mutant(
        "others may pass the head for longer than a running job says that it runs",
        "machine.py",
        "early, late = Instant(ends_at - off_ms), Instant(ends_at + off_ms)",
        "early = late = Instant(ends_at + 20 * measured.left_ms)",
        by="reservation",
    ),
    Mutant(
        "a job is preempted that was never said to resume",
        "machine.py",
        "if not (self.policy.preemption and job.spec.preemptible):",
        "if not self.policy.preemption:",
    ),
    Mutant(
        "jobs of one priority preempt each other",
        "preemption.py",
        "h.yields_above < priority",
        "h.yields_above <= priority",
    ),
    Mutant(
        "a job that was just started again is preempted",
        "machine.py",
        "is_exempt = job.attempt > 1 and ran_ms < self.policy.preempt_exempt_ms",
        "is_exempt = False",
    ),
    Mutant(
        "jobs are preempted whose end leads to nothing",
        "preemption.py",
        "    is_enough = fits()\n",
        "    is_enough = True\n",
    ),
    Mutant(
        "more are preempted while the first are on their way",
        "preemption.py",
        "[h for h in ahead.holders if h.is_leaving]",
        "[]",
    ),
    Mutant(
        "the room that was made by preemption is given to somebody else",
        "policy.py",
        "if made is not None or is_due or waits_ms ",
        "if is_due or waits_ms ",
        by="preemption",
    ),
    Mutant(
        "the reservation goes while a GPU is read again",
        "policy.py",
        "outlook.at, outlook.policy\n    ahead = replace(outlook, room=outlook.room.guessed()",
        "outlook.at, outlook.policy\n    ahead = replace(outlook, room=outlook.room.copy()",
    ),
    Mutant(
        "a job that a shutdown stopped has failed by itself",
        "machine.py",
        "if not exit_.stopped_by_others or exit_.code == 0:",
        "if True:",
    ),
    Mutant(
        "a job that a shutdown met when it was done is run again",
        "machine.py",
        "if not exit_.stopped_by_others or exit_.code == 0:",
        "if not exit_.stopped_by_others:",
    ),
    Mutant(
        "held jobs start",
        "machine.py",
        """            case Pending(held=True):
                pass
            case Pending(not_before=at) if at > self.now:""",
        "            case Pending(not_before=at) if at > self.now:",
    ),
    Mutant(
        "draining starts jobs",
        "machine.py",
        "if self.closed or not self._queue.size:",
        "if not self._queue.size:",
        by="hypothesis",
    ),
    Mutant(
        "a request that comes too late is not answered",
        "machine.py",
        """        if job is None:
            self._refuse(event, "it has ended already", None)
        return job""",
        "        return job",
    ),
    Mutant(
        "a job that succeeded unheard is run again",
        "machine.py",
        """                # It had started after all, was told nothing, and came to its own end.
                self._ended_unasked(job, exit_)""",
        """                self._finish_stop(job, exit_, "")""",
    ),
    Mutant(
        "who has had more of the machine goes first",
        "fairness.py",
        "return (-self._age(job_id) - share, level)",
        "return (self._age(job_id) + share, -level)",
    ),
    Mutant(
        "what is given within a pass does not count",
        "fairness.py",
        "        self._counted[user] += amount\n",
        "",
        by="fairness",
    ),
    Mutant(
        "what is held does not count until it has been used",
        "fairness.py",
        "counted[user] = counted.get(user, 0.0) + rate.machine * HELD_COUNTS_AS_MS",
        "counted[user] = counted.get(user, 0.0)",
    ),
    Mutant(
        "the reservation goes to whoever has had least by now",
        "machine.py",
        "promised=self._promised_spec(),",
        "promised=None,",
        by="fairness",
    ),
    Mutant(
        "use does not decay",
        "fairness.py",
        "factor = 2.0 ** (-(now - self.at) / self.policy.half_life_ms)",
        "factor = 1.0",
        by="fairness",
    ),
    Mutant(
        "a job that ended while no daemon was there pays until one came back",
        "machine.py",
        "self._count(job, self._holding(job), Instant(self.now - ago_ms))",
        "self._count(job, self._holding(job), self.now)",
        by="fairness",
    ),
    Mutant(
        "all pay the same, however large their jobs are",
        "fairness.py",
        "return Rate(min(1.0, machine), sum(on), charge.cores)",
        "return Rate(1.0, sum(on), charge.cores)",
        by="fairness",
    ),
    Mutant(
        "a job that was paused has no time limit any more",
        "machine.py",
        "deadline = None if state.left_ms is None else Instant(self.now + state.left_ms)",
        "deadline = None",
    ),
    Mutant(
        "time counts while a job is paused",
        "machine.py",
        "left_ms = None if state.deadline is None else max(1, state.deadline - self.now)",
        "left_ms = None if state.deadline is None else max(1, (state.deadline - self.now) // 2)",
    ),
    Mutant(
        "rlqd pauses a job for ever",
        "states.py",
        "return None if why is None else why.until",
        "return None",
    ),
    Mutant(
        "rlqd pauses a job again as soon as it goes on",
        "machine.py",
        "rested_at = None if by_user else self.now",
        "rested_at = None",
    ),
    Mutant(
        "rlqd pauses a job that a user let go on",
        "machine.py",
        "and not (job.state.stays or job.spec.exclusive or job.spec.interactive)",
        "and not (job.spec.exclusive or job.spec.interactive)",
    ),
    Mutant(
        "rlqd pauses a job that somebody sits in front of",
        "machine.py",
        "and not (job.state.stays or job.spec.exclusive or job.spec.interactive)",
        "and not (job.state.stays or job.spec.exclusive)",
    ),
    Mutant(
        "rlqd lets a job go on that a user has paused",
        "machine.py",
        "self._to(job, replace(job.state, backed_off=None))",
        "self._to(job, job.state)",
        by="backoff",
    ),
    Mutant(
        "a stranger starts on a booked GPU",
        "calendar.py",
        "            kept |= dict.fromkeys(booking.gpus, booking)\n",
        "",
    ),
    Mutant(
        "what has no sure end starts before a booking",
        "calendar.py",
        "and (ends_at is None or ends_at > b.starts_at)",
        "and (ends_at is not None and ends_at > b.starts_at)",
    ),
    Mutant(
        "a booking counts until it begins",
        "calendar.py",
        "if at < b.ends_at\n",
        "if at < b.starts_at\n",
    ),
    Mutant(
        "maintenance keeps nobody away",
        "calendar.py",
        "if booking.whole:",
        "if False:",
    ),
    Mutant(
        "booked cores are given away",
        "calendar.py",
        "sum(len(h.placement.cores) for h in gone) - cores",
        "sum(len(h.placement.cores) for h in gone)",
    ),
    Mutant(
        "booked host memory is given away",
        "calendar.py",
        "sum(h.charge.mem_mib for h in gone) - mem",
        "sum(h.charge.mem_mib for h in gone)",
    ),
    Mutant(
        "jobs that may still be there have left when a booking begins",
        "calendar.py",
        "return moment > self.at and holder.ends_at is not None and holder.ends_at <= moment",
        "return holder.ends_at is None or holder.ends_at <= moment",
    ),
    Mutant(
        "quiet hours count the next job alone",
        "calendar.py",
        "left = quiet.cores - sum(len(h.placement.cores) for h in self.holders)",
        "left = quiet.cores",
    ),
    Mutant(
        "all GPUs in quiet hours",
        "calendar.py",
        "by_index[quiet.gpus :]",
        "by_index[:0]",
    ),
    Mutant(
        "the end of a booking is slept through",
        "calendar.py",
        "for at in (w.starts_at, w.ends_at)]",
        "for at in (w.starts_at,)]",
    ),
    Mutant(
        "a start is promised inside a booking",
        "policy.py",
        "found = place(need, ahead.of(spec.user, latest_end(ahead.at, spec)), policy)",
        "found = place(need, ahead.room, policy)",
    ),
]

HUNT = """
import sys
from rlqd.sim.world import World
for seed in range(int(sys.argv[1])):
    try:
        World(seed, check_every=3).run()
    except AssertionError as error:
        print(seed, type(error).__name__, str(error)[:150])
        sys.exit(1)
"""


def hunt(mutant: Mutant, folder: Path) -> str | None:
    """How the mutant was caught, or None."""
    shutil.copytree(PACKAGE, folder / "rlqd", ignore=shutil.ignore_patterns("__pycache__"))
    target = folder / "rlqd" / "core" / mutant.file
    source = target.read_text()
    assert source.count(mutant.old) == 1, (
        f"{mutant.file} no longer has the text of {mutant.name!r} (once): bring it up to date"
    )
    target.write_text(source.replace(mutant.old, mutant.new))
    env = {**os.environ, "PYTHONPATH": str(folder), "RLQ_HYPOTHESIS": "hunt"}
    command = [sys.executable, "-c", HUNT, str(SEEDS)]
    if mutant.by in TESTS:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            TESTS[mutant.by],
        ]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    assert done.returncode in (0, 1), done.stderr
    return " ".join(last) if done.returncode else None


def test_every_planted_bug_is_caught(tmp_path: Path) -> None:
    def one(number: int) -> str | None:
        return hunt(MUTANTS[number], tmp_path / str(number))

    with ThreadPoolExecutor(max_workers=2) as pool:
        caught = list(pool.map(one, range(len(MUTANTS))))
    for mutant, how in zip(MUTANTS, caught, strict=True):
        print(f"{mutant.name}: {how}")
    missed = [m.name for m, how in zip(MUTANTS, caught, strict=True) if how is None]
    assert not missed, f"not caught: {missed}"


def test_without_a_bug_nothing_is_caught(tmp_path: Path) -> None:
    nothing = Mutant("none", "states.py", "KILL_AGAIN_MS = 5_000", "KILL_AGAIN_MS = 5_001")
    assert hunt(nothing, tmp_path) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_text_of_each_mutant_is_still_there(mutant: Mutant) -> None:
    source = (PACKAGE / "core" / mutant.file).read_text()
    assert source.count(mutant.old) == 1, "bring the mutant up to date with the source"
