"""How jobs end, end to end: cancelled, timed out, out of memory; and what they report before."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from tests.support.rlqd import Rlqd
from tests.support.waiting import wait_until

from rlq.protocol.states import JobState

#: Daemonises itself twice over, in a session of its own, with an environment of its own, deaf
#: to SIGTERM; writes its pid to argv[1].
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        for fd in range(3):
            os.close(fd)
        if os.environ:
            os.execve(sys.executable, [sys.executable, "-c", CODE, sys.argv[1]], {})
    os._exit(0)
"""
DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "a") as pids:
    pids.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
TREE = (
    f"CODE = {DEAF!r}\n{DAEMON}\n"
    "os.execv(sys.executable, [sys.executable, '-c', CODE, sys.argv[1]])"
)


WORK = "while :; do sleep 0.02; done"


def pids_in(path: Path, count: int) -> list[int]:
    return wait_until(
        lambda: [int(x) for x in path.read_text().split()] if path.exists() else [],
        lambda pids: len(pids) == count,
    )


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("now", [True, False], ids=["now", "after its grace"])
def test_cancel_takes_the_whole_tree_daemonised_grandchildren_included(
    tmp_path: Path, now: bool
) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        out = tmp_path / "pids"
        grace = "1h" if now else "300ms"
        job = client.submit([sys.executable, "-c", TREE, str(out)], grace=grace)
        pids = pids_in(out, 2)
        assert len({os.getsid(pid) for pid in pids}) == 2, "one has left the session"
        [changed] = client.cancel(job, now=now)
        assert changed.ok
        done = d.until_state(client, job, JobState.CANCELLED)
        assert done.signal == 9
        assert not [pid for pid in pids if is_alive(pid)]
        assert d.marked_processes() == []


