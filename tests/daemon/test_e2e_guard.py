"""The throughput guard end to end: a real rlqd, and jobs that really share a GPU that is a token
(tests/support/gpu_emulator.py).  NVML reads 100 % whatever runs, so who goes by it fails here;
what is right is known in closed form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.support.gpu_emulator import EmulatedGpus, Kind
from tests.support.rlqd import configured
from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.protocol.messages import Explanation
from rlq.protocol.states import JobState

#: Far from both what one job more brings below the knee (0.5 and more) and above it (nothing).
THRESHOLD = 0.2
GUARD = {
    "observe": "1500ms",
    "threshold": f"{THRESHOLD:.0%}",
    # Waiting for a first report ends with it; a loaded machine may take long to start a job.
    "first_report": "60s",
    "patience": "120s",
}
CONFIG = configured(guard=GUARD, monitor={"period": "150ms"})

#: So many that never few are left: the last ones are started as long as they do no harm.
MANY = 16

#: STP 1, 2, 2.5, 2.5 …
KNEE = Kind(env="Knee-v0", think_ms=30, serve_ms=20)
#: All of its time on the GPU: two of them have the speed of one.
TURNS = Kind(env="Turns-v0", think_ms=0, serve_ms=40)
#: Two of them are slower than one.
QUARREL = Kind(env="Quarrel-v0", think_ms=0, serve_ms=30, switch_ms=20)


@dataclass
class Watch:
    """Looks at one GPU's queue again and again, and keeps what it saw."""

    d: EmulatedGpus
    client: Client
    running_max: int = 0
    #: What NVML said of the GPU while a job ran on it.
    utilisation: list[int | None] = field(default_factory=list)

    def running(self) -> list[int]:
        found = [job.id for job in self.client.list() if job.state is JobState.RUNNING]
        self.running_max = max(self.running_max, len(found))
        if found:
            self.utilisation.append(self.d.utilisation(self.client))
        return sorted(found)

    def until_settled(self, waiting: int) -> list[int]:
        """Until the last of the queue is told that one more job would not help, by measurements
        of just those jobs that run now; the jobs that run."""

        def look() -> tuple[list[int], str]:
            return self.running(), self.client.why(waiting).summary

        def is_settled(seen: tuple[list[int], str]) -> bool:
            running, said = seen
            return said.startswith(f"waiting for throughput: {len(running)} job")

        return wait_until(look, is_settled, 90)[0]

    def until_ended(self, job: int) -> None:
        self.client.cancel(job, now=True)
        self.d.until_state(self.client, job, JobState.CANCELLED)
        # By a reading from after its end.
        self.d.read_anew(self.client)

    def curve(self, *kinds: Kind) -> dict[int, float]:
        """What was learned: STP by the number of jobs."""
        wanted = tuple(sorted(kind.signature for kind in kinds))
        curves = self.client.profile().curves
        return {p.jobs: p.stp for c in curves if c.signatures == wanted for p in c.points}

    def until_solo(self, kind: Kind) -> float | None:
        return wait_until(lambda: self.solo(kind), lambda rate: rate is not None, 60)

    def solo(self, kind: Kind) -> float | None:
        for program in self.client.profile().programs:
            if program.signature == kind.signature and program.solo:
                return program.solo[0].steps_per_s
        return None


def about(value: float) -> object:
    """Closer than the difference that any of these tests turns on."""
    return pytest.approx(value, rel=0.15)


def test_settles_at_the_knee_while_utilisation_reads_100_percent_all_along(
    tmp_path: Path,
) -> None:
    knee = KNEE.knee(THRESHOLD)
    assert knee == 3
    with EmulatedGpus(tmp_path, config=CONFIG) as d:
        watch = Watch(d, client := d.client())
        ids = d.train(client, KNEE, count=MANY)
        last = ids[-1]
        watch.until_settled(last)
        assert watch.running_max <= knee + 2, "settled within a few jobs"

        # As jobs end, only as many take their places as help.
        for _ in range(2):
            watch.until_ended(watch.running()[0])
            running = watch.until_settled(last)
        assert abs(len(running) - knee) <= 1
        assert watch.running_max <= knee + 2

        assert watch.solo(KNEE) == about(KNEE.solo_steps_per_s)
        curve = watch.curve(KNEE)
        assert curve == {n: about(KNEE.stp(n)) for n in curve}

        busy = watch.utilisation[watch.utilisation.index(100) :]
        assert set(busy) == {100}, "from the first job's first kernel on"

        told = d.rlq("why", str(last)).stdout
        said = re.search(
            r"waiting for throughput: (\d) jobs on GPU 0 give (\d\.\d)x one job's speed; "
            r"(?:the last one added|a \dth would add) (-?\d\.\d\d)",
            told,
        )
        assert said, told
        assert int(said[1]) == len(running)
        assert float(said[2]) == about(KNEE.stp(len(running)))
        assert float(said[3]) < THRESHOLD


@pytest.mark.parametrize("kind", [TURNS, QUARREL], ids=["take turns", "slow each other down"])
def test_jobs_that_gain_nothing_together_run_alone_after_one_trial(
    tmp_path: Path, kind: Kind
) -> None:
    with EmulatedGpus(tmp_path, config=CONFIG) as d:
        watch = Watch(d, client := d.client())
        ids = d.train(client, kind, count=MANY)
        assert watch.until_settled(ids[-1]) == ids[:2]
        assert watch.curve(kind) == {2: about(kind.stp(2))}

        watch.until_ended(ids[0])
        assert watch.until_settled(ids[-1]) == [ids[1]], "its place is left empty"
        told = client.why(ids[-1]).summary
        gain = re.search(r"a 2nd would add (-?\d\.\d\d)", told)
        assert gain, told
        assert float(gain[1]) == pytest.approx(kind.stp(2) - 1, abs=0.15)

        watch.until_ended(ids[1])
        assert watch.until_settled(ids[-1]) == [ids[2]]
        assert watch.running_max == 2


