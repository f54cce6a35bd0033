"""A claim and a maintenance window through the real command, against a real daemon."""

from __future__ import annotations

import json
import os
import pwd
import time
from pathlib import Path

from tests.support.rlqd import Rlqd

from rlq.protocol.states import JobState


def test_a_claimed_gpu_gets_no_job_until_it_is_released(tmp_path: Path) -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name
    with Rlqd(tmp_path, gpus=[{}]) as d:
        client = d.client()
        runs = d.submit_gpu_job(client, 600)
        d.until_state(client, runs, JobState.RUNNING)
        said = d.rlq("claim", "--gpu", "0", "--for", "2h")
        assert f"claimed by {me} until" in said.stdout
        assert f"1 job still runs on it ({runs})" in said.stderr

        waits = d.submit_gpu_job(client, 600)
        assert f"GPU 0, which is claimed by {me} until" in d.rlq("why", str(waits)).stdout
        assert client.devices().bookings[0].gpu_indices == (0,)
        assert client.get(runs).state is JobState.RUNNING

        d.kill9()
        d.start()
        assert client.get(waits).state is JobState.PENDING
        assert [one.name for one in client.bookings().bookings] == ["claim_1"]

        d.rlq("claim", "--release")
        d.until_state(client, waits, JobState.RUNNING)


def test_before_maintenance_only_what_ends_in_time_starts(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        booked = client.reserve(
            maintenance=True, starts_at=time.time() + 3600, ends_at=time.time() + 7200
        )
        listed = json.loads(d.rlq("reserve", "list", "--json").stdout)
        assert [one["name"] for one in listed["bookings"]] == [booked.name]
        endless = client.submit(["sleep", "600"], gpus=0)
        ends = client.submit(["sleep", "600"], gpus=0, time_limit="30m")
        d.until_state(client, ends, JobState.RUNNING)
        summary = client.why(endless).summary
        assert "the machine, which is under maintenance from" in summary
        assert "without a time limit" in summary
        d.rlq("reserve", "cancel", booked.name)
        d.until_state(client, endless, JobState.RUNNING)