def test_a_job_that_ends_takes_its_daemons_with_it(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        out = tmp_path / "pids"
        code = f"CODE = {DEAF!r}\n{DAEMON}\n" + (
            "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(3)"
        )
        job = client.submit([sys.executable, "-c", code, str(out)])
        [left] = pids_in(out, 1)
        done = d.until_state(client, job, JobState.FAILED)
        assert done.exit_code == 3
        assert not is_alive(left)


def test_the_grace_period_is_for_saying_goodbye(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint"
    script = f"trap 'echo saved > {saved}; exit 0' TERM; touch {tmp_path}/up; {WORK}"
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit(["sh", "-c", script], grace="1h")
        wait_until((tmp_path / "up").exists, bool)
        client.cancel(job)
        done = d.until_state(client, job, JobState.CANCELLED)
        assert saved.read_text() == "saved\n"
        assert (done.exit_code, done.signal) == (0, None)


def test_a_second_cancel_with_now_ends_the_grace_period(tmp_path: Path) -> None:
    script = f"trap '' TERM; touch {tmp_path}/up; {WORK}"
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit(["sh", "-c", script], grace="1h")
        wait_until((tmp_path / "up").exists, bool)
        d.rlq("cancel", str(job))
        stopping = d.until_state(client, job, JobState.COMPLETING)
        assert "SIGKILL in" in stopping.reason
        d.rlq("cancel", "--now", str(job))
        done = d.until_state(client, job, JobState.CANCELLED)
        assert done.signal == 9


def test_the_time_limit_asks_and_then_kills(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint"
    with Rlqd(tmp_path) as d:
        client = d.client()
        polite = client.submit(
            [
                "sh",
                "-c",
                f"trap 'echo saved > {saved}; exit 0' TERM; {WORK}",
            ],
            time_limit="1s",
            grace="1h",
        )
        deaf = client.submit(
            ["sh", "-c", f"trap '' TERM; {WORK}"],
            time_limit="1s",
            grace="300ms",
        )
        quick = client.submit(["true"], time_limit="1h")
        first, second, third = client.wait([polite, deaf, quick], timeout=60)
        assert (first.state, first.exit_code) == (JobState.TIMEOUT, 0)
        assert saved.read_text() == "saved\n"
        assert (second.state, second.signal) == (JobState.TIMEOUT, 9)
        assert "time limit" in second.reason
        assert third.state is JobState.COMPLETED
        assert d.rlq("wait", str(deaf), check=False).returncode != 0


def test_a_paused_job_stands_still_and_can_be_cancelled(tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    script = f"while :; do echo x >> {ticks}; sleep 0.01; done"
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit(["sh", "-c", script])
        wait_until(ticks.exists, bool)
        d.rlq("pause", str(job))
        paused = d.until_state(client, job, JobState.SUSPENDED)
        assert paused.pid is not None
        status = Path(f"/proc/{paused.pid}/stat")
        wait_until(
            lambda: status.read_text().rpartition(")")[2].split()[0], lambda state: state == "T"
        )
        size = ticks.stat().st_size
        d.kill9()  # a restart must not wake it
        d.start()
        client = d.client()
        assert client.get(job).state is JobState.SUSPENDED
        assert ticks.stat().st_size == size

        d.rlq("resume", str(job))
        d.until_state(client, job, JobState.RUNNING)
        wait_until(lambda: ticks.stat().st_size, lambda now: now > size)
        client.pause(job)
        d.until_state(client, job, JobState.SUSPENDED)
        client.cancel(job)
        d.until_state(client, job, JobState.CANCELLED)


TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    model.learn(total_timesteps=700_000)
"""
TORCH_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
XLA_OOM = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17 bytes.\n"
NUMPY_OOM = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 5.61 GiB for an array\n"


@pytest.mark.parametrize(
    ("text", "gpus", "memory"),
    [
        (TORCH_OOM, 1, "GPU"),
        (XLA_OOM, 1, "GPU"),
        (NUMPY_OOM, 0, "host"),
        ("MemoryError\n", 0, "host"),
    ],
    ids=["torch", "xla", "numpy", "python"],
)
def test_running_out_of_memory_is_told_as_the_reason(
    tmp_path: Path, text: str, gpus: int, memory: str
) -> None:
    code = f"import sys; sys.stderr.write({TRACEBACK + text!r}); sys.exit(1)"
    with Rlqd(tmp_path, gpus=[{}]) as d:
        client = d.client()
        out = client.submit([sys.executable, "-c", code], gpus=gpus)
        caught = code.replace("exit(1)", "exit(0)")
        survived = client.submit([sys.executable, "-c", caught], gpus=gpus)
        done, fine = client.wait([out, survived], timeout=60)
        assert (done.state, done.exit_code) == (JobState.OUT_OF_MEMORY, 1)
        assert f"{memory} memory" in done.reason
        assert fine.state is JobState.COMPLETED, "it has caught the error and gone on"
        shown = json.loads(d.rlq("show", "--json", str(out)).stdout)
        assert "OUT_OF_MEMORY" in json.dumps(shown)


def test_what_a_job_reports_is_shown_with_its_rate_and_end(tmp_path: Path) -> None:
    code = """
import os, sys, time, rlq.job
step = 0
while not os.path.exists(sys.argv[1]):
    step += 10
    rlq.job.report(step, 100_000, loss=0.5)
    time.sleep(0.05)
rlq.job.report(100_000, 100_000, loss=0.25)
"""
    flag = tmp_path / "end"
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit([sys.executable, "-c", code, str(flag)])
        seen = wait_until(
            lambda: client.get(job).progress,
            lambda progress: progress is not None and progress.steps_per_s is not None,
        )
        assert seen is not None
        assert seen.steps_per_s is not None
        assert seen.total == 100_000
        assert 0 < seen.step < 100_000
        assert 0 < seen.steps_per_s < 1000
        assert seen.eta_s is not None
        assert seen.eta_s == pytest.approx((100_000 - seen.step) / seen.steps_per_s, rel=0.01)
        assert seen.metrics == {"loss": 0.5}
        assert seen.reported_at <= time.time()
        assert (
            "100,000" in d.rlq("show", str(job)).stdout
            or "100000" in d.rlq("show", str(job)).stdout
        )

        flag.touch()
        done = d.until_state(client, job, JobState.COMPLETED)
        assert done.progress is not None
        assert (done.progress.step, done.progress.metrics) == (100_000, {"loss": 0.25})


def test_a_report_on_somebody_elses_job_is_dropped(tmp_path: Path) -> None:
    """By attempt: an old attempt's straggler does not speak for the new one."""
    code = "import rlq.job, time; rlq.job.report(1, 10); time.sleep(600)"
    with Rlqd(tmp_path) as d:
        client = d.client()
        job = client.submit(["env", "RLQ_ATTEMPT=7", sys.executable, "-c", code], cores=1)
        other = client.submit([sys.executable, "-c", code], cores=1)
        wait_until(lambda: client.get(other).progress, lambda progress: progress is not None)
        assert client.get(job).progress is None
