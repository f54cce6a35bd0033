"""What is booked is kept on disk, in times of day; the core is told it on its own clock."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.core.machines import FACTS, A, B, Desk, gpu, spec

from rlq.errors import NotFoundError, NotPermittedError, RefusedError, UsageError
from rlq.protocol.messages import Booking, Claim, Reserve, Unbook
from rlqd.adapters.sqlite import Store
from rlqd.config import Config, parse
from rlqd.core import model
from rlqd.shell.accounts import Accounts, Peer
from rlqd.shell.bookings import Bookings

HOUR = 3600.0
#: Names that every machine has.
NAMES = [one.pw_name for one in pwd.getpwall() if one.pw_uid not in (0, os.geteuid())][:2]
DAEMON, BIN = NAMES
ADMIN = Peer(uid=os.geteuid(), gid=0, pid=1)
USER = Peer(uid=pwd.getpwnam(DAEMON).pw_uid, gid=1, pid=1)
OTHER = Peer(uid=pwd.getpwnam(BIN).pw_uid, gid=1, pid=1)


@dataclass
class Lab:
    """Two GPUs, eight cores; the wall clock is the test's."""

    path: Path
    config: Config = field(default_factory=Config)
    wall: float = 1_800_000_000.0
    now: int = 5_000_000

    def __post_init__(self) -> None:
        self.desk = Desk(replace(FACTS, gpus=(gpu(A), gpu(B))))
        self.store = Store(self.path)
        self.open()

    def open(self) -> None:
        self.bookings = Bookings(
            store=self.store,
            config=self.config,
            accounts=Accounts(look_up=lambda uid: None),
            core=lambda: self.desk.core,
            gpu_indices=lambda: {A: 0, B: 1},
            wall=lambda: self.wall,
        )

    def restart(self) -> None:
        self.store.close()
        self.store = Store(self.path)
        self.open()

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.now += round(seconds * 1000)

    def news(self) -> model.CalendarSet | None:
        return self.bookings.news(model.Instant(self.now))

    def reserve(self, **asked: object) -> Booking:
        words = {
            "users": (DAEMON,),
            "starts_at": self.wall + HOUR,
            "ends_at": self.wall + 3 * HOUR,
            **asked,
        }
        return self.bookings.reserve(Reserve(**words), ADMIN).booking  # type: ignore[arg-type]

    def claim(self, peer: Peer = USER, gpu: int = 0, hours: float = 2) -> Booking:
        asked = Claim(gpu_index=gpu, for_ms=round(hours * 3_600_000))
        return self.bookings.claim(asked, peer).booking

    def names(self) -> list[str]:
        return [one.name for one in self.bookings.calendar().bookings]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path / "jobs.sqlite")
    yield lab
    lab.store.close()


# ---- what the core is told ---------------------------------------------------------


def test_the_core_hears_of_it_on_its_own_clock_and_once(lab: Lab) -> None:
    lab.reserve(gpus=1, cores=2, mem_mib=100)
    told = lab.news()
    assert told is not None
    (window,) = told.bookings
    assert (window.starts_at - lab.now, window.ends_at - lab.now) == (3_600_000, 10_800_000)
    assert (window.gpus, window.cores, window.mem_mib) == (frozenset({B}), 2, 100)
    assert window.users == frozenset({USER.uid})
    lab.pass_(60)
    assert lab.news() is None


@pytest.mark.parametrize("jump_s", [-1800.0, 1800.0])
def test_a_wall_clock_that_is_set_moves_the_windows(lab: Lab, jump_s: float) -> None:
    lab.reserve(gpus=1)
    lab.news()
    lab.wall += jump_s
    lab.now += 1_000
    told = lab.news()
    assert told is not None
    starts_in_ms = told.bookings[0].starts_at - lab.now
    assert abs(starts_in_ms - (3600 - jump_s) * 1000) <= 1_000


def test_a_clock_that_drifts_a_little_is_let_be(lab: Lab) -> None:
    lab.reserve(gpus=1)
    lab.news()
    lab.pass_(60)
    lab.wall += 0.2
    assert lab.news() is None


def test_what_is_over_is_no_longer_told_and_no_longer_shown(lab: Lab) -> None:
    lab.reserve(gpus=1)
    lab.news()
    lab.pass_(3 * HOUR)
    told = lab.news()
    assert told is not None
    assert told.bookings == ()
    assert lab.names() == []


