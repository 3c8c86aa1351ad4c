"""Bytes in VRAM: a copy of what a hit needs, and whether two copies agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.kv_reach import KvKind

from .kv_groups import KvGroup

NULL_BLOCK = 0


@dataclass(slots=True)
class Snapshot:
    """Copy of the blocks that a hit of ``tokens`` needs.

    Attributes:
        blocks: tensors of each block, by group and index of the block. Blocks that the request
            does not have are missing.
    """

    tokens: int
    blocks: dict[int, dict[int, list[Any]]] = field(default_factory=dict)


class Vram:
    """KV memory of an engine whose worker runs in this process."""

    def __init__(self, core: Any, groups: Sequence[KvGroup]) -> None:
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self._groups = groups
        self._num_blocks = core.scheduler.kv_cache_config.num_blocks
        self._layers = self.runner.compilation_config.static_forward_context

    def snapshot(self, tables: Sequence[Sequence[int]], tokens: int) -> Snapshot:
        """Copy what a hit of ``tokens`` needs.

        Args:
            tables: ids of the request's blocks, by group.
        """
        taken = Snapshot(tokens)
        for group in self._groups:
            table, blocks = tables[group.index], dict[int, list[Any]]()
            for at in group.needs(tokens):
                if at < len(table) and table[at] != NULL_BLOCK:
                    used = min(group.block_size, tokens - at * group.block_size)
                    blocks[at] = self._copy(group, table[at], used)
            taken.blocks[group.index] = blocks
        return taken

    def draft_layers(self) -> list[str]:
        """Names of the layers that are a drafter's."""
        drafter = getattr(self.runner, "drafter", None)
        return sorted(getattr(drafter, "_draft_attn_layer_names", ()))

    def zero(self, tables: Sequence[Sequence[int]], tokens: int, layers: Sequence[str]) -> None:
        """Overwrite the KV of some layers of attention that a hit of ``tokens`` needs."""
        for group in self._groups:
            blocks = [tables[group.index][at] for at in group.needs(tokens)]
            for layer in set(layers).intersection(group.layers):
                self._layers[layer].kv_cache[blocks] = 0

    def _copy(self, group: KvGroup, block: int, used: int) -> list[Any]:
        if group.reach.kind is KvKind.STATE:
            return [
                part[block].contiguous().clone()
                for layer in group.layers
                for part in _parts(self._layers[layer].kv_cache)
            ]
        return [
            self._rows(self._layers[layer].kv_cache, block, group.block_size)[..., :used, :].clone()
            for layer in group.layers
        ]

    def _rows(self, cache: Any, block: int, block_size: int) -> Any:
        """A layer's block as ``[..., tokens, bytes of a token]``."""
        pieces = cache.shape[0] // self._num_blocks  # kernel blocks of a block
        if pieces == 1:
            return cache[block]
        import torch

        return torch.cat(list(cache[block * pieces : (block + 1) * pieces]), dim=-2)


def _parts(cache: Any) -> list[Any]:
    return list(cache) if isinstance(cache, (list, tuple)) else [cache]


def unlike(ended: Snapshot, restored: Snapshot, groups: Sequence[KvGroup]) -> list[str]:
    """Differences between a turn's end and what was restored of it, in words; none if all bytes
    agree."""
    return [
        f"bytes of {group.words}: {said}"
        for group in groups
        if (said := _unlike(ended, restored, group)) is not None
    ]


def _unlike(ended: Snapshot, restored: Snapshot, group: KvGroup) -> str | None:
    if group.reach.kind is KvKind.STATE and ended.tokens != restored.tokens:
        return f"a state after {restored.tokens} tokens, where the turn ended at {ended.tokens}"
    before, after = ended.blocks[group.index], restored.blocks[group.index]
    for at in group.needs(restored.tokens):
        if at not in before or at not in after:
            return f"block {at} is missing {'at the end' if at not in before else 'afterwards'}"
        for one, other in zip(before[at], after[at], strict=True):
            rows = other.shape[-2] if group.reach.kind is not KvKind.STATE else None
            if not _same_bytes(one if rows is None else one[..., :rows, :], other):
                return f"block {at} differs"
    return None


def _same_bytes(one: Any, other: Any) -> bool:
    import torch

    if one.shape != other.shape:
        return False
    raw = [tensor.contiguous().view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*raw))
