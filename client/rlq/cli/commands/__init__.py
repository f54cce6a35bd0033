"""One verb, one file; each has `command`.  Loaded by name from rlq.cli.VERBS."""

from __future__ import annotations
