"""Every verb against the fake daemon: what it sends, prints and exits with."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.conftest import Invoke
from tests.support.fake_daemon import HOST, ME, FakeDaemon, make_job

from rlq.cli import VERBS
from rlq.protocol import messages as m
from rlq.protocol.states import JobState


def some_jobs(daemon: FakeDaemon) -> None:
    now = time.time()
    daemon.add(
        make_job(
            1,
            JobState.RUNNING,
            name="sac-Humanoid-v5-s0",
            attempt=1,
            started_at=now - 100,
            placement=m.Placement(gpus=("GPU-a",), gpu_indices=(0,), cores=(0, 1, 2)),
            progress=m.Progress(step=440, total=1000, steps_per_s=61.2, eta_s=9.0),
            log_path=str(daemon.path.parent / "1.log"),
        ),
        make_job(2, name="waits", reason="cores: needs 4, 2 free"),
        make_job(3, JobState.FAILED, exit_code=3, started_at=now - 9, ended_at=now - 2, attempt=1),
        make_job(4, JobState.COMPLETED, exit_code=0, started_at=now - 9, ended_at=now - 1),
        make_job(5, JobState.RUNNING, user="bob", uid=ME + 1, started_at=now - 50),
    )


def document(result: Any) -> Any:
    assert result.exit_code in {0, 1, 124}, result.output
    return json.loads(result.stdout)


# ---- submit ------------------------------------------------------------------------


def test_submit_sends_the_command_exactly_and_prints_its_id(
    daemon: FakeDaemon, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("submit", "--", "echo", "--cores", "a  b", "", "--", "x\ny", "é")
    assert (result.exit_code, result.stdout) == (0, "1\n")
    [(spec, env)] = daemon.submitted
    assert spec.argv == ("echo", "--cores", "a  b", "", "--", "x\ny", "é")
    assert spec.cwd == str(tmp_path)
    assert env == dict(os.environ)


def test_options_after_the_first_word_belong_to_the_command(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    assert invoke("submit", "--cores", "2", "echo", "--lr", "3", "--cores", "9").exit_code == 0
    [(spec, _)] = daemon.submitted
    assert spec.argv == ("echo", "--lr", "3", "--cores", "9")
    assert spec.resources.cores == 2


def test_every_option_of_submit_arrives(
    daemon: FakeDaemon, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAKEN", "from here")
    result = invoke(
        *("submit", "--gpus", "2", "--gpu-mem", "2G", "--sm", "30%", "--cores", "4"),
        *("--mem", "8G", "--exclusive", "--time-limit", "2h", "--priority", "-5"),
        *("--name", "my job", "--env", "OMP_NUM_THREADS=4", "--env", "TAKEN", "--env", "E="),
        *("--cwd", str(tmp_path), "--log", "%j.log", "--log-max", "100M", "--grace", "5s"),
        *("--requeue", "--hold", "--like", "big sac", "--", "true"),
    )
    assert result.exit_code == 0, result.output
    [(spec, _)] = daemon.submitted
    assert spec == m.JobSpec(
        argv=("true",),
        cwd=str(tmp_path),
        env={"OMP_NUM_THREADS": "4", "TAKEN": "from here", "E": ""},
        umask=spec.umask,
        name="my job",
        resources=m.Resources(
            gpus=2,
            gpu_mem_mib=2048,
            sm_pct=30,
            cores=4,
            mem_mib=8192,
            exclusive=True,
            time_limit_ms=7_200_000,
        ),
        priority=-5,
        grace_ms=5000,
        requeue=True,
        held=True,
        env_given=("OMP_NUM_THREADS", "TAKEN", "E"),
        log_path=f"{tmp_path}/%j.log",
        log_mib_max=100,
        like="big sac",
    )


@pytest.mark.parametrize(("given", "gpus"), [("0", 0), ("1", 1), ("auto", None), ("AUTO", None)])
def test_gpus_are_a_number_or_auto(
    daemon: FakeDaemon, invoke: Invoke, given: str, gpus: int | None
) -> None:
    assert invoke("submit", "--gpus", given, "true").exit_code == 0
    assert daemon.submitted[0][0].resources.gpus == gpus


def test_an_array_is_one_request_with_a_job_for_each_task(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    result = invoke("submit", "--array", "0-2,7", "--name", "sweep", "--env", "A=1", "--", "true")
    assert result.stdout == "1\n2\n3\n4\n"
    assert len(daemon.requests) == 1
    specs = [spec for spec, _ in daemon.submitted]
    assert [spec.name for spec in specs] == ["sweep-0", "sweep-1", "sweep-2", "sweep-7"]
    assert [spec.env["RLQ_ARRAY_TASK_ID"] for spec in specs] == ["0", "1", "2", "7"]
    assert all(spec.env["A"] == "1" and spec.env_given == ("A",) for spec in specs)


def test_a_program_is_looked_for_on_the_path_that_the_job_will_have(
    daemon: FakeDaemon, invoke: Invoke, tmp_path: Path
) -> None:
    program = tmp_path / "only-here"
    program.write_text("#!/bin/sh\n")
    assert invoke("submit", "--env", f"PATH={tmp_path}", "--", "only-here").exit_code == 2
    program.chmod(0o755)
    assert invoke("submit", "--env", f"PATH={tmp_path}", "--", "only-here").exit_code == 0
    assert invoke("submit", "--cwd", str(tmp_path), "--", "./only-here").exit_code == 0
    assert len(daemon.submitted) == 2


def test_a_script_given_without_its_interpreter_gets_the_right_hint(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert "rlq submit -- python train.py" in invoke("submit", "train.py").stderr
    assert "rlq submit -- python ./train.py" in invoke("submit", "./train.py").stderr
    (tmp_path / "train.py").chmod(0o755)
    assert "hint: rlq submit -- ./train.py\n" in invoke("submit", "train.py").stderr


def test_rlq_run_gives_hints_of_its_own_verb(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for words in (["--"], ["--", "no-such-program"], ["--cwd", str(tmp_path), "--", "train.py"]):
        result = invoke("run", *words)
        assert result.exit_code == 2
        assert "rlq run" in result.stderr
        assert "submit" not in result.stderr


def test_a_command_quoted_as_one_word_gets_the_right_hint(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    result = invoke("submit", "sh train.sh --lr 3")
    assert result.exit_code == 2
    assert (
        "hint: do not quote the whole command: rlq submit -- sh train.sh --lr 3\n" in result.stderr
    )
    assert daemon.requests == []


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("nodir/%j", "there is no folder {here}/nodir for the log\nhint: mkdir -p {here}/nodir\n"),
        ("no/%x/%j.log", "there is no folder {here}/no for the log\n"),
        (
            "file.txt/x",
            "{here}/file.txt is not a folder\nhint: name another, such as {here}/%j.log\n",
        ),
        ("file.txt/a/%j", "{here}/file.txt is not a folder\n"),
        ("%q.log", "%q in the log's path {here}/%q.log means nothing\nhint: %j is the job's id"),
    ],
)
def test_a_log_that_could_not_be_written_is_refused(
    daemon: FakeDaemon, invoke: Invoke, tmp_path: Path, log: str, said: str
) -> None:
    (tmp_path / "file.txt").touch()
    result = invoke("submit", "--log", str(tmp_path / log), "--", "true")
    assert result.exit_code == 2
    assert said.format(here=tmp_path) in result.stderr
    assert daemon.requests == []
    assert invoke("submit", "--log", str(tmp_path / "%x-%j-100%.log"), "true").exit_code == 0


def test_a_variable_that_cannot_be_sent_is_left_out_with_a_warning(
    daemon: FakeDaemon, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environb, b"BROKEN", b"\xff")
    result = invoke("submit", "true")
    assert (result.exit_code, result.stdout) == (0, "1\n")
    assert "warning: the variable BROKEN" in result.stderr
    assert "BROKEN" not in daemon.submitted[0][1]


def test_the_daemons_warnings_are_talk_and_its_refusals_are_errors(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    daemon.answers[m.Submit] = m.Submitted(ids=(1,), warnings=("gpu1 is lost",))
    result = invoke("submit", "true")
    assert result.stdout == "1\n"
    assert "warning: gpu1 is lost" in result.stderr
    daemon.answers[m.Submit] = m.Error(kind="refused", message="99 cores", hint="it has 16")
    result = invoke("submit", "true")
    assert result.exit_code == 3
    assert result.stderr == "error: 99 cores\nhint: it has 16\n"
    assert result.stdout == ""


def test_submit_wait_exits_as_the_job_does(daemon: FakeDaemon, invoke: Invoke) -> None:
    def end_at_once(request: m.Request) -> m.Reply:
        assert isinstance(request, m.Wait)
        [(job, _)] = request.selection.ids
        return m.Waited(done=True, jobs=(make_job(job, JobState.FAILED, exit_code=3),))

    daemon.answers[m.Wait] = end_at_once
    result = invoke("submit", "--wait", "true")
    assert result.exit_code == 1
    assert result.stdout == "1\n"
    assert "FAILED, exit code 3" in result.stderr
    result = invoke("submit", "--wait", "--json", "true")
    assert json.loads(result.stdout)["done"] is True


# ---- submit sac --------------------------------------------------------------------


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workload that answers `plan` with what is in the file, and records how it was asked."""
    package = tmp_path / "modules" / "rlq_sac"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import os, pathlib, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / 'asked').write_text('\\0'.join(sys.argv[1:]))\n"
        "exec((here / 'answer').read_text())\n"
    )
    answer = {"cores": 3, "mem_mib": 6500, "gpus": None, "warnings": ["v4 is deprecated"]}
    (package / "answer").write_text(f"print({json.dumps(json.dumps(answer))})")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return package


