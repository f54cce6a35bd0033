"""The limits of the configuration, by uid: what the core is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rlqd import config
from rlqd.core import model
from rlqd.core.model import Instant
from rlqd.shell.accounts import REMEMBERED_S, Account, Accounts, gid_of, uid_of


@dataclass(slots=True)
class LimitTable:
    """Knows the users that have jobs, or have asked for some."""

    configured: config.Limits
    accounts: Accounts
    _by_uid: dict[int, tuple[model.Limit, ...]] = field(
        default_factory=dict[int, tuple[model.Limit, ...]]
    )
    _due: int = 0

    def of(self, uids: Iterable[int], now: Instant) -> model.Limits:
        """For the core: of these users, and of all that were asked for before.  Memberships are
        looked up anew every minute."""
        if self.configured == config.Limits():
            return {}
        stale = now >= self._due
        if stale:
            self._due = now + round(REMEMBERED_S * 1000)
        wanted = set(uids)
        changed = {
            uid: self._limits_of(uid)
            for uid in (wanted | self._by_uid.keys() if stale else wanted - self._by_uid.keys())
        }
        if changed:
            # A new one: the core's must not change under it.
            self._by_uid = {**self._by_uid, **changed}
        return self._by_uid

    def reconfigure(self, configured: config.Limits) -> None:
        self.configured = configured
        self._due = 0

    def unknown(self) -> Iterator[str]:
        """The names that this machine does not know, as keys of the configuration."""
        for name in self.configured.users:
            if uid_of(name) is None:
                yield f"limits.users.{name}"
        for name in self.configured.groups:
            if gid_of(name) is None:
                yield f"limits.groups.{name}"

    def _limits_of(self, uid: int) -> tuple[model.Limit, ...]:
        account = self.accounts.account(uid)
        if account is None:
            # A directory service that is down lifts no limit.
            known = self._by_uid.get(uid)
            return known or (_limit(f"user {uid}", self.configured),)
        return (self._own(account), *self._groups(account))

    def _own(self, account: Account) -> model.Limit:
        own = self.configured.users.get(account.name, self.configured)
        return _limit(f"user {account.name}", own)

    def _groups(self, account: Account) -> Iterator[model.Limit]:
        for name, limit in self.configured.groups.items():
            if self.accounts.gid(name) in account.gids:
                yield _limit(f"group {name}", limit)


def _limit(whose: str, configured: config.Limit) -> model.Limit:
    return model.Limit(
        whose=whose,
        max_jobs=configured.max_jobs,
        max_submit_jobs=configured.max_submit_jobs,
        gpus=configured.gpus,
        gpu_mem_mib=configured.gpu_mem_mib,
        cores=configured.cores,
    )
