"""The files a training leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlq_sac import results
from rlq_sac.results import CurvePoint

POINTS = [
    CurvePoint(step=10, wall_s=1.0, train_reward=-5.5),
    CurvePoint(step=20, wall_s=2.0, train_reward=-4.0, eval_mean=-3.0, eval_std=0.25),
    CurvePoint(step=30, wall_s=3.0, eval_mean=-2.0, eval_std=0.0),
]


def test_a_curve_goes_on_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    results.write_curve(path, POINTS)
    assert path.read_text().splitlines()[:3] == [
        "step,wall_s,train_ep_rew_mean,eval_rew_mean,eval_rew_std",
        "10,1.000,-5.5,,",
        "20,2.000,-4,-3,0.25",
    ]
    assert results.read_curve(path, 30) == POINTS
    assert results.read_curve(path, 29) == POINTS[:2]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a,b\n1,2\n", b"step,wall_s\nx,y\n"])
def test_an_unreadable_curve_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "curve.csv").write_bytes(content)
    assert results.read_curve(tmp_path / "curve.csv", 10) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"done": false}'])
def test_only_a_finished_result_counts(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    assert results.read_result(tmp_path / "result.json") is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    results.write_result(path, {"done": True, "steps": 1})
    with pytest.raises(ValueError, match="JSON"):
        results.write_result(path, {"done": True, "steps": float("nan")})
    assert json.loads(path.read_text())["steps"] == 1
    path.unlink()
    path.mkdir()  # nothing can be renamed over it
    with pytest.raises(OSError, match="directory"):
        results.write_result(path, {"done": True})
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.sac
@pytest.mark.parametrize("points", [[], POINTS[:1], POINTS])
def test_the_curve_is_drawn(tmp_path: Path, points: list[CurvePoint]) -> None:
    results.draw_curve(tmp_path / "curve.png", points, "SAC on Pendulum-v1")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")
