"""The throughput guard end to end: a real rlqd and programs that report steps.  What is learned
can be read, is kept, and can be forgotten; `rlq calibrate` finds the knee of jobs that take
turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.nvml_stub import VERSION_MISMATCH
from tests.support.rlqd import Rlqd, configured
from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.errors import NotFoundError
from rlq.protocol.messages import Profiles
from rlq.protocol.states import JobState

CONFIG = configured(guard={"observe": "1s"}, scheduling={"settle": "1s"})
CORES = len(os.sched_getaffinity(0))
SAC = "rlq_sac algo=sb3 env=Turns-v0"

#: argv: steps per report, of which there are ten a second.
REPORTING = """
import sys, time
import rlq.job
step = 0
while True:
    step += int(sys.argv[1])
    rlq.job.report(step, 10**9)
    rlq.job.flush()
    time.sleep(0.1)
"""

#: Stands in for the built-in workload: jobs that take turns, so that k of them have the speed of
#: one.  Each says that it is there by a file in the folder TURNS.
TURNS = """
import json, os, pathlib, sys, time
if sys.argv[1] == "plan":
    print(json.dumps({"cores": 1, "mem_mib": 64}))
    sys.exit()
import rlq.job
here = pathlib.Path(os.environ["TURNS"])
(here / str(os.getpid())).touch()
step = 0.0
while True:
    step += 100 / sum(os.path.exists(f"/proc/{one.name}") for one in here.iterdir())
    rlq.job.report(round(step), 10**9)
    rlq.job.flush()
    time.sleep(0.1)
"""


def submit_reporting(d: Rlqd, client: Client, steps: int, like: str) -> int:
    argv = [sys.executable, "-c", REPORTING, str(steps)]
    return client.submit(argv, env=d.user_env, gpus=0, cores=1, like=like)


def until_solo(client: Client, signature: str) -> Profiles:
    return wait_until(
        lambda: client.profile(signature),
        lambda found: any(p.signature == signature and p.solo for p in found.programs),
        60,
    )


def test_what_a_job_shows_is_remembered_until_it_is_forgotten(tmp_path: Path) -> None:
    with Rlqd(tmp_path, config=CONFIG) as d:
        client = d.client()
        job = submit_reporting(d, client, 50, "steady runner")
        assert d.until_state(client, job, JobState.RUNNING).signature == "steady runner"
        until_solo(client, "steady runner")
        host = wait_until(
            lambda: client.devices().host, lambda host: host.throughput.stp is not None, 60
        )
        assert host.throughput.jobs == 1
        assert host.throughput.antt is not None
        wait_until(
            lambda: client.get(job).usage, lambda usage: usage is not None and usage.settled
        )
        client.cancel(job, now=True)
        d.until_state(client, job, JobState.CANCELLED)
        [program] = wait_until(lambda: client.profile().programs, lambda found: found[0].runs == 1)
        assert program.mem_mib
        assert [p.signature for p in client.profile("STEADY").programs] == ["steady runner"]
        assert client.profile("something else") == Profiles()

        d.kill9()
        d.start()
        assert "steady runner" in d.rlq("profile").stdout
        assert client.profile().programs[0].runs == 1

        with pytest.raises(NotFoundError, match="nothing was learned"):
            client.forget("steady")
        said = d.rlq("profile", "--forget", "steady runner").stdout
        assert said == "forgotten: steady runner\n"
        assert client.profile() == Profiles()
        d.kill9()
        d.start()
        assert client.profile() == Profiles()


@pytest.fixture
def turns(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell in which `rlq_sac` are jobs that take turns."""
    package = tmp_path / "modules" / "rlq_sac"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(TURNS)
    folder = tmp_path / "turns"
    folder.mkdir()
    return {"PYTHONPATH": str(package.parent), "TURNS": str(folder)}


def calibrate(d: Rlqd, turns: dict[str, str], out: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "rlq", "calibrate", "--env", "Turns-v0"),
            *("--seconds", "4", "--out", str(out), *more),
        ],
        env={**d.user_env, **turns},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(CORES < 2, reason="two jobs at a time need two cores")
