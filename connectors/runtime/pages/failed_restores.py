"""What a failed sync restore has touched is made unfindable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiered_kv.connectors.runtime.base import BlockPool
from tiered_kv.connectors.runtime.turn import Turn

from .saves import Saves


class FailedRestores:
    """vLLM hashes the blocks of a restore before it is made. It rewinds the requests that use a
    bad block so that they compute it anew, but leaves its hash in place: if they are aborted or
    preempted first, the next lookup would hit garbage. So the hashes of the bad blocks, and of
    those computed behind them, go as soon as they are known.

    Saves ordered beside the restore were refused by the workers: they are offered again, but for
    requests that hold a bad block: nothing of these is saved or restored any more.

    Args:
        pool: vLLM's block pool.
    """

    def __init__(self, pool: BlockPool, saves: Saves) -> None:
        self._pool = pool
        self._saves = saves

    def clear(
        self, bad: set[int], restored: Sequence[int], turns: Iterable[Turn], step: int
    ) -> None:
        """Blocks ``bad`` hold nothing.

        Args:
            restored: blocks of the request that the restore was for, first to last; it may be gone.
            turns: those that live.
        """
        self._evict_from(bad, restored)
        for turn in turns:
            if not turn.admitted or turn.loading:
                continue
            ids = [block.block_id for block in self._pool.tables.get(turn.request_id, ())]
            if self._evict_from(bad, ids):
                turn.forget_pages()
            else:
                turn.cursor = 0
                self._saves.watch(turn, step + 1)

    def _evict_from(self, bad: set[int], ids: Sequence[int]) -> bool:
        """Blocks from the first bad one on are not found any more; False if there is none."""
        first = next((i for i, block in enumerate(ids) if block in bad), len(ids))
        self._pool.forget(ids[first:])
        return first < len(ids)
