"""Lookups: the pages that a store which others write to as well is asked for, and the longest wait
for its answer. Pure."""

from __future__ import annotations

LOOKUPS = 2
"""Times that stores are asked for a turn's pages: for the first ones, and for the others."""
FIRST_LOOKUP = 64
"""Pages of a turn that a store is asked for first; the others once all of these are there."""
MOST_BOUNDARIES = 64
"""Boundaries of a prompt at which a store is asked for windows and states, the last ones: an answer
is not longer than these."""
LOOKUP_S = 0.05
"""Seconds that a turn waits for a store's answer; less if computing takes less."""
LOOKUP_SHARE = 0.05
"""Share of the time to compute the rest of its prompt that a turn waits if that is more. Both
lookups together make its first token a tenth later at most if no answer comes."""


def pages_asked(lookups: int, unknown: int) -> int:
    """Number of a turn's unknown pages that stores are asked for now, the first ones.

    Args:
        lookups: times that they were asked for the turn before.
        unknown: pages of which nobody knows whether a store has them.
    """
    if lookups >= LOOKUPS:
        return 0
    return min(unknown, FIRST_LOOKUP) if lookups == 0 else unknown


def answer_wait_s(compute_s: float, *, measured: bool) -> float:
    """Longest wait for the answer, seconds.

    Args:
        compute_s: time to compute what the answer may spare, seconds; 0 if unknown.
        measured: True if a prefill was measured. An estimate, which is of a machine that computes
            at its best, can only make the wait longer.
    """
    longest = max(LOOKUP_S, LOOKUP_SHARE * compute_s)
    return min(longest, compute_s) if measured else longest