def test_submit_sac_makes_one_job_for_each_seed_as_the_plan_says(
    daemon: FakeDaemon, invoke: Invoke, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(
        *("submit", "sac", "--algo", "sbx", "--env", "Humanoid-v5", "--steps", "700k"),
        *("--seeds", "0-1", "--n-envs", "2", "--set", "batch_size=512", "--eval-freq", "1e4"),
        *("--priority", "3", "--set-env", "OMP_NUM_THREADS=1", "--like", "sweep"),
    )
    assert (result.exit_code, result.stdout) == (0, "1\n2\n"), result.output
    assert "warning: v4 is deprecated" in result.stderr
    assert len(daemon.requests) == 1
    specs = [spec for spec, _ in daemon.submitted]
    kind = "sac-Humanoid-v5-sbx-n_envs=2-batch_size=512"
    assert [spec.name for spec in specs] == ["sbx-Humanoid-v5-s0", "sbx-Humanoid-v5-s1"]
    for seed, spec in enumerate(specs):
        assert spec.argv[1] == "-P"  # modules of the user's folder do not shadow the workload's
        words = spec.argv[2:]
        assert words[:3] == ("-m", "rlq_sac", "train")
        options = dict(zip(words[3::2], words[4::2], strict=False))
        assert options["--seed"] == str(seed)
        assert f"--out\0{tmp_path}/runs/{kind}-s{seed}" in "\0".join(words)
        assert options["--steps"] == "700000"
        assert options["--eval-freq"] == "10000"
        assert options["--set"] == "batch_size=512"
        assert "--resume" in words
        assert spec.resources == m.Resources(gpus=None, cores=3, mem_mib=6500)
        assert (spec.priority, spec.env_given) == (3, ("OMP_NUM_THREADS",))
        assert spec.like == "sweep"
    asked = (plan / "asked").read_text().split("\0")
    assert asked[0] == "plan"
    assert asked[1:] == list(specs[0].argv[5:])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ([], "sac-X-v0-sb3"),
        (["--n-envs", "1"], "sac-X-v0-sb3"),
        (["--set", "learning_rate=0.001"], "sac-X-v0-sb3-lr=0.001"),
        (["--set", "tau=1", "--set", "gamma=0.9"], "sac-X-v0-sb3-gamma=0.9-tau=1"),
        (["--set", "gamma=0.9", "--set", "tau=1"], "sac-X-v0-sb3-gamma=0.9-tau=1"),
        (["--name", "mine", "--set", "tau=1"], "sac-X-v0-sb3-mine-tau=1"),
        (["--env", "a/X-v0"], "sac-a-X-v0-sb3"),
    ],
)
def test_runs_of_other_settings_have_folders_of_their_own(
    daemon: FakeDaemon, invoke: Invoke, plan: Path, tmp_path: Path, options: list[str], kind: str
) -> None:
    out = str(tmp_path / "out")
    sac = ["submit", "sac", "--env", "X-v0", "--steps", "9", "--out", out, *options]
    assert invoke(*sac).exit_code == 0
    argv = daemon.submitted[0][0].argv
    assert argv[argv.index("--out") + 1] == f"{out}/{kind}-s0"


