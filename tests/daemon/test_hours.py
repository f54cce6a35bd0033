"""Hours of the week on the calendar: by the clock on the wall, whatever it does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from rlqd.hours import is_always, parse_hours, windows

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(day: str, clock: str) -> float:
    return datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=BERLIN).timestamp()


def next_two(text: str, now: float) -> list[tuple[str, str]]:
    def words(when: float) -> str:
        return datetime.fromtimestamp(when, BERLIN).strftime("%a %d %H:%M")

    return [(words(a), words(b)) for a, b in windows([parse_hours(text)], now)][:2]


# 2026-11-27 is a Friday.
def test_the_hours_of_today_until_they_are_over() -> None:
    assert next_two("Mon-Fri 09:00-18:00", at("2026-11-27", "17:59")) == [
        ("Fri 27 09:00", "Fri 27 18:00"),
        ("Mon 30 09:00", "Mon 30 18:00"),
    ]
    assert next_two("Mon-Fri 09:00-18:00", at("2026-11-27", "18:00"))[0][0] == "Mon 30 09:00"


def test_hours_over_midnight_belong_to_the_day_they_begin_on() -> None:
    assert next_two("Fri 22:00-06:00", at("2026-11-28", "05:00")) == [
        ("Fri 27 22:00", "Sat 28 06:00"),
        ("Fri 04 22:00", "Sat 05 06:00"),
    ]


def test_days_may_run_over_the_end_of_the_week() -> None:
    assert parse_hours("sat-mon 8:00-9:00").days == (5, 6, 0)


def test_hours_that_touch_are_one() -> None:
    assert next_two("Sat-Sun 00:00-24:00", at("2026-11-28", "12:00"))[0] == (
        "Sat 28 00:00",
        "Mon 30 00:00",
    )


def test_nine_stays_nine_when_the_clocks_change() -> None:
    # Summer time ends on 25 October 2026, at 03:00.
    before, after = windows([parse_hours("Sat-Sun 09:00-10:00")], at("2026-10-24", "08:00"))[:2]
    assert after[0] - before[0] == 25 * 3600
    assert next_two("Sat-Sun 09:00-10:00", at("2026-10-24", "08:00"))[1][0] == "Sun 25 09:00"


@pytest.mark.parametrize(
    ("hours", "always"),
    [
        (["00:00-24:00"], True),
        (["08:00-08:00"], True),
        (["00:00-23:59"], False),
        (["Mon-Fri 00:00-24:00", "Sat 00:00-24:00"], False),
        (["Mon-Fri 00:00-24:00", "Sat 00:00-24:00", "Sun 00:00-24:00"], True),
        ([], False),
    ],
)
def test_hours_that_are_all_of_the_week(hours: list[str], always: bool) -> None:
    assert is_always([parse_hours(text) for text in hours]) == always


@pytest.mark.parametrize(
    "text", ["", "Mon", "9-18", "Mon-Fri", "Xyz 09:00-18:00", "24:00-25:00", "09:60-10:00"]
)
def test_what_is_no_hours(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_hours(text)
