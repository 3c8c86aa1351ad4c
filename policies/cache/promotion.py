"""Whether pages on SSD come up for a turn, and how long the turn waits for them."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Promotion:
    """What is known when a promotion is about to be ordered.

    Attributes:
        promote_s: seconds until its pages are in CPU memory, queue included.
        recompute_s: seconds the tokens they give would take to compute; 0 if unknown.
    """

    promote_s: float
    recompute_s: float

    @property
    def longest_wait_s(self) -> float:
        """Seconds after which the turn computes its tokens instead.

        As long as computing takes: whatever the disk then does, the turn has lost at most
        as much again (the ski-rental bound of 2).
        """
        return self.recompute_s or UNKNOWN_WAIT_S


def worth_promoting(promotion: Promotion) -> bool:
    """True unless computing is faster."""
    return not 0 < promotion.recompute_s < promotion.promote_s
