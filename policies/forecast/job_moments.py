"""Moments of a job: a few numbers that tell what its turns were like so far, for ``rank_trees``.

Times and tokens are logarithms, so that differences and spreads are factors.
"""

from __future__ import annotations

import math

from tiered_kv.policies.base import NO_TOOL, TurnEnd

LAST = 5
"""Gaps that are features one by one."""
DECAYS = (0.8, 1.0)
"""Decays of a gap's weight with each later one, in the two means: of recent gaps, and of all."""
UNKNOWN = -9.0
"""Feature that does not exist yet. Trees tell it from all others by its value."""

FEATURES = 8 + LAST + 2 * len(DECAYS)


class Moments:
    """A job's turns so far. Not thread-safe."""

    __slots__ = ("_began_at", "_context", "_due_at", "_last", "_sums", "_turn")

    def __init__(self) -> None:
        self._began_at = self._due_at = math.nan
        self._context = self._turn = 0
        self._last = [UNKNOWN] * LAST
        self._sums = [(0.0, 0.0, 0.0)] * len(DECAYS)

    def features(self, turn: TurnEnd) -> list[float]:
        """Features at the end of the job's next turn: ``FEATURES`` numbers. Does not mutate."""
        since_s = turn.ended_at - self._began_at
        # Not known of turns whose predecessor was not observed.
        turn_s = turn.ended_at - self._due_at if turn.turn == self._turn + 1 else math.nan
        found = [
            _log(turn.output_tokens),
            _log(turn.new_tokens),
            _log(turn.context_tokens),
            _log(turn.context_tokens - self._context),
            float(turn.turn),
            float(turn.tool == NO_TOOL),
            _log(since_s),
            math.log(max(turn_s, 0.01)) if turn_s == turn_s else UNKNOWN,
            *self._last,
        ]
        for weight, total, squares in self._sums:
            mean = total / weight if weight else UNKNOWN
            found.append(mean)
            found.append(squares / weight - mean * mean if weight else UNKNOWN)
        return found

    def observe(self, turn: TurnEnd, gap_s: float) -> None:
        """Add a turn and the gap after it."""
        if math.isnan(self._began_at):
            self._began_at = turn.ended_at
        self._due_at = turn.ended_at + gap_s
        self._context, self._turn = turn.context_tokens, turn.turn
        x = math.log(max(gap_s, 0.03))
        self._last = [x, *self._last[:-1]]
        self._sums = [
            (weight * decay + 1, total * decay + x, squares * decay + x * x)
            for decay, (weight, total, squares) in zip(DECAYS, self._sums, strict=True)
        ]


def _log(number: float) -> float:
    return math.log1p(number) if number > 0 else 0.0
