"""Catalogue of tiny models: one of each architecture, and how vLLM's CPU build runs it.

Widths are the smallest that the kernels take. Engine options say what this build needs; each has
its reason beside it. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

VOCABULARY = 2048
BLOCK = 128
"""Tokens of a block, unless a model's states make vLLM raise it."""

IMAGE_TOKEN = 3
"""Token for which an image is put, in models that see."""

IMAGE_PIXELS, PATCH_PIXELS = 56, 14
"""Edges of an image, and of the part of it that takes a token."""

STATE_CHUNK = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
"""vLLM's CPU scan of Mamba 2 keeps no state inside a chunk of a prefill: a chunk must not be
longer than a block."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LAYERED_ROPE = {"sliding_attention": dict(_ROPE), "full_attention": dict(_ROPE)}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


class Drafter(Enum):
    """Guessing tokens ahead, which the model then verifies."""

    NGRAM = "ngram"
    """Words that followed the same words before."""
    ITSELF = "draft_model"
    """A second copy of the model: its guesses are right as long as its own KV is."""
    EAGLE = "eagle"
    """A layer of random weights on the model's last hidden state."""
    MTP = "mtp"
    """A layer of the model's own, of random weights."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model of a few layers with random weights.

    Attributes:
        name: name of its row.
        config: transformers' class of its configuration.
        architecture: transformers' class of the model, and vLLM's name of it.
        settings: fields of the configuration.
        options: arguments of the engine.
        adapter: True to serve it with a LoRA adapter.
        image_tokens: tokens that an image takes in its prompts; 0 for a model without eyes, else
            ``settings`` are those of all its parts.
        stub_torchvision: True if vLLM imports torchvision for it, which CPU builds lack.
        drafter: what guesses tokens ahead.
        ranks: processes that the model is cut over.
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
"""Fields that most configurations have. The wide spread of weights makes a model whose answers
depend on all of its context."""

_MAMBA_HEADS: Mapping[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}

_GATED_DELTA: Mapping[str, object] = {
    "head_dim": 64,
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_EXPERTS: Mapping[str, object] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

_LATENT: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

_SMALL_BLOCKS = {"num_gpu_blocks_override": 100}
"""A pool for blocks of 16 tokens, which vLLM's CPU build takes for MLA where there is no AMX."""

_LLAMA = ("LlamaConfig", "LlamaForCausalLM")

MODELS: tuple[TinyModel, ...] = (
    TinyModel("llama", *_LLAMA),
    TinyModel(
        "mistral_sliding",
        "MistralConfig",
        "MistralForCausalLM",
        {"sliding_window": 200},
    ),
    TinyModel(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 200,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "query_pre_attn_scalar": 32,
            "rope_parameters": _LAYERED_ROPE,
        },
    ),
    TinyModel(
        "gemma4",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "sliding_window": 200,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    TinyModel(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        },
    ),
    TinyModel(
        "olmo3",
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {
            "sliding_window": 200,
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
        },
    ),
    TinyModel(
        "llama4",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 512,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["chunked_attention"] * 3 + [_FULL],
        },
    ),
    TinyModel(
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_GATED_DELTA,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
        },
    ),
    TinyModel(
        "qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        _GATED_DELTA,
        stub_torchvision=True,
    ),
    TinyModel(
        "granite4",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "attention_multiplier": 0.2,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
        },
        STATE_CHUNK,
    ),
    TinyModel(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 64,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
        STATE_CHUNK,
    ),
    TinyModel(
        "falcon_h1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**_MAMBA_HEADS, "mamba_d_ssm": 256, "num_hidden_layers": 2},
        STATE_CHUNK,
    ),
    TinyModel(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 64,
            "n_groups": 1,
            "chunk_size": 64,
        },
        {**STATE_CHUNK, "block_size": 256},
    ),
    TinyModel("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", _LATENT, _SMALL_BLOCKS),
    TinyModel(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_LATENT, "topk_method": "noaux_tc"},
        _SMALL_BLOCKS,
    ),
    TinyModel(
        "llava",
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**COMMON, "model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": IMAGE_PIXELS,
                "patch_size": PATCH_PIXELS,
                "initializer_range": 0.15,
            },
            "image_token_index": IMAGE_TOKEN,
        },
        {"mm_processor_kwargs": {"backend": "pil"}},  # the other needs a real torchvision
        stub_torchvision=True,
        image_tokens=(IMAGE_PIXELS // PATCH_PIXELS) ** 2,
    ),
    TinyModel("llama_fp8_kv", *_LLAMA, options={"kv_cache_dtype": "fp8"}),
    TinyModel("llama_lora", *_LLAMA, adapter=True),
)
"""Every architecture whose KV differs from the others'."""

_BY_NAME = {model.name: model for model in MODELS}

_GLM = TinyModel(
    "glm4_moe_mtp",
    "Glm4MoeConfig",
    "Glm4MoeForCausalLM",
    {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "use_qk_norm": False,
    },
    drafter=Drafter.MTP,
)

VARIANTS: Mapping[str, tuple[TinyModel, ...]] = {
    "speculation": (
        replace(_BY_NAME["llama"], name="llama_ngram", drafter=Drafter.NGRAM),
        replace(_BY_NAME["llama"], name="llama_draft", drafter=Drafter.ITSELF),
        replace(_BY_NAME["llama"], name="llama_eagle", drafter=Drafter.EAGLE),
        _GLM,
        replace(_BY_NAME["qwen3_next"], name="qwen3_next_ngram", drafter=Drafter.NGRAM),
        replace(_BY_NAME["deepseek_v3"], name="deepseek_v3_mtp", drafter=Drafter.MTP),
    ),
    "tensor_parallel": (
        replace(
            _BY_NAME["qwen3_5"],
            name="qwen3_5_tp2",
            options={"tensor_parallel_size": 2},
            ranks=2,
        ),
    ),
    "pipeline_parallel": (
        replace(
            _BY_NAME["gemma3"],
            name="gemma3_pp2",
            options={
                "pipeline_parallel_size": 2,
                "worker_cls": "tests.e2e.models.pipeline_worker.PipelineWorker",
            },
            ranks=2,
        ),
    ),
}
"""Ways of serving that change what KV there is, by kind."""

EVERY: tuple[TinyModel, ...] = (*MODELS, *(model for some in VARIANTS.values() for model in some))
