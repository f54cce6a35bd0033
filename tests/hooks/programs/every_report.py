"""Lets every report through, where a test counts them."""

from __future__ import annotations

import sys
from typing import Any

import stable_baselines3.common.base_class  # noqa: F401

attached: Any = sys.modules["_rlq_hooks"]
attached.INTERVAL_S = 0.0
attached.reporter().SEND_INTERVAL_S = 0.0
