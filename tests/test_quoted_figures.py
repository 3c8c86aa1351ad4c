"""Figures quoted in the documents match the results in docs/data that they link to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
QUOTES = re.compile(r"\]\((?:docs/)?data/([\w-]+\.json)\)")
"""Link to a result. Every number on the same line (a paragraph or a table row) is a quote."""
NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)")
NUMBER = re.compile(r"(?<![\w.,^-])(\d[\d,]*(?:\.\d+)?)(?![\w^]|[.,]\d|-\w)")
SCALES = (1.0, 1e2, 1e3, 1e-3, 1e-6)
"""Factors between a quoted figure and the stored value, for percentages and other units."""


def quoted() -> list[tuple[str, str, list[str]]]:
    """Return document, line and result names for each line that quotes results."""
    found = []
    for page in DOCUMENTS:
        for line in page.read_text().splitlines():
            if names := QUOTES.findall(line):
                found.append((page.name, line, names))
    return found


def unfounded(line: str, *results: Any) -> list[str]:
    """Return the numbers in a line that match no value in the results after rounding."""
    values = [value for result in results for value in numbers_in(result)]
    return [
        number
        for number in NUMBER.findall(NO_FIGURES.sub("", line))
        if not any(is_rounded(number, value) for value in values)
    ]


def numbers_in(result: Any) -> Iterator[float]:
    """Yield all numbers in a result."""
    if isinstance(result, dict | list):
        for inner in result.values() if isinstance(result, dict) else result:
            yield from numbers_in(inner)
    elif isinstance(result, int | float):
        yield float(result)


def is_rounded(number: str, value: float) -> bool:
    """Return True if ``number``, as printed, is ``value`` rounded in some unit."""
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    written = float(number.replace(",", ""))
    return any(abs(value * scale - written) <= half * (1 + 1e-9) for scale in SCALES)


@pytest.mark.parametrize(("page", "line", "names"), quoted())
def test_a_line_quotes_the_results_that_it_links_to(page: str, line: str, names: list[str]) -> None:
    results = [json.loads((DATA / name).read_text()) for name in names]
    assert not unfounded(line, *results), f"{page}: not in {', '.join(names)}"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.name)
def test_a_result_states_the_machine_and_the_code_that_it_was_measured_with(path: Path) -> None:
    measured = json.loads(path.read_text()).get("measured")
    if measured is not None:  # otherwise the result is from a finished study
        assert re.fullmatch("[0-9a-f]{40}", measured["commit"]), "measured with changed files"
        assert measured["cpu"]
        assert measured["seconds"] > 0


RESULT = {"ratio": 0.8639, "first_ms": 1904.3, "rows": [{"pages": 142_318}], "tokens": 3000}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("3,000 tokens: 0.86 of it, 86.4% or 0.864", []),
        ("1,904 ms, which are 1.9 s or 1.904 s; 142 thousand pages of bf16 by zstd-1", []),
        ("`bench.x --rounds 7` of [it](data/17.json)", []),
        ("0.87 of it, 1,905 ms and 2.0 s", ["0.87", "1,905", "2.0"]),
    ],
)
def test_a_number_that_a_result_does_not_have_is_found(line: str, wrong: list[str]) -> None:
    assert unfounded(line, RESULT) == wrong
