"""Kinds of a model's layers: which attend to what, and which keep a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from .model_config import MAX_LAYERS, ModelConfig, ModelError


class LayerKind(Enum):
    """Kind of a layer, by what it keeps of its tokens."""

    FULL = "full"
    """Attention to all tokens."""
    WINDOW = "window"
    """Attention to the last tokens."""
    CHUNK = "chunk"
    """Attention to the tokens of the present chunk."""
    STATE = "state"
    """A state of fixed size."""
    BOTH = "both"
    """Attention to all tokens, beside a state."""
    NOTHING = "nothing"
    """A perceptron or experts alone."""


_FULL, _WINDOW, _CHUNK = LayerKind.FULL, LayerKind.WINDOW, LayerKind.CHUNK
_STATE, _NOTHING = LayerKind.STATE, LayerKind.NOTHING

WORDS: Mapping[str, LayerKind] = {
    "full_attention": _FULL,
    "attention": _FULL,
    "sliding_attention": _WINDOW,
    "chunked_attention": _CHUNK,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "conv": _STATE,
    "mlp": _NOTHING,
    "moe": _NOTHING,
}
"""Words of ``layer_types`` and ``layers_block_type``."""

LETTERS: Mapping[str, LayerKind] = {"M": _STATE, "*": _FULL, "-": _NOTHING, "E": _NOTHING}
"""Letters of Nemotron-H's ``hybrid_override_pattern``."""


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """Kind of each layer, from the first on.

    What a layer is follows vLLM's class of the model where that and ``layer_types`` differ.

    Raises:
        ModelError: the number of layers is missing, or a layer is of no known kind.
    """
    pattern = config.given("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [_known(config, letter, LETTERS) for letter in pattern]
    named = _named(config)
    layers = len(named or ()) or config.number("num_hidden_layers", "n_layer", "num_layers")
    if layers > MAX_LAYERS:
        raise ModelError(f"{config.path}: {layers:,} layers are more than any model has.")
    if config.model_type in ("mamba", "falcon_mamba", "mamba2"):
        return [_STATE] * layers
    if config.model_type == "falcon_h1":
        return [LayerKind.BOTH] * layers
    if config.model_type == "llama4_text":
        return _llama4(config, layers)
    if config.model_type == "jamba":
        period, offset = config.number("attn_layer_period"), config.find("attn_layer_offset") or 0
        return [_FULL if at % period == offset else _STATE for at in range(layers)]
    if config.model_type == "lfm2" and named is None:
        full = config.given("full_attn_idxs")
        held = full if isinstance(full, list) else range(layers)
        return [_FULL if at in held else _STATE for at in range(layers)]
    if named is not None:
        return [_known(config, word, WORDS) for word in named]
    if (every := config.find("full_attention_interval")) is not None:
        return _every(every, layers, _STATE)
    if config.find("sliding_window") is None or config.given("use_sliding_window") is False:
        return [_FULL] * layers
    return _windows(config, layers)


def _named(config: ModelConfig) -> list[str] | None:
    for name in ("layers_block_type", "layer_types"):
        if words := config.words(name):
            return words
    return None


def _known(config: ModelConfig, word: str, words: Mapping[str, LayerKind]) -> LayerKind:
    if word not in words:
        raise ModelError(
            f"{config.path}: {config.architecture} has layers of an unknown kind, {word!r}."
        )
    return words[word]


def _windows(config: ModelConfig, layers: int) -> list[LayerKind]:
    """Layers of a model with a window: all of them, unless a pattern tells others."""
    pattern = config.given("sliding_window_pattern")
    if isinstance(pattern, str):  # EXAONE: L is local, G global
        last = layers - 1
        letters = [pattern[at % len(pattern)] for at in range(layers)]
        return [_FULL if at == last or one == "G" else _WINDOW for at, one in enumerate(letters)]
    if (every := config.find("sliding_window_pattern")) is not None:
        kinds = _every(every, layers, _WINDOW)
        if config.model_type == "gemma4_text":
            kinds[-1] = _FULL
        return kinds
    if config.given("use_sliding_window") is True:  # Qwen2: lower layers see everything
        below = config.find("max_window_layers") or 0
        return [_FULL if at < below else _WINDOW for at in range(layers)]
    return [_WINDOW] * layers


def _llama4(config: ModelConfig, layers: int) -> list[LayerKind]:
    """Layers with rotary positions attend within chunks."""
    if config.find("attention_chunk_size") is None:
        return [_FULL] * layers
    given = config.given("no_rope_layers")
    if isinstance(given, Sequence) and given:
        return [_CHUNK if rotary else _FULL for rotary in given]
    return _every(config.number("no_rope_layer_interval"), layers, _CHUNK)


def _every(interval: int, layers: int, others: LayerKind) -> list[LayerKind]:
    """Full attention in every layer of that interval."""
    return [others if (at + 1) % interval else _FULL for at in range(layers)]
