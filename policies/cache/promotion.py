"""Promotions: the choice whether pages on SSD come up for a turn, and the longest wait for them."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN_WAIT_S = 10.0
"""Longest wait where nothing is known of the time to compute the tokens."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Costs of a promotion that is about to be ordered.

    Attributes:
        promote_s: seconds until its pages are in CPU memory, queue included.
        recompute_s: seconds to compute their tokens instead; 0 if unknown.
    """

    promote_s: float
    recompute_s: float

    @property
    def longest_wait_s(self) -> float:
        """Seconds after which the turn computes its tokens instead.

        It is the time that computing takes. So whatever the disk does, the turn needs at most
        twice that (the ski-rental bound of 2).
        """
        return self.recompute_s or UNKNOWN_WAIT_S


def worth_promoting(promotion: Promotion) -> bool:
    """True unless computing is faster."""
    return not 0 < promotion.recompute_s < promotion.promote_s