def test_a_clock_that_was_wrong_for_a_while_costs_no_reservation(lab: Lab) -> None:
    lab.reserve(gpus=1, name="course")
    lab.wall += 86_400
    lab.claim()
    lab.wall -= 86_400
    lab.restart()
    assert "course" in lab.names()


def test_a_restart_forgets_nothing(lab: Lab) -> None:
    lab.reserve(gpus=1, name="course")
    lab.claim()
    before = lab.bookings.calendar()
    lab.restart()
    assert lab.bookings.calendar() == before
    told = lab.news()
    assert told is not None
    assert len(told.bookings) == 2


def test_a_damaged_row_costs_the_others_nothing(lab: Lab) -> None:
    lab.reserve(gpus=1, name="course")
    with lab.store.transaction():
        lab.store.insert_booking(b"{}")
    lab.restart()
    assert lab.names() == ["course"]


def test_quiet_hours_of_the_configuration(tmp_path: Path) -> None:
    text = '[quiet]\nhours = ["00:00-24:00"]\ngpus = 1\nsm = "40%"\n'
    lab = Lab(tmp_path / "jobs.sqlite", parse(text, "test"))
    told = lab.news()
    assert told is not None
    (quiet,) = told.quiet
    assert (quiet.gpus, quiet.cores, quiet.sm_pct, quiet.ends_at) == (1, None, 40, None)
    lab.store.close()


# ---- reservations ------------------------------------------------------------------


def test_gpus_of_the_daemons_choice_are_those_that_nobody_has_booked(lab: Lab) -> None:
    assert lab.reserve(gpus=1).gpu_indices == (1,)
    assert lab.reserve(gpus=1).gpu_indices == (0,)
    with pytest.raises(RefusedError, match="0 nobody has booked"):
        lab.reserve(gpus=1)
    later = {"starts_at": lab.wall + 3 * HOUR, "ends_at": lab.wall + 4 * HOUR}
    assert lab.reserve(gpus=2, **later).gpu_indices == (0, 1)


def test_a_gpu_is_not_booked_twice(lab: Lab) -> None:
    lab.claim(hours=2)
    with pytest.raises(RefusedError, match=f"claimed by {DAEMON}"):
        lab.reserve(gpu_indices=(0,))


def test_a_gpu_brings_the_cores_and_the_memory_of_a_job(lab: Lab) -> None:
    booked = lab.reserve(gpus=2)
    assert (booked.cores, booked.mem_mib) == (2, 4096)
    assert lab.reserve(cores=1).mem_mib == 0


def test_no_more_cores_are_booked_at_a_time_than_there_are(lab: Lab) -> None:
    lab.reserve(cores=5)
    with pytest.raises(RefusedError, match="3 are not booked"):
        lab.reserve(cores=4)
    lab.reserve(cores=8, starts_at=lab.wall + 3 * HOUR, ends_at=lab.wall + 4 * HOUR)


