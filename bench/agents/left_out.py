"""Counts of what a recording has and a benchmark cannot play."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Counts of what is not played.

    Attributes:
        sessions: those of which all or a part is not.
        turns: of these sessions, those that are not.
    """

    sessions: int = 0
    turns: int = 0

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.sessions + other.sessions, self.turns + other.turns)
