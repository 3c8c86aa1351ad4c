"""A tiny model in a process of its own is restored from every tier, and the controls work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tiered_kv.bench.models.__main__ import environment, run_model
from tiered_kv.bench.models.catalogue import BLOCK, MODELS
from tiered_kv.bench.models.processes import run_process
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


@pytest.mark.parametrize("name", ["granite4", "qwen3_next"])
def test_a_recurrent_model_goes_on_behind_a_local_prefix_and_a_restored_tail(
    tmp_path: Path, name: str
) -> None:
    """Mamba 2 and a gated delta net. A state covers every token before it; reports on other
    connectors (LMCache#4247) describe wrong text in this case."""
    model, log = next(one for one in MODELS if one.name == name), tmp_path / "log"
    env = environment(os.environ, tmp_path, model)
    status = run_process("tests.e2e.mixed_prefix", [name, str(tmp_path)], env, log, 900.0)
    assert status == 0, log.read_text()[-3000:]
    found = json.loads((tmp_path / "mixed.json").read_text())
    assert any("state" in words for words in found["groups"]), found["groups"]
    assert found["hit"] == found["context"]
    assert 0 < found["local"] <= found["half"]
    assert found["local"] + found["restored"] == found["context"]
    assert found["unlike"] == []
    assert found["same"]
