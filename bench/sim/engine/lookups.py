"""Cache of prefix lookups.

vLLM looks up the prefix of the request at the head of its queue in every step, which takes half of
the simulator's time. A cached result is valid until a block that the lookup found is evicted, or
the first missing block is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 16
"""Maximum number of cached lookups. They are needed for the head of the queue, and for requests
that a connector holds back."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A cached lookup.

    Attributes:
        hashes: hashes of the request's blocks. The list object itself is kept, so that its id stays
            unique.
        asked: number of hashes, and maximum number of tokens to find.
        found: blocks found in each group, and the coordinator's two counts.
        decides: keys of the found blocks and of the first missing block.
    """

    hashes: Sequence[bytes]
    asked: tuple[int, int]
    found: tuple[Any, ...]
    decides: frozenset[bytes]


class RememberedLookups:
    """Caches the prefix lookups of a KV cache manager that has a single full-attention group. The
    manager's prefix cache must not be reset.
    """

    def __init__(self, manager: Any) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self._key = make_block_hash_with_group_id
        self._known: dict[int, _Known] = {}
        self._deciding: set[bytes] = set()  # keys on which cached lookups depend, possibly more
        self._look_up = manager.coordinator.find_longest_cache_hit
        manager.coordinator.find_longest_cache_hit = self.find
        cached = manager.block_pool.cached_block_hash_to_block
        cached.insert, cached.pop = self._forgetting(cached.insert), self._forgetting(cached.pop)

    def find(self, hashes: Sequence[bytes], most: int) -> tuple[Any, ...]:
        """Find a hit. Same arguments and result as the coordinator's ``find_longest_cache_hit``."""
        asked = len(hashes), most
        known = self._known.get(id(hashes))
        if known is None or known.asked != asked:
            known = self._remember(hashes, asked)
        blocks, *counts = known.found
        return tuple(list(some) for some in blocks), *counts

    def _remember(self, hashes: Sequence[bytes], asked: tuple[int, int]) -> _Known:
        found = self._look_up(hashes, asked[1])
        blocks = found[0][0]
        decides = {block.block_hash for block in blocks}
        if len(blocks) < len(hashes):
            decides.add(self._key(hashes[len(blocks)], 0))
        self._deciding |= decides
        self._known.pop(id(hashes), None)
        known = self._known[id(hashes)] = _Known(hashes, asked, found, frozenset(decides))
        if len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        return known

    def _forgetting(self, change: Callable[[bytes, Any], Any]) -> Callable[[bytes, Any], Any]:
        """Wrap a change of the pool's index, so that it drops the cached lookups that depend on the
        changed key.
        """

        def changed(key: bytes, what: Any) -> Any:
            if key in self._deciding:
                self._deciding.discard(key)
                self._known = {
                    one: known for one, known in self._known.items() if key not in known.decides
                }
            return change(key, what)

        return changed
