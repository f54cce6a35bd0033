"""Hooks: what the daemon adds to a job's Python so that an unchanged program reports.

Rule 1: `path/` is what goes onto PYTHONPATH; it holds sitecustomize.py and nothing else, for
        whatever lies there shadows the program's own modules.
Rule 2: what runs inside a job (path/, attach.py, follow.py, ../job.py) needs the standard
        library of Python 3.8 only: the job's Python is seldom ours and has no rlq.
Rule 3: nothing here may break or change a job: a surprise turns the hooks off, in one line.
"""

from __future__ import annotations

import os

#: The folder that is put first on a job's PYTHONPATH.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")


def pythonpath(before: str | None, *, on: bool) -> str | None:
    """A job's PYTHONPATH: `before` with the hooks in front, or without them.  None: unset.

    A job submitted from inside another has the folder on it already.  An empty part means the
    working folder to Python, so that nothing may be joined carelessly.
    """
    parts = [] if not before else [part for part in before.split(":") if part != FOLDER]
    if on:
        parts.insert(0, FOLDER)
    return ":".join(parts) or None
