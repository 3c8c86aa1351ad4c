"""The tables on reference pages match the code."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = runpy.run_path(str(ROOT / "scripts" / "reference"))


@pytest.mark.parametrize("page", REFERENCE["PAGES"])
def test_a_reference_page_matches_the_code(page: str) -> None:
    kept = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert kept == REFERENCE["text"](page), "run scripts/reference"
