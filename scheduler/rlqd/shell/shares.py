"""Fair share as the configuration sets it and as users are shown it."""

from __future__ import annotations

import logging

from rlq.errors import UnavailableError, UsageError
from rlq.protocol.messages import JobRank, Shares, UserShare
from rlqd.adapters.sqlite import Row
from rlqd.config import Config
from rlqd.core import model
from rlqd.core.fairness import HELD_COUNTS_AS_MS, Ranking, Use
from rlqd.core.machine import Scheduler
from rlqd.shell.accounts import uid_of, user_name

log = logging.getLogger(__name__)


def policy(config: Config) -> model.SharePolicy:
    """A user of `share.shares` who does not exist (now) is told in the log and left out."""
    found: dict[int, int] = {}
    for user, shares in config.share.shares:
        uid = _uid_of(user)
        if uid is None:
            log.warning("share.shares: there is no user %s on this machine (now)", user)
        else:
            found[uid] = shares
    return model.SharePolicy(
        half_life_ms=config.share.half_life_ms,
        age_max_ms=config.share.age_max_ms,
        age_weight=config.share.age_weight,
        share_weight=config.share.share_weight,
        shares=tuple(sorted(found.items())),
    )


def shares(core: Scheduler, row: Row | None) -> Shares:
    """Everybody's standing, and the rank of the job of `row`.

    Raises:
        RlqError: the machine has not been read, or the job does not wait.
    """
    ranking = core.ranking()
    if ranking is None:
        raise UnavailableError("the machine has not been read yet", hint="try again in a moment")
    policy = core.fairness.policy
    users = sorted(ranking.users(), key=lambda uid: (ranking.level(uid), uid))
    return Shares(
        users=tuple(_standing(core, ranking, uid) for uid in users),
        half_life_s=policy.half_life_ms / 1000,
        held_counts_as_s=HELD_COUNTS_AS_MS / 1000,
        age_weight=policy.age_weight,
        age_max_s=policy.age_max_ms / 1000,
        share_weight=policy.share_weight,
        job=None if row is None else _rank(core, ranking, row),
    )


def _standing(core: Scheduler, ranking: Ranking, uid: int) -> UserShare:
    hour_ms = 3_600_000
    use = core.fairness.uses.get(uid, Use())
    counted_ms = ranking.counted_ms(uid)
    return UserShare(
        user=user_name(uid),
        uid=uid,
        shares=ranking.shares(uid),
        part=ranking.part(uid),
        machine_hours=use.machine_ms / hour_ms,
        gpu_hours=use.gpu_ms / hour_ms,
        core_hours=use.core_ms / hour_ms,
        held=max(0.0, counted_ms - use.machine_ms) / HELD_COUNTS_AS_MS,
        counted_hours=counted_ms / hour_ms,
        factor=ranking.factor(uid),
    )


def _rank(core: Scheduler, ranking: Ranking, row: Row) -> JobRank:
    job = core.jobs.get(model.JobId(row.id))
    if job is None or not isinstance(job.state, model.Pending) or not core.is_waiting(job):
        raise UsageError(
            f"job {row.id} has no rank: it is {'held' if row.held else row.state}",
            hint="`rlq share` without a number shows the users",
        )
    score = ranking.score(row.uid, job.id)
    return JobRank(
        id=row.id,
        user=row.user,
        priority=job.spec.priority,
        waited_s=(core.now - job.state.since) / 1000,
        age=score.age,
        share=score.share,
        jobs_ahead=core.jobs_ahead(job),
        reserved=core.promised == job.id,
    )


def _uid_of(user: str) -> int | None:
    if (uid := uid_of(user)) is not None:
        return uid
    return int(user) if user.isascii() and user.isdigit() else None
