"""What a training leaves behind: result.json, curve.csv and curve.png.

Every file is written beside its name and renamed: a reader never sees half of one.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COLUMNS = ("step", "wall_s", "train_ep_rew_mean", "eval_rew_mean", "eval_rew_std")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    step: int
    #: Since the training began, sessions before a resume included.
    wall_s: float
    #: Mean return of the last episodes of the training itself; None: no episode has ended.
    train_reward: float | None = None
    #: Over the episodes of one evaluation; None: no evaluation here.
    eval_mean: float | None = None
    eval_std: float | None = None


def write_curve(path: Path, points: Sequence[CurvePoint]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for point in points:
        rewards = (point.train_reward, point.eval_mean, point.eval_std)
        shown = ("" if value is None else f"{value:.6g}" for value in rewards)
        writer.writerow([point.step, f"{point.wall_s:.3f}", *shown])
    replace(path, text.getvalue().encode())


def read_curve(path: Path, up_to_step: int) -> list[CurvePoint]:
    """The points up to a step: later ones will be trained again.

    A curve that is missing or unreadable is an empty one: it must not keep a run from going on.
    """
    points = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                step = int(row["step"])
                if step <= up_to_step:
                    points.append(
                        CurvePoint(
                            step=step,
                            wall_s=float(row["wall_s"]),
                            train_reward=_number(row["train_ep_rew_mean"]),
                            eval_mean=_number(row["eval_rew_mean"]),
                            eval_std=_number(row["eval_rew_std"]),
                        )
                    )
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return []
    return points


def _number(text: str) -> float | None:
    return float(text) if text else None


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    replace(path, (json.dumps(result, indent=2, allow_nan=False) + "\n").encode())


def read_result(path: Path) -> dict[str, Any] | None:
    """The result of a finished run; None: there is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("done") is True else None


def draw_curve(path: Path, points: Sequence[CurvePoint], title: str) -> None:
    """The learning curve: training as a line, evaluations with one standard deviation."""
    # Not pyplot: it would keep the figure and look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trained = [(p.step, p.train_reward) for p in points if p.train_reward is not None]
    if trained:
        steps, rewards = zip(*trained, strict=True)
        axes.plot(steps, rewards, color="0.55", linewidth=1.2, label="training (recent episodes)")
    evaluated = [
        (p.step, p.eval_mean, p.eval_std or 0.0) for p in points if p.eval_mean is not None
    ]
    if evaluated:
        steps, means, stds = zip(*evaluated, strict=True)
        axes.plot(
            steps, means, color="#1f6fb4", linewidth=1.8, marker="o", markersize=3.5,
            label="evaluation (mean ± std)",
        )  # fmt: skip
        axes.fill_between(
            steps,
            [mean - std for mean, std in zip(means, stds, strict=True)],
            [mean + std for mean, std in zip(means, stds, strict=True)],
            color="#1f6fb4", alpha=0.18, linewidth=0,
        )  # fmt: skip
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return per episode")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if trained or evaluated:
        axes.legend(frameon=False, fontsize=9)
    image = io.BytesIO()
    canvas.print_png(image)  # type: ignore[no-untyped-call]
    replace(path, image.getvalue())


def finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else float(value)


def replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
