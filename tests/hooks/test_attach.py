"""What a learn() reports, and what the hooks survive; on a stand-in for SB3 (programs/)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.hooks.conftest import PROGRAMS, Jobs

import rlq

BEGIN = """
import every_report
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
"""


def test_steps_target_reward_and_whether_it_is_warm(jobs: Jobs) -> None:
    program = """
model = BaseAlgorithm(learning_starts=2)
def reward():
    model.ep_info_buffer.append({"r": float(model.num_timesteps), "l": 1})
model.learn(5, reward)
"""
    run = jobs(BEGIN + program)
    assert (run.code, run.err) == (0, "")
    assert run.steps == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5), (5, 5)]
    told = [report["metrics"] for report in run.reports]
    assert [metrics["warming_up"] for metrics in told] == [1, 1, 1, 0, 0, 0], "update at step 3"
    assert [metrics["ep_rew_mean"] for metrics in told] == [1, 1.5, 2, 2.5, 3, 3]
    assert {(report["job"], report["attempt"]) for report in run.reports} == {(7, 2)}


@pytest.mark.parametrize(
    ("model", "warm_at_the_end"),
    [
        ("BaseAlgorithm(learning_starts=50)", False),
        ("BaseAlgorithm(); model.gradient_steps = 0", True),  # there will be no update
        ("BaseAlgorithm(); del model._n_updates", True),  # an algorithm that counts none
        ("BaseAlgorithm(50); del model._n_updates", False),
        ("BaseAlgorithm(50); model._n_updates = 9", False),  # a checkpoint's
    ],
)
def test_warm_up_ends_with_the_first_update_or_where_there_is_none(
    jobs: Jobs, model: str, warm_at_the_end: bool
) -> None:
    run = jobs(BEGIN + f"model = {model}\nmodel.learn(5)")
    assert run.err == ""
    assert (run.reports[-1]["metrics"]["warming_up"] == 0.0) is warm_at_the_end


@pytest.mark.parametrize(
    "callback",
    ["None", "[]", "[Counting(), Counting()]", "CallbackList([Counting()])", "lambda: True"],
)
def test_any_callback(jobs: Jobs, callback: str) -> None:
    program = f"""
class Counting(BaseCallback):
    begun = steps = 0
    def _init_callback(self):
        self.begun += 1
    def _on_step(self):
        self.steps += 1
        return True
callback = {callback}
BaseAlgorithm().learn(3, callback)
counting = callback if isinstance(callback, list) else getattr(callback, "callbacks", [])
assert all((c.begun, c.steps) == (1, 3) for c in counting), vars(counting[0])
if isinstance(callback, CallbackList):
    assert len(callback.callbacks) == 1, "the program's list is the program's"
"""
    run = jobs(BEGIN + program)
    assert (run.code, run.err) == (0, "")
    assert run.steps[-1] == (3, 3)


def test_learn_after_learn_continues_or_begins_anew(jobs: Jobs) -> None:
    program = """
model = BaseAlgorithm()
model.learn(2).learn(2, reset_num_timesteps=False)
model.learn(3)
"""
    steps = jobs(BEGIN + program).steps
    assert list(dict.fromkeys(steps)) == [(1, 2), (2, 2), (3, 4), (4, 4), (1, 3), (2, 3), (3, 3)]


def test_a_callback_that_stops_the_training_stops_it(jobs: Jobs) -> None:
    run = jobs(BEGIN + "BaseAlgorithm().learn(9, lambda: False)")
    assert set(run.steps) == {(1, 9)}


def test_a_training_inside_another_is_not_the_jobs_progress(jobs: Jobs) -> None:
    program = """
inner = BaseAlgorithm()
BaseAlgorithm().learn(2, lambda: inner.learn(77) is not None)
inner.learn(4)  # by itself it is
"""
    assert {total for _step, total in jobs(BEGIN + program).steps} == {2, 4}


def test_a_learn_left_by_an_exception_does_not_silence_the_next(jobs: Jobs) -> None:
    program = """
def fail():
    raise RuntimeError("by the program")
kept = []
try:
    BaseAlgorithm().learn(9, fail)
except RuntimeError as error:
    kept.append(error)  # with all its frames
BaseAlgorithm().learn(3)
BaseAlgorithm().learn(8, fail)
"""
    run = jobs(BEGIN + program)
    assert run.code == 1
    assert run.err.endswith("RuntimeError: by the program\n")
    assert "hooks off" not in run.err
    assert run.steps[-1] == (3, 3)


def test_algorithms_with_a_hook_of_their_own_report_once(jobs: Jobs) -> None:
    program = """
import in_the_wild
in_the_wild.Standalone().learn(2)
in_the_wild.Cooperating().learn(3)
class InTheProgram(BaseAlgorithm):
    pass
