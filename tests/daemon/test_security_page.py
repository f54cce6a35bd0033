"""docs/security.md names tests: they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/security.md").read_text()
FILES = {path.stem: path for path in (REPOSITORY / "tests").rglob("test_*.py")}
NAMES = [
    name for path in FILES.values() for name in re.findall(r"def (test_\w+)", path.read_text())
]


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`(?:tests/\w+/)?(test_\w+)`", PAGE))))
def test_a_file_that_the_page_names_exists(file: str) -> None:
    assert file in FILES


@pytest.mark.parametrize("part", sorted(set(re.findall(r"`…([a-z_]+)…?`", PAGE))))
def test_a_test_that_the_page_names_exists(part: str) -> None:
    assert [name for name in NAMES if part in name]
