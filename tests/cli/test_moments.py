"""Moments as people write them."""

from __future__ import annotations

import time

import pytest

from rlq.cli.moments import parse_moment
from rlq.errors import UsageError

#: Monday, 30 November 2026, 14:00 local time, wherever this runs.
NOW = time.mktime((2026, 11, 30, 14, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("2026-12-01T09:00", (2026, 12, 1, 9, 0)),
        ("2026-12-01 09:00:00", (2026, 12, 1, 9, 0)),
        ("2026-12-01", (2026, 12, 1, 0, 0)),
        ("15:30", (2026, 11, 30, 15, 30)),
        ("9:00", (2026, 12, 1, 9, 0)),
        ("today 9:00", (2026, 11, 30, 9, 0)),
        ("Tomorrow 15:30", (2026, 12, 1, 15, 30)),
    ],
)
def test_local_times(text: str, means: tuple[int, ...]) -> None:
    assert time.localtime(parse_moment(text, NOW))[:5] == means


def test_now() -> None:
    assert parse_moment("now", NOW) == NOW


@pytest.mark.parametrize(
    "text", ["", "soon", "25:00", "12:60", "2026-02-30", "2026-12-01T25:00", "9", "1.12.2026"]
)
def test_what_is_no_moment_says_what_would_be(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_moment(text, NOW)
    assert "2026-12-01T09:00" in (caught.value.hint or "")
