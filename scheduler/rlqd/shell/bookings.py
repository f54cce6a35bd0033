"""Reservations, maintenance, claims and quiet hours: kept in times of day, told to the core.

The core's clock is the monotonic one, people's is the clock on the wall, and the two part when
NTP steps it, when somebody sets it, and when the machine sleeps.  So the windows are made anew
from times of day whenever the distance between the clocks has changed, and told to the core.

A booking is over by itself.  Its row stays for a week: a clock that was wrong for a while must
not have cost anybody a reservation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from rlq.errors import NotFoundError, NotPermittedError, RefusedError, UnavailableError, UsageError
from rlq.protocol import messages as wire
from rlq.protocol.bookings import booked_words, quiet_words
from rlq.protocol.units import format_duration, format_mib
from rlqd import hours
from rlqd.adapters.sqlite import Store
from rlqd.config import Config
from rlqd.core import model
from rlqd.core.machine import Scheduler
from rlqd.core.room import Holding
from rlqd.shell.accounts import Accounts, Peer, uid_of, user_name
from rlqd.shell.requests import act_of

log = logging.getLogger(__name__)

#: A distance between the clocks that has changed by less is left as it was told.
CLOCK_SLACK_MS = 500
LOOK_PERIOD_MS = 1_000
KEPT_S = 7 * 86_400.0
YEAR_S = 366 * 86_400.0
BOOKINGS_MAX = 1_000
USERS_MAX = 100
NAME_CHARS_MAX = 40


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A booking as it is stored.  New fields need defaults."""

    kind: str
    name: str
    uid: int
    by: str
    users: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    cores: int = 0
    mem_mib: int = 0
    starts_at: float
    ends_at: float

    def meets(self, starts_at: float, ends_at: float) -> bool:
        return self.starts_at < ends_at and starts_at < self.ends_at

    @property
    def is_maintenance(self) -> bool:
        return self.kind == "maintenance"


