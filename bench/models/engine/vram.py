"""Bytes in VRAM, as every worker of an engine sees them.

The scheduler's side asks by remote calls, so that it does not matter where the workers run. Copies
stay with the workers; digests of them travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.page_group import KvKind

from .kv_groups import KvGroup, kv_groups

NULL_BLOCK = 0
Tables = Sequence[Sequence[int]]
"""Ids of a request's blocks, by group."""
Digests = Mapping[str, str]
"""Digests of bytes by the group's words, or in words why there are none."""


@dataclass(slots=True)
class Snapshot:
    """Copy of the blocks that a hit of ``tokens`` needs.

    Attributes:
        blocks: tensors of each block, by group and index of the block. Blocks that the request
            does not have are missing.
    """

    tokens: int
    blocks: dict[int, dict[int, list[Any]]] = field(default_factory=dict)

    def digest(self, group: KvGroup, tokens: int) -> str:
        """Digest of a group's bytes that a hit of ``tokens`` needs, no more than the copy's own."""
        if group.reach.kind is KvKind.STATE and self.tokens != tokens:
            return f"a state after {self.tokens} tokens, not {tokens}"
        digest = hashlib.sha256()
        for at in group.needs(tokens):
            if at not in self.blocks[group.index]:
                return f"block {at} is missing of {self.tokens} tokens"
            used = min(group.block_size, tokens - at * group.block_size)
            for part in self.blocks[group.index][at]:
                kept = part if group.reach.kind is KvKind.STATE else part[..., :used, :]
                digest.update(raw_bytes(kept))
        return digest.hexdigest()[:16]


def raw_bytes(tensor: Any) -> bytes:
    """The bytes of a tensor's elements, in order."""
    import torch

    raw: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


class Vram:
    """KV memory of one worker. Lives in its process.

    Args:
        runner: its model runner.
    """

    def __init__(self, runner: Any) -> None:
        config = runner.kv_cache_config
        self.groups = kv_groups(config)
        self.snapshots: dict[str, Snapshot] = {}
        self._armed: list[tuple[str, Tables, int, Sequence[str]]] = []
        self._num_blocks = config.num_blocks
        self._layers = runner.compilation_config.static_forward_context
        self._forward: Callable[..., Any] = runner._model_forward  # noqa: SLF001 - after sync loads
        runner._model_forward = self._about_to_compute  # noqa: SLF001

    def keep(self, label: str, tables: Tables, tokens: int) -> None:
        """Copy what a hit of ``tokens`` needs."""
        taken = self.snapshots[label] = Snapshot(tokens)
        for group in self.groups:
            table, blocks = tables[group.index], dict[int, list[Any]]()
            for at in group.needs(tokens):
                if at < len(table) and table[at] != NULL_BLOCK:
                    blocks[at] = self._copy(group, table[at])
            taken.blocks[group.index] = blocks

    def arm(self, label: str, tables: Tables, tokens: int, zeroed: Sequence[str]) -> None:
        """``keep`` when the next forward pass begins, and then zero the KV of some layers."""
        self._armed.append((label, tables, tokens, zeroed))

    def _about_to_compute(self, *args: Any, **kwargs: Any) -> Any:
        for label, tables, tokens, zeroed in self._armed:
            self.keep(label, tables, tokens)
            self._zero(tables, tokens, zeroed)
        self._armed.clear()
        return self._forward(*args, **kwargs)

    def _zero(self, tables: Tables, tokens: int, layers: Sequence[str]) -> None:
        for group in self.groups:
            blocks = [tables[group.index][at] for at in group.needs(tokens)]
            for layer in set(layers).intersection(group.layers):
                self._layers[layer].kv_cache[blocks] = 0

    def _copy(self, group: KvGroup, block: int) -> list[Any]:
        caches = [self._layers[layer].kv_cache for layer in group.layers]
        if group.reach.kind is KvKind.STATE:
            return [part[block].clone() for cache in caches for part in _parts(cache)]
        return [self._rows(cache, block).clone() for cache in caches]

    def _rows(self, cache: Any, block: int) -> Any:
        """A layer's block as ``[..., tokens, numbers of a token]``."""
        pieces = cache.shape[0] // self._num_blocks  # kernel blocks of a block
        if pieces == 1:
            return cache[block]
        import torch

        return torch.cat(list(cache[block * pieces : (block + 1) * pieces]), dim=-2)


def _parts(cache: Any) -> list[Any]:
    return list(cache) if isinstance(cache, (list, tuple)) else [cache]


# -- what runs in the workers ------------------------------------------------------


def watch(worker: Any) -> None:
    """Begin to look at a worker's KV memory."""
    worker.model_runner.watched_vram = Vram(worker.model_runner)


def keep(worker: Any, label: str, tables: Tables, tokens: int) -> None:
    """See ``Vram.keep``."""
    worker.model_runner.watched_vram.keep(label, tables, tokens)


def arm(worker: Any, label: str, tables: Tables, tokens: int, zeroed: Sequence[str]) -> None:
    """See ``Vram.arm``."""
    worker.model_runner.watched_vram.arm(label, tables, tokens, zeroed)


def digests(worker: Any, label: str, tokens: int) -> Digests:
    """Digests of a copy, as far as a hit of ``tokens`` goes."""
    vram: Vram = worker.model_runner.watched_vram
    taken = vram.snapshots.get(label)
    return {
        f"group {group.index} ({group.words})": (
            taken.digest(group, tokens) if taken is not None else "nothing was found"
        )
        for group in vram.groups
    }


def draft_layers(worker: Any) -> list[str]:
    """Names of the layers that are a drafter's."""
    drafter = getattr(worker.model_runner, "drafter", None)
    return sorted(getattr(drafter, "_draft_attn_layer_names", ()))


def unlike(one: Sequence[Digests], other: Sequence[Digests]) -> list[str]:
    """Differences between what the ranks hold, in words; none if all bytes agree."""
    wrong = []
    for rank, (before, after) in enumerate(zip(one, other, strict=True)):
        where = f"rank {rank}, " if len(one) > 1 else ""
        for group, digest in before.items():
            if digest != after[group]:
                wrong.append(f"bytes of {where}{group}: {digest}, then {after[group]}")
            elif " " in digest:  # words: there is nothing to compare
                wrong.append(f"bytes of {where}{group}: {digest}")
    return wrong
