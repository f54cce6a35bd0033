"""What a job is given, looked at from /proc and from inside: its cores, threads, GPU, caps."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.nvml_stub import stub_uuid
from tests.support.rlqd import Rlqd
from tests.support.waiting import wait_until

from rlq.protocol.messages import Job, JobSpec, Resources
from rlq.protocol.states import JobState
from rlqd.core.model import Charge, GpuId, Placement
from rlqd.shell import launching

CORES = len(os.sched_getaffinity(0))
THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")
TELL = "import json, os; print(json.dumps(dict(os.environ)))"


def cores_of_threads(pid: int) -> list[frozenset[int]]:
    """Of every thread of a process, by its /proc status."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        match = re.search(r"Cpus_allowed_list:\s*(\S+)", (task / "status").read_text())
        assert match is not None
        cores: set[int] = set()
        for part in match[1].split(","):
            low, _, high = part.partition("-")
            cores |= set(range(int(low), int(high or low) + 1))
        found.append(frozenset(cores))
    return found


def told_env(d: Rlqd, client: Any, **options: Any) -> dict[str, str]:
    """The environment that a job finds."""
    argv = options.pop("argv", [sys.executable, "-c", TELL])
    job = client.submit(argv, env=options.pop("env", d.user_env), **options)
    done = d.until_state(client, job, JobState.COMPLETED)
    found: dict[str, str] = json.loads(Path(done.log_path).read_text())
    return found


@pytest.mark.skipif(CORES < 2, reason="disjoint cores need two")
def test_every_thread_of_a_job_is_on_its_cores_and_no_two_jobs_share_one(tmp_path: Path) -> None:
    code = """
import subprocess, sys, threading, time
for _ in range(4):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{child.pid}\\n")
time.sleep(600)
"""
    with Rlqd(tmp_path) as d:
        client = d.client()
        jobs: list[Job] = []
        for number in range(2):
            out = tmp_path / f"child-{number}"
            job = client.submit([sys.executable, "-c", code, str(out)], cores=1)
            child = int(
                wait_until(lambda o=out: o.read_text() if o.exists() else "", bool)  # type: ignore[misc]
            )
            view = wait_until(lambda j=job: client.get(j), lambda job: job.pid is not None)  # type: ignore[misc]
            assert view.placement is not None
            assert view.pid is not None
            mine = frozenset(view.placement.cores)
            assert len(mine) == 1
            threads = cores_of_threads(view.pid)
            assert len(threads) == 5
            assert {*threads, *cores_of_threads(child)} == {mine}
            jobs.append(view)
        first, second = (set(job.placement.cores) for job in jobs if job.placement)
        assert not first & second


def test_the_thread_variables_match_the_cores_whatever_was_inherited(tmp_path: Path) -> None:
    with Rlqd(tmp_path) as d:
        client = d.client()
        inherited = {**d.user_env, "OMP_NUM_THREADS": "64", "NPROC": "64", "MINE": "kept"}
        env = told_env(d, client, env=inherited, cores=CORES)
        assert {env[f"{name}_NUM_THREADS"] for name in THREADS} == {str(CORES)}
        assert env["NPROC"] == str(CORES)
        assert env["OMP_WAIT_POLICY"] == "PASSIVE"
        assert env["MINE"] == "kept"
        assert (env["RLQ_JOB_ID"], env["RLQ_ATTEMPT"]) == ("1", "1")
        assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_what_the_user_gave_with_env_is_left_alone(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}]) as d:
        log = tmp_path / "log"
        d.rlq(
            *("submit", "--wait", "--env", "OMP_NUM_THREADS=7", "--env", "CUDA_VISIBLE_DEVICES=5"),
            *("--log", str(log), "--cores", "1", "--", sys.executable, "-c", TELL),
        )
        env = json.loads(log.read_text())
        assert env["OMP_NUM_THREADS"] == "7"
        assert env["CUDA_VISIBLE_DEVICES"] == "5"
        assert env["MKL_NUM_THREADS"] == "1"


