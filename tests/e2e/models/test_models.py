"""A tiny model of each architecture, in a separate process, is restored from every tier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.models.checks import PROMPT
from tests.e2e.models.rows import MIXED, run_checks, run_model
from tiered_kv.bench.models.catalogue import BLOCK, EVERY, MODELS, TinyModel

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TIMEOUT_S = 900.0
EVERY_MODEL = [
    pytest.param(model, id=model.name, marks=() if model.name == "gemma3" else pytest.mark.nightly)
    for model in EVERY
]
"""All models. The model that also runs outside nightly has full attention and windows."""
FOUND_AT_EVERY_TOKEN = {
    "llama": [f"full attention, 4 layers, blocks of {BLOCK}"],
    "gemma3": [
        f"full attention, 2 layers, blocks of {BLOCK}",
        f"window of 200, 2 layers, blocks of {BLOCK}",
    ],
}
"""KV groups of models for which nothing has to be recomputed after a restore."""


@pytest.mark.parametrize("model", EVERY_MODEL)
def test_a_model_is_restored_bit_for_bit(model: TinyModel, tmp_path: Path) -> None:
    row = run_model(model, tmp_path / "log", TIMEOUT_S)
    if row.cannot_start is not None:
        pytest.skip(f"stock vLLM does not run it here: {row.cannot_start}")
    assert row.equal, row.notes
    assert row.equal_bytes, row.notes
    assert row.control_differs, row.notes
    assert min(row.cpu_tokens, row.ssd_tokens, row.restart_tokens) > 0
    assert row.answer_recomputed is not None
    assert row.stock_answer_recomputed is not None
    assert row.answer_recomputed <= row.stock_answer_recomputed
    assert row.stripped_hit > 0
    assert row.pinned_hit > 0
    if model.name in FOUND_AT_EVERY_TOKEN:
        assert row.notes == []
        assert sorted(row.groups) == FOUND_AT_EVERY_TOKEN[model.name]
        assert row.cpu_tokens == row.ssd_tokens == row.restart_tokens == row.context
        assert row.answer_recomputed == 0
        assert min(row.pinned_hit, row.stripped_hit) >= PROMPT // BLOCK * BLOCK
        assert row.stop_string_hit == row.stop_string_had


@pytest.mark.parametrize("name", ["granite4", "qwen3_next"])
def test_a_recurrent_model_continues_after_a_local_prefix_and_a_restored_tail(
    tmp_path: Path, name: str
) -> None:
    """VRAM has the first half of a context, and the rest is restored. The models have Mamba 2
    layers or a gated delta net, whose states depend on every token before them. LMCache#4247
    reports wrong text from another connector in this case."""
    model, log = next(one for one in MODELS if one.name == name), tmp_path / "log"
    failed = run_checks(model, tmp_path, log, TIMEOUT_S, "--mixed")
    assert failed is None, log.read_text()[-3000:]
    found = json.loads((tmp_path / MIXED).read_text())
    assert any("state" in words for words in found["groups"]), found["groups"]
    assert found["hit"] == found["context"]
    assert 0 < found["local"] <= found["half"]
    assert found["local"] + found["restored"] == found["context"]
    assert found["unlike"] == []
    assert found["same"]


def test_a_model_that_takes_too_long_leaves_a_row_and_no_process(tmp_path: Path) -> None:
    row = run_model(MODELS[0], tmp_path / "log", timeout_s=1.0)
    assert row.notes == ["took longer than 1 s"]
    assert not row.equal
