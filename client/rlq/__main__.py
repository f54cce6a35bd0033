"""`python -m rlq`."""

from __future__ import annotations

from rlq.cli import main

main()