def test_a_folders_name_is_fit_for_a_file_system_and_no_others() -> None:
    from rlq.cli.commands.submit_sac import folder_name

    arches = [f"policy_kwargs.net_arch=[{width}, 64]" for width in (1, 2)] + [
        "a={1, 64}",
        "a=x" * 99,
    ]
    names = [folder_name("X-v0", "sb3", "", None, (arch,)) for arch in arches]
    assert len(set(names)) == len(arches)
    assert all(len(name) < 120 and not set(name) & set("/ []{}*") for name in names)


def test_the_workload_looks_at_the_folders_of_all_seeds_that_are_there(
    daemon: FakeDaemon, invoke: Invoke, plan: Path, tmp_path: Path
) -> None:
    (tmp_path / "sac-X-v0-sb3-s2").mkdir()
    sac = ("submit", "sac", "--env", "X-v0", "--steps", "9", "--out", str(tmp_path))
    assert invoke(*sac, "--seeds", "0-2").exit_code == 0
    asked = (plan / "asked").read_text().split("\0")
    assert asked[-3:] == ["--also", "2", f"{tmp_path}/sac-X-v0-sb3-s2"]


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("auto", None)])
def test_the_device_of_submit_sac_decides_the_gpus(
    daemon: FakeDaemon, invoke: Invoke, plan: Path, device: str, gpus: int | None
) -> None:
    sac = ("submit", "sac", "--env", "X-v0", "--steps", "9", "--device", device)
    assert invoke(*sac, "--cores", "7", "--mem", "1G").exit_code == 0
    assert daemon.submitted[0][0].resources == m.Resources(gpus=gpus, cores=7, mem_mib=1024)


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (
            "sys.exit('error: no environment X-v0\\nhint: did you mean Y-v0?' if 0 else 2)",
            2,
            "failed without a word",
        ),
        (
            "print('error: no such X\\nhint: take Y', file=sys.stderr); sys.exit(2)",
            2,
            "error: no such X\nhint: take Y\n",
        ),
        ("raise ValueError('boom')", 70, "boom"),
        ("print('not json')", 70, "cannot be read"),
        ("print('{}')", 70, "cannot be read"),
        ("""print('{"cores": 0, "mem_mib": true}')""", 70, "cannot be read"),
    ],
)
def test_what_the_workload_refuses_is_passed_on_and_nothing_is_queued(
    daemon: FakeDaemon, invoke: Invoke, plan: Path, answer: str, code: int, said: str
) -> None:
    (plan / "answer").write_text(answer)
    result = invoke("submit", "sac", "--env", "X-v0", "--steps", "9")
    assert result.exit_code == code
    assert said in result.stderr
    assert daemon.requests == []


def test_a_program_called_sac_is_a_program_after_two_dashes(
    daemon: FakeDaemon, invoke: Invoke, tmp_path: Path
) -> None:
    (tmp_path / "sac").write_text("#!/bin/sh\n")
    (tmp_path / "sac").chmod(0o755)
    assert invoke("submit", "--env", f"PATH={tmp_path}", "--", "sac", "--env").exit_code == 0
    assert daemon.submitted[0][0].argv == ("sac", "--env")


# ---- list, history, show -----------------------------------------------------------


