"""On a job's path, and as if not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.hooks.conftest import PROGRAMS, Jobs

from rlq import hooks
from rlq.protocol.messages import JobSpec, Resources
from rlqd.core.model import Charge, GpuId, Placement
from rlqd.shell import launching

SEEN = """
import json, sys
own = sys.modules.get("sitecustomize")
print(json.dumps({
    "path": sys.path,
    "own": own and own.__file__,
    "own spec": own and own.__spec__.origin,
    "left by it": getattr(sys, "left", None),
    "modules": sorted(sys.modules),
    "finders": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path
                if type(f).__module__ != "sitecustomize"],
}))
"""
LEARN = """
from stable_baselines3.common.base_class import BaseAlgorithm
BaseAlgorithm().learn(5)
"""


def seen(jobs: Jobs, *flags: str, path: tuple[Path, ...]) -> dict[str, tuple[str, Any]]:
    """What a program sees with the hooks, without them, and switched off: (stderr, document)."""
    without = ":".join(map(str, path)) or None
    runs = {
        "with": jobs(SEEN, *flags, path=path),
        "off": jobs(SEEN, *flags, path=path, env={"RLQ_HOOKS": "0"}),
        "without": jobs(SEEN, *flags, env={"PYTHONPATH": without}),
    }
    assert {run.code for run in runs.values()} == {0}, runs
    return {name: (run.err, json.loads(run.out)) for name, run in runs.items()}


@pytest.mark.parametrize(
    "own",
    [
        "import sys; sys.left = [sys.modules['sitecustomize'] is not None, len(sys.meta_path)]",
        "import sys; sys.left = __name__, __file__; sys.path.insert(0, '/added')",
        "raise ValueError('broken')",
        "import no_such_module",
        "raise ImportError('odd')",
        None,
    ],
)
def test_the_programs_own_sitecustomize_runs_as_if_the_hooks_were_not_there(
    jobs: Jobs, tmp_path: Path, own: str | None
) -> None:
    if own is not None:
        (tmp_path / "sitecustomize.py").write_text(own)
    runs = seen(jobs, path=(tmp_path,))
    assert runs["with"] == runs["without"] == runs["off"]
    if own is None:
        assert runs["with"][0] == ""


def test_a_program_with_its_own_sitecustomize_reports(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('broken')")
    assert jobs(LEARN, path=(tmp_path, PROGRAMS)).steps == [(1, 5), (5, 5)]


def test_usercustomize_is_untouched(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "usercustomize.py").write_text("import sys; sys.left = 'by the user'")
    runs = seen(jobs, path=(tmp_path,))
    assert runs["with"] == runs["without"]


@pytest.mark.parametrize("flag", ["-I", "-S", "-E"])
def test_python_without_its_site_or_environment_runs_unharmed(jobs: Jobs, flag: str) -> None:
    run = jobs("import sys; print('_rlq_hooks' in sys.modules, len(sys.meta_path))", flag)
    assert (run.code, run.err, run.reports) == (0, "", [])
    assert run.out.startswith("False")


@pytest.mark.parametrize("flags", [("-W", "error"), ("-X", "dev", "-W", "error"), ("-O",)])
def test_nothing_is_said_where_warnings_are_errors(jobs: Jobs, flags: tuple[str, ...]) -> None:
    run = jobs(LEARN, *flags)
    assert (run.code, run.err, run.steps) == (0, "", [(1, 5), (5, 5)])


@pytest.mark.parametrize("env", [{"RLQ_HOOKS": "0"}, {"RLQ_REPORT_SOCKET": None}])
def test_switched_off_or_outside_the_queue_nothing_is_hooked(
    jobs: Jobs, env: dict[str, str | None]
) -> None:
    program = LEARN + "import sys; print('_rlq_hooks' in sys.modules)"
    run = jobs(program, env=env)
    assert (run.code, run.out, run.err, run.reports) == (0, "False\n", "", [])


def test_a_python_that_has_no_rlq_reports_too(jobs: Jobs, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    program = "import importlib.util as u; print(u.find_spec('rlq'))" + LEARN
    run = jobs(program, python=tmp_path / "venv" / "bin" / "python")
    assert (run.code, run.out, run.err) == (0, "None\n", "")
    assert run.steps == [(1, 5), (5, 5)]


def other_pythons() -> list[str]:
    """Every other Python on this machine, by version; on PATH or pyenv's."""
    found = {}
    for minor in range(6, 20):
        on_path = shutil.which(f"python3.{minor}")
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        for python in [*map(str, pyenv), *([on_path] if on_path else [])]:
            works = subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
            if minor != sys.version_info.minor and works:
                found[minor] = python
    return list(found.values())


