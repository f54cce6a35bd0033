"""CUDA MPS, against a fake control daemon.  Nothing here has seen a GPU (docs/mps.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_mps import CLIENT, FakeMps
from tests.support.rlqd import GPU_JOB, Rlqd, configured
from tests.support.waiting import wait_until

from rlq.client import Client
from rlq.errors import UsageError
from rlq.protocol.messages import Gpu, JobSpec, Resources
from rlq.protocol.states import JobState
from rlqd import config as configuration
from rlqd.__main__ import mps_folders
from rlqd.adapters import mps as adapter
from rlqd.adapters.mps import Mps, MpsReading, MpsServer, Release, Released, Which
from rlqd.core.model import Charge, GpuId, JobId, Placement
from rlqd.readings import GpuProcessReading, GpuReading, GpusReading
from rlqd.shell import launching
from rlqd.shell import mps as shell
from rlqd.shell.mps import NOWHERE, MpsJobs

UID = os.getuid()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    fake = FakeMps(tmp_path / "mps")
    for name, value in fake.env.items():
        monkeypatch.setenv(name, value)
    return fake


@pytest.fixture
def watch(fake: FakeMps) -> Iterator[Callable[..., Mps]]:
    """An `Mps` on the fake, with its thread running."""
    started: list[Mps] = []

    def start(**options: Any) -> Mps:
        started.append(Mps(fake.pipe_dir, fake.log_dir, **options))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def sleeper() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Python processes that do what they are told and then wait; they say when they wait."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str = "") -> subprocess.Popen[str]:
        waiting = f"import signal\n{code}\nprint('waits', flush=True)\nsignal.pause()"
        started.append(
            subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, text=True)
        )
        out = started[-1].stdout
        assert out is not None
        assert out.readline() == "waits\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read(mps: Mps) -> MpsReading:
    """A reading that is taken after this call."""
    before = mps.reading()
    mps.ask()
    found = wait_until(mps.reading, lambda now: now is not None and now is not before)
    assert found is not None
    return found


def release(mps: Mps, root_pid: int, which: Which = Which.ALL) -> Released:
    mps.release(Release(job=7, attempt=1, root_pid=root_pid, which=which))
    return wait_until(mps.drain, bool)[0]


# ---- talking to the control daemon -------------------------------------------------


def test_the_servers_and_their_clients_are_read(
    fake: FakeMps, watch: Callable[..., Mps], sleeper: Callable[[], subprocess.Popen[str]]
) -> None:
    fake.run()
    client = sleeper().pid
    fake.attach(client)
    server = MpsServer(pid=os.getpid(), uid=UID, status="ACTIVE", clients=frozenset({client}))
    found = read(watch())
    assert (found.problem, found.servers) == ("", (server,))
    assert found.clients == {client}


def test_no_control_daemon_is_a_problem_in_plain_words(
    fake: FakeMps, watch: Callable[..., Mps]
) -> None:
    found = read(watch())
    assert found.problem == (
        "the CUDA MPS control daemon cannot be reached: Cannot find MPS control daemon process"
    )
    assert not found.servers


def test_a_machine_without_the_program_is_told_so(
    watch: Callable[..., Mps], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-cuda-mps-control is not on the daemon's PATH" in read(watch()).problem
    assert "not on the daemon's PATH" in read(watch(manage=True)).problem


def test_a_control_daemon_that_hangs_is_given_up_and_tried_again(
    fake: FakeMps, watch: Callable[..., Mps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "ASK_S", 0.5)
    fake.run()
    fake.hang("get_server_list")
    mps = watch()
    assert "does not answer: `get_server_list`" in read(mps).problem
    fake.hang()
    monkeypatch.setattr(adapter, "ASK_S", 30)
    assert read(mps).problem == ""


def test_one_that_is_busy_with_somebody_else_is_asked_again(
    fake: FakeMps, watch: Callable[..., Mps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "REFUSED_PAUSE_S", 0)
    fake.run()
    fake.refuse(2)
    mps = watch()
    assert read(mps).problem == ""
    fake.refuse(100)
    assert "Cannot send command" in read(mps).problem


def test_manage_starts_the_control_daemon_where_none_answers(
    fake: FakeMps, watch: Callable[..., Mps], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The GPUs of this process are not to be the GPUs of everybody's server.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert "CUDA_VISIBLE_DEVICES" not in adapter.Control(Path("/a"), Path("/b")).environment
    mps = watch(manage=True)
    assert read(mps).problem == ""
    assert fake.runs_with() == "-d"
    mps.stop()
    again = watch(manage=True)
    assert read(again).problem == ""
    again.stop()
    assert fake.runs_with() == "-d", "it outlives the daemon that started it"
    assert fake.calls().count("-d") == 1


def test_manage_for_several_users_asks_for_a_server_of_several_users(
    fake: FakeMps, watch: Callable[..., Mps]
) -> None:
    assert read(watch(manage=True, multi_user=True)).problem == ""
    assert fake.runs_with() == "-d -multiuser-server"


def test_root_makes_a_pipe_folder_that_every_users_server_can_use(
    fake: FakeMps, watch: Callable[..., Mps]
) -> None:
    assert read(watch(manage=True)).problem == ""
    open_to_all = fake.pipe_dir.stat().st_mode & 0o7777 == 0o1777
    assert open_to_all is (UID == 0)


def test_a_control_daemon_that_cannot_be_started_is_not_started_all_the_time(
    fake: FakeMps, watch: Callable[..., Mps]
) -> None:
    fake.fail("-d")
    mps = watch(manage=True)
    assert "cannot be started: -d failed" in read(mps).problem
    assert "Cannot find MPS control daemon" in read(mps).problem
    assert fake.calls().count("-d") == 1


# ---- taking a job off the server ---------------------------------------------------


def test_only_the_jobs_own_clients_are_terminated(
    fake: FakeMps, watch: Callable[..., Mps], sleeper: Callable[[], subprocess.Popen[str]]
) -> None:
    fake.run()
    ours, another = sleeper(), sleeper()
    fake.attach(ours.pid)
    fake.attach(another.pid)
    mps = watch()
    assert release(mps, ours.pid) == Released(
        order=Release(job=7, attempt=1, root_pid=ours.pid, which=Which.ALL),
        terminated=(ours.pid,),
    )
    assert read(mps).clients == {another.pid}
    ours.kill()
    ours.wait()
    assert fake.status() == "ACTIVE"
    another.kill()
    another.wait()
    assert fake.status() == "FAULT", "the fake does not do what termination is there to prevent"
    assert read(mps).servers[0].status == "FAULT"


def test_a_whole_tree_is_taken_off(fake: FakeMps, watch: Callable[..., Mps]) -> None:
    fake.run()
    shell_ = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    assert shell_.stdout is not None
    child = int(shell_.stdout.readline())
    fake.attach(child)
    try:
        assert release(watch(), shell_.pid).terminated == (child,)
    finally:
        os.kill(child, 9)
        shell_.communicate()


def test_before_sigterm_a_process_that_handles_it_keeps_its_gpu(
    fake: FakeMps, watch: Callable[..., Mps], sleeper: Callable[[str], subprocess.Popen[str]]
) -> None:
    """It may want to save what it has there; SIGKILL, later, is another matter."""
    fake.run()
    saves = sleeper("signal.signal(signal.SIGTERM, lambda *_: None)")
    dies = sleeper("")
    for process in (saves, dies):
        fake.attach(process.pid)
    mps = watch()
    assert release(mps, saves.pid, Which.UNHANDLED).terminated == ()
    assert release(mps, dies.pid, Which.UNHANDLED).terminated == (dies.pid,)
    assert release(mps, saves.pid, Which.ALL).terminated == (saves.pid,)


def test_a_paused_client_is_woken_to_be_terminated(
    fake: FakeMps, watch: Callable[..., Mps], sleeper: Callable[[], subprocess.Popen[str]]
) -> None:
    fake.run()
    paused = sleeper()
    fake.attach(paused.pid)
    paused.send_signal(19)  # SIGSTOP

    def state() -> str:
        return Path(f"/proc/{paused.pid}/stat").read_text().rpartition(")")[2].split()[0]

    wait_until(state, lambda found: found == "T")
    assert release(watch(), paused.pid).terminated == (paused.pid,)
    assert state() != "T"


def test_a_termination_that_fails_or_hangs_is_told(
    fake: FakeMps,
    watch: Callable[..., Mps],
    sleeper: Callable[[], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.run()
    client = sleeper().pid
    fake.attach(client)
    mps = watch()
    fake.fail("terminate_client")
    assert "terminate_client failed" in release(mps, client).problem
    monkeypatch.setattr(adapter, "ASK_S", 0.5)
    fake.hang("terminate_client")
    assert "does not answer" in release(mps, client).problem


# ---- what a job is given -----------------------------------------------------------


class Still(Mps):
    """Reads what it is told; has no thread and no control daemon."""

    def __init__(self, *servers: MpsServer, problem: str = "", at_ms: int | None = None) -> None:
        super().__init__(Path("/pipes"), Path("/logs"))
        self.orders: list[Release] = []
        self.set(*servers, problem=problem, at_ms=at_ms)

    def set(self, *servers: MpsServer, problem: str = "", at_ms: int | None = None) -> None:
        at_ms = adapter._now_ms() if at_ms is None else at_ms
        self._reading = MpsReading(taken_at_ms=at_ms, problem=problem, servers=servers)

    def release(self, order: Release) -> None:
        self.orders.append(order)


def jobs_on(
    mps: Mps, *, required: bool = True, multi_user: bool = False, cap_sm: bool = True
) -> MpsJobs:
    return MpsJobs(mps=mps, required=required, multi_user=multi_user, cap_sm=cap_sm)


def spec(
    env_given: tuple[str, ...] = (), sm_pct: int | None = None, gpu_mem_mib: int | None = None
) -> JobSpec:
    resources = Resources(sm_pct=sm_pct, gpu_mem_mib=gpu_mem_mib)
    return JobSpec(argv=("true",), cwd="/", env_given=env_given, resources=resources)


def test_a_job_is_held_to_what_it_declared_and_to_nothing_else() -> None:
    jobs = jobs_on(Still())
    where = {"CUDA_MPS_PIPE_DIRECTORY": "/pipes", "CUDA_MPS_LOG_DIRECTORY": "/logs"}
    unset = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": None,
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": None,
    }
    assert jobs.variables(JobId(1), UID, spec(), [0]) == where | unset
    assert jobs.variables(JobId(2), UID, spec(sm_pct=30, gpu_mem_mib=4096), [0]) == where | {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
    }
    uncapped = jobs_on(Still(), cap_sm=False).variables(JobId(1), UID, spec(sm_pct=30), [0])
    assert uncapped["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] is None


def test_the_memory_limit_names_a_gpu_by_the_programs_number_and_by_the_machines() -> None:
    given = jobs_on(Still()).variables(JobId(1), UID, spec(gpu_mem_mib=100), [2, 3])
    assert given["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=100M,1=100M,2=100M,3=100M"


def test_another_users_job_runs_beside_the_server_not_behind_it() -> None:
    """The control daemon would keep it waiting in cuInit until the others have ended."""
    taken = MpsServer(pid=10, uid=UID + 1, status="ACTIVE", clients=frozenset({11}))
    jobs = jobs_on(Still(taken))
    assert jobs.variables(JobId(1), UID, spec(), [0])["CUDA_MPS_PIPE_DIRECTORY"] == NOWHERE
    assert "another user's" in jobs.remark(JobId(1))
    idle = MpsServer(pid=10, uid=UID + 1, status="ACTIVE")
    jobs = jobs_on(Still(idle))
    assert jobs.variables(JobId(1), UID, spec(), [0])["CUDA_MPS_PIPE_DIRECTORY"] == "/pipes"
    # A job that has only just been started is no client yet, and counts all the same.
    second = jobs.variables(JobId(2), UID + 1, spec(), [0])
    assert second["CUDA_MPS_PIPE_DIRECTORY"] == NOWHERE
    jobs.forget(JobId(1))
    third = jobs.variables(JobId(3), UID + 1, spec(), [0])
    assert third["CUDA_MPS_PIPE_DIRECTORY"] == "/pipes"


def test_a_server_of_several_users_takes_them_all() -> None:
    root = MpsServer(pid=10, uid=0, status="ACTIVE", clients=frozenset({11}))
    jobs = jobs_on(Still(root), multi_user=True)
    for job, uid in ((1, 1000), (2, 1001)):
        given = jobs.variables(JobId(job), uid, spec(), [0])
        assert given["CUDA_MPS_PIPE_DIRECTORY"] == "/pipes"


def environment(mps: dict[str, str | None], env_given: tuple[str, ...] = ()) -> dict[str, str]:
    charge = Charge(gpu_mem_mib=100, sm_pct=10, cores=1, mem_mib=100)
    return launching.environment(
        spec(env_given),
        {"CUDA_MPS_PIPE_DIRECTORY": "/mine", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "5"},
        Placement(gpus=(GpuId("GPU-a"),), cores=(0,), charge=charge),
        queue={},
        configured={},
        gpu_mem_mib_total=40_000,
        machine_has_gpus=True,
        mps=mps,
    )


def test_off_leaves_the_variables_of_mps_as_they_were_submitted() -> None:
    found = environment({})
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == "/mine"
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "5"
    assert configuration.Config().mps.mode == "off"


def test_inherited_variables_are_overridden_and_given_ones_are_not() -> None:
    ours = jobs_on(Still()).variables(JobId(1), UID, spec(), [0])
    found = environment(ours)
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == "/pipes"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in found
    given = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    jobs = jobs_on(Still())
    found = environment(jobs.variables(JobId(1), UID, spec(given), [0]), given)
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == "/mine"
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "5"
    assert "--env" in jobs.remark(JobId(1))


def test_the_folders_are_nvidias_or_the_daemons_own(tmp_path: Path) -> None:
    use = configuration.Mps(mode="use")
    assert mps_folders(use, tmp_path) == (Path("/tmp/nvidia-mps"), Path("/var/log/nvidia-mps"))
    manage = configuration.Mps(mode="manage", log_dir="/logs")
    assert mps_folders(manage, tmp_path) == (tmp_path / "mps" / "pipe", Path("/logs"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('mode = "on"', 'mps.mode is "on", and must be one of "off", "use", "manage"'),
        ('pipe_dir = "mps"', 'mps.pipe_dir is "mps"'),
        ("required = 1", "mps.required is 1, and must be true or false"),
    ],
)
def test_a_wrong_value_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        configuration.parse(f"[mps]\n{text}", "rlqd.toml")
    assert message in caught.value.message


# ---- whether a job is on it --------------------------------------------------------


def on_gpu(*pids: int, at_ms: int) -> GpusReading:
    processes = tuple(GpuProcessReading(pid=pid, mem_mib=100, sm_pct=1) for pid in pids)
    gpu = GpuReading(uuid="GPU-a", index=0, name="A100", processes=processes)
    return GpusReading(taken_at_ms=at_ms, gpus=(gpu,))


def test_a_job_is_no_client_only_by_a_reading_taken_after_it_was_on_the_gpu() -> None:
    now = adapter._now_ms()
    mps = Still(at_ms=now)
    jobs = jobs_on(mps)
    jobs.variables(JobId(7), UID, spec(), [0])
    owner = {70: JobId(7)}.get
    jobs.look(on_gpu(70, at_ms=now), owner)
    assert (jobs.remark(JobId(7)), jobs.is_client(70)) == ("", None)
    mps.set(at_ms=now + 1)
    jobs.look(on_gpu(70, at_ms=now), owner)
    assert jobs.remark(JobId(7)).startswith("runs without CUDA MPS: its process 70 is on a GPU")
    assert jobs.is_client(70) is False
    assert jobs.problems() == ["without CUDA MPS: job 7 (`rlq show ID` tells why)"]
    jobs.forget(JobId(7))
    assert jobs.problems() == []


def test_a_helper_that_only_draws_does_not_make_its_job_a_stray() -> None:
    server = MpsServer(pid=10, uid=UID, clients=frozenset({70}))
    mps = Still(server, at_ms=adapter._now_ms())
    jobs = jobs_on(mps)
    owner = {70: JobId(7), 71: JobId(7)}.get
    jobs.look(on_gpu(70, 71, 99, at_ms=0), owner)
    assert (jobs.remark(JobId(7)), jobs.is_client(70)) == ("", True)


def test_nothing_is_said_of_jobs_while_the_control_daemon_does_not_answer() -> None:
    jobs = jobs_on(Still(problem="gone"))
    jobs.look(on_gpu(70, at_ms=0), {70: JobId(7)}.get)
    assert jobs.remark(JobId(7)) == ""
    assert jobs.problems() == ["gone: no job starts on a GPU"]


def test_a_failed_server_and_an_old_reading_close_the_gpus() -> None:
    fault = MpsServer(pid=10, uid=UID, status="FAULT")
    assert "has failed" in jobs_on(Still(fault)).closes_gpus()
    assert jobs_on(Still(fault), required=False).closes_gpus() == ""
    old = Still(at_ms=adapter._now_ms() - shell.STALE_MS - 1000)
    assert "has not answered for 6" in jobs_on(old).closes_gpus()
    unread = Mps(Path("/pipes"), Path("/logs"))
    assert jobs_on(unread, required=False).closes_gpus(), "nobody knows yet"


# ---- signals -----------------------------------------------------------------------


def kill(which: Which = Which.ALL) -> Release:
    return Release(job=7, attempt=1, root_pid=70, which=which)


def test_a_signal_waits_for_the_clients_and_is_sent_once() -> None:
    mps = Still()
    jobs = jobs_on(mps)
    jobs.variables(JobId(7), UID, spec(), [0])
    sent: list[str] = []
    jobs.before(kill(), lambda: sent.append("kill"))
    jobs.before(kill(), lambda: sent.append("kill again"))
    assert (sent, mps.orders) == ([], [kill()])
    mps._released.append(Released(order=kill(), terminated=(70,)))
    jobs.take()
    assert sent == ["kill"]
    jobs.before(kill(), lambda: sent.append("later"))
    assert sent == ["kill", "later"], "its clients are off: nothing to wait for"
    assert len(mps.orders) == 1


def test_a_signal_is_sent_when_the_control_daemon_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    mps = Still(MpsServer(pid=10, uid=UID, clients=frozenset({70})))
    jobs = jobs_on(mps)
    jobs.variables(JobId(7), UID, spec(), [0])
    sent: list[str] = []
    jobs.before(kill(), lambda: sent.append("kill"))
    jobs.send_due()
    assert sent == []
    assert list(jobs.next_due())
    monkeypatch.setattr(shell, "_now_ms", lambda: adapter._now_ms() + shell.RELEASE_MS)
    jobs.send_due()
    assert sent == ["kill"]
    assert "may have been an MPS client" in jobs.problems()[0]
    mps._released.append(Released(order=kill()))
    jobs.take()
    assert sent == ["kill"], "the answer that came too late"
    mps.set(MpsServer(pid=20, uid=UID))
    jobs.look(on_gpu(at_ms=0), lambda pid: None)
    assert jobs.problems() == [], "another server: the damage is gone"


def test_a_job_that_never_was_on_mps_is_signalled_at_once() -> None:
    mps = Still(problem="gone")
    jobs = jobs_on(mps, required=False)
    jobs.variables(JobId(7), UID, spec(), [0])
    sent: list[str] = []
    jobs.before(kill(), lambda: sent.append("kill"))
    assert (sent, mps.orders) == (["kill"], [])


# ---- end to end --------------------------------------------------------------------


def daemon(tmp_path: Path, fake: FakeMps, **mps: object) -> Rlqd:
    folders = {"pipe_dir": str(fake.pipe_dir), "log_dir": str(fake.log_dir)}
    return Rlqd(tmp_path, config=configured(mps={**folders, "mode": "use", **mps}), gpus=[{}])


def submit(d: Rlqd, client: Client, env: dict[str, str] | None = None, **options: Any) -> int:
    argv = [sys.executable, "-c", CLIENT + GPU_JOB, "600"]
    return client.submit(argv, env=d.user_env | (env or {}), gpus=1, **options)


def until_on_gpu(client: Client, job_id: int, mps: bool) -> Gpu:
    def of_job(gpu: Gpu) -> list[bool | None]:
        return [p.mps for p in gpu.processes if p.job == job_id]

    return wait_until(lambda: client.devices().gpus[0], lambda gpu: of_job(gpu) == [mps])


def test_jobs_go_through_mps_and_are_cancelled_without_harm(tmp_path: Path, fake: FakeMps) -> None:
    fake.run()
    with daemon(tmp_path, fake) as d:
        client = d.client()
        for now in (True, False):
            job_id = submit(d, client)
            until_on_gpu(client, job_id, mps=True)
            assert client.get(job_id).reason == ""
            client.cancel([job_id], now=now)
            d.until_state(client, job_id, JobState.CANCELLED)
            assert fake.status() == "ACTIVE"
        terminated = [call for call in fake.calls() if call.startswith("terminate_client")]
        assert len(terminated) == 2
        assert client.status().problems == ()


def test_gpu_jobs_wait_for_the_control_daemon_and_others_do_not(
    tmp_path: Path, fake: FakeMps
) -> None:
    with daemon(tmp_path, fake) as d:
        client = d.client()
        job_id = submit(d, client)
        other = client.submit(["true"], env=d.user_env, gpus=0)
        d.until_state(client, other, JobState.COMPLETED)
        said = client.why(job_id)
        assert said.state is JobState.PENDING
        assert "MPS control daemon cannot be reached" in said.summary
        assert "no job starts on a GPU" in d.rlq("status").stderr
        fake.run()
        d.until_state(client, job_id, JobState.RUNNING)
        until_on_gpu(client, job_id, mps=True)


def test_not_required_jobs_start_without_mps_and_say_so(tmp_path: Path, fake: FakeMps) -> None:
    with daemon(tmp_path, fake, required=False) as d:
        client = d.client()
        job_id = submit(d, client)
        job = d.until_state(client, job_id, JobState.RUNNING)
        assert job.reason.startswith("runs without CUDA MPS: when it started, the CUDA MPS")
        assert "runs without CUDA MPS" in d.rlq("show", str(job_id)).stdout
        problems = client.status().problems
        assert any("jobs start without MPS" in said for said in problems), problems
        assert any(f"without CUDA MPS: job {job_id}" in said for said in problems), problems
        client.cancel([job_id], now=True)
        d.until_state(client, job_id, JobState.CANCELLED)


def test_a_job_that_misses_mps_is_shown(tmp_path: Path, fake: FakeMps) -> None:
    fake.run()
    with daemon(tmp_path, fake) as d:
        client = d.client()
        job_id = submit(d, client, env={"FAKE_MPS_MISSES": "1"})
        until_on_gpu(client, job_id, mps=False)
        assert "is no client of the MPS server" in client.get(job_id).reason
        assert f"without CUDA MPS: job {job_id}" in d.rlq("status").stderr
        assert any(f"job {job_id}" in said for said in client.status().problems)


def test_a_client_killed_by_others_closes_the_gpus_until_it_is_over(
    tmp_path: Path, fake: FakeMps
) -> None:
    fake.run()
    with daemon(tmp_path, fake) as d:
        client = d.client()
        job_id = submit(d, client)
        gpu = until_on_gpu(client, job_id, mps=True)
        (pid,) = (p.pid for p in gpu.processes if p.job == job_id)
        os.kill(pid, 9)
        d.until_state(client, job_id, JobState.FAILED)
        wait_until(client.status, lambda now: any("has failed" in p for p in now.problems))
        (fake.pipe_dir / "clients" / str(pid)).unlink()
        wait_until(client.status, lambda now: now.problems == ())


def test_managed_the_control_daemon_outlives_the_queues(tmp_path: Path, fake: FakeMps) -> None:
    with daemon(tmp_path, fake, mode="manage") as d:
        client = d.client()
        job_id = submit(d, client)
        d.until_state(client, job_id, JobState.RUNNING)
        until_on_gpu(client, job_id, mps=True)
        d.kill9()
        d.start()
        client = d.client()
        until_on_gpu(client, job_id, mps=True)
        client.cancel([job_id], now=True)
        d.until_state(client, job_id, JobState.CANCELLED)
        assert fake.status() == "ACTIVE", "found again, it is still taken off before the kill"
        assert fake.calls().count("-d") == 1
