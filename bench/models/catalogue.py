"""Catalogue of tiny models, one per architecture, with the options that vLLM's CPU build needs.

Widths are the smallest that the kernels support. Comments give the reasons for engine options. This
module imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

VOCABULARY = 2048
BLOCK = 128
"""Tokens per block, unless vLLM needs larger blocks for the states of a model's recurrent layers.
"""
IMAGE_TOKEN = 3
"""Placeholder token for an image, in multimodal models."""
IMAGE_PIXELS, PATCH_PIXELS = 56, 14
"""Edge length of an image, and of the patch that becomes one token, in pixels."""
STATE_CHUNK = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
"""Engine options that limit a prefill chunk. vLLM's CPU scan for Mamba 2 keeps no states inside a
chunk, so a chunk must not be longer than a block."""

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


class Drafter(Enum):
    """Draft model for speculative decoding."""

    NGRAM = "ngram"
    """Proposes the tokens that followed the same tokens earlier in the context."""
    ITSELF = "draft_model"
    """A second copy of the model. Its proposals are accepted as long as its own KV is correct."""
    EAGLE = "eagle"
    """A layer with random weights whose input is the model's last hidden state."""
    MTP = "mtp"
    """A multi-token prediction layer of the model itself, with random weights."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model of a few layers with random weights.

    Attributes:
        name: name of the row in the results.
        config: transformers' configuration class.
        architecture: transformers' model class, which is also vLLM's name for it.
        settings: fields of the model configuration.
        options: engine arguments.
        adapter: True to serve it with a LoRA adapter.
        image_tokens: tokens per image in a prompt; 0 for a text-only model. The ``settings`` of a
            model with images are complete: ``COMMON`` is not added to them.
        stub_torchvision: True if vLLM imports torchvision for the model. Installations for CPUs
            lack it, so a stand-in is needed.
        drafter: draft model for speculative decoding; None for no speculation.
        ranks: number of processes that share the model.
    """

    name: str
    config: str
    architecture: str
    settings: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    adapter: bool = False
    image_tokens: int = 0
    stub_torchvision: bool = False
    drafter: Drafter | None = None
    ranks: int = 1