InTheProgram().learn(4)
"""
    steps = jobs(BEGIN + program).steps
    assert steps == [(1, 2), (2, 2), (2, 2), *[(i, 3) for i in (1, 2, 3, 3)]] + [
        (i, 4) for i in (1, 2, 3, 4, 4)
    ]


def test_a_program_that_reports_is_left_to_it(jobs: Jobs) -> None:
    program = """
import rlq.job
rlq.job.report(1000, 2000)
BaseAlgorithm().learn(3)
"""
    assert jobs(BEGIN + program, path=(PROGRAMS, client())).steps == [(1000, 2000)]


@pytest.mark.parametrize(("wait_s", "reports"), [("60", False), ("0", True)])
def test_a_program_that_could_report_is_waited_for(jobs: Jobs, wait_s: str, reports: bool) -> None:
    program = f"""
import rlq.job
every_report.attached.OWN_REPORTS_WAIT_S = {wait_s}
BaseAlgorithm().learn(3)
"""
    assert bool(jobs(BEGIN + program, path=(PROGRAMS, client())).reports) is reports


def client() -> Path:
    return Path(rlq.__file__).parent.parent


# ---- several processes -------------------------------------------------------------


def test_of_several_processes_that_train_one_reports(jobs: Jobs) -> None:
    program = """
import subprocess, sys
other = [sys.executable, "-c", "import every_report\\n"
    "every_report.stable_baselines3.common.base_class.BaseAlgorithm().learn(77)"]
BaseAlgorithm().learn(2, lambda: subprocess.run(other, check=True) is not None)
subprocess.run([word.replace("77", "5") for word in other], check=True)  # now it is free
"""
    run = jobs(BEGIN + program)
    assert (run.code, run.err) == (0, "")
    assert {total for _step, total in run.steps} == {2, 5}


def test_a_forked_child_is_no_trouble(jobs: Jobs) -> None:
    program = """
import os, sys
def fork():
    child = os.fork()
    if child == 0:
        sys.exit(0)  # the exit hooks run here too
    assert os.waitpid(child, 0)[1] == 0
BaseAlgorithm().learn(3, fork)
child = os.fork()
if child == 0:
    os.closerange(3, 256)
    BaseAlgorithm().learn(4)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    run = jobs(BEGIN + program)
    assert (run.code, run.err) == (0, "")
    assert run.steps == [(i, 3) for i in (1, 2, 3, 3)] + [(i, 4) for i in (1, 2, 3, 4, 4)]


def test_a_child_that_lives_on_does_not_keep_others_from_reporting(jobs: Jobs) -> None:
    program = """
import os, signal, subprocess, sys
children = []
def fork():
    if not children:
        children.append(os.fork())
        if children == [0]:
            signal.pause()
BaseAlgorithm().learn(2, fork)
other = "import every_report\\n" \\
    "every_report.stable_baselines3.common.base_class.BaseAlgorithm().learn(5)"
subprocess.run([sys.executable, "-c", other], check=True)
os.kill(children[0], signal.SIGKILL)
"""
    run = jobs(BEGIN + program)
    assert (run.code, run.err) == (0, "")
    assert run.steps[-1] == (5, 5)


def test_a_program_that_closes_all_descriptors_keeps_those_it_opens_then(jobs: Jobs) -> None:
    program = """
import os
opened = []
def close():
    if not opened:
        os.closerange(3, 64)
        opened.extend(os.open("/dev/null", os.O_WRONLY) for _ in range(8))
BaseAlgorithm().learn(3, close)
for descriptor in opened:
    os.write(descriptor, b"x")
"""
    run = jobs(BEGIN + program)
    assert (run.code, run.err) == (0, "")


def test_the_last_report_of_a_short_learn_is_not_lost_to_the_next(jobs: Jobs) -> None:
    program = """
from stable_baselines3.common.base_class import BaseAlgorithm
for total in (5, 3, 4):
    BaseAlgorithm().learn(total)
"""
    assert set(jobs(program).steps) >= {(5, 5), (3, 3), (4, 4)}


# ---- imports -----------------------------------------------------------------------


def test_a_module_looks_as_if_imported_without_hooks(jobs: Jobs) -> None:
    program = """
import inspect, sys
import stable_baselines3.common.base_class as module
spec = module.__spec__
print(type(spec.loader).__name__, module.__loader__ is spec.loader, vars(spec.loader).keys(),
      spec.origin == module.__file__, spec.cached, len(inspect.getsource(module)),
      inspect.signature(module.BaseAlgorithm._init_callback),
      inspect.getsource(module.BaseAlgorithm._init_callback))
"""
    on, off = jobs(program), jobs(program, env={"RLQ_HOOKS": "0"})
    assert (on.code, on.out) == (0, off.out)


