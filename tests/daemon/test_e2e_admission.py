"""Admission end to end: a real rlqd, real processes, GPUs made of files behind the real NVML
binding.  Two cores suffice for every test here."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.nvml_stub import VERSION_MISMATCH
from tests.support.rlqd import Rlqd, configured
from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.errors import RefusedError
from rlq.protocol.messages import Explanation, Job, Shortage
from rlq.protocol.states import JobState

CORES = len(os.sched_getaffinity(0))
SLEEP = ["sleep", "600"]

pytestmark = pytest.mark.skipif(CORES < 2, reason="two jobs at a time need two cores")


def until_short_of(client: Client, job_id: int, resource: str) -> Shortage:
    """Until the job waits for exactly this, in `why` and in its reason.

    Where the two cores are given out as well, they may be short beside it.
    """

    def is_short(said: Explanation) -> bool:
        return {s.resource for s in said.shortages} - {"cores"} == {resource} - {"cores"}

    said = wait_until(lambda: client.why(job_id), is_short)
    assert said.state is JobState.PENDING
    assert resource in said.summary.lower()
    return next(s for s in said.shortages if s.resource == resource)


def start(d: Rlqd, client: Client, job_id: int) -> Job:
    return d.until_state(client, job_id, JobState.RUNNING)


# ---- the four resources ------------------------------------------------------------


def test_gpu_memory_decides_which_job_starts(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{"mem_total_mib": 40960}]) as d:
        client = d.client()
        first = d.submit_gpu_job(client, 600, mem=20_000, gpu_mem="24G")
        start(d, client, first)
        too_big = d.submit_gpu_job(client, 600, mem=20_000, gpu_mem="20G")
        small = d.submit_gpu_job(client, 600, mem=1000, gpu_mem="8G")
        start(d, client, small)
        short = until_short_of(client, too_big, "gpu memory")
        assert (short.need, short.unit, short.gpu_index) == (20 * 1024, "MiB", 0)
        assert short.free < short.need <= short.total
        held = {h.job: h.amount for h in short.holders}
        assert held[first] >= 24 * 1024
        assert held[small] >= 8 * 1024
        told = d.rlq("why", str(too_big)).stdout
        assert "gpu memory" in told
        assert f"job {first}" in told

        client.cancel([first, small], now=True)
        start(d, client, too_big)


def test_sm_share_decides_which_job_starts(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}]) as d:
        client = d.client()
        first = client.submit(SLEEP, gpus=1, gpu_mem="2G", sm="60%")
        start(d, client, first)
        too_big = client.submit(SLEEP, gpus=1, gpu_mem="2G", sm="60%")
        small = client.submit(SLEEP, gpus=1, gpu_mem="2G", sm="30%")
        start(d, client, small)
        short = until_short_of(client, too_big, "gpu sm")
        assert (short.need, short.free, short.total, short.unit) == (60, 10, 100, "%")
        assert [(h.job, h.amount) for h in short.holders] == [(first, 60), (small, 30)]
        assert "gpu sm" in d.rlq("why", str(too_big)).stdout

        client.cancel([first, small], now=True)
        start(d, client, too_big)


def test_cores_decide_which_job_starts(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        first = client.submit(SLEEP, cores=CORES - 1)
        start(d, client, first)
        too_big = client.submit(SLEEP, cores=2)
        small = client.submit(SLEEP, cores=1)
        start(d, client, small)
        short = until_short_of(client, too_big, "cores")
        assert (short.need, short.free, short.total) == (2, 0, CORES)
        assert [(h.job, h.amount) for h in short.holders] == [(first, CORES - 1), (small, 1)]
        assert "cores" in d.rlq("why", str(too_big)).stdout

        client.cancel([first, small], now=True)
        start(d, client, too_big)


def test_host_memory_decides_which_job_starts(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        host = wait_until(lambda: client.devices().host, lambda h: h.mem_mib_available > 0)
        large = host.mem_mib_available * 6 // 10
        first = client.submit(SLEEP, mem=large)
        start(d, client, first)
        too_big = client.submit(SLEEP, mem=large)
        small = client.submit(SLEEP, mem=16)
        start(d, client, small)
        short = until_short_of(client, too_big, "host memory")
        assert (short.need, short.unit) == (large, "MiB")
        assert short.free < large
        assert (first, large) in [(h.job, h.amount) for h in short.holders]
        assert "host memory" in d.rlq("why", str(too_big)).stdout

        client.cancel([first, small], now=True)
        start(d, client, too_big)


def test_a_cheap_job_passes_a_blocked_one_but_not_for_ever(tmp_path: Path) -> None:
    """A job that needs the whole GPU, against a stream of small ones that would never let it."""
    config = configured(scheduling={"reserve_after": "1s"})
    with Rlqd(tmp_path, gpus=[{}], config=config) as d:
        client = d.client()
        small: dict[str, Any] = {"gpus": 1, "gpu_mem": "1G", "sm": 40}
        # Never two ends at a time, or the GPU would be whole for a moment.
        lengths = ["0.5", *["1"] * 21]
        ahead = [client.submit(["sleep", length], **small) for length in lengths[:2]]
        whole = client.submit(["true"], gpus=1, gpu_mem="1G", sm=100)
        stream = [client.submit(["sleep", length], **small) for length in lengths[2:]]
        done = d.until_state(client, whole, JobState.COMPLETED)
        assert done.started_at is not None
        client.cancel(stream, now=True)
        before = [
            job.id
            for job in client.wait([*ahead, *stream], timeout=60)
            if job.started_at is not None and job.started_at < done.started_at
        ]
        # Those ahead of it, and what two cores can run in the second before its reservation.
        assert len(before) <= 12, before


# ---- what is measured --------------------------------------------------------------


def test_an_undeclared_job_is_charged_the_default_and_then_what_it_uses(tmp_path: Path) -> None:
    config = configured(defaults={"gpu_mem": "25G", "sm": "60%"})
    with Rlqd(tmp_path, gpus=[{}], config=config) as d:
        client = d.client()
        first = d.submit_gpu_job(client, 600, mem=1000, sm=10)
        second = d.submit_gpu_job(client, 600, mem=1000, sm=10)
        start(d, client, first)
        said = wait_until(lambda: client.why(second), lambda said: bool(said.shortages))
        assert [s.resource for s in said.shortages] == ["gpu memory", "gpu sm"]
        holder = said.shortages[1].holders[0]
        assert (holder.job, holder.amount) == (first, 60)

        wait_until(
            lambda: client.get(first).usage, lambda usage: usage is not None and usage.settled
        )
        start(d, client, second)
        gpu = wait_until(
            lambda: client.devices().gpus[0], lambda gpu: gpu.mem_mib_charged < 25 * 1024
        )
        assert 2000 <= gpu.mem_mib_charged <= 2500, "both by their measure, with the margin"


def test_a_job_that_takes_more_than_it_declared_is_charged_what_it_takes(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}]) as d:
        client = d.client()
        liar = d.submit_gpu_job(client, 600, mem=30_000, gpu_mem="1G")
        start(d, client, liar)
        wait_until(lambda: client.devices().gpus[0], lambda gpu: gpu.mem_mib_charged >= 30_000)
        waits = client.submit(SLEEP, gpus=1, gpu_mem="20G")
        short = until_short_of(client, waits, "gpu memory")
        assert short.holders[0].job == liar
        assert short.holders[0].amount >= 30_000


def test_memory_that_an_outsider_frees_is_offered(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{"mem_external_mib": 30_000}]) as d:
        client = d.client()
        waits = client.submit(SLEEP, gpus=1, gpu_mem="20G")
        short = until_short_of(client, waits, "gpu memory")
        assert [h.job for h in short.holders] == [None]
        assert short.holders[0].amount >= 30_000
        assert "outside the queue" in d.rlq("why", str(waits)).stdout

        d.nvml.update(0, mem_external_mib=0)
        start(d, client, waits)


def test_an_outsiders_process_is_named_and_subtracted(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}]) as d, subprocess.Popen(["sleep", "600"]) as outsider:
        try:
            d.nvml.set_process(outsider.pid, mem_mib=30_000, sm=70)
            client = d.client()
            wait_until(lambda: client.devices().gpus[0], lambda gpu: bool(gpu.processes))
            d.read_anew(client)
            waits = client.submit(SLEEP, gpus=1, gpu_mem="20G", sm=50)
            wait_until(
                lambda: client.why(waits),
                lambda said: [s.resource for s in said.shortages] == ["gpu memory", "gpu sm"],
            )
            [shown] = json.loads(d.rlq("gpus", "--json").stdout)["gpus"][0]["processes"]
            assert shown["pid"] == outsider.pid
            assert shown["user"] == pwd.getpwuid(os.getuid()).pw_name
            assert shown["command"].startswith("sleep")
            assert shown["mem_mib"] == 30_000
            assert "job" not in shown or shown["job"] is None
        finally:
            outsider.kill()
        # Its memory returns with its end, as a real driver's would.
        start(d, client, waits)


def test_memory_that_lingers_after_a_job_is_not_offered(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}]) as d:
        client = d.client()
        first = d.submit_gpu_job(client, 600, mem=30_000, gpu_mem="30G")
        start(d, client, first)
        waits = client.submit(SLEEP, gpus=1, gpu_mem="20G")
        until_short_of(client, waits, "gpu memory")

        d.nvml.update(0, mem_external_mib=30_000)
        client.cancel(first, now=True)
        d.until_state(client, first, JobState.CANCELLED)
        d.read_anew(client)
        assert client.get(waits).state is JobState.PENDING
        assert until_short_of(client, waits, "gpu memory").holders[0].job is None

        d.nvml.update(0, mem_external_mib=0)
        start(d, client, waits)


# ---- GPUs that fail ----------------------------------------------------------------


def test_a_gpu_that_is_lost_disturbs_nothing_and_admits_nothing(tmp_path: Path) -> None:
    # A lost board is asked for again every 60 periods.
    config = configured(monitor={"period": "100ms"})
    with Rlqd(tmp_path, gpus=[{}], config=config) as d:
        client = d.client()
        runs = d.submit_gpu_job(client, 600, gpu_mem="2G")
        start(d, client, runs)

        d.nvml.lose(0)
        wait_until(lambda: client.devices().gpus[0].problem, lambda text: "lost" in text)
        waits = client.submit(SLEEP, gpus=1, gpu_mem="1G")
        short = until_short_of(client, waits, "gpu")
        assert short.gpu_index == 0
        assert "lost" in client.why(waits).summary
        assert any("lost" in problem for problem in client.status().problems)
        assert "lost" in d.rlq("gpus").stdout
        beside = client.submit(["true"], gpus=0)
        d.until_state(client, beside, JobState.COMPLETED)
        assert client.get(runs).state is JobState.RUNNING
        assert client.get(waits).state is JobState.PENDING

        d.nvml.update(0, error=0)
        start(d, client, waits)
        assert client.get(runs).attempt == 1


def test_the_other_gpu_goes_on_when_one_is_lost(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}, {}]) as d:
        client = d.client()
        wait_until(client.devices, lambda machine: len(machine.gpus) == 2)
        d.nvml.lose(0)
        wait_until(lambda: client.devices().gpus[0].problem, lambda text: "lost" in text)
        job = start(d, client, client.submit(SLEEP, gpus=1))
        assert job.placement is not None
        assert job.placement.gpu_indices == (1,)


def test_a_driver_mismatch_keeps_gpu_jobs_waiting_and_cpu_jobs_running(tmp_path: Path) -> None:
    d = Rlqd(tmp_path, gpus=[{}])
    d.nvml.fail(VERSION_MISMATCH)
    with d:
        client = d.client()
        wait_until(lambda: client.devices().nvml_problem, lambda text: "upgraded" in text)
        auto = client.submit(["true"])
        on_cpu = client.submit(["true"], gpus=0)
        d.until_state(client, on_cpu, JobState.COMPLETED)
        said = client.why(auto)
        assert said.state is JobState.PENDING
        assert "reboot or reload the driver" in said.summary
        assert any("upgraded" in problem for problem in client.status().problems)

        d.nvml.fail(0)
        done = d.until_state(client, auto, JobState.COMPLETED)
        assert done.placement is not None
        assert done.placement.gpu_indices == (0,)


def test_a_hanging_driver_does_not_keep_cpu_jobs_from_starting(tmp_path: Path) -> None:
    d = Rlqd(tmp_path, gpus=[{}])
    d.nvml.hang(3)
    with d:
        client = d.client()
        auto = client.submit(["true"])
        on_cpu = client.submit(["true"], gpus=0)
        d.until_state(client, on_cpu, JobState.COMPLETED)
        said = client.why(auto)
        assert said.state is JobState.PENDING
        assert "GPU" in said.summary, said
        assert "--gpus 0" not in said.summary
        d.nvml.hang(0)
        d.until_state(client, auto, JobState.COMPLETED, limit_s=60)


def test_without_a_driver_auto_means_the_cpu_and_a_gpu_is_refused(tmp_path: Path) -> None:
    d = Rlqd(tmp_path, gpus=[{}])
    d.nvml.fail(12)  # LIBRARY_NOT_FOUND, whatever this machine has
    with d:
        client = d.client()
        auto = client.submit(["true"])
        done = d.until_state(client, auto, JobState.COMPLETED)
        assert done.placement is not None
        assert done.placement.gpus == ()
        with pytest.raises(RefusedError, match="1 GPU, this machine has 0"):
            client.submit(["true"], gpus=1)
        refused = d.rlq("submit", "--gpus", "1", "--", "true", check=False)
        assert refused.returncode == 3
        assert "hint:" in refused.stderr
        assert [job.id for job in client.list()] == [auto]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus": 2}, "this machine has 1"),
        ({"gpus": 1, "gpu_mem": "80G"}, "80 GiB"),
        ({"cores": 4000}, "4000 cores"),
        ({"mem": "900T"}, "host memory"),
    ],
)
def test_what_this_machine_can_never_run_is_refused_at_once(
    tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    with Rlqd(tmp_path, gpus=[{}]) as d:
        client = d.client()
        wait_until(client.devices, lambda machine: len(machine.gpus) == 1)
        with pytest.raises(RefusedError, match=message):
            client.submit(["true"], **asked)
        assert client.list() == []


def test_an_end_beside_a_start_leaves_the_start_alone(tmp_path: Path) -> None:
    """Once a daemon took the number of an ended job's closed pipe for the next job's."""
    with Rlqd(tmp_path) as d:
        client = d.client()
        ends = client.submit(SLEEP)
        for _ in range(8):
            start(d, client, ends)
            # It is launched while the other dies.
            client.cancel(ends, now=True)
            begins = client.submit(SLEEP)
            start(d, client, begins)
            d.until_state(client, ends, JobState.CANCELLED)
            ends = begins
