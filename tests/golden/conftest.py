"""Fixtures for golden files: copies that a test may open and damage, and a comparison of published
names."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.golden.written import ARCHIVE

Copy = Callable[[str], Path]
Compare = Callable[[str, Mapping[str, Any]], None]
NAMES = Path(__file__).with_name("names")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-names", action="store_true", help="write tests/golden/names, and compare nothing"
    )


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all golden files. Nothing writes to it."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # exists since 3.11.4
        archive.extractall(folder)
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Copy:
    """Return a function that copies a folder of golden files, and returns the copy."""
    return lambda name: shutil.copytree(written / name, tmp_path / name)


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Compare:
    """Return a function that compares collected names with the published names in a file of
    ``names/``."""

    def compare(name: str, found: Mapping[str, Any]) -> None:
        path = NAMES / f"{name}.json"
        if request.config.getoption("--write-names", default=False):
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        now = set(_lines(json.loads(json.dumps(found))))
        known = set(_lines(json.loads(path.read_text())))
        assert now == known, f"lost: {sorted(known - now)}, new: {sorted(now - known)}"

    return compare


def _lines(value: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each value, with its path."""
    if isinstance(value, dict):
        if not value:
            yield f"{place}: empty"
        for name, one in value.items():
            yield from _lines(one, f"{place} > {name}" if place else name)
    elif isinstance(value, list):
        if not value:
            yield f"{place}: empty list"
        for at, one in enumerate(value):
            yield from _lines(one, f"{place} > {'any' if isinstance(one, str) else at}")
    else:
        yield f"{place}: {value}"
