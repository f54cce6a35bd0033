"""The built-in workload: one SAC training (SB3 or SBX) as a job that can be stopped and resumed.

`python -m rlq_sac train|plan …`, a child process of the queue.
Rule 1: of rlq it imports `rlq.job` and `rlq.errors` only: it runs as well without a queue.
Rule 2: the algorithms are used as they are published; everything of ours is in a callback.
Rule 3: torch, jax and their kin are imported by `training` only, after the options are known.
Rule 4: a file appears under its final name only when it is complete.
"""

from __future__ import annotations
