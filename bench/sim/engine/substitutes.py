"""Substitutes for parts of the connector that a virtual clock has no use for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv.connectors.runtime.step_timer import StepTimer
from tiered_kv.policies.cache.restore_mode import AlwaysRestore

BEGIN_S = 1000.0
"""The clock's begin: connectors may take 0 for never."""


class LeapTimer(StepTimer):
    """Takes a leap for the many steps of a real engine that it is.

    Args:
        decoded: steps so far, those of leaps counted.
    """

    def __init__(self, decoded: Callable[[], int]) -> None:
        super().__init__()
        self._decoded = decoded
        self._seen = 0

    def look(self, now: float, steps: int) -> None:
        since, self._seen = self._decoded() - self._seen, self._decoded()
        super().look(now, steps and since)


@dataclass(frozen=True, slots=True)
class ChunkedRestore(AlwaysRestore):
    """Restores that end where a chunk of tokens does, and have no partial tail."""

    chunk: int

    def usable(self, tokens: int) -> int:
        return tokens // self.chunk * self.chunk
