"""What the throughput guard knows, shown: `rlq profile`, `gpus`, `history`."""

from __future__ import annotations

import json
import time

import pytest
from tests.cli.conftest import Invoke
from tests.support.fake_daemon import HOST, FakeDaemon, make_job

from rlq.cli.commands.gpus import throughput_words
from rlq.cli.commands.profile import mix_words
from rlq.protocol import messages as m
from rlq.protocol.states import JobState

SAC = "rlq_sac algo=sb3 env=Humanoid-v5"
A100 = "NVIDIA A100-SXM4-40GB"


def some_profiles() -> m.Profiles:
    hour_ago = time.time() - 3600
    return m.Profiles(
        programs=(
            m.Profiled(
                signature=SAC,
                runs=12,
                learned_at=hour_ago,
                mem_mib=6500,
                gpu_mem_mib=900,
                sm_pct=35,
                cpu_cores=1.02,
                solo=(m.SoloRate(device=A100, steps_per_s=61.25, learned_at=hour_ago),),
            ),
            m.Profiled(signature="train.py", runs=1, learned_at=hour_ago, mem_mib=300),
        ),
        curves=(
            m.Curve(
                device=A100,
                signatures=(SAC,),
                points=(m.CurvePoint(jobs=2, stp=1.9), m.CurvePoint(jobs=3, stp=2.4)),
            ),
            m.Curve(
                device="CPU, 16 cores",
                signatures=(SAC, "train.py"),
                points=(m.CurvePoint(jobs=2, stp=2.0, learned_at=hour_ago),),
            ),
        ),
    )


# ---- profile -----------------------------------------------------------------------


def test_profile_has_a_line_for_each_program_and_device(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    daemon.answers[m.Profile] = some_profiles()
    header, *lines = [line.split("\t") for line in invoke("profile").stdout.splitlines()]
    assert {len(line) for line in lines} == {len(header)}
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["SIGNATURE"] for row in rows] == [SAC, "train.py", f"{SAC} + train.py"]
    assert (rows[0]["DEVICE"], rows[0]["SOLO_STEPS_PER_S"]) == (A100, "61.25")
    assert rows[0]["STP"] == "2:1.900,3:2.400"
    assert (rows[0]["MEM_MIB"], rows[0]["RUNS"]) == ("6500", "12")
    assert (rows[1]["DEVICE"], rows[1]["GPU_MEM_MIB"]) == ("-", "-")
    assert (rows[2]["DEVICE"], rows[2]["STP"]) == ("CPU, 16 cores", "2:2.000")


def test_profile_asks_for_what_the_pattern_means(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.answers[m.Profile] = some_profiles()
    assert json.loads(invoke("profile", "sac*", "--json").stdout)["programs"][0]["runs"] == 12
    assert daemon.requests == [m.Profile(pattern="sac*")]


def test_forget_names_one_signature_exactly(daemon: FakeDaemon, invoke: Invoke) -> None:
    result = invoke("profile", "--forget", SAC)
    assert (result.exit_code, result.stdout) == (0, f"forgotten: {SAC}\n")
    assert daemon.requests == [m.Forget(signature=SAC)]


@pytest.mark.parametrize(
    ("signatures", "said"),
    [
        (("a", "b"), "a beside b"),
        (("a", "a", "a", "b"), "a (75%) beside b (25%)"),
    ],
)
def test_a_mix_in_words(signatures: tuple[str, ...], said: str) -> None:
    assert mix_words(signatures) == said


# ---- gpus, status ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (m.Throughput(jobs=3, stp=2.41, antt=1.28), "3 jobs give 2.4x one job's speed (ANTT 1.3)"),
        (m.Throughput(jobs=1, stp=0.97, antt=1.0), "1 job gives 1.0x one job's speed (ANTT 1.0)"),
        (m.Throughput(jobs=2), ""),
        (m.Throughput(), ""),
    ],
)
def test_what_the_jobs_achieve_in_words(found: m.Throughput, said: str) -> None:
    assert throughput_words(found) == said


def test_gpus_tell_what_the_jobs_on_each_achieve(daemon: FakeDaemon, invoke: Invoke) -> None:
    together = m.Throughput(jobs=3, stp=2.4, antt=1.25)
    daemon.answers[m.Devices] = m.Machine(
        host=HOST,
        gpus=(
            m.Gpu(uuid="GPU-a", index=0, name=A100, throughput=together),
            m.Gpu(uuid="GPU-b", index=1, name=A100),
        ),
    )
    header, *lines = [line.split("\t") for line in invoke("gpus").stdout.splitlines()]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [(row["STP"], row["ANTT"]) for row in rows] == [("2.400", "1.250"), ("-", "-")]


def test_no_driver_is_no_problem_and_a_failing_one_is(daemon: FakeDaemon, invoke: Invoke) -> None:
    why = "no NVIDIA driver is installed (libnvidia-ml.so.1 not found)"
    daemon.answers[m.Devices] = m.Machine(host=HOST, nvml_problem=why, nvml_absent=True)
    assert "warning" not in invoke("gpus").stderr
    assert "none (no NVIDIA driver here)" in invoke("status").stdout
    daemon.answers[m.Devices] = m.Machine(host=HOST, nvml_problem="versions differ")
    assert "warning: versions differ" in invoke("gpus").stderr
    assert "versions differ" in invoke("status").stdout


# ---- show, history -----------------------------------------------------------------


def test_show_tells_what_a_job_is_taken_for(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(make_job(1, signature=SAC))
    assert SAC in invoke("show", "1").stdout


@pytest.mark.parametrize(
    ("metrics", "result"),
    [
        ({"mean_reward": 512.25, "ep_rew_mean": 3.0}, "512.25"),
        ({"ep_rew_mean": -1.5, "fps": 9.0}, "-1.5"),
        ({"loss": 0.1}, "-"),
    ],
)
def test_the_result_is_the_last_evaluation_else_the_training_reward(
    daemon: FakeDaemon, invoke: Invoke, metrics: dict[str, float], result: str
) -> None:
    progress = m.Progress(step=9, total=9, metrics=metrics)
    daemon.add(make_job(1, JobState.COMPLETED, progress=progress))
    header, row = [line.split("\t") for line in invoke("history").stdout.splitlines()]
    assert dict(zip(header, row, strict=True))["RESULT"] == result
