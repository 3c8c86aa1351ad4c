"""Counts of recorded sessions and turns that a benchmark cannot play."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Counts of recorded sessions and turns that are not played.

    Attributes:
        sessions: sessions that are not played completely.
        turns: turns of these sessions that are not played.
    """

    sessions: int = 0
    turns: int = 0

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.sessions + other.sessions, self.turns + other.turns)