def test_the_jobs_in_its_way_are_named(lab: Lab) -> None:
    stranger, ends_in_time, theirs = lab.desk.run(
        spec(gpus=1, gpu_mem=1),
        spec(gpus=1, gpu_mem=1, limit=1_000),
        spec(gpus=1, gpu_mem=1, user=USER.uid),
    )
    lab.now = lab.desk.now
    lab.news()
    booked = lab.reserve(gpu_indices=(0, 1))
    assert booked.jobs == (stranger,)
    lab.news()
    everybody = lab.bookings.reserve(
        Reserve(maintenance=True, starts_at=lab.wall, ends_at=lab.wall + 60), ADMIN
    )
    assert everybody.booking.jobs == (stranger, ends_in_time, theirs)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({}, "nothing to book"),
        ({"gpus": 1, "users": ()}, "for somebody's jobs"),
        ({"gpus": 1, "users": ("no such user",)}, "no user"),
        ({"gpu_indices": (7,)}, "no GPU 7"),
        ({"gpus": 1, "ends_at": 0.0}, "ends after it starts"),
        ({"gpus": 1, "starts_at": float("inf"), "ends_at": float("inf")}, "ends after it starts"),
        ({"gpus": 1, "ends_at": float("nan")}, "ends after it starts"),
        ({"gpus": 1, "starts_at": float("nan")}, "ends after it starts"),
        ({"gpus": 1, "name": "two words"}, "name"),
        ({"cores": -1}, "out of range"),
        ({"maintenance": True, "gpus": 1}, "all of the machine"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    lab: Lab, asked: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        lab.reserve(**asked)
    assert lab.names() == []


def test_a_name_is_for_one_booking(lab: Lab) -> None:
    lab.reserve(cores=1, name="course")
    with pytest.raises(UsageError, match="booked already"):
        lab.reserve(cores=1, name="course")
    assert lab.reserve(cores=1).name == f"{DAEMON}_1"


def test_only_administrators_end_a_reservation(lab: Lab) -> None:
    lab.reserve(cores=1, name="course")
    with pytest.raises(NotPermittedError):
        lab.bookings.end(Unbook(name="course"), USER)
    with pytest.raises(NotPermittedError):
        lab.bookings.end(Unbook(name="course"), replace(ADMIN, remote=True))
    lab.bookings.end(Unbook(name="course"), ADMIN)
    with pytest.raises(NotFoundError):
        lab.bookings.end(Unbook(name="course"), ADMIN)
    told = lab.news()
    assert told is None or told.bookings == ()


# ---- claims ------------------------------------------------------------------------


def test_a_claim_is_for_nobodys_jobs(lab: Lab) -> None:
    claim = lab.claim()
    told = lab.news()
    assert (claim.kind, claim.users, claim.by) == ("claim", (), DAEMON)
    assert told is not None
    assert told.bookings[0].users == frozenset()


def test_a_claim_is_for_so_long_at_most(lab: Lab) -> None:
    with pytest.raises(NotPermittedError, match="for 4h 0m at most"):
        lab.claim(hours=4.1)
    lab.claim(hours=4)
    lab.claim(ADMIN, gpu=1, hours=24)


def test_one_claim_at_a_time(lab: Lab) -> None:
    lab.claim(gpu=0)
    with pytest.raises(NotPermittedError, match="GPU 0 already"):
        lab.claim(gpu=1)
    lab.pass_(2 * HOUR)
    lab.claim(gpu=1)
    lab.claim(ADMIN, gpu=0)


def test_claiming_again_is_for_longer(lab: Lab) -> None:
    first = lab.claim(hours=1)
    lab.pass_(HOUR / 2)
    again = lab.claim(hours=2)
    assert again.starts_at == first.starts_at
    assert again.ends_at == lab.wall + 2 * HOUR
    assert lab.names() == [again.name]


def test_claims_one_after_the_other_take_nobodys_place(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlqd.shell.bookings.BOOKINGS_MAX", 3)
    lab.claim(OTHER, gpu=1)
    for _ in range(5):
        lab.claim(USER, hours=1e-6)
        lab.pass_(1)
    lab.reserve(cores=1, name="course")
    lab.restart()
    assert len(lab.bookings.rows) == 3


def test_what_somebody_has_booked_cannot_be_claimed(lab: Lab) -> None:
    lab.claim(USER)
    with pytest.raises(RefusedError, match=f"GPU 0 is claimed by {DAEMON} until"):
        lab.claim(OTHER)
    lab.reserve(gpu_indices=(1,), users=(BIN,))
    lab.bookings.end(Unbook(claim=True), USER)
    with pytest.raises(RefusedError, match="reserved for"):
        lab.claim(USER, gpu=1)
    assert lab.claim(OTHER, gpu=1).gpu_indices == (1,)


def test_a_claim_is_given_back_by_whose_it_is_or_by_an_administrator(lab: Lab) -> None:
    lab.claim(USER)
    with pytest.raises(NotFoundError):
        lab.bookings.end(Unbook(claim=True, gpu_index=0), OTHER)
    with pytest.raises(NotPermittedError):
        lab.bookings.end(Unbook(name="claim_1"), OTHER)
    lab.bookings.end(Unbook(claim=True, gpu_index=0), ADMIN)
    lab.claim(USER)
    lab.bookings.end(Unbook(claim=True), USER)
    assert lab.names() == []


def test_what_administrators_book_and_end_is_recorded(lab: Lab) -> None:
    lab.reserve(cores=1, name="course")
    lab.claim(USER)
    lab.claim(OTHER, gpu=1)
    lab.bookings.end(Unbook(claim=True), OTHER)
    lab.bookings.end(Unbook(claim=True, gpu_index=0), ADMIN)
    acts = lab.store.audit(limit=10)
    assert {(act.verb, act.owner, act.detail) for act in acts} == {
        ("reserve", "", "course"),
        ("unbook", DAEMON, "claim_1"),
    }
    seen = lab.store.audit(limit=10, owner_uid=USER.uid)
    assert [act.detail for act in seen] == ["claim_1"], "whose it was can see who ended it"
