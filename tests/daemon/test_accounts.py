"""Who may act on everybody's jobs: the kernel's uid and the machine's groups say so."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass, field

import pytest

from rlqd.shell.accounts import REMEMBERED_S, Account, Accounts, Peer, account_of, gid_of

ALICE, BOB = 54_001, 54_002
ADMINS, STUDENTS = 7_001, 7_002


@dataclass
class Directory:
    """A user database that counts how often it is asked."""

    members: dict[int, set[int]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    asked: int = 0

    def account(self, uid: int) -> Account | None:
        self.asked += 1
        gids = self.members.get(uid)
        return None if gids is None else Account(f"user{uid}", frozenset(gids))

    def gid(self, group: str) -> int | None:
        return self.groups.get(group)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def peer(uid: int, *, remote: bool = False) -> Peer:
    return Peer(uid=uid, gid=uid, pid=1, remote=remote)


@pytest.fixture
def directory() -> Directory:
    return Directory({ALICE: {ADMINS}, BOB: {STUDENTS}}, {"rlq-admin": ADMINS})


def accounts(directory: Directory, group: str, clock: Clock | None = None) -> Accounts:
    return Accounts(
        admin_group=group,
        look_up=directory.account,
        look_up_group=directory.gid,
        clock=clock or Clock(),
    )


def test_root_the_daemons_user_and_the_groups_members_are_administrators(
    directory: Directory,
) -> None:
    known = accounts(directory, "rlq-admin")
    assert known.is_operator(peer(0))
    assert known.is_operator(peer(os.geteuid()))
    assert known.is_operator(peer(ALICE))
    assert not known.is_operator(peer(BOB))


@pytest.mark.parametrize("group", ["", "no-such-group"])
def test_without_a_group_nobody_else_is(directory: Directory, group: str) -> None:
    known = accounts(directory, group)
    assert not known.is_operator(peer(ALICE))
    assert not known.is_operator(peer(BOB))
    assert known.is_operator(peer(0))


def test_everybody_acts_on_their_own_and_administrators_on_all(directory: Directory) -> None:
    known = accounts(directory, "rlq-admin")
    assert known.may_act_for(peer(BOB), BOB)
    assert not known.may_act_for(peer(BOB), ALICE)
    assert known.may_act_for(peer(ALICE), BOB)


def test_from_another_machine_nobody_is_an_administrator(directory: Directory) -> None:
    known = accounts(directory, "rlq-admin")
    for uid in (0, os.geteuid(), ALICE):
        assert not known.is_operator(peer(uid, remote=True))
    assert not known.may_act_for(peer(ALICE, remote=True), BOB)
    assert known.may_act_for(peer(ALICE, remote=True), ALICE)


def test_a_membership_is_remembered_a_while_and_then_looked_up_anew(
    directory: Directory,
) -> None:
    clock = Clock()
    known = accounts(directory, "rlq-admin", clock)
    for _ in range(100):
        assert known.is_operator(peer(ALICE))
    assert directory.asked == 1
    directory.members[ALICE] = set()
    clock.now = REMEMBERED_S - 1
    assert known.is_operator(peer(ALICE))
    clock.now = REMEMBERED_S
    assert not known.is_operator(peer(ALICE)), "taken away, and not for long still there"
    directory.members[ALICE] = {ADMINS}
    known.forget()
    assert known.is_operator(peer(ALICE))


def test_a_group_that_comes_with_the_directory_service_counts_from_then_on(
    directory: Directory,
) -> None:
    clock = Clock()
    gid = directory.groups.pop("rlq-admin")
    known = accounts(directory, "rlq-admin", clock)
    assert not known.is_operator(peer(ALICE))
    directory.groups["rlq-admin"] = gid
    clock.now = REMEMBERED_S
    assert known.is_operator(peer(ALICE))


def test_the_machines_own_database_is_asked() -> None:
    me = os.geteuid()
    mine = account_of(me)
    assert mine is not None
    assert mine.name == pwd.getpwuid(me).pw_name
    assert pwd.getpwuid(me).pw_gid in mine.gids
    assert gid_of(grp.getgrgid(os.getegid()).gr_name) == os.getegid()
    assert account_of(3_999_999_999) is None
    assert gid_of("no such group") is None
