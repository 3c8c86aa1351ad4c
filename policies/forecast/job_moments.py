"""Moments of a job: a few numbers that tell what its turns were like so far, for ``rank_trees``.

Times and tokens are logarithms, so that differences and spreads are factors. What is left out (the
context's size, the job's age, earlier gaps) told nothing more of sessions that were not learned.
"""

from __future__ import annotations

import math

from tiered_kv.policies.base import TurnEnd

RECENT_DECAY = 0.8
"""Decay of a gap's weight with each later gap, among the job's recent gaps."""
LAST = 3
"""Gaps that are features one by one."""
UNKNOWN = -9.0
"""Feature that does not exist yet. Trees tell it from all others by its value."""

FEATURES = 4 + LAST + 2


class Moments:
    """A job's turns so far. Not thread-safe."""

    __slots__ = ("_context", "_due_at", "_last", "_mean", "_squares", "_turn", "_weight")

    def __init__(self) -> None:
        self._due_at = 0.0
        self._context = self._turn = 0
        self._last = [UNKNOWN] * LAST
        self._weight = self._mean = self._squares = 0.0

    def features(self, turn: TurnEnd) -> list[float]:
        """Features at the end of the job's next turn: ``FEATURES`` numbers. Does not mutate."""
        follows = self._turn and turn.turn == self._turn + 1  # or its predecessor was not observed
        return [
            _log(turn.output_tokens),
            _log(turn.new_tokens),
            _log(turn.context_tokens - self._context),
            math.log(max(turn.ended_at - self._due_at, 0.01)) if follows else UNKNOWN,
            *self._last,
            self._mean if self._weight else UNKNOWN,
            self._squares / self._weight if self._weight else UNKNOWN,
        ]

    def observe(self, turn: TurnEnd, gap_s: float) -> None:
        """Add a turn and the gap after it."""
        self._due_at = turn.ended_at + gap_s
        self._context, self._turn = turn.context_tokens, turn.turn
        x = math.log(max(gap_s, 0.03))
        self._last = [x, *self._last[:-1]]
        before = self._weight * RECENT_DECAY
        off = x - self._mean
        self._weight = before + 1
        self._mean += off / self._weight
        self._squares = self._squares * RECENT_DECAY + off * off * before / self._weight


def _log(tokens: int) -> float:
    return math.log1p(max(tokens, 0))
