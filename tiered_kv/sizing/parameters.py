"""Parameters of a model, added up from its configuration.

Norms, biases, routers' corrections and parts that see or hear are left out: a percent or so of a
language model.
"""

from __future__ import annotations

from dataclasses import dataclass

from .attention_kv import heads_of, is_latent
from .layer_kinds import LayerKind
from .model_config import ModelConfig
from .state_kv import mamba2_inner, mamba2_shape

UNGATED = frozenset({"nemotron_h", "gpt2", "opt", "gpt_neox", "falcon", "starcoder2"})
"""Models whose perceptrons have two matrices instead of three."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a model.

    Attributes:
        total: in all. active: those that a token is multiplied with.
    """

    total: float
    active: float

    def __add__(self, other: Parameters) -> Parameters:
        """Sum of both."""
        return Parameters(self.total + other.total, self.active + other.active)


def count_parameters(config: ModelConfig, kinds: list[LayerKind]) -> Parameters:
    """Add the parameters of a model up.

    Raises:
        ModelError: a field is missing.
    """
    hidden = config.number("hidden_size", "n_embd", "d_model")
    table = float(config.number("vocab_size") * hidden)
    tied = config.given("tie_word_embeddings")
    if tied is None:
        tied = config.whole.get("tie_word_embeddings", False)
    sum_ = Parameters(table if tied else 2 * table, table)  # only the output is multiplied
    for layer, kind in enumerate(kinds):
        own = config.of_layer(layer)
        mixers = 0.0
        if kind in (LayerKind.STATE, LayerKind.BOTH):
            mixers += _state_layer(own, hidden)
        if kind not in (LayerKind.STATE, LayerKind.NOTHING):
            mixers += _attention(own, kind, hidden)
        sum_ += Parameters(mixers, mixers)
        sum_ += _perceptron(own, layer, kind, hidden)
    return sum_


def _attention(config: ModelConfig, kind: LayerKind, hidden: int) -> float:
    if is_latent(config):
        heads = config.number("num_attention_heads")
        positions, rank = config.number("qk_rope_head_dim"), config.number("kv_lora_rank")
        plain, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
        query = heads * (plain + positions)
        narrow = config.find("q_lora_rank")
        asked = narrow * (hidden + query) if narrow else hidden * query
        kept = hidden * (rank + positions) + rank * heads * (plain + value)
        return float(asked + kept + heads * value * hidden)
    one = heads_of(config, kind)
    gates = 2 if config.given("attn_output_gate") is True else 1
    query = one.query * one.size * hidden
    return float(gates * query + one.kv * (one.size + one.value_size) * hidden + query)


def _state_layer(config: ModelConfig, hidden: int) -> float:
    if config.find("linear_num_value_heads") is not None:
        keys = config.number("linear_num_key_heads") * config.number("linear_key_head_dim")
        heads = config.number("linear_num_value_heads")
        values = heads * config.number("linear_value_head_dim")
        return float(hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden)
    if config.model_type == "lfm2":
        width = config.number("conv_dim", "hidden_size")
        return float(4 * hidden * width)
    if config.model_type in ("mamba", "falcon_mamba", "jamba"):
        inner = config.number("mamba_expand", "expand") * hidden
        state, step = config.number("mamba_d_state", "state_size"), hidden // 16
        return float(3 * hidden * inner + inner * (2 * state + 3 * step))
    heads, size, state, groups = mamba2_shape(config)
    inner = mamba2_inner(config, heads, size)
    return float(hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden)


def _perceptron(config: ModelConfig, layer: int, kind: LayerKind, hidden: int) -> Parameters:
    """A layer's perceptron, or its experts."""
    matrices = 2 if config.model_type in UNGATED else 3
    word = _block_word(config, layer)
    alone = config.model_type == "nemotron_h" and kind is not LayerKind.NOTHING
    if alone or config.model_type in ("mamba", "falcon_mamba", "mamba2"):
        return Parameters(0.0, 0.0)
    experts = config.find("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    if experts is None or not _has_experts(config, layer, word):
        size = float(matrices * hidden * _width(config, hidden))
        return Parameters(size, size)
    return _experts(config, hidden, experts, matrices)


def _width(config: ModelConfig, hidden: int) -> int:
    """Width of a perceptron inside."""
    if config.model_type == "granitemoehybrid":  # without experts, all share one
        return config.number("shared_intermediate_size", "intermediate_size")
    found = config.find(
        "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"
    )
    return found or 4 * hidden


def _experts(config: ModelConfig, hidden: int, experts: int, matrices: int) -> Parameters:
    width = config.number("moe_intermediate_size", "intermediate_size")
    one = float(matrices * hidden * width)
    shared_width = config.find(
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    shared = float(matrices * hidden * shared_width) if shared_width else 0.0
    if not shared and config.model_type == "llama4_text":
        shared = one
    if not shared:
        shared = one * (config.find("n_shared_experts", "num_shared_experts") or 0)
    router = float(experts * hidden)
    chosen = config.find("num_experts_per_tok", "num_experts_per_token", "top_k_experts") or 1
    always = shared + router
    return Parameters(always + experts * one, always + min(chosen, experts) * one)


def _block_word(config: ModelConfig, layer: int) -> str:
    pattern = config.given("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return pattern[layer]
    words = config.words("layers_block_type")
    return words[layer] if words else ""


def _has_experts(config: ModelConfig, layer: int, word: str) -> bool:
    """True if a layer of a model with experts has some."""
    if word in ("mlp", "-"):
        return False
    if (first := config.find("first_k_dense_replace")) is not None and layer < first:
        return False
    moe_layers, dense = config.given("moe_layers"), config.given("mlp_only_layers")
    if isinstance(moe_layers, list):
        return layer in moe_layers
    if isinstance(dense, list) and layer in dense:
        return False
    if (period := config.find("expert_layer_period")) is not None:
        return layer % period == (config.find("expert_layer_offset") or 0)
    step = config.find("interleave_moe_layer_step", "decoder_sparse_step") or 1
    return (layer + 1) % step == 0
