"""The port's ``BlockPool`` over vLLM's KV cache manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class VllmBlockPool:
    """vLLM's block pool as a ``BlockPool`` (``runtime.base``).

    Args:
        manager: vLLM's KV cache manager.
        groups: the KV cache group of each page group.
    """

    def __init__(self, manager: Any, groups: Sequence[int]) -> None:
        self._pool = manager.block_pool
        self._groups = [[group] for group in groups] or [[0]]
        self.blocks: Sequence[Any] = self._pool.blocks
        self._managers = manager.coordinator.single_type_managers
        self.tables: Sequence[Mapping[str, Sequence[Any]]] = [
            self._managers[group].req_to_blocks for (group,) in self._groups
        ]
        self.watermark = int(manager.watermark_blocks)
        self.num_free = self._pool.get_num_free_blocks
        self.hold = self._pool.touch
        self.release = self._pool.free_blocks

    def num_cached(self) -> int:
        return len(self._pool.cached_block_hash_to_block)

    def forget(self, block_ids: Iterable[int]) -> None:
        self._pool.evict_blocks(set(block_ids))

    def blocks_of(self, request_id: str) -> Sequence[Any]:
        return [block for one in self._managers for block in one.req_to_blocks.get(request_id, ())]

    def cached(self, block_hash: bytes, group: int) -> Any | None:
        found = self._pool.get_cached_block(block_hash, self._groups[group])
        return found[0] if found else None