@dataclass(slots=True, kw_only=True)
class Bookings:
    store: Store
    config: Config
    accounts: Accounts
    #: The core of this moment: it is another after each recovery.
    core: Callable[[], Scheduler]
    gpu_indices: Callable[[], dict[model.GpuId, int]]
    wall: Callable[[], float] = time.time
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    #: Of the monotonic clock, in ms, before the wall clock, as the core was told.
    _offset_ms: int | None = None
    #: None: not known what the core knows.
    _told: tuple[tuple[model.Booking, ...], tuple[model.Quiet, ...]] | None = None
    _look_due: int = 0
    _said_at: int = 0
    _said: dict[model.Booking | model.Quiet, str] = field(
        default_factory=dict[model.Booking | model.Quiet, str]
    )

    def __post_init__(self) -> None:
        for id_, body in self.store.bookings():
            try:
                self.rows[id_] = msgspec.json.decode(body, type=Row)
            except msgspec.MsgspecError:
                log.exception("booking %d cannot be read from the database; it is left out", id_)

    # ---- what the core is told -----------------------------------------------------

    def forget(self) -> None:
        """The core is a new one, the configuration was read anew: tell everything again."""
        self._told = None
        self._look_due = 0

    def news(self, now: model.Instant) -> model.CalendarSet | None:
        """What the core does not know yet; looks once a second."""
        if now < self._look_due:
            return None
        self._look_due = now + LOOK_PERIOD_MS
        wall = self.wall()
        offset_ms = round(wall * 1000) - now
        if self._offset_ms is None or abs(offset_ms - self._offset_ms) > CLOCK_SLACK_MS:
            self._offset_ms = offset_ms
        told = (
            tuple(self._window(i, row) for i, row in self.rows.items() if row.ends_at > wall),
            tuple(self._quiet(wall)),
        )
        if told == self._told:
            return None
        self._told = told
        return model.CalendarSet(now, *told)

    def _instant(self, at: float) -> model.Instant:
        assert self._offset_ms is not None
        return model.Instant(round(at * 1000) - self._offset_ms)

    def _window(self, id_: int, row: Row) -> model.Booking:
        return model.Booking(
            id=id_,
            starts_at=self._instant(row.starts_at),
            ends_at=self._instant(row.ends_at),
            users=frozenset(row.users),
            gpus=frozenset(map(model.GpuId, row.gpus)),
            cores=row.cores,
            mem_mib=row.mem_mib,
            whole=row.is_maintenance,
        )

    def _quiet(self, wall: float) -> Iterable[model.Quiet]:
        for quiet in self.quiet_hours(wall):
            ends_at = quiet.ends_at
            yield model.Quiet(
                starts_at=model.Instant(0) if ends_at is None else self._instant(quiet.starts_at),
                ends_at=None if ends_at is None else self._instant(ends_at),
                gpus=quiet.gpus,
                cores=quiet.cores,
                sm_pct=quiet.sm_pct,
            )

    def quiet_hours(self, wall: float) -> list[wire.Quiet]:
        """Of the days that come; the first holds now or comes next."""
        asked = self.config.quiet
        if hours.is_always(asked.hours):
            spans: list[tuple[float, float | None]] = [(0.0, None)]
        else:
            spans = [*hours.windows(asked.hours, wall)]
        return [
            wire.Quiet(
                starts_at=starts_at,
                ends_at=ends_at,
                gpus=asked.gpus,
                cores=asked.cores,
                sm_pct=asked.sm_pct,
            )
            for starts_at, ends_at in spans
        ]

    # ---- what people are told ------------------------------------------------------

    def calendar(self, *, current_only: bool = False) -> wire.Calendar:
        wall = self.wall()
        latest = wall if current_only else float("inf")
        holdings = self.core().holdings() if self.rows else []
        rows = [
            row for row in self.rows.values() if wall < row.ends_at and row.starts_at <= latest
        ]
        rows.sort(key=lambda row: (row.starts_at, row.name))
        quiet = next(iter(self.quiet_hours(wall)), None)
        return wire.Calendar(
            bookings=tuple(self._view(row, holdings) for row in rows),
            quiet=None if quiet is None or quiet.starts_at > latest else quiet,
        )

    def words(self, window: model.Booking | model.Quiet) -> str:
        """What keeps a job waiting: "claimed by alice until 16:10"."""
        wall = self.wall()
        if self._said_at != int(wall):  # a list of jobs asks for the same words for each
            self._said_at, self._said = int(wall), {}
        if window not in self._said:
            self._said[window] = self._words(window, wall)
        return self._said[window]

    def _words(self, window: model.Booking | model.Quiet, wall: float) -> str:
        if isinstance(window, model.Quiet):
            quiet = next(iter(self.quiet_hours(wall)), None)
            return "kept free in quiet hours" if quiet is None else quiet_words(quiet, wall)
        row = self.rows.get(window.id)
        return "booked" if row is None else booked_words(self._view(row, ()), wall)

    def _view(self, row: Row, holdings: Sequence[Holding]) -> wire.Booking:
        indices = self.gpu_indices()
        return wire.Booking(
            kind=row.kind,
            name=row.name,
            by=row.by,
            users=tuple(map(user_name, row.users)),
            gpus=row.gpus,
            gpu_indices=tuple(indices.get(model.GpuId(gpu), -1) for gpu in row.gpus),
            cores=row.cores,
            mem_mib=row.mem_mib,
            starts_at=row.starts_at,
            ends_at=row.ends_at,
            jobs=tuple(h.job_id for h in holdings if self._is_in_its_way(row, h)),
        )

    def _is_in_its_way(self, row: Row, holding: Holding) -> bool:
        ends_in_time = (
            self._offset_ms is not None
            and holding.ends_at is not None
            and holding.ends_at <= self._instant(row.starts_at)
        )
        shares = row.is_maintenance or not set(row.gpus).isdisjoint(holding.placement.gpus)
        return shares and not ends_in_time and holding.user not in row.users

    # ---- booking -------------------------------------------------------------------

    def reserve(self, asked: wire.Reserve, peer: Peer) -> wire.Booked:
        """
        Raises:
            UsageError: it makes no sense.
            RefusedError: this machine has not so much that is not booked.
        """
        wall = self.wall()
        starts_at, ends_at = max(asked.starts_at, wall), asked.ends_at
        if not (wall < ends_at <= wall + YEAR_S and starts_at < ends_at):
            raise UsageError(
                "a booking ends after it starts, in the future, and within a year",
                hint="--from 2026-12-01T09:00 --to 2026-12-01T18:00",
            )
        users = tuple(sorted({_uid(name) for name in asked.users[: USERS_MAX + 1]}))
        self._check_sense(asked, users)
        gpus = self._choose(asked, starts_at, ends_at)
        defaults = self.config.defaults
        cores, mem_mib = asked.cores, asked.mem_mib
        if not asked.maintenance:
            # A GPU is no use to a job without a core.
            cores = len(gpus) * defaults.cores if cores is None else cores
            mem_mib = len(gpus) * defaults.mem_mib if mem_mib is None else mem_mib
            self._check_amounts(cores, mem_mib, starts_at, ends_at)
        kind = "maintenance" if asked.maintenance else "reservation"
        row = Row(
            kind=kind,
            name=asked.name or self._new_name(kind if not users else user_name(users[0])),
            uid=peer.uid,
            by=user_name(peer.uid),
            users=users,
            gpus=gpus,
            cores=cores or 0,
            mem_mib=mem_mib or 0,
            starts_at=starts_at,
            ends_at=ends_at,
        )
        return self._add(row, peer)

    def claim(self, asked: wire.Claim, peer: Peer) -> wire.Booked:
        """
        Raises:
            UsageError: no such GPU.
            NotPermittedError: for longer than one may, or one more than one may.
            RefusedError: somebody has booked it.
        """
        is_admin = self.accounts.is_operator(peer)
        most_ms = self.config.bookings.claim_ms_max
        if not 0 < asked.for_ms <= YEAR_S * 1000:
            raise UsageError("a claim is for some time", hint="rlq claim --gpu 0 --for 2h")
        if asked.for_ms > most_ms and not is_admin:
            raise NotPermittedError(
                f"a GPU can be claimed for {format_duration(most_ms / 1000)} at most"
                if most_ms
                else "only administrators claim GPUs here",
                hint="claim it again when that is over, or ask an administrator to reserve it",
            )
        gpu = self._gpu(asked.gpu_index)
        wall = self.wall()
        starts_at, ends_at = wall, wall + asked.for_ms / 1000
        mine = self._claims_of(peer.uid, wall)
        again = [i for i, row in mine.items() if row.gpus == (gpu,)]
        if mine and not again and not is_admin:
            other = self._view(next(iter(mine.values())), ())
            raise NotPermittedError(
                f"you have claimed GPU {other.gpu_indices[0]} already, and one at a time is yours",
                hint="`rlq claim --release` gives it back",
            )
        for id_, row in self._in_the_way(gpu, starts_at, ends_at):
            if id_ not in again and peer.uid not in row.users:
                raise RefusedError(
                    f"GPU {asked.gpu_index} is {booked_words(self._view(row, ()), wall)}",
                    hint="`rlq reserve list` shows what is booked",
                )
        row = Row(
            kind="claim",
            name=self._new_name("claim", but=again),
            uid=peer.uid,
            by=user_name(peer.uid),
            gpus=(gpu,),
            starts_at=min([starts_at, *(self.rows[i].starts_at for i in again)]),
            ends_at=ends_at,
        )
        return self._add(row, peer, instead_of=again)

    def end(self, asked: wire.Unbook, peer: Peer) -> wire.Ok:
        """
        Raises:
            NotFoundError: nothing of that name is booked.
            NotPermittedError: it is not the caller's to end.
        """
        wall = self.wall()
        is_admin = self.accounts.is_operator(peer)
        if asked.claim:
            found = self._claims_of(
                None if is_admin and asked.gpu_index is not None else peer.uid, wall
            )
            if asked.gpu_index is not None:
                gpu = self._gpu(asked.gpu_index)
                found = {i: row for i, row in found.items() if row.gpus == (gpu,)}
            if not found:
                which = "no GPU" if asked.gpu_index is None else f"not GPU {asked.gpu_index}"
                raise NotFoundError(
                    f"you have claimed {which}", hint="`rlq reserve list` shows what is booked"
                )
        else:
            found = {
                i: row
                for i, row in self.rows.items()
                if row.name == asked.name and row.ends_at > wall
            }
            if not found:
                raise NotFoundError(
                    f"nothing by the name {asked.name!r} is booked",
                    hint="`rlq reserve list` shows what is",
                )
        for row in found.values():
            if not is_admin and (row.kind != "claim" or row.uid != peer.uid):
                raise NotPermittedError(f"{row.by} has booked it", hint="ask an administrator")
        with self.store.transaction():
            self.store.drop_bookings(found)
            # What people do with their own claims is nobody's business.
            self.store.put_audit(
                # Whose claim it was, sees it; a reservation is nobody's own.
                replace(act_of(peer, "unbook", row.name), owner_uid=row.uid, owner=row.by)
                if row.kind == "claim"
                else act_of(peer, "unbook", f"{row.name} of {row.by}")
                for row in found.values()
                if row.uid != peer.uid or row.kind != "claim"
            )
        for id_, row in found.items():
            log.info("%s ended the booking %s of %s", user_name(peer.uid), row.name, row.by)
            del self.rows[id_]
        self._look_due = 0
        return wire.Ok(message=f"no longer booked: {', '.join(r.name for r in found.values())}")

    def _add(self, row: Row, peer: Peer, instead_of: Iterable[int] = ()) -> wire.Booked:
        wall = self.wall()
        old = [
            i
            for i, other in self.rows.items()
            if other.ends_at < wall - KEPT_S
            # Everybody may claim: of each user's claims the last is kept, or short ones by the
            # thousand would leave no room for anybody's bookings.
            or (
                row.kind == other.kind == "claim"
                and row.uid == other.uid
                and other.ends_at <= wall
            )
        ]
        gone = [*old, *instead_of]
        if len(self.rows) - len(gone) >= BOOKINGS_MAX:
            raise UnavailableError(f"there are {len(self.rows)} bookings already", hint="end some")
        with self.store.transaction():
            self.store.drop_bookings(gone)
            if row.kind != "claim":
                self.store.put_audit((act_of(peer, "reserve", row.name),))
            id_ = self.store.insert_booking(msgspec.json.encode(row))
        for other in gone:
            del self.rows[other]
        self.rows[id_] = row
        log.info("%s booked %s", row.by, row)
        self._look_due = 0
        return wire.Booked(booking=self._view(row, self.core().holdings()))

    # ---- checks --------------------------------------------------------------------

    def _check_sense(self, asked: wire.Reserve, users: tuple[int, ...]) -> None:
        name = asked.name
        if not (len(name) <= NAME_CHARS_MAX and name.isprintable() and " " not in name):
            raise UsageError(
                f"a booking's name has at most {NAME_CHARS_MAX} letters and no blanks",
                hint="--name course",
            )
        if any(row.name == name and row.ends_at > self.wall() for row in self.rows.values()):
            raise UsageError(f"something by the name {name!r} is booked already")
        amounts = (len(asked.gpu_indices), asked.gpus, asked.cores or 0, asked.mem_mib or 0)
        if asked.maintenance:
            if users or any(amounts):
                raise UsageError(
                    "maintenance is all of the machine, for nobody's jobs",
                    hint="leave out --users and what to book",
                )
            return
        if not users:
            raise UsageError(
                "a reservation is for somebody's jobs",
                hint="--users alice,bob; to keep everybody away: --maintenance",
            )
        if len(users) > USERS_MAX:
            raise UsageError(f"a reservation is for at most {USERS_MAX} users")
        if not any(amounts):
            raise UsageError("nothing to book was named", hint="--gpus 1, --cores 8, --mem 64G")
        if any(not 0 <= n < 2**40 for n in amounts):
            raise UsageError("an amount to book is out of range")

    def _choose(self, asked: wire.Reserve, starts_at: float, ends_at: float) -> tuple[str, ...]:
        """The devices that are asked for by number, and as many more of those that nobody has
        booked and fewest jobs are on."""
        chosen = [self._gpu(index) for index in dict.fromkeys(asked.gpu_indices)]
        for gpu in chosen:
            for _, row in self._in_the_way(gpu, starts_at, ends_at):
                index = self.gpu_indices()[model.GpuId(gpu)]
                raise RefusedError(
                    f"GPU {index} is {booked_words(self._view(row, ()), self.wall())}",
                    hint=f"end that first: `rlq reserve cancel {row.name}`",
                )
        holdings = self.core().holdings()
        free = [
            gpu
            for gpu in self.gpu_indices()
            if gpu not in chosen and not self._in_the_way(gpu, starts_at, ends_at)
        ]
        free.sort(
            key=lambda g: (sum(g in h.placement.gpus for h in holdings), -self.gpu_indices()[g])
        )
        if len(free) < asked.gpus:
            raise RefusedError(
                f"{asked.gpus} more GPUs are asked for, and {len(free)} nobody has booked then",
                hint="`rlq reserve list` shows what is booked",
            )
        indices = self.gpu_indices()
        chosen += free[: asked.gpus]
        return tuple(sorted(chosen, key=lambda g: indices[model.GpuId(g)]))

    def _check_amounts(self, cores: int, mem_mib: int, starts_at: float, ends_at: float) -> None:
        """Of cores and host memory no more is booked at a time than there is."""
        facts = self.core().facts
        if facts is None:
            raise UnavailableError("the machine has not been read yet")
        there = [r for r in self.rows.values() if r.meets(starts_at, ends_at)]
        moments = {max(starts_at, row.starts_at) for row in there} | {starts_at}
        at_once = [[r for r in there if r.starts_at <= at < r.ends_at] for at in moments]
        cores_left = len(facts.cores) - max(sum(r.cores for r in rows) for rows in at_once)
        mem_left = facts.mem_mib_total - max(sum(r.mem_mib for r in rows) for rows in at_once)
        if cores > cores_left:
            raise RefusedError(f"{cores} cores are asked for, {cores_left} are not booked then")
        if mem_mib > mem_left:
            raise RefusedError(
                f"{format_mib(mem_mib)} is asked for, {format_mib(mem_left)} is not booked then"
            )

    def _gpu(self, index: int) -> str:
        for gpu, number in self.gpu_indices().items():
            if number == index:
                return gpu
        raise UsageError(f"there is no GPU {index} here", hint="`rlq gpus` shows what there is")

    def _in_the_way(self, gpu: str, starts_at: float, ends_at: float) -> list[tuple[int, Row]]:
        return [
            (i, row)
            for i, row in self.rows.items()
            if row.meets(starts_at, ends_at) and (gpu in row.gpus or row.is_maintenance)
        ]

    def _claims_of(self, uid: int | None, wall: float) -> dict[int, Row]:
        """None: everybody's."""
        return {
            i: row
            for i, row in self.rows.items()
            if row.kind == "claim" and uid in (None, row.uid) and row.ends_at > wall
        }

    def _new_name(self, stem: str, but: Iterable[int] = ()) -> str:
        """As Slurm makes them up: alice_1."""
        taken = {row.name for i, row in self.rows.items() if i not in but}
        return next(
            name for n in range(1, BOOKINGS_MAX + 2) if (name := f"{stem}_{n}") not in taken
        )


def _uid(name: str) -> int:
    if (uid := uid_of(name)) is None:
        raise UsageError(
            f"there is no user {name!r} here", hint="login names, with commas: --users alice,bob"
        )
    return uid
