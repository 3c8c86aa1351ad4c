"""Two tensor-parallel ranks act as one engine, and each has its own store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.models.catalogue import MODELS
from tiered_kv.bench.models.weights import write_model
from tiered_kv.bench.servers.dtypes import read_features
from tiered_kv.bench.servers.engines import engine

pytestmark = pytest.mark.e2e

OPTIONS: dict[str, Any] = {
    # bf16 is used even where float32 is faster, because bf16 pages have their own code path.
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,  # prompts hold tokens that the tokenizer lacks
    "max_model_len": 1024,
    "num_gpu_blocks_override": 60,
    "tensor_parallel_size": 2,
}


def prompts() -> list[list[int]]:
    return [[(17 * i + 31 * j) % 2000 + 5 for j in range(60 + 90 * i)] for i in range(5)]


def skip_if_vllm_cannot(model: Path) -> None:
    """Skip the test if stock vLLM fails with two ranks. Without AVX-512, two ranks of its CPU build
    have answered with tokens that the model does not have."""
    if read_features().avx512:
        return
    try:
        with engine(model, connector=False, **OPTIONS) as stock:
            stock.alone(prompts())
    except Exception as error:
        pytest.skip(f"stock vLLM cannot run two ranks on this CPU: {error}")


def test_two_ranks_count_as_one_and_keep_their_pages_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has its own store in the configured folder. A page counts only if both ranks have
    it."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = write_model(MODELS[0], tmp_path, OPTIONS["dtype"])
    skip_if_vllm_cannot(model)
    extra: dict[str, Any] = {"cpu_gib": 0.5, "ssd_path": str(tmp_path / "ssd"), "ssd_gib": 1}
    with engine(model, connector=True, extra=extra, **OPTIONS) as two:
        assert two.half.facts.ranks == 2
        cold = [answer.tokens for answer in two.alone(prompts())]
        two.evict_vram(60 * 32)
        before = dict(two.half.counters.totals)
        assert [answer.tokens for answer in two.alone(prompts())] == cold
        two.settle()
        after = two.half.counters.totals
        assert after["prompt_tokens_cpu"] - before["prompt_tokens_cpu"] > 1000
        assert after["bytes_saved"] == after["pages_saved"] * two.half.facts.slot_bytes * 2
        assert after["hook_errors"] == after["restore_failures"] == 0
        assert two.half.pages.book.in_flight == 0
        two.half.pages.index.check_integrity()
    assert len(list((tmp_path / "ssd").glob("*/*/lock"))) == 2

    with engine(model, connector=True, extra=extra, **OPTIONS) as two:
        assert [answer.tokens for answer in two.alone(prompts())] == cold
        two.settle()
        two.half.pages.index.check_integrity()
        totals = two.half.counters.totals
        assert totals["prompt_tokens_ssd"] > 0.9 * sum(map(len, prompts())) - 5 * 32
        assert totals["hook_errors"] == totals["promotion_failures"] == 0
