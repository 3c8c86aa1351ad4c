"""Resets of vLLM's cache: our references go first, and KV that survives the reset is never
found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def watch_resets(
    manager: Any, blocks_of: Mapping[str, Sequence[Any]], told: Callable[[], None]
) -> None:
    """Hear of every reset of vLLM's KV cache manager, before it, and change nothing: nothing was
    saved that could be found. Takes what ``Resets`` takes.
    """
    reset = manager.reset_prefix_cache

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        told()
        return reset(*args, **kwargs)

    manager.reset_prefix_cache = reset_prefix_cache


class Resets:
    """Wrapper around the reset of vLLM's KV cache manager.

    vLLM refuses to reset its cache while blocks are referenced, and tells the connector too late.
    So our references are released first, inside the manager's own reset.

    If vLLM still refuses, because requests run or are being restored, their KV belongs to the past
    generation, and so does everything they compute from it. Its hashes are removed, and no more of
    it is hashed. Otherwise later requests would find it, and save it under keys of the new
    generation. A preempted request starts over, and is then like any other.

    Args:
        manager: vLLM's KV cache manager.
        blocks_of: returns the manager's blocks of each request.
        let_go: releases everything we hold; called before vLLM checks.
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
        self._old: dict[str, Sequence[Any]] = {}  # block tables; a new one is of a new beginning
        self._reset = manager.reset_prefix_cache
        self._hash: Callable[..., None] | None = None
        manager.reset_prefix_cache = self._reset_prefix_cache

    def _reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        self._let_go()
        done = self._reset(*args, **kwargs)
        if not done:
            self._pool.evict_blocks(set(range(len(self._pool.blocks))))
            self._old = {request: blocks for request, blocks in self._blocks_of.items() if blocks}
            if self._hash is None:  # not before: it is asked in every step of every request
                self._hash = self._coordinator.cache_blocks
                self._coordinator.cache_blocks = self._cache_blocks
        return done

    def _cache_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Hash the blocks that a request has filled, unless it began before the last reset."""
        assert self._hash is not None
        blocks = self._old.get(request.request_id)
        if blocks is not None:
            if self._blocks_of.get(request.request_id) is blocks:
                return
            del self._old[request.request_id]
        self._hash(request, *args, **kwargs)
