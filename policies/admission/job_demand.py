"""Demand of one job while a turn of it runs, and while it is away. Pure but for ``TurnPace``, which
learns."""

from __future__ import annotations

from tiered_kv.policies.jobs.silence import SOON_S

from .working_set import JobDemand

PACE_DECAY = 0.9
"""Weight of the old mean when a new time is averaged in."""


class TurnPace:
    """Mean time of a turn, and of the gap between two, over all jobs.

    Attributes:
        turn_s: seconds; 0 before the first.
        served_s: the same without the wait for the first blocks.
        gap_s: the same of gaps, of which none counts for more than ``SOON_S``.
    """

    def __init__(self) -> None:
        self.turn_s = self.served_s = self.gap_s = 0.0

    @property
    def cycle_s(self) -> float:
        """Mean time from a turn's first blocks to the job's next turn, seconds."""
        return self.served_s + self.gap_s

    def on_turn(self, seconds: float, served_s: float) -> None:
        """Add a turn that ended, of which it had blocks for ``served_s``."""
        self.turn_s = _mean(self.turn_s, seconds)
        self.served_s = _mean(self.served_s, served_s)

    def on_gap(self, seconds: float) -> None:
        """Add a gap that ended with the job's return."""
        self.gap_s = _mean(self.gap_s, min(seconds, SOON_S))

    def vram_share(self, away_s: float) -> float:
        """Share of the time until its next turn has ended in which a job needs VRAM. It needs it
        while a turn runs.

        Args:
            away_s: time since its last turn ended, seconds; 0 for a whole gap to come.
        """
        cycle_s = self.turn_s + max(self.gap_s, away_s)
        return self.turn_s / cycle_s if self.turn_s else 1.0


def running_demand(blocks: float, grows: float, left: float, shared: float) -> JobDemand:
    """Demand of a job of which a turn runs: its whole context.

    Args:
        blocks: unshared blocks of its context at the end of the turn.
        grows: growth with every turn after that, blocks.
        left: number of turns after that.
        shared: blocks that it counts for its family.
    """
    return JobDemand(blocks, grows, left, 1.0, 1.0, shared)


def away_demand(
    blocks: float,
    grows: float,
    left: float,
    shared: float,
    chance: float,
    weight: float,
) -> JobDemand:
    """Demand of a job between two turns, of which the next one counts as the present.

    Args:
        blocks: unshared blocks of its context.
        grows: growth with every turn, blocks.
        left: number of turns after the last.
        shared: blocks that it counts for its family.
        chance: that it returns soon.
        weight: share of its blocks that VRAM must have on average: the chance to return, times
            the share of the time in which it then needs them (all of it under a pin).
    """
    return JobDemand(blocks + grows, grows, max(0.0, left - 1), weight, chance, shared)


def mean_context(demand: JobDemand) -> float:
    """Blocks of a job's context in the mean of the turns that it still has."""
    return demand.blocks + demand.grows * demand.left / 2


def _mean(old: float, new: float) -> float:
    return PACE_DECAY * old + (1 - PACE_DECAY) * new if old else new