def test_a_program_that_replaces_the_finders_runs_without_hooks(jobs: Jobs) -> None:
    program = "import sys\nsys.meta_path = [f for f in sys.meta_path if isinstance(f, type)]"
    run = jobs(program + BEGIN.replace("import every_report", "") + "BaseAlgorithm().learn(3)")
    assert (run.code, run.err, run.reports) == (0, "", [])


def test_a_finder_that_comes_first_does_not_hide_the_import(jobs: Jobs) -> None:
    program = """
import sys
from importlib.machinery import PathFinder
class First:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path) if name.startswith("stable") else None
sys.meta_path.insert(0, First())
from stable_baselines3.common.base_class import BaseAlgorithm
import colorsys
BaseAlgorithm().learn(3)
"""
    assert jobs(program).steps[-1] == (3, 3)


def test_a_torch_that_cannot_be_imported_fails_as_ever(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcuda.so: no such file')")
    program = """
for _ in range(2):
    try:
        import torch
    except OSError as error:
        print(error)
try:
    import torch.nn
except Exception as error:
    print(type(error).__name__)
import stable_baselines3.common.base_class as sb3
sb3.BaseAlgorithm().learn(3)
"""
    run = jobs(program, path=(tmp_path, PROGRAMS))
    assert (run.code, run.err) == (0, "")
    assert run.out == "libcuda.so: no such file\n" * 2 + "OSError\n"
    assert run.steps[-1] == (3, 3)


def test_a_torch_that_is_not_there_is_not_there(jobs: Jobs, tmp_path: Path) -> None:
    program = """
import sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p]
for _ in range(2):
    try:
        import torch
    except ModuleNotFoundError as error:
        print(error.name)
"""
    run = jobs(program)
    assert (run.code, run.out, run.err) == (0, "torch\ntorch\n", "")


def test_a_torch_that_can_be_imported_later_is_hooked_then(jobs: Jobs, tmp_path: Path) -> None:
    text = "import sys\nassert 'ready' in vars(sys)\n" + TORCH
    (tmp_path / "torch.py").write_text(text)
    program = f"""
import os, sys
del os.environ["OMP_NUM_THREADS"]
path = sys.path[:]
sys.path[:] = [p for p in sys.path if "site-packages" not in p]
for expected in (ModuleNotFoundError, AssertionError):
    try:
        import torch
    except expected:
        sys.path[:] = [{str(tmp_path)!r}, *path]
sys.ready = True
import torch
print(torch.get_num_threads())
"""
    run = jobs(program)
    assert (run.code, run.err) == (0, "")
    assert run.out == f"{len(os.sched_getaffinity(0))}\n"


# ---- surprises ---------------------------------------------------------------------

LEARN = """
import sys
from stable_baselines3.common.base_class import BaseAlgorithm
model = BaseAlgorithm()
SURPRISE
model.learn(3)
BaseAlgorithm().learn(4)
print(model.num_timesteps)
"""


@pytest.mark.parametrize(
    "surprise",
    [
        "model.ep_info_buffer.append({})",
        "model.ep_info_buffer.append({'r': 'word'})",
        "model.ep_info_buffer = 3",
        "model._n_updates = None",
        "sys.modules['_rlq_hooks']._HERE = '/gone'",
        "sys.modules['_rlq_hooks'].reporter().report = None",
        "sys.modules['_rlq_hooks'].time = None",
    ],
)
def test_a_surprise_in_a_learn_ends_its_reports_in_one_line(jobs: Jobs, surprise: str) -> None:
    program = LEARN.replace("SURPRISE", surprise)
    if "_n_updates" in surprise:
        program = program.replace("BaseAlgorithm()", "BaseAlgorithm(learning_starts=50)")
    run = jobs(program)
    assert (run.code, run.out) == (0, "3\n")
    assert run.err.startswith("rlq: hooks off: ")
    assert run.err.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" _init_callback(self, callback", " _prepare(self, callback"),
        ("CallbackList", "ManyCallbacks"),
        ("BaseAlgorithm", "Algorithm"),
        ("verbose: int = 0", "model: Any = None, *, model_first: bool = True"),
    ],
)
def test_an_sb3_of_another_shape_runs_without_hooks(
    jobs: Jobs, tmp_path: Path, old: str, new: str
) -> None:
    package = shutil.copytree(PROGRAMS / "stable_baselines3", tmp_path / "stable_baselines3")
    for file in (package / "common").glob("*.py"):
        text = file.read_text().replace(old, new).replace("= verbose", "= 0")
        if "_prepare" in new:
            text = text.replace("self._init_callback(callback)", "self._prepare(callback)")
        file.write_text(text)
    program = LEARN.replace("SURPRISE", "").replace("BaseAlgorithm", "Algorithm")
    program = program.replace(
        "import Algorithm", f"import {new if old[:4] == 'Base' else 'BaseAlgorithm'} as Algorithm"
    )
    run = jobs(program, path=(tmp_path,))
    assert (run.code, run.out) == (0, "3\n")
    assert run.err.startswith("rlq: hooks off: ")
    assert run.err.count("\n") == 1


