"""KV groups of an engine, read from vLLM's own configuration of its cache.

The connector reads them too. This is written apart from it, so that the two can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiered_kv.page_group import KvKind, KvReach


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose blocks are of one kind.

    Attributes:
        index: the engine's number for the group.
        block_size: tokens of a block.
        layers: names of its layers.
        words: kind and block size in words.
    """

    index: int
    reach: KvReach
    block_size: int
    layers: tuple[str, ...]
    words: str

    def needs(self, tokens: int) -> range:
        """Blocks that a hit of ``tokens`` needs."""
        return self.reach.blocks(tokens, self.block_size)


def kv_groups(kv_cache_config: Any) -> list[KvGroup]:
    """The groups whose blocks can be found again."""
    groups = kv_cache_config.kv_cache_groups
    cacheable = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(groups)))
    return [_read(index, groups[index]) for index in cacheable]


def _read(index: int, group: Any) -> KvGroup:
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    first = next(iter(inner.values())) if inner else spec
    reach, name = _reach(first)
    layers = tuple(group.layer_names)
    layers_in_words = f"{len(layers)} layer{'s' if len(layers) > 1 else ''}"
    words = f"{name}, {layers_in_words}, blocks of {spec.block_size}"
    return KvGroup(index, reach, spec.block_size, layers, words)


def _reach(spec: Any) -> tuple[KvReach, str]:
    kind = type(spec).__name__
    if hasattr(spec, "shapes"):
        said = getattr(spec, "mamba_type", "")
        name = str(getattr(said, "name", said)).lower().removesuffix("_attn")
        return KvReach(KvKind.STATE), f"{name} state"
    if (chunk := getattr(spec, "attention_chunk_size", None)) is not None:
        return KvReach(KvKind.CHUNK, chunk), f"chunks of {chunk}"
    if (window := getattr(spec, "sliding_window", None)) is not None:
        extra = int(getattr(spec, "extra_retained_tokens", 0))
        return KvReach(KvKind.WINDOW, window, extra), f"window of {window}"
    return KvReach(), "MLA" if kind.startswith("MLA") else "full attention"
