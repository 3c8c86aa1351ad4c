"""Chooses the mode of a restore from CPU memory: sync or async."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.orders import RestoreMode


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """Costs of a restore before it is ordered.

    Attributes:
        copy_s: copy time at the bandwidth measured so far, seconds.
        step_s: measured time of a scheduler step with its forward pass, seconds.
        others: number of other running requests.
    """

    copy_s: float
    step_s: float
    others: int


@dataclass(frozen=True, slots=True)
class FasterRestore:
    """Chooses the mode for which the waits of all requests have the smallest sum. Pure.

    A sync restore delays this step, so the restored request and all others wait for the copy:
    ``copy_s * (1 + others)``. An async restore starts after this step's forward pass. Only the
    restored request waits: for two steps, or for the copy if the copy takes longer, because the
    request is scheduled in the step after the step in which the copy is found to be finished.
    """

    def choose(self, cost: RestoreCost) -> RestoreMode:
        """Choose the mode of one restore. Called on the scheduler thread."""
        if cost.others == 0:
            return RestoreMode.SYNC
        sync_s = cost.copy_s * (1 + cost.others)
        async_s = max(cost.copy_s, 2 * cost.step_s)
        return RestoreMode.SYNC if sync_s <= async_s else RestoreMode.ASYNC

    def usable(self, tokens: int) -> int:
        """Return how many of ``tokens`` prompt tokens to restore, if the KV of all of them was
        found. This class restores all."""
        return tokens


@dataclass(frozen=True, slots=True)
class AlwaysRestore(FasterRestore):
    """Always chooses the mode ``mode``, for tests and measurements."""

    mode: RestoreMode

    def choose(self, cost: RestoreCost) -> RestoreMode:
        return self.mode