def test_the_youngest_of_jobs_that_slow_each_other_down_can_be_paused(tmp_path: Path) -> None:
    config = configured(
        guard={**GUARD, "pause_youngest": True, "pause_turn": "1h"}, monitor={"period": "150ms"}
    )
    with EmulatedGpus(tmp_path, config=config) as d:
        first, second, *_, last = d.train(client := d.client(), QUARREL, count=MANY)
        paused = wait_until(
            lambda: client.get(second), lambda job: job.state is JobState.SUSPENDED, 90
        )
        said = "paused by rlqd: 2 jobs on GPU 0 are slower than 1"
        assert paused.reason == said
        assert said in d.rlq("list").stdout
        assert client.why(second).summary.startswith(f"{said}; it goes on in ")
        assert "2 jobs on GPU 0 are slower than 1, so one" in client.why(last).summary

        client.cancel(first, now=True)
        wait_until(lambda: client.get(second), lambda job: job.state is JobState.RUNNING, 60)
        assert [job.id for job in client.list() if job.state is JobState.RUNNING] == [second]


def test_what_was_learned_survives_a_kill_of_the_daemon(tmp_path: Path) -> None:
    knee = KNEE.knee(THRESHOLD)
    with EmulatedGpus(tmp_path, config=CONFIG) as d:
        watch = Watch(d, client := d.client())
        ids = d.train(client, KNEE, count=MANY)
        watch.until_settled(ids[-1])
        learned = watch.curve(KNEE)
        client.cancel(ids, now=True)
        client.wait(ids, timeout=60)

        d.kill9()
        d.start()
        assert watch.curve(KNEE) == learned
        assert KNEE.signature in d.rlq("profile").stdout

        # They never begin to train, so that nothing can be learned from them.
        watch.running_max = 0
        never = replace(KNEE, warm_steps=10**9, warm_ms=20)
        ids = d.train(client, never, count=MANY)
        assert abs(len(watch.until_settled(ids[-1])) - knee) <= 1
        assert watch.running_max <= knee + 1, "no trial of what is known"
        assert watch.curve(KNEE) == learned


def until_packed_by_memory(d: EmulatedGpus, client: Client, ids: Sequence[int]) -> None:
    """Until four of five jobs of 9 GB are on the GPU of 40 GB and the fifth waits for memory."""

    def look() -> tuple[list[JobState], Explanation]:
        return [job.state for job in client.list()], client.why(ids[-1])

    def is_full(seen: tuple[list[JobState], Explanation]) -> bool:
        states, why = seen
        return states.count(JobState.RUNNING) == 4 and "gpu memory" in why.summary

    wait_until(look, is_full, 60)


def test_jobs_that_never_report_are_packed_by_the_four_resources(tmp_path: Path) -> None:
    impatient = configured(guard={**GUARD, "first_report": "1s"})
    mute = replace(TURNS, mute=True, sm=5)
    with EmulatedGpus(tmp_path, config=impatient) as d:
        client = d.client()
        ids = d.train(client, mute, count=5, gpu_mem="9G")
        until_packed_by_memory(d, client, ids)
        assert client.profile().curves == ()


def test_without_the_guard_jobs_are_packed_by_the_four_resources(tmp_path: Path) -> None:
    unguarded = configured(guard={**GUARD, "enabled": False})
    with EmulatedGpus(tmp_path, config=unguarded) as d:
        client = d.client()
        ids = d.train(client, replace(TURNS, sm=5), count=5, gpu_mem="9G")
        until_packed_by_memory(d, client, ids)


def test_the_rate_before_training_begins_fools_nobody(tmp_path: Path) -> None:
    eager = replace(TURNS, env="Eager-v0", warm_steps=400, warm_ms=4)
    assert 1000 / eager.warm_ms >= 10 * eager.solo_steps_per_s
    with EmulatedGpus(tmp_path, config=CONFIG) as d:
        watch = Watch(d, client := d.client())
        ids = d.train(client, eager, count=MANY)
        assert watch.until_solo(eager) == about(eager.solo_steps_per_s)
        assert watch.until_settled(ids[-1]) == ids[:2]
        assert watch.curve(eager) == {2: about(1.0)}


def test_a_mix_of_two_programs_settles_at_the_knee(tmp_path: Path) -> None:
    # Half as fast, with the same share of the GPU: from the knee on, jobs in whatever proportion
    # give what so many of one program give.
    slow = Kind(env="Slow-v0", think_ms=60, serve_ms=40)
    knee = KNEE.knee(THRESHOLD)
    assert slow.knee(THRESHOLD) == knee
    with EmulatedGpus(tmp_path, config=CONFIG) as d:
        watch = Watch(d, client := d.client())
        for kind in (KNEE, slow):
            [alone] = d.train(client, kind)
            assert watch.until_solo(kind) == about(kind.solo_steps_per_s)
            watch.until_ended(alone)
        watch.running_max = 0
        ids = d.train(client, KNEE, slow, count=MANY // 2)
        running = watch.until_settled(ids[-1])
        assert set(running) & set(ids[::2])
        assert set(running) & set(ids[1::2])
        assert watch.running_max <= knee + 2
        for _ in range(2):
            watch.until_ended(watch.running()[0])
            running = watch.until_settled(ids[-1])
        # The more proportions there are, the more has to be tried: up to two too many.
        assert knee - 1 <= len(running) <= knee + 2
