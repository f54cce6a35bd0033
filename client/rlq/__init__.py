"""rlq: the job queue that makes a shared lab workstation train faster.

    from rlq import Client
    with Client() as queue:
        job = queue.submit(["python", "train.py"], cores=1)
        queue.wait(job)

Importing this module is cheap: `Client` and what it needs load at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlq.version import VERSION as __version__

if TYPE_CHECKING:
    from rlq.client import Client
    from rlq.errors import RlqError

__all__ = ["Client", "RlqError", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from rlq.client import Client

        return Client
    if name == "RlqError":
        from rlq.errors import RlqError

        return RlqError
    raise AttributeError(f"module 'rlq' has no attribute {name!r}")
