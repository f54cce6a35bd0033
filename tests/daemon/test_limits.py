"""The limits of the configuration, given to the core by uid."""

from __future__ import annotations

from tests.daemon.test_accounts import Directory

from rlqd.config import Limits, parse
from rlqd.core.model import Instant, Limit
from rlqd.shell.accounts import REMEMBERED_S, Accounts
from rlqd.shell.limits import LimitTable

ALICE, BOB = 54_001, 54_002
STUDENTS, STAFF = 7_001, 7_002
CONFIG = """
[limits]
max_jobs = 4
[limits.users.user54001]
max_jobs = 8
[limits.groups.students]
gpus = 2
[limits.groups.staff]
cores = 6
"""


class Clock:
    """Of the machine and of the daemon at once."""

    ms = 0

    def __call__(self) -> float:
        return self.ms / 1000


def table(text: str, directory: Directory, clock: Clock) -> LimitTable:
    accounts = Accounts(look_up=directory.account, look_up_group=directory.gid, clock=clock)
    return LimitTable(parse(text, "rlqd.toml").limits, accounts)


def people() -> Directory:
    return Directory(
        {ALICE: {STUDENTS}, BOB: {STUDENTS, STAFF}}, {"students": STUDENTS, "staff": STAFF}
    )


def test_a_user_has_the_own_limit_and_those_of_every_group() -> None:
    found = table(CONFIG, people(), Clock()).of([ALICE, BOB], Instant(0))
    students = Limit(whose="group students", gpus=2)
    assert found[ALICE] == (Limit(whose="user user54001", max_jobs=8), students)
    assert found[BOB] == (
        Limit(whose="user user54002", max_jobs=4),
        students,
        Limit(whose="group staff", cores=6),
    )


def test_without_limits_nobody_is_looked_up() -> None:
    directory = people()
    assert not table("", directory, Clock()).of([ALICE, BOB], Instant(0))
    assert directory.asked == 0


def test_users_that_were_asked_for_stay_and_are_looked_up_again_after_a_while() -> None:
    directory, clock = people(), Clock()
    limits = table(CONFIG, directory, clock)
    limits.of([ALICE], Instant(0))
    both = limits.of([BOB], Instant(1))
    assert both.keys() == {ALICE, BOB}
    directory.members[ALICE] = {STAFF}
    assert limits.of([], Instant(2)) is both, "nothing to do, a thousand times a second"
    clock.ms = round(REMEMBERED_S * 1000)
    later = limits.of([], Instant(clock.ms))
    assert [one.whose for one in later[ALICE]] == ["user user54001", "group staff"]
    assert [one.whose for one in both[ALICE]] == ["user user54001", "group students"]


def test_a_directory_service_that_is_down_lifts_no_limit() -> None:
    directory, clock = people(), Clock()
    limits = table(CONFIG, directory, clock)
    before = limits.of([ALICE], Instant(0))
    directory.members.clear()
    clock.ms = round(REMEMBERED_S * 1000)
    assert limits.of([], Instant(clock.ms))[ALICE] == before[ALICE]
    assert limits.of([BOB], Instant(clock.ms))[BOB] == (Limit(whose="user 54002", max_jobs=4),)


def test_a_new_configuration_holds_at_once() -> None:
    limits = table(CONFIG, people(), Clock())
    limits.of([ALICE], Instant(0))
    limits.reconfigure(parse("[limits]\ncores = 1", "rlqd.toml").limits)
    assert limits.of([], Instant(1))[ALICE] == (Limit(whose="user user54001", cores=1),)
    limits.reconfigure(Limits())
    assert limits.of([], Instant(2)) == {}


def test_names_that_the_machine_does_not_know_are_told() -> None:
    text = """
    [limits.users.root]
    gpus = 1
    [limits.users.no-such-user]
    gpus = 1
    [limits.groups.no-such-group]
    gpus = 1
    """
    assert list(table(text, people(), Clock()).unknown()) == [
        "limits.users.no-such-user",
        "limits.groups.no-such-group",
    ]
