"""For inside a job: tell the queue how far it is.

    import rlq.job

    for step in range(total):
        ...
        rlq.job.report(step + 1, total, loss=loss)

A report never blocks, never raises, and does nothing outside the queue. `rlq list` shows the
progress; the daemon works out steps per second and the time left. Standard library only, so that
training code can import it anywhere.

A report is one JSON datagram to the socket named by RLQ_REPORT_SOCKET (docs/protocol.md). Every
send opens a socket of its own: at two sends per second that costs nothing, and there is nothing
to go wrong when the job forks, closes all its descriptors, or outlives the daemon.

This file also serves the hooks (rlq/hooks), which load it by its path into programs whose
Python has no rlq: it has to run on Python 3.8 and may import nothing of ours.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

__all__ = ["flush", "id", "is_queued", "report"]

SEND_INTERVAL_S = 0.5
FLUSH_WAIT_S = 0.25
PAYLOAD_BYTES_MAX = 8 * 1024 - 1
METRICS_MAX = 32
METRIC_NAME_CHARS_MAX = 64
STEP_MAX = 2**63 - 1

if TYPE_CHECKING:  # Python 3.8 cannot subscript these when it runs
    _Report = tuple[int, int | None, float, dict[str, float]]

#: The newest report that has not been sent.  One reference, replaced as a whole: threads may
#: call `report` without a lock, and a lock held at a fork would hang the child.
_waiting: _Report | None = None
_sent_at = -math.inf
#: The last report sent said that the work is done: the next one like it can wait.
_sent_final = False
_has_warned = False
#: The program has called `report`: the hooks leave the reporting to it.
_has_reported = False


def report(step: int, total: int | None = None, **metrics: float) -> None:
    """Tell the queue that `step` of `total` steps are done.

    Call it as often as you like: at most two reports per second are sent, the newest one; the
    first and the one with `step >= total` at once, and what is left over when the job exits.
    A value that is no finite number (NaN, a word) is left out, with one warning on stderr.

    Args:
        step: steps done since the beginning of the work, earlier attempts included.
        total: steps of the whole work; None: not known.
        metrics: at most 32 numbers to show beside it; numpy scalars and the like will do.
    """
    global _waiting, _has_reported
    if "RLQ_REPORT_SOCKET" not in os.environ:
        return
    _has_reported = True
    try:
        now = time.monotonic()
        done = _whole(step)
        if done is None:
            _warn(f"rlq.job.report: step={_shown(step)} is not a whole number from 0")
            return
        goal = None if total is None else _whole(total)
        if total is not None and not goal:
            _warn(f"rlq.job.report: total={_shown(total)} is not a whole number above 0")
            goal = None
        _waiting = (done, goal, now, _finite(metrics))
        is_final = goal is not None and done >= goal
        if now - _sent_at >= SEND_INTERVAL_S or (is_final and not _sent_final):
            _send(wait_s=0.0)
    except Exception as error:  # whatever a value's __float__ or __index__ does
        _warn(f"rlq.job.report: {type(error).__name__}: {_shown(error)}")


def flush() -> None:
    """Send now what `report` still holds back.  Done by itself when the interpreter exits.

    It waits, at most a quarter of a second, for a daemon that is busy: a result comes only once.
    """
    _send(wait_s=FLUSH_WAIT_S)


def _send(*, wait_s: float) -> None:
    global _waiting, _sent_at, _sent_final
    held, path = _waiting, os.environ.get("RLQ_REPORT_SOCKET")
    if held is None or not path:
        return
    step, total, at_s, metrics = held
    _sent_at = time.monotonic()  # whether or not it arrives: a full socket is not hammered
    try:
        payload = _payload(step, total, at_s, metrics)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(wait_s)  # 0: not blocking
            sender.sendto(payload, path)
    except OSError:
        return  # the daemon is away or behind; the newest report stays for the next try
    except Exception as error:
        _warn(f"rlq.job.report: {type(error).__name__}: {_shown(error)}")
    else:
        _sent_final = total is not None and step >= total
    if _waiting is held:
        _waiting = None


def id() -> int | None:
    """This job's number in the queue; None outside the queue."""
    try:
        number = int(os.environ["RLQ_JOB_ID"])
    except (KeyError, ValueError):
        return None
    return number if number > 0 else None


def is_queued() -> bool:
    """Does this process run as a job of the queue?"""
    return id() is not None


def _payload(step: int, total: int | None, at_s: float, metrics: dict[str, float]) -> bytes:
    message = {
        "v": 1,
        "job": int(os.environ["RLQ_JOB_ID"]),
        "attempt": int(os.environ.get("RLQ_ATTEMPT") or 1),
        "step": step,
        "total": total,
        "t": at_s,
        "metrics": metrics,
    }
    while True:
        text = json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        payload = text.encode("utf-8", "replace")
        if len(payload) <= PAYLOAD_BYTES_MAX:
            return payload
        metrics = dict(list(metrics.items())[:-1])  # only names of four-byte letters get here
        message["metrics"] = metrics


def _whole(value: Any) -> int | None:
    """`value` as an integer from 0 to STEP_MAX, or None; 7e5 and numpy's integers will do."""
    try:
        whole = int(value)
        is_whole = not isinstance(value, (str, bytes)) and whole == value
    except (TypeError, ValueError, OverflowError):
        return None
    return whole if is_whole and 0 <= whole <= STEP_MAX else None


def _finite(metrics: dict[str, Any]) -> dict[str, float]:
    kept: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except Exception:  # a list, a word, a tensor with many elements, a broken __float__
            _warn(f"rlq.job.report: left out {_shown(name)}={_shown(value)}: not a number")
            continue
        if not math.isfinite(number):
            _warn(f"rlq.job.report: left out {_shown(name)}={number}: not a finite number")
        elif len(kept) == METRICS_MAX:
            _warn(f"rlq.job.report: only {METRICS_MAX} metrics are sent")
            break
        else:
            kept[name[:METRIC_NAME_CHARS_MAX]] = number
    return kept


def _shown(value: object) -> str:
    try:
        text = repr(value) if not isinstance(value, Exception) else str(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _warn(message: str) -> None:
    """One line, the first time only: a training loop would print it a million times."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    try:
        print(f"{message} (told once)", file=sys.stderr)
    except Exception:  # stderr is closed, None or full: nothing left to tell it to
        return


def _forget() -> None:
    """In a forked child: what the parent holds back is the parent's to send."""
    global _waiting
    _waiting = None


os.register_at_fork(after_in_child=_forget)
atexit.register(flush)
