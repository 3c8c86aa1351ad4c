"""``BlockPool`` (``runtime.base``) on top of vLLM's KV cache manager, hooks for cache resets, and
the conversion of vLLM's scheduled steps.

Before a cache reset, tiered-kv's references to blocks are released. KV that survives a reset is
never found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from tiered_kv.connectors.runtime.base import KeptState, Request, ScheduledStep
from tiered_kv.connectors.vllm.requests.vllm_request import VllmRequest

_REFERENCES = attrgetter("ref_cnt")
_HASH = attrgetter("_block_hash")  # the property calls Python code for each block


class VllmBlockPool:
    """vLLM's block pool as a ``BlockPool`` (``runtime.base``).

    Args:
        manager: vLLM's KV cache manager.
        groups: the KV cache group of each page group.
    """

    def __init__(self, manager: Any, groups: Sequence[int]) -> None:
        self._manager = manager
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
        return len(self._pool.cached_block_hash_to_block)  # a cache reset replaces this dict

    def hashed_blocks_of(self, request_id: str) -> list[Any]:
        blocks = self.blocks_of(request_id)
        return list(compress(blocks, map(_HASH, blocks)))

    def hash_prefix(self, request: Request, tokens: int) -> None:
        assert isinstance(request, VllmRequest)
        self._manager.cache_blocks(request.of_vllm, tokens)

    def forget(self, block_ids: Iterable[int]) -> None:
        self._pool.evict_blocks(set(block_ids))

    def blocks_of(self, request_id: str) -> Sequence[Any]:
        return [block for one in self._managers for block in one.req_to_blocks.get(request_id, ())]

    def cached_prefix(self, hashes: Sequence[bytes], group: int) -> int:
        at, part = 0, 16  # most prefixes are not cached at all
        while found := self._cached_each(hashes[at : at + part], group):
            if not all(found):  # `None in found` would compare every block in Python
                return at + next(i for i, one in enumerate(found) if one is None)
            at, part = at + part, 256
        return len(hashes)

    def num_in_use(self, hashes: Sequence[bytes], group: int) -> int:
        found = self._cached_each(hashes, group)
        try:
            return len(found) - [*map(_REFERENCES, found)].count(0)
        except AttributeError:  # some entries are dicts or None
            blocks = (next(iter(one.values())) if isinstance(one, dict) else one for one in found)
            return sum(block is not None and block.ref_cnt > 0 for block in blocks)

    def _cached_each(self, hashes: Sequence[bytes], group: int) -> list[Any]:
        """Return for each hash its block; a dict of blocks by id if several blocks have the hash;
        None if no block has it. Avoids four calls of ``get_cached_block`` per hash."""
        (of_vllm,) = self._groups[group]
        suffix = make_block_hash_with_group_id(BlockHash(b""), of_vllm)
        cache = self._pool.cached_block_hash_to_block._cache  # noqa: SLF001
        return [*map(cache.get, [one + suffix for one in hashes])]

    def cached(self, block_hash: bytes, group: int) -> Any | None:
        found = self._pool.get_cached_block(block_hash, self._groups[group])
        return found[0] if found else None


def watch_resets(
    manager: Any, blocks_of: Mapping[str, Sequence[Any]], told: Callable[[], None]
) -> None:
    """Call ``told`` before every reset of vLLM's KV cache manager. Used in observe mode, in which
    no KV was saved. Takes the same arguments as ``Resets``, but does not use ``blocks_of``."""
    reset = manager.reset_prefix_cache

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        told()
        return reset(*args, **kwargs)

    manager.reset_prefix_cache = reset_prefix_cache


class Resets:
    """Wrapper around the reset of vLLM's KV cache manager.

    vLLM refuses to reset its cache while blocks are referenced, and notifies the connector too
    late. So tiered-kv's references are released first, inside the manager's own reset.

    If vLLM still refuses, because requests run or are being restored, the KV of these requests
    belongs to the previous generation, and so does everything that they compute from it. The hashes
    of this KV are removed, and no further blocks of these requests are hashed. Otherwise later
    requests would find this KV, and save it under keys of the new generation. A preempted request
    starts over, and is then treated like any other request.

    Args:
        manager: vLLM's KV cache manager.
        blocks_of: maps each request to the manager's blocks.
        let_go: releases tiered-kv's references to blocks; called before vLLM checks for
            references.
    """

    def __init__(
        self,
        manager: Any,
        blocks_of: Mapping[str, Sequence[Any]],
        let_go: Callable[[], None],
    ) -> None:
        self._pool = manager.block_pool
        self._coordinator = manager.coordinator
        self._blocks_of = blocks_of
        self._let_go = let_go
        self._old: dict[str, Sequence[Any]] = {}  # block tables; a new table means a restart
        self._reset = manager.reset_prefix_cache
        self._hash: Callable[..., None] | None = None
        manager.reset_prefix_cache = self._reset_prefix_cache

    def _reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        self._let_go()
        done = self._reset(*args, **kwargs)
        if not done:
            self._pool.evict_blocks(set(range(len(self._pool.blocks))))
            self._old = {request: blocks for request, blocks in self._blocks_of.items() if blocks}
            if self._hash is None:  # not earlier, because it runs for every request in each step
                self._hash = self._coordinator.cache_blocks
                self._coordinator.cache_blocks = self._cache_blocks
        return done

    def _cache_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Hash the blocks that a request has filled, unless it started before the last reset."""
        assert self._hash is not None
        blocks = self._old.get(request.request_id)
        if blocks is not None:
            if self._blocks_of.get(request.request_id) is blocks:
                return
            del self._old[request.request_id]
        self._hash(request, *args, **kwargs)


def scheduled_step(output: Any) -> ScheduledStep:
    """Convert vLLM's ``SchedulerOutput``. Depending on vLLM's model runner, a request that resumes
    after preemption is in the list of new requests or in the list of running requests."""
    new = [one.req_id for one in output.scheduled_new_reqs]
    return ScheduledStep(
        tokens=output.num_scheduled_tokens,
        total=output.total_num_scheduled_tokens,
        begun=[*new, *output.scheduled_cached_reqs.resumed_req_ids],
        preempted=output.preempted_req_ids or (),
    )


def kept_states(output: Any, positions: Mapping[int, int]) -> list[KeptState]:
    """Return the recurrent states that vLLM offers for saving in this step.

    Args:
        positions: positions of page groups by vLLM's group index.
    """
    offered = output.kv_connector_block_state.boundary_state_offloads
    return [
        KeptState(request_id, positions[group], block, tokens)
        for request_id, states in offered.items()
        for group, block, tokens in states
        if group in positions
    ]