def test_without_a_stderr_there_is_nothing_to_say(jobs: Jobs) -> None:
    run = jobs(
        "import sys\nsys.stderr = None\n" + LEARN.replace("SURPRISE", "model.ep_info_buffer = 3")
    )
    assert (run.code, run.out) == (0, "3\n")


# ---- torch -------------------------------------------------------------------------

TORCH = """
import os
__version__ = "2.4.0"
threads = int(os.environ.get("OMP_NUM_THREADS", "64"))
def get_num_threads():
    return threads
def set_num_threads(number):
    global threads
    threads = number
class cuda:
    queued, capped, devices = [], [], 2
    _lazy_call = staticmethod(queued.append)
    @classmethod
    def device_count(cls):
        return cls.devices
    @classmethod
    def set_per_process_memory_fraction(cls, fraction, device):
        cls.capped.append((fraction, device))
    @classmethod
    def init(cls):
        for call in cls.queued:
            call()
"""


@pytest.fixture
def torch_2_4(tmp_path: Path) -> Path:
    (tmp_path / "torch.py").write_text(TORCH)
    return tmp_path


@pytest.mark.parametrize(
    ("before", "threads"),
    [
        ("", 1),  # OMP_NUM_THREADS=1 is obeyed
        ("os.environ.pop('OMP_NUM_THREADS')", "cores"),
        ("os.environ['OMP_NUM_THREADS'] = '8'", 8),  # the user's own
        ("os.environ['OMP_NUM_THREADS'] = '8,2'; torch_reads = 8", "8 of nested"),
    ],
)
def test_torch_uses_the_jobs_cores(
    jobs: Jobs, torch_2_4: Path, before: str, threads: int | str
) -> None:
    if threads == "8 of nested":
        (torch_2_4 / "torch.py").write_text(TORCH.replace('"64"))', '"64").split(",")[0])'))
        threads = 8
    program = f"import os\n{before}\nimport torch\nprint(torch.get_num_threads())"
    run = jobs(program, path=(torch_2_4,))
    wanted = len(os.sched_getaffinity(0)) if threads == "cores" else threads
    assert (run.code, run.out, run.err) == (0, f"{wanted}\n", "")


CAPPED = "import torch\nprint(torch.cuda.capped)\ntorch.cuda.init()\nprint(torch.cuda.capped)"


@pytest.mark.parametrize(
    ("env", "capped"),
    [
        ({"RLQ_GPU_MEM_FRACTION": "0.25"}, [(0.25, 0), (0.25, 1)]),
        ({}, []),
        (
            {
                "RLQ_GPU_MEM_FRACTION": "0.25",
                "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.25",
            },
            [],
        ),
        (
            {"RLQ_GPU_MEM_FRACTION": "0.25", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
            [(0.25, 0), (0.25, 1)],
        ),
    ],
)
def test_gpu_memory_is_capped_once_cuda_is_used(
    jobs: Jobs, torch_2_4: Path, env: dict[str, str], capped: list[tuple[float, int]]
) -> None:
    run = jobs(CAPPED, path=(torch_2_4,), env=env)
    assert (run.code, run.out, run.err) == (0, f"[]\n{capped}\n", "")


def test_a_cap_that_fails_does_not_end_the_job(jobs: Jobs, torch_2_4: Path) -> None:
    program = CAPPED.replace("import torch", "import torch; torch.cuda.devices = 'two'")
    run = jobs(program, path=(torch_2_4,), env={"RLQ_GPU_MEM_FRACTION": "0.25"})
    assert (run.code, run.out) == (0, "[]\n[]\n")
    assert run.err.startswith("rlq: hooks off: GPU memory is not capped: TypeError")


@pytest.mark.parametrize("broken", ["del get_num_threads", "del cuda._lazy_call"])
def test_a_torch_of_another_shape_runs_without_hooks(
    jobs: Jobs, torch_2_4: Path, broken: str
) -> None:
    (torch_2_4 / "torch.py").write_text(TORCH + broken)
    run = jobs("import torch", path=(torch_2_4,), env={"RLQ_GPU_MEM_FRACTION": "0.25"})
    assert run.code == 0
    assert run.err.startswith("rlq: hooks off: AttributeError")
