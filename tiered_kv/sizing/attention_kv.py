"""KV of attention layers: keys and values of heads, or MLA's latent vectors."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.kv_reach import KvKind, KvReach

from .kv_layers import KvLayers
from .layer_kinds import LayerKind
from .model_config import ModelConfig, ModelError

LATENT_TYPES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "kimi_k2",
        "pangu_ultra_moe",
    }
)
"""Models that vLLM serves with MLA if they have a ``kv_lora_rank``
(``ModelArchConfigConvertorBase.is_deepseek_mla``), with one attention a layer."""

SPARSE_LATENT_BYTES = 656
"""Bytes of a token that sparse MLA keeps in fp8: 512 of them, four scales in float32, and 64
positions in bf16 (vLLM's ``fp8_ds_mla``)."""
INDEX_BLOCK = 128
"""Elements of an indexer's key that share a scale in float32."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a layer of attention.

    Attributes:
        query: heads of queries. kv: heads of keys and values. size: elements of a head.
        value_size: elements of a head of values.
    """

    query: int
    kv: int
    size: int
    value_size: int

    @property
    def both(self) -> int:
        """Elements of a key and a value."""
        return self.size + self.value_size


def is_latent(config: ModelConfig) -> bool:
    """True if the model keeps one latent vector of a token instead of keys and values."""
    return config.model_type in LATENT_TYPES and config.find("kv_lora_rank") is not None


def heads_of(config: ModelConfig, kind: LayerKind) -> Heads:
    """Heads of a layer.

    Args:
        config: fields of that layer.

    Raises:
        ModelError: a field is missing.
    """
    query = config.number("num_attention_heads", "n_head", "n_heads")
    kv = config.find(
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    )
    if config.given("multi_query") is True and kv is None:
        kv = 1
    size = config.find("head_dim", "hidden_size_per_head", "attention_head_dim", "kv_channels")
    if size is None:
        size = config.number("hidden_size", "n_embd", "d_model") // query
    if kind is LayerKind.FULL and "per_layer_config" not in config.values:
        size = config.find("global_head_dim") or size
        if config.given("attention_k_eq_v") is True:
            kv = config.find("num_global_key_value_heads") or kv
    return Heads(query, kv or query, size, config.find("v_head_dim") or size)


def attention_kv(
    config: ModelConfig, kinds: list[LayerKind], element: int, ranks: int
) -> list[KvLayers]:
    """Layers of attention by what they keep; those that share the KV of others keep none.

    Args:
        element: bytes of an element of KV.
        ranks: ranks of tensor parallelism.

    Raises:
        ModelError: a field is missing, or the heads cannot be split over the ranks.
    """
    if is_latent(config):
        return _latent(config, kinds, element)
    shared = config.find("num_kv_shared_layers") or 0
    found: dict[tuple[str, KvReach, Heads], int] = {}
    for layer, kind in enumerate(kinds[: len(kinds) - shared]):
        if kind in (LayerKind.STATE, LayerKind.NOTHING):
            continue
        words, reach = _reach(config, kind)
        key = (words, reach, heads_of(config.of_layer(layer), kind))
        found[key] = found.get(key, 0) + 1
    return [
        KvLayers(
            words,
            reach,
            count,
            token_bytes=kv_on_rank(config, heads, ranks) * heads.both * element,
            pair_flops=2 * heads.query * heads.both,
        )
        for (words, reach, heads), count in found.items()
    ]


def kv_on_rank(config: ModelConfig, heads: Heads, ranks: int) -> int:
    """KV heads on one rank; where there are fewer than ranks, several ranks have the same.

    Raises:
        ModelError: the ranks do not divide the heads.
    """
    uneven = heads.kv % ranks if heads.kv > ranks else ranks % heads.kv
    if heads.query % ranks or uneven:
        raise ModelError(
            f"{config.path}: {heads.query} heads with {heads.kv} of keys and values cannot be "
            f"split over {ranks} GPUs."
        )
    return max(1, heads.kv // ranks)


def _latent(config: ModelConfig, kinds: list[LayerKind], element: int) -> list[KvLayers]:
    rank, positions = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    heads = config.number("num_attention_heads")
    scores = config.number("qk_nope_head_dim") + positions
    pair_flops = 2 * heads * (scores + config.number("v_head_dim"))
    token_bytes = (rank + positions) * element
    if (sees := config.find("index_topk")) is None:
        return [KvLayers("MLA", KvReach(), len(kinds), token_bytes, pair_flops=pair_flops)]
    if element == 1:
        token_bytes = SPARSE_LATENT_BYTES
    size = config.number("index_head_dim")
    index_bytes = size + size // INDEX_BLOCK * 4
    index_flops = 2 * size * config.number("index_n_heads")
    return [
        KvLayers("MLA", KvReach(), len(kinds), token_bytes, pair_flops=pair_flops, sees=sees),
        KvLayers("MLA's indexer", KvReach(), len(kinds), index_bytes, pair_flops=index_flops),
    ]


def _reach(config: ModelConfig, kind: LayerKind) -> tuple[str, KvReach]:
    if kind is LayerKind.WINDOW:
        span = config.number("sliding_window")
        if config.model_type == "cohere2":  # its layers see one token more (``commandr.py``)
            span += 1
        if config.given("use_bidirectional_attention") == "all":
            span = span // 2 + 1
        return f"window of {span:,}", KvReach(KvKind.WINDOW, span)
    if kind is LayerKind.CHUNK:
        span = config.number("attention_chunk_size")
        return f"chunks of {span:,}", KvReach(KvKind.CHUNK, span)
    return "full attention", KvReach()
