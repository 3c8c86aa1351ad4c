"""Recent decisions: how often each was made among the last ones."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from tiered_kv.policies.base import Decision, GapClass, Tier

MOST = 256
"""Decisions that are remembered."""


class Kind(NamedTuple):
    """Kind of a decision: the class of its gap, None without classes, and its tier."""

    gap_class: GapClass | None
    tier: Tier


class RecentDecisions:
    """The last decisions. One thread."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, Kind]] = deque()
        self._counts: Counter[Kind] = Counter()

    def __len__(self) -> int:
        return len(self._last)

    def add(self, decision: Decision, now: float) -> None:
        """Remember a decision, and forget the oldest of too many."""
        kind = Kind(decision.gap_class, decision.tier)
        self._last.append((now, kind))
        self._counts[kind] += 1
        if len(self._last) > MOST:
            _, oldest = self._last.popleft()
            self._counts[oldest] -= 1

    @property
    def since(self) -> float | None:
        """Time of the oldest that is remembered; None if there is none."""
        return self._last[0][0] if self._last else None

    def counts(self) -> Iterator[tuple[Kind, int]]:
        """Number of decisions of each kind, the most frequent first."""
        return ((kind, times) for kind, times in self._counts.most_common() if times)