def test_a_pipe_gets_tab_separated_lines_with_a_header(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    header, *lines = [line.split("\t") for line in invoke("list").stdout.splitlines()]
    assert {len(line) for line in lines} == {len(header)}
    rows = {line[0]: dict(zip(header, line, strict=True)) for line in lines}
    assert rows.keys() == {"1", "2", "3", "4", "5"}
    assert rows["1"]["DEVICE"] == "gpu0"
    assert rows["1"]["CORES"] == "0-2"
    assert rows["1"]["PROGRESS_PCT"] == "44"
    assert rows["2"]["REASON"] == "cores: needs 4, 2 free"
    assert rows["3"]["EXIT_CODE"] == "3"


def test_list_leaves_out_all_but_the_last_that_ended(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(*(make_job(i, JobState.COMPLETED) for i in range(1, 20)), make_job(20))
    listed = document(invoke("list", "--json"))
    assert [job["id"] for job in listed["jobs"]] == [20, 19, 18, 17, 16, 15]
    assert [job["id"] for job in document(invoke("list", "--json", "3-5"))["jobs"]] == [5, 4, 3]
    assert len(document(invoke("list", "--json", "--all"))["jobs"]) == 20


def test_a_queue_of_thousands_does_not_travel(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(*(make_job(i) for i in range(1, 501)))
    listed = document(invoke("list", "--json", "-n", "50"))
    assert (len(listed["jobs"]), listed["total"]) == (50, 500)
    assert all(request.limit for request in daemon.requests)  # type: ignore[union-attr]
    assert len(document(invoke("list", "--json"))["jobs"]) == 500


@pytest.mark.parametrize(
    ("args", "ids"),
    [
        (["1", "3-4"], [4, 3, 1]),
        (["--state", "running"], [5, 1]),
        (["--state", "PENDING,FAILED"], [3, 2]),
        (["--state", "ended"], [4, 3]),
        (["--name", "sac-*"], [1]),
        (["--user", str(ME + 1)], [5]),
        (["--user", "me", "--state", "live"], [2, 1]),
        (["--state", "HELD"], []),
        (["--state", "starting,stopping,out of mem,NOT_RUN,node-fail"], []),
        (["-n", "2"], [5, 4]),
    ],
)
def test_list_selects(daemon: FakeDaemon, invoke: Invoke, args: list[str], ids: list[int]) -> None:
    some_jobs(daemon)
    assert [job["id"] for job in document(invoke("list", "--json", *args))["jobs"]] == ids


def test_list_tells_of_ids_that_do_not_exist(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    assert invoke("list", "99").exit_code == 4
    result = invoke("list", "1", "99")
    assert result.exit_code == 1
    assert "there is no job 99" in result.stderr


def test_names_cannot_move_the_cursor(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(make_job(1, name="\x1b[2Jboo\nhoo", reason="a\tb"))
    for verb in (["list"], ["show", "1"]):
        assert not {"\x1b", "\r"} & set(invoke(*verb).stdout)
    assert len(invoke("list").stdout.splitlines()) == 2


def test_states_go_by_the_words_of_the_table(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(
        make_job(1, held=True),
        make_job(2),
        make_job(3, JobState.CONFIGURING),
        make_job(4, JobState.COMPLETING),
        make_job(5, JobState.OUT_OF_MEMORY),
    )

    def listed(state: str) -> list[int]:
        return [job["id"] for job in document(invoke("list", "--json", "--state", state))["jobs"]]

    assert listed("HELD") == [1]
    assert listed("held,STARTING") == [3, 1]
    assert listed("HELD,PENDING") == [2, 1]
    assert listed("STOPPING") == [4]
    assert listed("OUT OF MEM") == [5]
    # To the daemon they are PENDING ones: that would be too many.
    refused = invoke("cancel", "--state", "HELD")
    assert refused.exit_code == 2
    assert "hint: `rlq list --state HELD`" in refused.stderr
    assert daemon.asked(m.Cancel) == []


def test_history_goes_by_when_jobs_ended(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(*(make_job(i, JobState.COMPLETED, ended_at=100.0 + i) for i in range(1, 31)))
    daemon.set(3, ended_at=500.0)  # queued again, and ended since
    assert [job["id"] for job in document(invoke("history", "--json", "-n", "3"))["jobs"]] == [
        *(3, 30, 29)
    ]


def test_an_estimate_is_not_made_of_the_warm_up(daemon: FakeDaemon, invoke: Invoke) -> None:
    progress = m.Progress(
        step=5, total=10, steps_per_s=99.0, eta_s=7.0, metrics={"warming_up": 1.0}
    )
    daemon.add(make_job(1, JobState.RUNNING, progress=progress))
    header, line = (row.split("\t") for row in invoke("list").stdout.splitlines())
    row = dict(zip(header, line, strict=True))
    assert (row["PROGRESS_PCT"], row["STEPS_PER_S"], row["ETA_S"]) == ("50", "-", "-")
    assert "5 of 10 steps, 50%, warming up\n" in invoke("show", "1").stdout
    daemon.set(1, progress=msgspec.structs.replace(progress, metrics={"warming_up": 0.0}))
    assert "99.0 steps/s, 7s left" in invoke("show", "1").stdout


@pytest.mark.parametrize(("cores", "said"), [((0,), "core 0"), ((0, 1, 2, 5), "cores 0-2,5 (4)")])
def test_cores_are_told_by_number_and_how_many(
    daemon: FakeDaemon, invoke: Invoke, cores: tuple[int, ...], said: str
) -> None:
    daemon.add(make_job(1, JobState.RUNNING, placement=m.Placement(cores=cores)))
    assert f"cores       {said}\n" in invoke("show", "1").stdout


def test_history_is_what_has_ended(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    assert [job["id"] for job in document(invoke("history", "--json"))["jobs"]] == [4, 3]
    assert [job["id"] for job in document(invoke("history", "--json", "-n", "1"))["jobs"]] == [4]
    earlier = invoke("history", "--json", "--before", "4", "--state", "failed")
    assert [job["id"] for job in document(earlier)["jobs"]] == [3]


def test_json_has_every_field_of_a_job_even_those_at_their_default(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    daemon.add(make_job(1))
    shown = document(invoke("show", "1", "--json"))
    assert shown.keys() == {*m.Job.__struct_fields__, "acts", "attempts"}
    assert shown["exit_code"] is None
    assert shown["resources"].keys() == set(m.Resources.__struct_fields__)


def test_show_tells_everything_that_is_known(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    said = invoke("show", "1").stdout
    for word in ("sac-Humanoid-v5-s0", "RUNNING", "gpu0", "0-2", "440 of 1,000 steps, 44%"):
        assert word in said
    assert "FAILED, exit code 3" in invoke("show", "3").stdout
    assert invoke("show", "9").exit_code == 4


# ---- secrets -----------------------------------------------------------------------


def test_no_verb_prints_a_secret_unless_it_is_ones_own_and_asked_for(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    secret = "s3cret-value"
    argv = ("python", "t.py", "--api-key", secret, f"--token={secret}", f"HF_TOKEN={secret}")
    daemon.add(make_job(1, argv=argv), make_job(2, argv=argv, uid=ME + 1, user="bob"))
    daemon.env = {"WANDB_API_KEY": secret, "MY_PASSWORD": secret, "PATH": "/bin"}
    for args in (["list"], ["list", "--json"], ["show", "1"], ["show", "1", "--json"]):
        assert secret not in invoke(*args).output
    for args in (["show", "1", "--env"], ["show", "1", "--env", "--json"]):
        result = invoke(*args)
        assert secret not in result.output
        assert "/bin" in result.stdout
    assert f"WANDB_API_KEY={secret}" in invoke("show", "1", "--env", "--reveal").stdout
    assert secret in invoke("show", "1", "--reveal", "--json").stdout
    refused = invoke("show", "2", "--reveal")
    assert refused.exit_code == 2
    assert secret not in refused.output


# ---- verbs that change jobs --------------------------------------------------------

ACTING: dict[str, type[m.Request]] = {
    "cancel": m.Cancel,
    "hold": m.Hold,
    "release": m.Release,
    "pause": m.Pause,
    "resume": m.Resume,
    "requeue": m.Requeue,
    "update": m.Prioritize,
}
#: What a verb needs besides a selection.
NEEDED = {"update": ("--priority", "-5")}


@pytest.mark.parametrize("verb", ACTING)
def test_a_verb_sends_its_selection_and_prints_what_became_of_each(
    daemon: FakeDaemon, invoke: Invoke, verb: str
) -> None:
    some_jobs(daemon)
    result = invoke(verb, *NEEDED.get(verb, ()), "1-2", "--name", "sac*", "--state", "running")
    assert result.exit_code == 0, result.output
    [request] = daemon.asked(ACTING[verb])
    assert request.selection == m.Selection(  # type: ignore[union-attr]
        ids=((1, 2),), name="sac*", states=(JobState.RUNNING,)
    )
    header, line = result.stdout.splitlines()
    assert header.split("\t") == ["ID", "OK", "STATE", "MESSAGE"]
    assert line.split("\t")[:2] == ["1", "yes"]


@pytest.mark.parametrize("verb", ACTING)
def test_the_exit_code_of_a_verb_tells_what_failed(
    daemon: FakeDaemon, invoke: Invoke, verb: str
) -> None:
    some_jobs(daemon)
    assert invoke(verb, *NEEDED.get(verb, ()), "99").exit_code == 4
    assert invoke(verb, *NEEDED.get(verb, ()), "5").exit_code == 5
    result = invoke(verb, *NEEDED.get(verb, ()), "1", "5", "99", "--json")
    assert result.exit_code == 1
    changes = json.loads(result.stdout)["changes"]
    assert [(change["id"], change["ok"]) for change in changes] == [
        (1, True),
        (5, False),
        (99, False),
    ]
    assert result.stderr.count("error: ") == 2
    assert invoke(verb, *NEEDED.get(verb, ()), "--name", "nothing-like-it").exit_code == 4


def test_cancel_now_is_sent(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    invoke("cancel", "--now", "1")
    assert daemon.asked(m.Cancel) == [m.Cancel(selection=m.Selection(ids=((1, 1),)), now=True)]


def test_all_needs_yes_where_nobody_can_be_asked(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    for verb in ("cancel", "requeue"):
        refused = invoke(verb, "--all", input="y\n")  # a pipe that says yes is not a person
        assert refused.exit_code == 2
        assert "--yes" in refused.stderr
    assert daemon.requests == []
    assert invoke("cancel", "--all", "--yes").exit_code == 0 or daemon.asked(m.Cancel)
    assert daemon.asked(m.Cancel) == [m.Cancel(selection=m.Selection(all=True))]
    invoke("hold", "--all")  # can be taken back: nobody is asked
    assert daemon.asked(m.Hold) == [m.Hold(selection=m.Selection(all=True))]


@pytest.mark.parametrize(
    ("args", "kind", "code", "message"),
    [
        (["show", "99", "--json"], "not-found", 4, "there is no job 99"),
        (["list", "--json", "--state", "x"], "usage", 2, "'x' is not a state (in --state)"),
        (["list", "--json", "--bad"], "usage", 2, "there is no option --bad"),
        (["cancel", "--json", "--name", "no-such-*"], "not-found", 4, "no job matches"),
        (["submit", "--json", "--", "nope"], "usage", 2, "there is no program 'nope' on PATH"),
    ],
)
def test_json_has_errors_too(
    invoke: Invoke, args: list[str], kind: str, code: int, message: str
) -> None:
    result = invoke(*args)
    assert result.exit_code == code
    error = json.loads(result.stdout)["error"]
    assert (error["kind"], error["message"]) == (kind, message)
    assert f"hint: {error['hint']}" in result.stderr
    assert f"error: {message}" in result.stderr


def test_an_option_of_the_command_itself_changes_no_error(invoke: Invoke) -> None:
    result = invoke("submit", "--bad", "--", "python", "--json")
    assert (result.exit_code, result.stdout) == (2, "")


def test_without_a_word_the_help_is_shown_and_nothing_is_called_an_error(invoke: Invoke) -> None:
    for words in ([], ["daemon"]):
        result = invoke(*words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("Usage: rlq")
        assert "error:" not in result.stderr


def test_what_stops_jobs_is_never_a_guess(invoke: Invoke) -> None:
    for word in ("top", "kil", "stp"):
        assert "stop" not in invoke(word).stderr
        assert "rlq kill" not in invoke(word).stderr


# ---- wait --------------------------------------------------------------------------


def test_wait_exits_by_how_the_jobs_ended(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    assert invoke("wait", "4").exit_code == 0
    assert invoke("wait", "3-4").exit_code == 1
    late = invoke("wait", "1", "--timeout", "20ms")
    assert late.exit_code == 124
    assert "hint: " in late.stderr
    assert invoke("wait", "99").exit_code == 4
    assert invoke("wait", "--name", "nothing-like-it").exit_code == 4


def test_waiting_for_all_of_nothing_is_done_at_once(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.add(make_job(1, JobState.FAILED))
    result = invoke("wait", "--all")
    assert (result.exit_code, result.stderr) == (0, "nothing to wait for\n")
    assert document(invoke("wait", "--all", "--json")) == {"done": True, "jobs": [], "missing": []}
    assert invoke("wait", "--name", "no-such-*").exit_code == 4


def test_wait_json_is_one_document_whatever_comes(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    ended = invoke("wait", "3-4", "--json")
    assert [job["state"] for job in document(ended)["jobs"]] == ["FAILED", "COMPLETED"]
    assert document(invoke("wait", "1", "--timeout", "20ms", "--json"))["done"] is False


def test_wait_without_ids_is_about_ones_own(daemon: FakeDaemon, invoke: Invoke) -> None:
    some_jobs(daemon)
    invoke("wait", "--state", "running", "--timeout", "20ms")
    [wait] = daemon.asked(m.Wait)
    assert wait.selection.ids == ((1, 1),)  # type: ignore[union-attr]


# ---- logs --------------------------------------------------------------------------


def with_log(daemon: FakeDaemon, content: bytes, **fields: Any) -> Path:
    log = daemon.path.parent / "1.log"
    log.write_bytes(content)
    daemon.add(make_job(1, **{"log_path": str(log), "attempt": 1, **fields}))
    return log


def test_logs_prints_the_bytes_of_the_file(daemon: FakeDaemon, invoke: Invoke) -> None:
    with_log(daemon, b"a\n\xff\nlast without newline")
    assert invoke("logs", "1").stdout_bytes == b"a\n\xff\nlast without newline"
    assert document(invoke("logs", "1", "--json"))["lines"] == ["a", "�", "last without newline"]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [(0, b""), (1, b"d"), (2, b"c\nd"), (4, b"a\nb\nc\nd"), (9, b"y\na\nb\nc\nd")],
)
def test_the_last_lines_reach_into_the_rotated_part(
    daemon: FakeDaemon, invoke: Invoke, lines: int, shown: bytes
) -> None:
    log = with_log(daemon, b"a\nb\nc\nd")
    if lines == 9:
        log.with_name("1.log.1").write_bytes(b"y\n")
    assert invoke("logs", "-n", str(lines), "1").stdout_bytes == shown


def test_the_last_lines_of_a_large_log_are_right(daemon: FakeDaemon, invoke: Invoke) -> None:
    every = [b"line %d " % i + b"x" * (i % 300) + b"\n" for i in range(5000)]
    with_log(daemon, b"".join(every))
    assert invoke("logs", "-n", "1234", "1").stdout_bytes == b"".join(every[-1234:])


def test_show_gives_a_reason_that_the_exit_code_does_not_tell(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    daemon.add(
        make_job(1, JobState.FAILED, exit_code=2, reason="exit code 2"),
        make_job(2, JobState.TIMEOUT, reason="reached its time limit"),
    )
    assert invoke("show", "1").stdout.count("exit code 2") == 1
    assert "reached its time limit" in invoke("show", "2").stdout


def test_a_log_that_cannot_be_shown_is_an_error_with_a_reason(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    gone = str(daemon.path.parent / "gone.log")
    daemon.add(
        make_job(1, log_path=gone),
        make_job(2, JobState.FAILED, attempt=1, log_path=gone),
        make_job(3, JobState.CANCELLED, log_path=gone),
    )
    assert "has not started yet" in invoke("logs", "1").stderr
    assert "is gone" in invoke("logs", "2").stderr
    assert "before it started" in invoke("logs", "3").stderr
    for job in "123":
        assert invoke("logs", job).exit_code == 4


def test_following_crosses_rotation_and_ends_with_the_job(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    log = with_log(daemon, b"one\n", state=JobState.RUNNING)
    rounds = 0

    def go_on(_: m.Request) -> m.Reply:
        """What happens between two looks at the file."""
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            with log.open("ab") as old:
                old.write(b"two\n")
            log.rename(log.with_name("1.log.1"))
            log.write_bytes(b"three\n")
        elif rounds == 2:
            log.write_bytes(b"4\n")  # cut off and begun again
        else:
            with log.open("ab") as last:
                last.write(b"the end")
            daemon.set(1, state=JobState.COMPLETED, exit_code=0)
        return m.Waited(done=daemon.jobs[1].state.is_final, jobs=(daemon.jobs[1],))

    daemon.answers[m.Wait] = go_on
    result = invoke("logs", "-f", "1")
    assert result.stdout == "one\ntwo\nthree\n4\nthe end"
    assert result.exit_code == 0


def test_a_job_cancelled_before_it_started_has_printed_nothing(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    daemon.add(make_job(1, JobState.CANCELLED, log_path="/no/such/1.log"))
    result = invoke("logs", "1")
    assert result.exit_code == 4
    assert "job 1 was cancelled before it started, so it has printed nothing" in result.stderr


def test_following_a_waiting_job_says_what_it_waits_for_and_then_shows_all(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    log = daemon.path.parent / "1.log"
    daemon.add(make_job(1, log_path=str(log), reason="cores: needs 4, 2 free"))

    def start_and_end(_: m.Request) -> m.Reply:
        log.write_bytes(b"all of it\n")
        daemon.set(1, state=JobState.COMPLETED, attempt=1)
        return m.Waited(done=True, jobs=(daemon.jobs[1],))

    daemon.answers[m.Wait] = start_and_end
    result = invoke("logs", "-f", "1")
    assert result.stdout == "all of it\n"
    assert "cores: needs 4, 2 free" in result.stderr


# ---- the machine and the daemon ----------------------------------------------------

EXPLANATION = m.Explanation(
    id=2,
    state=JobState.PENDING,
    summary="Job 2 waits for GPU memory.",
    jobs_ahead=1,
    reserved=True,
    starts_at=2e9,
    shortages=(
        m.Shortage(
            resource="gpu memory",
            unit="MiB",
            need=2048,
            free=1024,
            total=40960,
            gpu="GPU-a",
            gpu_index=0,
            holders=(
                m.Holder(job=1, user="alice", amount=8192, ends_at=2e9),
                m.Holder(user="carol", amount=4096),
            ),
        ),
    ),
)
MACHINE = m.Machine(
    host=HOST,
    gpus=(
        m.Gpu(
            uuid="GPU-a",
            index=0,
            name="NVIDIA A100",
            mem_mib_total=40960,
            mem_mib_free=1024,
            sm_pct=80,
            processes=(
                m.GpuProcess(pid=7, user="alice", command="python a.py", job=1, mem_mib=900),
                m.GpuProcess(pid=8, user="carol", command="python b.py", mem_mib=30_000),
            ),
        ),
        m.Gpu(uuid="GPU-b", index=1, name="NVIDIA A100", problem="lost (fell off the bus)"),
    ),
)


@pytest.mark.parametrize(
    ("after", "predicted", "said"),
    [
        (
            12,
            True,
            r"starts about (\d\d \w+ )?\d\d:\d\d \(in .*\), when job 12 is expected to end",
        ),
        (12, False, r"starts by (\d\d \w+ )?\d\d:\d\d \(in .*\), when job 12 ends at the latest"),
        (None, False, r"may start in .* or sooner"),
    ],
)
def test_why_tells_when_it_may_start_and_by_what(
    daemon: FakeDaemon, invoke: Invoke, after: int | None, predicted: bool, said: str
) -> None:
    daemon.answers[m.Why] = m.Explanation(
        id=2,
        state=JobState.PENDING,
        summary="waiting",
        reserved=True,
        starts_at=time.time() + 5,
        after=after,
        predicted=predicted,
    )
    lines = invoke("why", "2").stdout.splitlines()
    assert re.fullmatch(said, lines[-1]), lines


def test_why_names_what_is_short_and_who_holds_it(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.answers[m.Why] = EXPLANATION
    said = invoke("why", "2").stdout
    for word in ("Job 2 waits for GPU memory.", "2048", "1024", "job 1 (alice): 8 GiB", "carol"):
        assert word in said
    shortage = document(invoke("why", "2", "--json"))["shortages"][0]
    assert shortage["holders"][1] == {
        "job": None,
        "user": "carol",
        "amount": 4096,
        "ends_at": None,
        "kept": "",
    }


def test_why_says_each_limit_on_a_line_of_its_own(
    daemon: FakeDaemon, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "alice has 2 of at most 2 running jobs", "group students" + " and so on" * 8
    reached = m.LimitReached(whose="alice", resource="jobs", unit="jobs", used=2, limit=2, need=1)
    daemon.answers[m.Why] = m.Explanation(
        id=2, state=JobState.PENDING, summary="; ".join(words), limits=(reached, reached)
    )
    assert invoke("why", "2").stdout.splitlines() == list(words)
    monkeypatch.setattr("rlq.cli.output.stdout_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    first, *more = invoke("why", "2").stdout.splitlines()
    assert first == words[0]
    assert max(map(len, more)) <= 80
    assert " ".join(more) == words[1]


def test_gpus_names_users_inside_and_outside_the_queue(daemon: FakeDaemon, invoke: Invoke) -> None:
    daemon.answers[m.Devices] = MACHINE
    said = invoke("gpus").stdout
    assert "lost (fell off the bus)" in said
    assert document(invoke("gpus", "--json"))["gpus"][0]["processes"][1]["user"] == "carol"


def test_drain_and_its_end(daemon: FakeDaemon, invoke: Invoke) -> None:
    assert invoke("drain").exit_code == 0
    assert daemon.draining
    assert "draining" in invoke("status").stdout
    assert document(invoke("drain", "--off", "--json")) == {"message": "open"}
    assert not daemon.draining


def test_stopping_the_daemon_says_that_jobs_run_on(daemon: FakeDaemon, invoke: Invoke) -> None:
    assert document(invoke("daemon", "status", "--json"))["running"] is True
    result = invoke("daemon", "stop")
    assert result.exit_code == 0
    assert "running jobs run on" in result.stdout
    gone = invoke("daemon", "status", "--json")
    assert gone.exit_code == 6
    assert json.loads(gone.stdout) == {"running": False}
    assert invoke("daemon", "stop").exit_code == 6


def test_doctor_tells_of_what_hurts(
    daemon: FakeDaemon, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    daemon.answers[m.Devices] = MACHINE
    daemon.answers[m.Ping] = m.Pong(version="0.0.1", protocol=1, pid=1)
    result = invoke("doctor", "--json")
    assert result.exit_code == 1
    checks = json.loads(result.stdout)["checks"]
    told = {(check["name"], check["status"]) for check in checks}
    assert {("gpu", "fail"), ("version", "warn"), ("threads", "warn")} <= told
    assert all(check["hint"] for check in checks if check["name"] in {"gpu", "version", "threads"})


def test_doctor_without_a_daemon_starts_none(
    invoke: Invoke, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLQ_SOCKET")
    monkeypatch.setenv("RLQ_STATE_DIR", str(short_tmp / "state"))
    result = invoke("doctor", "--json")
    [check] = [c for c in json.loads(result.stdout)["checks"] if c["name"] == "daemon"]
    assert check["status"] == "ok"
    assert not (short_tmp / "state").exists()


def test_a_bug_is_told_in_two_lines_and_not_by_a_traceback(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("rlq.client.Client.why", broken)
    result = invoke("why", "1")
    assert result.exit_code == 70
    error, hint = result.stderr.splitlines()
    assert error == "error: ZeroDivisionError: a bug"
    assert hint.startswith("hint: this is a bug in rlq")


def test_an_answer_that_cannot_be_read_is_a_protocol_error(
    daemon: FakeDaemon, invoke: Invoke
) -> None:
    daemon.answers[m.Why] = m.Explanation(id=1, state=JobState.PENDING, summary=None)  # type: ignore[arg-type]
    result = invoke("why", "1")
    assert result.exit_code == 8
    assert "cannot read the reply" in result.stderr


# ---- all of them -------------------------------------------------------------------

EXAMPLES: dict[str, list[str]] = {
    "submit": ["true"],
    "show": ["1"],
    "logs": ["1"],
    "wait": ["4"],
    "why": ["1"],
    **{verb: ["1"] for verb in ("cancel", "hold", "release", "pause", "resume", "requeue")},
    "update": ["1", "--priority", "-5"],
    "daemon": ["status"],
    "key": ["list"],
    "report": ["5"],
    "claim": ["--gpu", "0", "--for", "2h"],
    "reserve": ["--maintenance", "--for", "2h"],
    "completion": ["bash"],
}


def with_json(verb: str) -> list[str]:
    words = EXAMPLES.get(verb, [])
    # After the command of `submit`, options are the command's.
    return ["--json", *words] if verb == "submit" else [*words, "--json"]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in {"calibrate", "run"}])
def test_every_verb_prints_one_json_document(
    daemon: FakeDaemon, invoke: Invoke, verb: str
) -> None:
    some_jobs(daemon)
    (daemon.path.parent / "1.log").write_text("x\n")
    assert isinstance(document(invoke(verb, *with_json(verb))), dict)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_takes_a_socket(invoke: Invoke, verb: str) -> None:
    assert invoke(verb, "--help").exit_code == 0
    if verb not in {"completion", "doctor", "daemon", "report", "submit", "run"}:
        away = invoke(verb, *EXAMPLES.get(verb, []), "--socket", "/no/such/socket")
        assert away.exit_code == 6
        assert "hint: " in away.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(invoke: Invoke, shell: str) -> None:
    assert "_RLQ_COMPLETE" in invoke("completion", shell).stdout
