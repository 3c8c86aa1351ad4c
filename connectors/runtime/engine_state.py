"""State of the engine that all components of the scheduler half share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv.metrics import Counters

from .base import BlockPool, EngineFacts
from .turn import LiveTurns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The engine's facts and block pool, and the state that all components share.

    Attributes:
        pool: the engine's blocks; a simulated pool in observe mode.
        turns: turns of the live requests.
        counters: counters of the scheduler half.
        clock: monotonic seconds.
    """

    facts: EngineFacts
    pool: BlockPool
    turns: LiveTurns
    counters: Counters
    clock: Callable[[], float]
