"""Random scripts: tests that are run once for each of many seeds.

A test marked ``@pytest.mark.scripts(150, nightly=10_000)`` takes the fixture ``seeds``. It runs 150
seeds by default, in batches, and 10,000 with ``-m nightly``. ``--scripts N --first-seed S`` runs N
seeds from S instead.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

BATCH = 25
"""Seeds of one test: each test has a folder of its own, which costs as much as a short script."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options of random scripts to pytest."""
    group = parser.getgroup("random scripts")
    group.addoption("--scripts", type=int, metavar="N", help="seeds of each random script")
    group.addoption("--first-seed", type=int, default=0, metavar="S", help="the first of them")


def generate(metafunc: pytest.Metafunc) -> None:
    """Parametrize a marked test with batches of seeds."""
    marker = metafunc.definition.get_closest_marker("scripts")
    if marker is None:
        return
    option = metafunc.config.option
    nightly = "nightly" in option.markexpr and "not nightly" not in option.markexpr
    count = option.scripts or (marker.kwargs["nightly"] if nightly else marker.args[0])
    end = option.first_seed + count
    starts = range(option.first_seed, end, BATCH)
    marks = [pytest.mark.nightly, pytest.mark.timeout(0)] if nightly else []
    batches = [
        pytest.param(range(start, min(start + BATCH, end)), id=f"{start}", marks=marks)
        for start in starts
    ]
    metafunc.parametrize("seeds", batches)


def play_each(folder: Path, seeds: range, play: Callable[[Path, int], None]) -> None:
    """Play the script of each seed in a folder of its own. An error names its seed."""
    for seed in seeds:
        own = folder / f"{seed}"
        try:
            play(own, seed)
        except BaseException as error:
            error.add_note(f"repeat with: --scripts 1 --first-seed {seed}")
            raise
        shutil.rmtree(own, ignore_errors=True)
