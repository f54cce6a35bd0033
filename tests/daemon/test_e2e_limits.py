"""Limits of users and groups, through the real command and daemon."""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.rlqd import QUIET_CONFIG, Rlqd
from tests.support.waiting import wait_until

from rlq.errors import RefusedError, UnavailableError
from rlq.protocol.states import JobState

SLEEP = ["sleep", "600"]
ME = pwd.getpwuid(os.geteuid()).pw_name
MY_GROUP = grp.getgrgid(pwd.getpwuid(os.geteuid()).pw_gid).gr_name


def test_limits_hold_are_explained_and_change_with_the_configuration(tmp_path: Path) -> None:
    config = f"""{QUIET_CONFIG}
[limits]
max_submit_jobs = 3
[limits.users.{ME}]
max_jobs = 1
[limits.users.nobody-of-that-name]
max_jobs = 1
[limits.groups.{MY_GROUP}]
cores = 2
"""
    with Rlqd(tmp_path, config=config) as d:
        assert "limits.users.nobody-of-that-name: there is none" in d.log()
        client = d.client()
        first, second, third = (client.submit(SLEEP) for _ in range(3))
        d.until_state(client, first, JobState.RUNNING)
        told = f"user {ME} has 1 of at most 1 running job"
        assert told in wait_until(lambda: d.rlq("why", str(second)).stdout, bool)
        said = json.loads(d.rlq("why", "--json", str(second)).stdout)
        assert [(at["resource"], at["used"], at["limit"]) for at in said["limits"]] == [
            ("jobs", 1, 1)
        ]
        assert told in d.rlq("list", "--json").stdout

        full = d.rlq("submit", "--", "true", check=False)
        assert full.returncode == UnavailableError.exit_code
        assert f"user {ME} has 3 of at most 3 jobs that wait or run" in full.stderr

        text = config.replace("max_jobs = 1", "").replace("max_submit_jobs = 3", "")
        d.config_path.write_text(text)
        assert d.process is not None
        os.kill(d.process.pid, signal.SIGHUP)
        d.until_state(client, second, JobState.RUNNING)
        assert "group " in wait_until(lambda: client.why(third).summary, bool)
        big = d.rlq("submit", "--cores", "3", "--", "true", check=False)
        assert big.returncode == RefusedError.exit_code
        assert f"group {MY_GROUP} may have at most 2 cores, and this takes 3" in big.stderr


def test_a_job_has_the_resource_limits_of_the_shell_that_submitted_it(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        shell = 'ulimit -Sn 321; ulimit -c 0; exec "$0" "$@"'
        rlq = [sys.executable, "-m", "rlq", "submit", "-q", "--log", str(tmp_path / "log")]
        done = subprocess.run(
            ["sh", "-c", shell, *rlq, "--", "sh", "-c", "ulimit -Sn; ulimit -Hc"],
            env=d.user_env,
            capture_output=True,
            text=True,
            check=True,
        )
        [job] = client.wait(int(done.stdout), timeout=30)
        assert job.state is JobState.COMPLETED
        assert (tmp_path / "log").read_text().split() == ["321", "0"]
