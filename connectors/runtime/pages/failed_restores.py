"""Cleaning up after a failed sync restore: blocks that it touched are found no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiered_kv.connectors.runtime.base import BlockPool
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.page_group import CONTEXT

from .restores import Restores
from .saves import Saves


class FailedRestores:
    """Makes blocks of failed restores unfindable.

    The engine hashes the blocks of a restore before it is made. It rewinds the requests that use a
    bad block so that they compute it anew, but leaves its hash in place: if they are aborted or
    preempted first, the next lookup would hit garbage. So the hashes of the bad blocks, and of
    those computed behind them, go as soon as they are known.

    Saves ordered beside the restore were refused by the workers: they are offered again, but for
    requests that hold a bad block: nothing of these is saved or restored any more.

    Args:
        pool: the engine's block pool.
    """

    def __init__(self, pool: BlockPool, saves: Saves, restores: Restores) -> None:
        self._pool = pool
        self._saves = saves
        self._restores = restores

    def on_failed(
        self, bad: set[int], restored: Sequence[int], turns: Iterable[Turn], step: int
    ) -> None:
        """Clean up after blocks that hold nothing.

        Args:
            bad: the blocks.
            restored: blocks of the request that the restore was for, first to last; it may be gone.
            turns: the live requests.
        """
        self._evict_from(bad, restored)
        for turn in turns:
            if not turn.source.admitted or turn.loading:
                continue
            ids = [block.block_id for block in self._pool.tables[CONTEXT].get(turn.request_id, ())]
            if self._evict_from(bad, ids):
                turn.forget_pages()
                self._restores.withdraw(turn)
            else:
                self._saves.start_over(turn)
                self._saves.watch(turn, step + 1)

    def _evict_from(self, bad: set[int], ids: Sequence[int]) -> bool:
        """Make blocks from the first bad one on unfindable; False if there is none."""
        first = next((i for i, block in enumerate(ids) if block in bad), len(ids))
        self._pool.forget(ids[first:])
        return first < len(ids)
