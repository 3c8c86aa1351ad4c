"""The mode of a restore from CPU memory: sync or async."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.orders import RestoreMode


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """Costs of a restore that is about to be ordered.

    Attributes:
        copy_s: seconds of the copy at the bandwidth measured so far.
        step_s: seconds of a scheduler step with its forward pass, measured.
        others: number of requests running beside this one.
    """

    copy_s: float
    step_s: float
    others: int


@dataclass(frozen=True, slots=True)
class FasterRestore:
    """The mode with the least waiting time, summed over all requests. Pure.

    A sync restore holds up this step, so this request and every other wait for the
    copy: ``copy_s * (1 + others)``. An async one starts behind this step's forward pass, and
    its request is scheduled in the step after the one that saw it finish: this request alone
    waits, for two steps, or for the copy if that is longer.
    """

    def choose(self, cost: RestoreCost) -> RestoreMode:
        """Choose the mode of one restore. Called on the scheduler thread."""
        if cost.others == 0:
            return RestoreMode.SYNC
        sync_s = cost.copy_s * (1 + cost.others)
        async_s = max(cost.copy_s, 2 * cost.step_s)
        return RestoreMode.SYNC if sync_s <= async_s else RestoreMode.ASYNC

    def usable(self, tokens: int) -> int:
        """Tokens of a prompt to have after a restore, out of those that are found."""
        return tokens


@dataclass(frozen=True, slots=True)
class AlwaysRestore(FasterRestore):
    """The same mode whatever it costs, for tests and measurements."""

    mode: RestoreMode

    def choose(self, cost: RestoreCost) -> RestoreMode:
        return self.mode
