"""Published models: each is planned as vLLM serves it, or refused with the missing facts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.sizing.recorded import answer_recorded, published, request
from tiered_kv.sizing.model_shape import ask_vllm

PUBLISHED = dict(published())
NAMED = re.compile(r"-(\d+(?:\.\d+)?)B\b")

REFUSED = {
    "MiniMaxAI--MiniMax-M3": "has no class MiniMaxM3ForCausalLM, and transformers",
    "sgl-project--DeepSeek-V4-Pro-FP8": "the file has no swiglu_limit, which vLLM's class",
    "stepfun-ai--Step-3.7-Flash-FP8": "Model architectures ['Step3p7FlashForCausalLM'] are not",
}
"""Models that cannot be planned because vLLM refuses them, and a part of the message."""


def answer(model: str) -> dict[str, Any]:
    return answer_recorded([PUBLISHED[model]])[0]


@pytest.mark.parametrize("model", [one for one in PUBLISHED if one not in REFUSED])
def test_a_model_has_about_as_many_parameters_as_its_name_says(model: str) -> None:
    found = answer(model)
    assert 0 < found["active_parameters"] <= found["parameters"]
    if named := NAMED.search(model):
        assert found["parameters"] / 1e9 == pytest.approx(float(named[1]), rel=0.12)


@pytest.mark.parametrize("model", REFUSED)
def test_missing_facts_are_named(model: str) -> None:
    assert REFUSED[model] in answer(model)["error"]


BASE = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": 262144}
MOE = {
    **BASE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
MIMO_V2_FLASH = {
    **BASE,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 192,
    "v_head_dim": 128,
    "vocab_size": 150000,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1] * 12,
}
NEMOTRON_3_SUPER = {
    **BASE,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "hybrid_override_pattern": ("ME" * 5 + "*") * 8,
    "num_hidden_layers": 88,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 131072,
    "intermediate_size": 2688,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "n_routed_experts": 512,
    "n_shared_experts": 1,
    "num_experts_per_tok": 22,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "expand": 2,
    "conv_kernel": 4,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MODELOPT_0_29 = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16},
}


def on_eight(config: dict[str, Any], quantization: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the recorded answer about a model on eight GPUs."""
    return answer_recorded([request(config, quantization, ranks=8)])[0]


def test_a_pattern_of_layers_is_read() -> None:
    """In MiMo-V2-Flash, one of every four layers has full attention, and the other layers have a
    window."""
    found = on_eight(MIMO_V2_FLASH)
    assert {one["reach"][1]: one["layers"] for one in found["kv"]} == {128: 36, 0: 12}
    assert found["assumed"]["sliding_window_size"] == 128, "by another name in this file"


def test_a_model_has_the_parameters_that_its_file_describes() -> None:
    """The file of MiMo-V2-Flash contains no number of experts, although transformers' class
    defaults to 256. The weights take two bytes for each counted parameter."""
    found = on_eight(MIMO_V2_FLASH)
    assert found["weight_bytes"] == pytest.approx(2 * found["parameters"], rel=0.01)


def test_experts_that_work_in_a_latent_space_are_counted_there() -> None:
    assert on_eight(NEMOTRON_3_SUPER)["parameters"] / 1e9 == pytest.approx(120, rel=0.05)


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        (MOE | {"quantization_config": INT4}, None),
        (MOE | {"quantization_config": NVFP4}, None),
        (MOE, MODELOPT_0_29),
    ],
    ids=["compressed-tensors", "modelopt", "modelopt before 0.31"],
)
def test_four_bit_weights_take_four_to_five_bits_each(
    config: dict[str, Any], quantization: dict[str, Any] | None
) -> None:
    found = on_eight(config, quantization)
    assert 4.2 < 8 * found["weight_bytes"] / found["parameters"] < 5.0


def test_kv_is_of_the_type_that_the_checkpoint_asks_for() -> None:
    found = on_eight(MOE, MODELOPT_0_29)
    assert found["kv_dtype"] == "fp8_e4m3"
    assert 8 * sum(one["layers"] * one["token_bytes"] for one in found["kv"]) == 188 * 1024


def test_keys_of_an_index_are_counted() -> None:
    """57 of MiniMax-M3's 60 layers keep an index key of 128 elements, in addition to the keys and
    values of four heads."""
    found = answer("nvidia--MiniMax-M3-NVFP4")["kv"]
    kept = sum(one["layers"] * one["token_bytes"] for one in found)
    assert kept == 60 * 4 * 2 * 128 * 2 + 57 * 128 * 2
    seen = {one["words"]: (one["layers"], one["sees"]) for one in found}
    assert seen == {
        "full attention": (3, 0),
        "sparse attention": (57, 16 * 128),
        "indexer": (57, 0),
    }


def test_every_rank_has_the_keys_of_an_index() -> None:
    asked = PUBLISHED["nvidia--MiniMax-M3-NVFP4"] | {"ranks": 8}
    (found,) = answer_recorded([asked])
    assert 8 * sum(one["layers"] * one["token_bytes"] for one in found["kv"]) == 354 * 1024


MINIMAX_M3 = {
    **BASE,
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3",
    "num_hidden_layers": 60,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 200064,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 3072,
    "sparse_attention_config": {
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_attention_freq": [0] * 3 + [1] * 57,
    },
}


def test_a_field_that_vllm_reads_and_the_file_lacks_is_named() -> None:
    assert on_eight(MINIMAX_M3)["error"].startswith("the file has no sparse_topk_blocks, which")


SAMPLE = ("Qwen--Qwen3-235B-A22B-FP8", "google--gemma-4-26B-A4B", "nvidia--GLM-5.2-NVFP4")


@pytest.mark.e2e
@pytest.mark.slow
def test_vllm_still_answers_as_recorded() -> None:
    pytest.importorskip("vllm")
    assert ask_vllm([PUBLISHED[model] for model in SAMPLE]) == [answer(one) for one in SAMPLE]
