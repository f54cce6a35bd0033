"""How many cores a job gets that declares none, by what more of them were measured to bring.
Opt-in.  Pure.

A core is best used by another job: that one gains its whole speed, a second core for the same
job a part of it.  And cores that were given are not taken back while the job runs.  So a job gets
more than the default only while nobody else waits, and no more than half of what is free, so that
whoever comes next finds some.

What is known of a program is its rate alone with 1, 2, 4, … cores.  The next doubling is tried on
an otherwise idle machine, once, while the last one paid: each core added at least the guard's
threshold.  For the guard a job with more cores is a program of its own, as its speed is another.
"""

from __future__ import annotations

from collections.abc import Mapping


def variant(signature: str, cores: int, default: int) -> str:
    """What a job counts as that was given so many cores without asking."""
    return f"{signature} cores={cores}" if signature and cores > default else signature


def doublings(least: int, most: int) -> list[int]:
    found = [least]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return found


def worth(
    known: Mapping[int, int], least: int, most: int, threshold_pct: int
) -> tuple[int, int | None]:
    """How many cores paid, and how many are worth a try; None: none are.

    `known`: the rate of a job alone by its cores.
    """
    if least not in known:
        return least, None
    best = least
    for cores in doublings(least, most)[1:]:
        if cores not in known:
            return best, cores
        gain = known[cores] - known[best]
        if gain * 100 * least < known[least] * threshold_pct * (cores - best):
            return best, None
        best = cores
    return best, None
