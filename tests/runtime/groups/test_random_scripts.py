"""Random clients, faults and resets with several kinds of KV: each checks itself in every step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runtime.test_random_scripts import play_script
from tiered_kv.connectors.runtime.worker import kv_tensors

from .kinds import MODELS

BATCHES, SCRIPTS = 40, 25
"""Tests, and the scripts of each: a thousand in all."""
NIGHTLY_SCRIPTS = 10_000


@pytest.fixture(autouse=True)
def _processor_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products of every engine would take a quarter of the time; the rig ignores them."""
    monkeypatch.setattr(kv_tensors, "measure_flops", lambda *_: 0.0)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_scripts_end_well(tmp_path: Path, batch: int) -> None:
    play(tmp_path, range(batch * SCRIPTS, (batch + 1) * SCRIPTS))


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_many_more_random_scripts_end_well(tmp_path: Path) -> None:
    play(tmp_path, range(BATCHES * SCRIPTS, NIGHTLY_SCRIPTS))


def play(folder: Path, seeds: range) -> None:
    """Play a script for each seed; half of the engines are a step ahead of their scheduler."""
    models = list(MODELS.values())
    for seed in seeds:
        play_script(folder / f"{seed}", seed, models[seed % len(models)])
        shutil.rmtree(folder / f"{seed}")