COMMON: Mapping[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Fields that most configurations have. The large standard deviation of the weights makes answers
depend on the whole context."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MIXED = {"sliding_window": 200, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 64}
_MAMBA = {**_MAMBA_HEADS, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64}
_GATED_DELTA: Mapping[str, object] = {
    "head_dim": 64,
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_GROUP = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, **_GROUP}
_HEADS = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
_RANKS = {"kv_lora_rank": 512, "q_lora_rank": 64, "num_key_value_heads": 4}
_LATENT = {**_ROUTED, **_HEADS, **_RANKS, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
_SMALL_BLOCKS = {"num_gpu_blocks_override": 100}
"""Pool size in blocks of 16 tokens, which vLLM's CPU build uses for MLA without AMX."""


def _causal(
    name: str, stem: str, settings: Mapping[str, object] = {}, config: str = "", **more: Any
) -> TinyModel:
    """Return a model with the classes ``{stem}ForCausalLM`` and, unless ``config`` names another,
    ``{stem}Config``.
    """
    return TinyModel(name, config or f"{stem}Config", f"{stem}ForCausalLM", settings, **more)


_LLAMA = _causal("llama", "Llama")
_GEMMA3 = _causal(
    "gemma3",
    "Gemma3",
    {
        **_MIXED,
        "query_pre_attn_scalar": 32,
        "rope_parameters": {_SLIDING: dict(_ROPE), _FULL: dict(_ROPE)},
    },
    "Gemma3TextConfig",
)
_GEMMA4 = {"global_head_dim": 64, "hidden_size_per_layer_input": 0}
_LLAMA4 = {"attention_chunk_size": 512, "no_rope_layers": [1, 1, 1, 0], "num_local_experts": 4}
_CHUNKED = {"layer_types": ["chunked_attention"] * 3 + [_FULL], "num_experts_per_tok": 1}
_QWEN3_NEXT = _causal(
    "qwen3_next",
    "Qwen3Next",
    {**_GATED_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
)
_QWEN3_5 = _causal("qwen3_5", "Qwen3_5", _GATED_DELTA, "Qwen3_5TextConfig", stub_torchvision=True)
_DEEPSEEK_V3 = _causal(
    "deepseek_v3",
    "DeepseekV3",
    {**_LATENT, "topk_method": "noaux_tc"},
    options=_SMALL_BLOCKS,
)
_CLIP: Mapping[str, object] = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_PIXELS,
    "patch_size": PATCH_PIXELS,
    "initializer_range": 0.15,
}

MODELS: tuple[TinyModel, ...] = (
    _LLAMA,
    _causal("mistral_sliding", "Mistral", {"sliding_window": 200}),
    _GEMMA3,
    _causal(
        "gemma4",
        "Gemma4",
        {**_MIXED, **_GEMMA4, "vocab_size_per_layer_input": VOCABULARY},
        "Gemma4TextConfig",
    ),
    _causal(
        "gpt_oss",
        "GptOss",
        {**_MIXED, **_FOUR_EXPERTS, "intermediate_size": 128, "sliding_window": 128},
    ),
    _causal("olmo3", "Olmo3", {**_MIXED, "layer_types": [_SLIDING] * 3 + [_FULL]}),
    _causal(
        "llama4",
        "Llama4",
        {**_LLAMA4, **_CHUNKED, "intermediate_size_mlp": 256},
        "Llama4TextConfig",
    ),
    _QWEN3_NEXT,
    _QWEN3_5,
    _causal(
        "granite4",
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            **_FOUR_EXPERTS,
            "shared_intermediate_size": 128,
            "attention_multiplier": 0.2,
            "layer_types": ["mamba"] * 3 + ["attention"],
        },
        options=STATE_CHUNK,
    ),
    _causal(
        "nemotron_h",
        "NemotronH",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 64,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
        options=STATE_CHUNK,
    ),
    _causal(
        "falcon_h1",
        "FalconH1",
        {**_MAMBA, "mamba_d_ssm": 256, "num_hidden_layers": 2},
        options=STATE_CHUNK,
    ),
    _causal(
        "mamba2",
        "Mamba2",
        {"num_heads": 8, "head_dim": 32, "state_size": 64, "n_groups": 1, "chunk_size": 64},
        options={**STATE_CHUNK, "block_size": 256},
    ),
    _causal("deepseek_v2", "DeepseekV2", _LATENT, options=_SMALL_BLOCKS),
    _DEEPSEEK_V3,
    TinyModel(
        "llava",
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**COMMON, "model_type": "llama"},
            "vision_config": _CLIP,
            "image_token_index": IMAGE_TOKEN,
        },
        {"mm_processor_kwargs": {"backend": "pil"}},  # the other backend needs a real torchvision
        stub_torchvision=True,
        image_tokens=(IMAGE_PIXELS // PATCH_PIXELS) ** 2,
    ),
    replace(_LLAMA, name="llama_fp8_kv", options={"kv_cache_dtype": "fp8"}),
    replace(_LLAMA, name="llama_lora", adapter=True),
)
"""One model for every architecture whose KV has a different form."""

_GLM = {**_EXPERTS, **_ROUTED, "num_nextn_predict_layers": 1, "use_qk_norm": False}
_PIPELINE = {
    "pipeline_parallel_size": 2,
    "worker_cls": "tests.e2e.models.pipeline_worker.PipelineWorker",
}
VARIANTS: Mapping[str, tuple[TinyModel, ...]] = {
    "speculation": (
        replace(_LLAMA, name="llama_ngram", drafter=Drafter.NGRAM),
        replace(_LLAMA, name="llama_draft", drafter=Drafter.ITSELF),
        replace(_LLAMA, name="llama_eagle", drafter=Drafter.EAGLE),
        _causal("glm4_moe_mtp", "Glm4Moe", _GLM, drafter=Drafter.MTP),
        replace(_QWEN3_NEXT, name="qwen3_next_ngram", drafter=Drafter.NGRAM),
        replace(_DEEPSEEK_V3, name="deepseek_v3_mtp", drafter=Drafter.MTP),
    ),
    "tensor_parallel": (
        replace(_QWEN3_5, name="qwen3_5_tp2", options={"tensor_parallel_size": 2}, ranks=2),
    ),
    "pipeline_parallel": (replace(_GEMMA3, name="gemma3_pp2", options=_PIPELINE, ranks=2),),
}
"""Models with serving options that change the KV, by type of option."""

EVERY: tuple[TinyModel, ...] = (*MODELS, *(model for some in VARIANTS.values() for model in some))
