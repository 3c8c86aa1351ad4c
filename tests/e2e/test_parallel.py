"""Two tensor-parallel ranks, and a model that is not all full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.servers.dtypes import read_features
from tiered_kv.bench.servers.engines import engine

pytestmark = pytest.mark.e2e

TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def tiny_model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY, **config}))
    return folder


def prompts() -> list[list[int]]:
    return [[(17 * i + 31 * j) % 2000 + 5 for j in range(60 + 90 * i)] for i in range(5)]


OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",  # also where float32 is faster: its pages are a path of their own
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "max_model_len": 1024,
    "num_gpu_blocks_override": 60,
    "seed": 1,
}


def real_tiny_model(folder: Path) -> Path:
    """Random weights in files: a model that can be recognised after a restart."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{key: value for key, value in TINY.items() if key != "torch_dtype"})
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def skip_if_vllm_cannot(model: Path, options: dict[str, Any]) -> None:
    """Without AVX-512, two ranks of vLLM's own CPU build were seen to answer with tokens that the
    model does not have."""
    if read_features().avx512:
        return
    try:
        with engine(model, connector=False, **options) as stock:
            stock.alone(prompts())
    except Exception as error:
        pytest.skip(f"stock vLLM cannot run two ranks on this CPU: {error}")


def test_two_ranks_count_as_one_and_keep_their_pages_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a store of its own under one path; a page counts if both have it."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = real_tiny_model(tmp_path / "tiny")
    options = {key: value for key, value in OPTIONS.items() if key != "load_format"}
    options["tensor_parallel_size"] = 2
    skip_if_vllm_cannot(model, options)
    extra: dict[str, Any] = {"cpu_gib": 0.5, "ssd_path": str(tmp_path / "ssd"), "ssd_gib": 1}
    with engine(model, connector=True, extra=extra, **options) as two:
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

    with engine(model, connector=True, extra=extra, **options) as two:
        assert [answer.tokens for answer in two.alone(prompts())] == cold
        two.settle()
        two.half.pages.index.check_integrity()
        totals = two.half.counters.totals
        assert totals["prompt_tokens_ssd"] > 0.9 * sum(map(len, prompts())) - 5 * 32
        assert totals["hook_errors"] == totals["promotion_failures"] == 0


def test_a_model_of_mixed_attention_comes_back_from_cpu_memory(tmp_path: Path) -> None:
    model = tiny_model(
        tmp_path / "mixed",
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
    )
    options = {**OPTIONS, "num_gpu_blocks_override": 200}
    with engine(model, connector=False, **options) as plain:
        right = [answer.tokens for answer in plain.alone(prompts())]
    with engine(model, connector=True, extra={"cpu_gib": 0.5}, **options) as mixed:
        assert len(mixed.half.facts.groups) == 2
        assert [answer.tokens for answer in mixed.alone(prompts())] == right
        mixed.settle()
        pool = mixed.core.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks(set(range(len(pool.blocks))))
        before = mixed.half.counters.totals["prompt_tokens_cpu"]
        assert [answer.tokens for answer in mixed.alone(prompts())] == right
        mixed.settle()
        totals = mixed.half.counters.totals
        assert totals["prompt_tokens_cpu"] - before > 0.8 * sum(map(len, prompts()))
        assert totals["hook_errors"] == totals["restore_failures"] == 0
        mixed.half.pages.index.check_integrity()