@pytest.mark.parametrize("python", other_pythons())
def test_every_python_from_3_8_reports_and_older_ones_run_unharmed(
    jobs: Jobs, python: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.left = 'ours'")
    (tmp_path / "train.py").write_text(LEARN)
    program = """
import sys
print(sys.left)
if sys.version_info >= (3, 7):  # what the stand-in is written in
    import train
print(sys.version_info >= (3, 8))
"""
    path = (tmp_path, PROGRAMS)
    run = jobs(program, "-W", "error", path=path, python=python)
    reports = run.out == "ours\nTrue\n"
    assert (run.code, run.err) == (0, "")
    assert reports or run.out == "ours\nFalse\n"
    assert run.steps == ([(1, 5), (5, 5)] if reports else [])


def test_all_that_runs_in_a_job_is_python_3_8() -> None:
    import ast

    package = Path(hooks.__file__).parent
    for file in (package / "attach.py", package / "follow.py", package.parent / "job.py"):
        ast.parse(file.read_text(), feature_version=(3, 8))
    ast.parse((package / "path" / "sitecustomize.py").read_text(), feature_version=(3, 6))


def test_the_folder_holds_nothing_that_could_shadow_a_module() -> None:
    names = {entry.name for entry in Path(hooks.FOLDER).iterdir()} - {"__pycache__"}
    assert names == {"sitecustomize.py"}


# ---- what the daemon sets ----------------------------------------------------------

FOLDER = hooks.FOLDER


@pytest.mark.parametrize(
    ("spec", "submitted", "expected"),
    [
        ({}, {}, FOLDER),
        ({}, {"PYTHONPATH": ""}, FOLDER),
        ({}, {"PYTHONPATH": "/a:/b"}, f"{FOLDER}:/a:/b"),
        ({}, {"PYTHONPATH": "/a:"}, f"{FOLDER}:/a:"),  # the empty part: the working folder
        ({"env_given": ("PYTHONPATH",)}, {"PYTHONPATH": "/a"}, f"{FOLDER}:/a"),
        ({}, {"PYTHONPATH": f"{FOLDER}:/a"}, f"{FOLDER}:/a"),  # submitted by a job
        ({"hooks": False}, {"PYTHONPATH": f"{FOLDER}:/a"}, "/a"),
        ({"hooks": False}, {"PYTHONPATH": FOLDER}, None),
        ({"hooks": False}, {}, None),
        ({}, {"PYTHONPATH": "/a", "RLQ_HOOKS": "0"}, "/a"),
    ],
)
def test_pythonpath(spec: dict[str, Any], submitted: dict[str, str], expected: str | None) -> None:
    assert environment(spec, submitted).get("PYTHONPATH") == expected


@pytest.mark.parametrize(("mib", "expected"), [(None, None), (4608, "0.1000")])
def test_a_declared_amount_of_gpu_memory_is_told_to_the_hooks(
    mib: int | None, expected: str | None
) -> None:
    spec = {"resources": Resources(gpu_mem_mib=mib)}
    env = environment(spec, {"RLQ_GPU_MEM_FRACTION": "0.9"})
    assert env.get("RLQ_GPU_MEM_FRACTION") == expected


def environment(spec: dict[str, Any], submitted: dict[str, str]) -> dict[str, str]:
    return launching.environment(
        JobSpec(argv=("true",), cwd="/", **spec),
        submitted,
        Placement(
            gpus=(GpuId("GPU-a"),),
            cores=(2, 3),
            charge=Charge(cores=2, mem_mib=64, gpu_mem_mib=64),
        ),
        queue={},
        configured={},
        gpu_mem_mib_total=40960,
        machine_has_gpus=True,
    )
