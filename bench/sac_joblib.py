"""The same trainings by joblib, as people write it: one line, one process each (loky).

Run: python bench/sac_joblib.py N FOLDER ALGO ENV STEPS WARMUP
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    # Its types are not needed to check the one line below, nor is it installed everywhere.
    from importlib import import_module

    from bench.sac_train import train

    joblib: Any = import_module("joblib")
    jobs, folder, algo, env, steps, warmup = sys.argv[1:]
    n = int(jobs)
    joblib.Parallel(n_jobs=n)(
        joblib.delayed(train)(f"{folder}/{seed}.json", algo, env, int(steps), int(warmup), seed)
        for seed in range(n)
    )


if __name__ == "__main__":
    main()
