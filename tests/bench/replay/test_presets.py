"""Presets of a comparison: how many rounds of what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.bench.replay.test_ab import KINDS, PRESET, Machine
from tiered_kv.bench.replay.ab import PRESETS, Harness, total_runs
from tiered_kv.bench.replay.ledger import Ledger


def test_bounds_may_run_in_the_first_round_alone(tmp_path: Path) -> None:
    machine = Machine()
    preset = replace(PRESET, bounds_once=True)
    Harness(KINDS, preset, machine, Ledger(tmp_path, {}, resume=False)).run_all()
    for load in ("pressure", "beyond"):
        by_round = [
            {name for at, name, n in machine.measured if (at, n) == (load, number)}
            for number in range(PRESET.rounds)
        ]
        assert by_round[0] >= {"reach", "bound", "tiered"}
        assert by_round[1] == {"stock", "tiered"}
    assert len(machine.measured) <= total_runs(KINDS, preset)


def test_the_preset_of_peers_is_three_paired_rounds() -> None:
    preset = PRESETS["peers"]
    assert (preset.rounds, preset.slowdown) == (3, PRESETS["cpu"].slowdown)
    assert preset.pool_tokens == PRESETS["cpu"].pool_tokens
