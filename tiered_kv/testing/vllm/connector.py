"""The connector with dependencies from a test or a simulation.

The class has the same name as the real connector. vLLM finds it by its module.
"""

from __future__ import annotations

from typing import Any

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.dependencies import Clock, Dependencies
from tiered_kv.connectors.vllm import connector

from . import changes


class TieredContinuumConnector(connector.TieredContinuumConnector):
    """The real connector with changed dependencies."""

    @classmethod
    def clock(cls) -> Clock:
        return changes.clock.get()

    @classmethod
    def make_dependencies(
        cls, vllm_config: Any, facts: EngineFacts, config: TierConfig
    ) -> Dependencies:
        found = super().make_dependencies(vllm_config, facts, config)
        change = changes.change.get()
        return found if change is None else change(found)
