"""Admission of an engine that holds nobody."""

from __future__ import annotations

from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.policies.base import JobKey


class NoAdmission:
    """Lets everybody in, and counts nothing. See ``Admission``."""

    refused = 0
    held: frozenset[str] = frozenset()
    num_active = 0
    share = 1.0

    def on_arrived(self, turn: Turn) -> bool:
        return False

    def on_started(self, turn: Turn) -> None:
        pass

    def on_joined(self, turn: Turn) -> None:
        pass

    def on_ended(self, turn: Turn, *, over: bool, gone: bool) -> None:
        pass

    def on_over(self, job: JobKey) -> None:
        pass

    def holds(self, turn: Turn, *, behind: bool = False) -> bool:
        return False

    def lets_overdue_in(self, turn: Turn) -> bool:
        return True

    def let_in(self, turn: Turn) -> None:
        pass

    def blocks_by_salt(self) -> dict[str, float]:
        return {}

    def first_blocks(self, turn: Turn) -> float:
        return 0.0

    def demand_with_pin(self, blocks: int, job: JobKey | None) -> None:
        return None
