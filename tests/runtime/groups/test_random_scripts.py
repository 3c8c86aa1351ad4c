"""Random clients, faults and resets with several kinds of KV: each checks itself in every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.random_scripts import play_each
from tests.runtime.test_random_scripts import play_script
from tiered_kv.connectors.runtime.worker import cpu_memory

from .kinds import MODELS


@pytest.fixture(autouse=True)
def _processor_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products of every engine would take a quarter of the time; the rig ignores them."""
    monkeypatch.setattr(cpu_memory, "measure_flops", lambda *_: 0.0)


@pytest.mark.scripts(1000, nightly=10_000)
def test_random_scripts_end_well(tmp_path: Path, seeds: range) -> None:
    models = list(MODELS.values())  # half of the engines are a step ahead of their scheduler

    def play(folder: Path, seed: int) -> None:
        play_script(folder, seed, models[seed % len(models)])

    play_each(tmp_path, seeds, play)
