"""The engine as the components of the scheduler half see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv.metrics import Counters

from .base import BlockPool, EngineFacts
from .turn import LiveTurns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The engine, and what all components share.

    Attributes:
        pool: its blocks.
        turns: its live requests.
        counters: what is counted of it.
        clock: monotonic seconds.
    """

    facts: EngineFacts
    pool: BlockPool
    turns: LiveTurns
    counters: Counters
    clock: Callable[[], float]
