"""Prefix lookups, remembered.

vLLM looks up the prefix of the request at the head of its queue in every step; in the simulator
that is half of all work. A result is valid until one of the found blocks is evicted, or the first
missing one is cached. It is remembered until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST = 16
"""Number of remembered lookups: a queue's head, and requests that a connector holds in it."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A lookup.

    Attributes:
        hashes: of the request's blocks; the list itself, so that its id stays unique.
        asked: number of hashes, and of tokens that might be found.
        decides: keys of the found blocks, and of the first missing one.
    """

    hashes: Sequence[bytes]
    asked: tuple[int, int]
    blocks: tuple[list[Any], ...]
    found: tuple[int, int]
    decides: frozenset[bytes]


class RememberedLookups:
    """Replaces the lookup of a KV cache manager with one group of full attention. Its prefix cache
    must not be reset."""

    def __init__(self, manager: Any) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self._key = make_block_hash_with_group_id
        self._known: dict[int, _Known] = {}
        self._deciding: set[bytes] = set()  # keys that decide any of them, and perhaps others
        self._look_up = manager.coordinator.find_longest_cache_hit
        manager.coordinator.find_longest_cache_hit = self.find
        cached = manager.block_pool.cached_block_hash_to_block
        self._insert, self._pop = cached.insert, cached.pop
        cached.insert, cached.pop = self._cached, self._evicted

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

    def _cached(self, key: bytes, block: Any) -> None:
        if key in self._deciding:
            self._forget(key)
        self._insert(key, block)

    def _evicted(self, key: bytes, block_id: int) -> Any:
        if key in self._deciding:
            self._forget(key)
        return self._pop(key, block_id)

    def _forget(self, key: bytes) -> None:
        self._deciding.discard(key)
        for one in [one for one, known in self._known.items() if key in known.decides]:
            del self._known[one]
