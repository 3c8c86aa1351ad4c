"""Prefix lookups, remembered.

vLLM looks up the prefix of the request at the head of its queue in every step, however long that
has to wait; in the simulator that is half of all work. The answer is the same until one of the
blocks found goes, or the first that was missing comes, and is remembered until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST = 16
"""Lookups that are remembered; a queue's head and those that a connector holds in it."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A lookup.

    Attributes:
        hashes: of the request's blocks; the list itself, so that no other can take its id.
        asked: how many they were, and how many tokens might be found.
        decides: keys of the blocks found, and of the first that was not.
    """

    hashes: Sequence[bytes]
    asked: tuple[int, int]
    blocks: tuple[list[Any], ...]
    found: tuple[int, int]
    decides: frozenset[bytes]


class RememberedLookups:
    """Takes the place of the lookup in a KV cache manager with one group of full attention, whose
    prefix cache is not reset."""

    def __init__(self, manager: Any) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self._key = make_block_hash_with_group_id
        self._known: dict[int, _Known] = {}
        self._deciding: set[bytes] = set()  # keys that decide any of them, and perhaps others
        self._look_up = manager.coordinator.find_longest_cache_hit
        manager.coordinator.find_longest_cache_hit = self.find
        cached = manager.block_pool.cached_block_hash_to_block
        self._insert, self._pop = cached.insert, cached.pop
        cached.insert, cached.pop = self._came, self._went

    def find(self, hashes: Sequence[bytes], most: int) -> tuple[tuple[list[Any], ...], int, int]:
        """Find a hit, as the coordinator's ``find_longest_cache_hit``."""
        asked = len(hashes), most
        known = self._known.get(id(hashes))
        if known is None or known.asked != asked:
            known = self._remember(hashes, asked)
        return tuple(list(blocks) for blocks in known.blocks), *known.found

    def _remember(self, hashes: Sequence[bytes], asked: tuple[int, int]) -> _Known:
        blocks, *found = self._look_up(hashes, asked[1])
        decides = {block.block_hash for block in blocks[0]}
        if len(blocks[0]) < len(hashes):
            decides.add(self._key(hashes[len(blocks[0])], 0))
        known = _Known(hashes, asked, blocks, (found[0], found[1]), frozenset(decides))
        self._known.pop(id(hashes), None)
        self._known[id(hashes)] = known
        self._deciding |= decides
        if len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        return known

    def _came(self, key: bytes, block: Any) -> None:
        if key in self._deciding:
            self._forget(key)
        self._insert(key, block)

    def _went(self, key: bytes, block_id: int) -> Any:
        if key in self._deciding:
            self._forget(key)
        return self._pop(key, block_id)

    def _forget(self, key: bytes) -> None:
        self._deciding.discard(key)
        for one in [one for one, known in self._known.items() if key in known.decides]:
            del self._known[one]
