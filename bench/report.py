"""How results are told: median, spread, number of runs, and the aim where there is one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def number(value: float) -> str:
    """Three significant digits, whole numbers from 100 on."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"


def spread(values: Sequence[float], unit: str) -> str:
    """'5,230 jobs/s (4,900 to 5,400, n=5)': the median and the range of all runs."""
    low, high = number(min(values)), number(max(values))
    return f"{number(statistics.median(values))} {unit} ({low} to {high}, n={len(values)})"


def tell(
    what: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """The line of one result."""
    line = f"{what}: {spread(values, unit)}"
    middle = statistics.median(values)
    if at_least is not None:
        verdict = "met" if middle >= at_least else "MISSED"
        line += f"; aim >= {number(at_least)} {unit}: {verdict}"
    if at_most is not None:
        verdict = "met" if middle <= at_most else "MISSED"
        line += f"; aim <= {number(at_most)} {unit}: {verdict}"
    print(line, flush=True)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Of pairs measured side by side: '0.42 (0.40 to 0.45)'."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    middle = number(statistics.median(ratios))
    return f"{middle} ({number(min(ratios))} to {number(max(ratios))})"
