"""Published models: each is planned as vLLM serves it, or refused with what is not known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.sizing.recorded import answers, key_of, published, request
from tiered_kv.sizing.model_shape import ask_vllm

PUBLISHED = dict(published())
ANSWERS = answers()
NAMED = re.compile(r"-(\d+(?:\.\d+)?)B\b")

REFUSED: dict[str, str] = {}
"""Models that are not planned, and the start of the sentence that says why."""


def answer(model: str) -> dict[str, Any]:
    return ANSWERS[key_of(PUBLISHED[model])]


@pytest.mark.parametrize("model", [one for one in PUBLISHED if one not in REFUSED])
def test_a_model_has_about_the_parameters_that_its_name_says(model: str) -> None:
    found = answer(model)
    assert 0 < found["active_parameters"] <= found["parameters"]
    if named := NAMED.search(model):
        assert found["parameters"] / 1e9 == pytest.approx(float(named[1]), rel=0.10)


@pytest.mark.parametrize("model", REFUSED)
def test_what_is_not_known_is_named(model: str) -> None:
    assert answer(model)["error"].startswith(REFUSED[model])


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
    """Answer about a model on eight GPUs."""
    return ANSWERS[key_of(request(config, quantization, ranks=8))]


def test_a_pattern_of_layers_is_read() -> None:
    """In MiMo-V2-Flash one layer in four sees all tokens, the others a window."""
    layers = {one["reach"][1]: one["layers"] for one in on_eight(MIMO_V2_FLASH)["kv"]}
    assert layers == {128: 36, 0: 12}


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
def test_weights_of_four_bits_take_about_as_many(
    config: dict[str, Any], quantization: dict[str, Any] | None
) -> None:
    found = on_eight(config, quantization)
    assert 4.2 < 8 * found["weight_bytes"] / found["parameters"] < 5.0


def test_kv_is_of_the_type_that_the_checkpoint_asks_for() -> None:
    found = on_eight(MOE, MODELOPT_0_29)
    assert found["kv_dtype"] == "fp8_e4m3"
    assert 8 * sum(one["layers"] * one["token_bytes"] for one in found["kv"]) == 188 * 1024


def test_keys_of_an_index_are_counted() -> None:
    """57 of MiniMax-M3's 60 layers keep one of 128 elements next to four heads' keys and values."""
    kept = sum(
        one["layers"] * one["token_bytes"] for one in answer("nvidia--MiniMax-M3-NVFP4")["kv"]
    )
    assert kept == 60 * 4 * 2 * 128 * 2 + 57 * 128 * 2


SAMPLE = ("Qwen--Qwen3-235B-A22B-FP8", "google--gemma-4-26B-A4B", "nvidia--GLM-5.2-NVFP4")


@pytest.mark.e2e
@pytest.mark.slow
def test_vllm_still_answers_as_recorded() -> None:
    pytest.importorskip("vllm")
    assert ask_vllm([PUBLISHED[model] for model in SAMPLE]) == [answer(one) for one in SAMPLE]
