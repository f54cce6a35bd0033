"""Waiting for what other processes do, without a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(read: Callable[[], T], wanted: Callable[[T], bool], limit_s: float = 30) -> T:
    """Read again and again until it is as `wanted`; fail with what was seen last."""
    end = time.monotonic() + limit_s
    while not wanted(last := read()):
        assert time.monotonic() < end, f"still not so after {limit_s} s; last seen: {last}"
        time.sleep(0.01)
    return last
