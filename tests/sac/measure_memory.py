"""Measure what plan.py declares: `python tests/sac/measure_memory.py` (three minutes; no test).

Prints the peak resident memory (VmHWM) of a training without its replay buffer, and of one
worker of SubprocVecEnv. Put the larger numbers, rounded up, into rlq_sac/plan.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import json, multiprocessing, re, runpy, sys
from pathlib import Path

def peak_mib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024

workers = []
if __name__ == "__main__":
    from stable_baselines3.common.vec_env import SubprocVecEnv
    close = SubprocVecEnv.close
    def close_measured(self):
        workers.extend(peak_mib(process.pid) for process in self.processes)
        close(self)
    SubprocVecEnv.close = close_measured
    out = sys.argv.pop()
    try:
        runpy.run_module("rlq_sac", run_name="__main__")
    finally:
        Path(out).write_text(json.dumps({"main": peak_mib("self"), "workers": workers}))
"""


def measure(algo: str, n_envs: int, env: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "memory.json"
        program = Path(folder) / "measured.py"
        program.write_text(PROGRAM)
        options = (
            f"train --algo {algo} --env {env} --steps 1200 --n-envs {n_envs} --device cpu "
            "--set learning_starts=200 --set buffer_size=1000 --eval-freq 600 "
            "--checkpoint-freq 600 --eval-episodes 1"
        ).split()
        command = [sys.executable, str(program), *options, "--out", folder + "/run", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        measured: dict[str, object] = json.loads(out.read_text())
        return measured


if __name__ == "__main__":
    for algo in ("sb3", "sbx"):
        for n_envs in (1, 2):
            print(algo, "n_envs", n_envs, measure(algo, n_envs, "Humanoid-v5"), flush=True)
