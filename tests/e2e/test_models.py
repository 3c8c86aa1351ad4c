"""A tiny model in a process of its own is restored from every tier, and the controls work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.models.__main__ import run_model
from tiered_kv.bench.models.catalogue import BLOCK, MODELS
from tiered_kv.bench.models.row import PROMPT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_llama_is_restored_bit_for_bit(tmp_path: Path) -> None:
    llama = next(model for model in MODELS if model.name == "llama")
    row = run_model(llama, tmp_path / "log", timeout_s=900.0)
    assert row["notes"] == []
    assert row["groups"] == [f"full attention, 4 layers, blocks of {BLOCK}"]
    assert row["equal"]
    assert row["equal_bytes"]
    assert row["control_differs"]
    for tokens in ("cpu_tokens", "ssd_tokens", "restart_tokens"):
        assert row[tokens] == row["context"]
    assert row["answer_recomputed"] <= BLOCK
    assert row["pinned_hit"] >= PROMPT // BLOCK * BLOCK
    assert row["stripped_hit"] >= PROMPT // BLOCK * BLOCK
    assert row["stop_string_hit"] >= row["stop_string_had"] - BLOCK