def test_a_gpu_is_named_by_uuid_and_a_cpu_job_sees_none(tmp_path: Path) -> None:
    with Rlqd(tmp_path, gpus=[{}, {"sm_external": 50}]) as d:
        client = d.client()
        inherited = {**d.user_env, "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "FASTEST"}
        env = told_env(d, client, env=inherited, gpus=1)
        assert env["CUDA_VISIBLE_DEVICES"] == stub_uuid(0)
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        both = told_env(d, client, env=inherited, gpus=2)
        assert sorted(both["CUDA_VISIBLE_DEVICES"].split(",")) == [stub_uuid(0), stub_uuid(1)]
        none = told_env(d, client, env=inherited, gpus=0)
        assert none["CUDA_VISIBLE_DEVICES"] == ""
        assert none["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (
            ["torch-2.13.0", "jaxlib-0.10.2"],
            {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.2375", "XLA_CLIENT": "0.2375"},
        ),
        (["torch-2.9.1", "jaxlib-0.4.30"], {"XLA_PYTHON_CLIENT": "0.2375"}),
        ([], {"XLA_PYTHON_CLIENT": "0.2375"}),
    ],
    ids=["new", "old", "unknown"],
)
def test_a_declared_amount_is_a_cap_where_the_version_has_one(
    tmp_path: Path, installed: list[str], expected: dict[str, str]
) -> None:
    prefix = tmp_path / "venv"
    (prefix / "bin").mkdir(parents=True)
    for name in installed:
        (prefix / f"lib/python3.11/site-packages/{name}.dist-info").mkdir(parents=True)
    python = prefix / "bin" / "python3"
    python.symlink_to(Path(sys.executable).resolve())
    with Rlqd(tmp_path, gpus=[{"mem_total_mib": 40960}]) as d:
        client = d.client()
        clean = {k: v for k, v in d.user_env.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
        # 10 GiB less half a GiB for the CUDA context, of 40.
        env = told_env(d, client, env=clean, argv=[str(python), "-c", TELL], gpus=1, gpu_mem="10G")
        names = ("PYTORCH_ALLOC_CONF", "XLA_CLIENT", "XLA_PYTHON_CLIENT")
        full = {name: name if "TORCH" in name else f"{name}_MEM_FRACTION" for name in names}
        assert {n: env[full[n]] for n in names if full[n] in env} == expected
        guess = told_env(d, client, env=clean, argv=[str(python), "-c", TELL], gpus=1)
        assert not [name for name in full.values() if name in guess], "a default is no cap"


# ---- launching.environment, as a table ---------------------------------------------

GPU = Placement(
    gpus=(GpuId("GPU-a"),), cores=(2, 3), charge=Charge(cores=2, mem_mib=64, gpu_mem_mib=64)
)
CPU = Placement(gpus=(), cores=(5,), charge=Charge(cores=1, mem_mib=64))
NEW = {"torch": "2.10.0+cu128", "jaxlib": "0.8.0"}
ABSENT = None


@pytest.mark.parametrize(
    ("spec", "placement", "submitted", "expected"),
    [
        ({}, CPU, {}, {"OMP_NUM_THREADS": "1", "NPROC": "1", "CUDA_VISIBLE_DEVICES": ""}),
        ({}, GPU, {}, {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "GPU-a"}),
        ({}, CPU, {"NPROC": "64"}, {"NPROC": "1"}),
        ({"env_given": ("NPROC",)}, CPU, {"NPROC": "64"}, {"NPROC": "64"}),
        ({}, CPU, {"SITE": "mine"}, {"SITE": "mine"}),
        ({}, CPU, {}, {"SITE": "configured"}),
        ({}, CPU, {"RLQ_JOB_ID": "999"}, {"RLQ_JOB_ID": "1"}),
        # Caps: only declared, only for known versions, and never two JAX variables at odds.
        ({"frameworks": NEW}, GPU, {}, {"PYTORCH_ALLOC_CONF": ABSENT}),
        (
            {"frameworks": NEW, "mib": 4608},
            GPU,
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"},
            {
                "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.1000",
                "XLA_CLIENT_MEM_FRACTION": "0.1000",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": ABSENT,
            },
        ),
        (
            {"frameworks": {"torch": "2.9.1", "jaxlib": "0.7.2"}, "mib": 4608},
            GPU,
            {"XLA_CLIENT_MEM_FRACTION": ".5"},
            {
                "PYTORCH_ALLOC_CONF": ABSENT,
                "XLA_CLIENT_MEM_FRACTION": ABSENT,
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1000",
            },
        ),
        (
            {"frameworks": NEW, "mib": 4608, "env_given": ("XLA_PYTHON_CLIENT_MEM_FRACTION",)},
            GPU,
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"},
            {"XLA_CLIENT_MEM_FRACTION": ABSENT, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"},
        ),
        (
            {"frameworks": NEW, "mib": 4608},
            GPU,
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.1000"},
        ),
        (
            {"frameworks": NEW, "mib": 4608},
            GPU,
            {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.9"},
            {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.9"},
        ),
        # Smaller than the CUDA context: a cap of nothing would be no cap at all.
        ({"frameworks": NEW, "mib": 100}, GPU, {}, {"XLA_CLIENT_MEM_FRACTION": "0.0100"}),
        # A version that cannot be read is unknown.
        (
            {"frameworks": {"torch": "nightly"}, "mib": 4608},
            GPU,
            {},
            {"PYTORCH_ALLOC_CONF": ABSENT},
        ),
        ({"frameworks": NEW, "mib": 4608}, CPU, {}, {"XLA_CLIENT_MEM_FRACTION": ABSENT}),
    ],
)
def test_environment(
    spec: dict[str, Any],
    placement: Placement,
    submitted: dict[str, str],
    expected: dict[str, str | None],
) -> None:
    fields = dict(spec)
    resources = Resources(gpu_mem_mib=fields.pop("mib", None))
    env = launching.environment(
        JobSpec(argv=("true",), cwd="/", resources=resources, **fields),
        submitted,
        placement,
        queue={"RLQ_JOB_ID": "1"},
        configured={"SITE": "configured"},
        gpu_mem_mib_total=40960,
        machine_has_gpus=True,
    )
    assert {name: env.get(name) for name in expected} == expected
