"""What is learned of a program is its user's own: no other user can name a job like it."""

from __future__ import annotations

import os

from msgspec.structs import replace

from rlq.protocol.messages import JobSpec
from rlqd.config import Config
from rlqd.core.guard import Estimate, Learned
from rlqd.core.learned import LearnedPeak
from rlqd.core.machine import Scheduler
from rlqd.core.model import Instant
from rlqd.shell import rows
from rlqd.shell.learning import profiles

ME = os.geteuid()
ALICE, BOB = ME + 1001, ME + 1002
SPEC = JobSpec(argv=("python", "train.py"), cwd="/")
NAMED_LIKE_ALICES = JobSpec(argv=("true",), cwd="/", like=f"{ALICE}:train.py")


def signature(spec: JobSpec, uid: int) -> str:
    return rows.core_spec(spec, uid, Config()).signature


def test_equal_programs_of_two_users_are_two() -> None:
    assert signature(SPEC, ALICE) != signature(SPEC, BOB)
    assert signature(SPEC, ME) == "train.py", "of the daemon's own user it is the plain name"


def test_nobody_can_name_a_job_like_anothers() -> None:
    assert signature(NAMED_LIKE_ALICES, BOB) != signature(SPEC, ALICE)


def test_what_has_no_signature_has_none_for_any_user() -> None:
    assert signature(JobSpec(argv=("python", "-c", "pass"), cwd="/"), ALICE) == ""


def test_a_job_in_front_of_somebody_is_told_from_others() -> None:
    assert not rows.core_spec(SPEC, ME, Config()).interactive
    run = replace(SPEC, via=("python", "relay.py"))
    assert rows.core_spec(run, ME, Config()).interactive
    assert signature(run, ME) == signature(SPEC, ME)


def test_users_see_their_own_programs_under_the_plain_name_and_operators_all() -> None:
    core = Scheduler()
    alices, bobs, mine = (signature(SPEC, uid) for uid in (ALICE, BOB, ME))
    estimate = Estimate(1000, 1, Instant(0))
    core.guard.load([Learned("GPU", (one,), 0, estimate) for one in (alices, mine)], Instant(0))
    core.guard.load([Learned("GPU", (alices, bobs), 2, estimate)], Instant(0))
    core.peaks.load(LearnedPeak(signature=s, mem_mib=7, at=Instant(0)) for s in (alices, bobs))

    seen = profiles(core, "train.py", 0.0, ALICE, sees_all=False)
    assert [(p.signature, p.mem_mib, len(p.solo)) for p in seen.programs] == [("train.py", 7, 1)]
    assert not seen.curves, "one that bob is in says what he runs"
    assert [p.solo for p in profiles(core, "", 0.0, BOB, sees_all=False).programs] == [()]
    seen = profiles(core, "", 0.0, ME, sees_all=True)
    assert {p.signature for p in seen.programs} == {alices, bobs, mine}
    assert len(seen.curves) == 1
    assert not profiles(core, str(ALICE), 0.0, ALICE, sees_all=False).programs, (
        "the pattern is of what is shown"
    )
