"""States of layers without attention: Mamba, Mamba 2, gated delta nets, short convolutions.

Shapes and types are those of vLLM's ``MambaStateShapeCalculator`` and
``MambaStateDtypeCalculator``: the last inputs of a convolution in the type of the activations, and
the state proper in that type or float32.
"""

from __future__ import annotations

from tiered_kv.kv_reach import KvKind, KvReach

from .element_types import SIZES
from .kv_layers import KvLayers
from .layer_kinds import LayerKind
from .model_config import ModelConfig, ModelError

_DELTA = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_MAMBA1 = frozenset({"mamba", "falcon_mamba", "jamba"})
_MAMBA2 = frozenset({"mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1"})
_CONVOLUTION = frozenset({"lfm2"})
STATE_TYPES = _DELTA | _MAMBA1 | _MAMBA2 | _CONVOLUTION
"""Models whose states are known."""


def state_kv(config: ModelConfig, kinds: list[LayerKind], dtype: str, ranks: int) -> list[KvLayers]:
    """Layers that keep a state; none if the model has no such layers.

    Args:
        dtype: type of the activations.
        ranks: ranks of tensor parallelism.

    Raises:
        ModelError: the model's states are not known, or cannot be split over the ranks.
    """
    count = sum(kind in (LayerKind.STATE, LayerKind.BOTH) for kind in kinds)
    if not count:
        return []
    model = config.model_type
    if model in _DELTA:
        words, nbytes = "gated delta net", _delta(config, dtype, ranks)
    elif model in _MAMBA1:
        words, nbytes = "Mamba", _mamba1(config, dtype, ranks)
    elif model in _MAMBA2:
        words, nbytes = "Mamba 2", _mamba2(config, dtype, ranks)
    elif model in _CONVOLUTION:
        words, nbytes = "short convolution", _convolution(config, dtype, ranks)
    else:
        raise ModelError(
            f"{config.path}: {config.architecture} keeps states of a kind that is not known."
        )
    return [KvLayers(words, KvReach(KvKind.STATE), count, state_bytes=nbytes)]


def _delta(config: ModelConfig, dtype: str, ranks: int) -> int:
    keys, values = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    key, value = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    inputs = config.number("linear_conv_kernel_dim") - 1
    width = _split(config, 2 * key * keys + value * values, ranks)
    state = _split(config, values, ranks) * key * value
    return width * inputs * SIZES[dtype] + state * _state_size(config, dtype)


def _mamba1(config: ModelConfig, dtype: str, ranks: int) -> int:
    inner = config.find("intermediate_size") if config.model_type != "jamba" else None
    if inner is None:
        expand = config.number("mamba_expand", "expand")
        inner = expand * config.number("hidden_size")
    width = _split(config, inner, ranks)
    inputs = config.number("mamba_d_conv", "conv_kernel") - 1
    state = width * config.number("mamba_d_state", "state_size")
    return width * inputs * SIZES[dtype] + state * _state_size(config, dtype)


def mamba2_shape(config: ModelConfig) -> tuple[int, int, int, int]:
    """Heads, elements of a head, elements of a state and groups of Mamba 2.

    Raises:
        ModelError: a field is missing.
    """
    heads = config.number("mamba_n_heads", "mamba_num_heads", "num_heads")
    size = config.find("mamba_head_dim") if config.model_type != "mamba2" else None
    if size is None and isinstance(config.given("mamba_d_head"), int):
        size = config.number("mamba_d_head")
    if size is None and config.model_type == "mamba2":
        size = config.number("head_dim")
    if size is None:  # "auto"
        size = mamba2_inner(config, heads, 0) // heads
    state = config.number("mamba_d_state", "ssm_state_size", "state_size")
    return heads, size, state, config.number("mamba_n_groups", "n_groups")


def mamba2_inner(config: ModelConfig, heads: int, size: int) -> int:
    """Width of Mamba 2 inside, as vLLM's class of the model takes it."""
    if config.model_type == "nemotron_h":
        return heads * size
    if config.model_type == "falcon_h1" and (inner := config.find("mamba_d_ssm")) is not None:
        return inner
    return config.number("mamba_expand", "expand") * config.number("hidden_size")


def _mamba2(config: ModelConfig, dtype: str, ranks: int) -> int:
    heads, size, state, groups = mamba2_shape(config)
    inner = mamba2_inner(config, heads, size)
    inputs = config.number("mamba_d_conv", "conv_kernel") - 1
    if groups % ranks:  # every rank needs the group of its heads
        groups = ranks
    width = _split(config, inner + 2 * groups * state, ranks)
    proper = _split(config, heads, ranks) * size * state
    return width * inputs * SIZES[dtype] + proper * _state_size(config, dtype)


def _convolution(config: ModelConfig, dtype: str, ranks: int) -> int:
    width = _split(config, config.number("conv_dim", "hidden_size"), ranks)
    return width * (config.number("conv_L_cache") - 1) * SIZES[dtype]


def _state_size(config: ModelConfig, dtype: str) -> int:
    """Bytes of an element of the state proper: the model's configuration may name its type."""
    name = "mamba_ssm_cache_dtype" if config.model_type == "nemotron_h" else "mamba_ssm_dtype"
    if config.model_type in ("nemotron_h", "qwen3_5_text", "qwen3_5_moe_text"):
        return SIZES.get(str(config.given(name)), SIZES[dtype])
    return SIZES[dtype]


def _split(config: ModelConfig, width: int, ranks: int) -> int:
    if width % ranks:
        raise ModelError(f"{config.path}: its states cannot be split over {ranks} GPUs.")
    return width // ranks
