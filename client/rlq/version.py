"""The version, alone, so that reading it imports nothing else."""

from __future__ import annotations

VERSION = "0.1.0"
