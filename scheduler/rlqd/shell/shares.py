"""Fair share as the configuration sets it and as users are shown it."""

from __future__ import annotations

import logging
import pwd

from rlqd.config import Config
from rlqd.core import model

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


def _uid_of(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, OSError):
        return int(user) if user.isascii() and user.isdigit() else None