def test_calibrate_finds_that_jobs_take_turns_and_the_queue_learns_it(
    tmp_path: Path, turns: dict[str, str]
) -> None:
    out = tmp_path / "out"
    with Rlqd(tmp_path, config=CONFIG, gpus=[{}]) as d:
        client = d.client()
        asked = calibrate(d, turns, out, "--device", "both", "--jobs-max", "2", "--json")
        said, talk = asked.communicate(timeout=250)
        assert said, talk
        curves = json.loads(said)["curves"]
        assert [curve["device"][:3] for curve in curves] == ["NVI", "CPU"]
        for curve in curves:
            assert [point["jobs"] for point in curve["points"]] == [1, 2], talk
            # The two share what one has: far from the 2.0 that two cores would suggest.
            assert curve["points"][1]["stp"] < 1.5
            assert curve["points"][1]["antt"] > 1.3
        assert (out / "calibration.png").exists()
        assert json.loads((out / "calibration.json").read_text()) == json.loads(said)
        jobs = client.list()
        assert {job.state for job in jobs} == {JobState.CANCELLED}
        # Wherever it ran, it is one program, and so is a later `submit sac` of it.
        assert {job.signature for job in jobs} == {SAC}
        [program] = client.profile(SAC).programs
        assert {solo.device[:3] for solo in program.solo} == {"NVI", "CPU"}


@pytest.mark.skipif(CORES < 2, reason="two jobs at a time need two cores")
def test_calibrate_keeps_to_one_gpu_of_several(tmp_path: Path, turns: dict[str, str]) -> None:
    with Rlqd(tmp_path, config=CONFIG, gpus=[{}, {}]) as d:
        asked = calibrate(d, turns, tmp_path / "out", "--jobs-max", "1")
        _, talk = asked.communicate(timeout=120)
        assert asked.returncode == 0, talk
        holder, job = sorted(d.client().list(), key=lambda job: job.id)
        assert holder.argv == ("sleep", "infinity")
        assert holder.placement is not None
        assert job.placement is not None
        assert not set(holder.placement.gpus) & set(job.placement.gpus)
        assert holder.state is job.state is JobState.CANCELLED


def test_calibrate_stops_its_jobs_when_it_is_interrupted(
    tmp_path: Path, turns: dict[str, str]
) -> None:
    with Rlqd(tmp_path, config=CONFIG) as d:
        client = d.client()
        running = calibrate(d, turns, tmp_path / "out", "--device", "cpu")
        wait_until(
            lambda: [job.state for job in client.list()],
            lambda states: JobState.RUNNING in states,
            60,
        )
        running.send_signal(signal.SIGINT)
        _, talk = running.communicate(timeout=60)
        assert running.returncode == 130, talk
        assert "Traceback" not in talk
        assert {job.state for job in client.list()} == {JobState.CANCELLED}


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver here")
def test_without_a_driver_nothing_is_wrong(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        wait_until(client.devices, lambda machine: machine.nvml_absent)
        assert d.rlq("submit", "--", "true").stderr == ""
        assert d.rlq("gpus").stderr == ""
        assert client.status().problems == ()


def test_a_failing_driver_is_not_an_absent_one(tmp_path: Path) -> None:
    d = Rlqd(tmp_path, gpus=[{}])
    d.nvml.fail(VERSION_MISMATCH)
    with d:
        client = d.client()
        machine = wait_until(client.devices, lambda machine: "upgraded" in machine.nvml_problem)
        assert not machine.nvml_absent
        assert "the GPUs cannot be read now" in d.rlq("submit", "--", "true").stderr
        assert "warning" in d.rlq("gpus").stderr


def test_no_daemon_is_started_from_within_a_job(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RLQ_")}
    env |= {"RLQ_STATE_DIR": str(tmp_path / "state"), "RLQ_JOB_ID": "7"}
    for words in (["list"], ["daemon", "start"]):
        done = subprocess.run(
            [sys.executable, "-m", "rlq", *words], env=env, capture_output=True, text=True
        )
        assert done.returncode == 2, done
        assert "from within a job (this is job 7)" in done.stderr
        assert "hint: " in done.stderr
    assert not (tmp_path / "state" / "rlqd.sock").exists()
