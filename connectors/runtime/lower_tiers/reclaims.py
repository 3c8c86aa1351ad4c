"""Answers to the stores of a tier: which pages of a segment are written once more before it is
deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal, Reclaim
from tiered_kv.pages.tier_index import TierIndex

LIKELY = 0.5
"""Chance of a return that is worth a second write."""
SURVIVING_SHARE = 2
"""One page in this many may survive, so that a segment's death frees at least half a segment."""


def survivors(
    dying: Sequence[PageKey], used: Callable[[PageKey], bool], chance: Callable[[PageKey], float]
) -> tuple[PageKey, ...]:
    """Pages of a dying segment to be written again: those that a waiting job is likely to come
    back for, and those that were used. If they are too many, the likeliest, and of equal ones
    those written last.

    Args:
        dying: the segment's pages, in the order in which they were written.
        used: True if a page was used since it was last written.
        chance: probability that somebody comes back for a page; 0 if unknown.
    """
    chances = {key: chance(key) for key in dying}
    kept = [key for key in dying if used(key) or chances[key] >= LIKELY]
    kept.sort(key=chances.__getitem__)
    chosen = set(kept[len(kept) - min(len(kept), len(dying) // SURVIVING_SHARE) :])
    return tuple(key for key in dying if key in chosen)


REPEAT_S = 5.0
"""Seconds after which a proposal that stays is answered again: the store has not done it."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """The last answer to a rank: the segment, and the time in seconds."""

    segment: int
    at: float


@dataclass(slots=True)
class _Verdict:
    """Fate of a page: the same for every rank, whichever asks first.

    Attributes:
        survives: True if it is written again.
        waiting: ranks that have not asked yet.
    """

    survives: bool
    waiting: set[int]


class Reclaims:
    """The unsent answers of one tier.

    Args:
        pages: the tier's index.
        ranks: workers that have a store each.
        chance: probability that a waiting job comes back for a page.
        clock: monotonic seconds.

    Attributes:
        unsent: the answers by rank.
    """

    def __init__(
        self,
        pages: TierIndex,
        ranks: int,
        chance: Callable[[PageKey], float],
        clock: Callable[[], float],
    ) -> None:
        self._pages = pages
        self._ranks = ranks
        self._chance = chance
        self._clock = clock
        self.unsent: dict[int, Reclaim] = {}
        self._answered: dict[int, _Answered] = {}
        self._verdicts: dict[PageKey, _Verdict] = {}

    def take(self) -> dict[int, Reclaim]:
        """Hand over the unsent answers, by rank."""
        unsent = self.unsent.copy()
        self.unsent.clear()
        return unsent

    def answer(self, rank: int, dying: Proposal) -> None:
        """Answer a rank's proposal, unless it was answered a moment ago."""
        now, last = self._clock(), self._answered.get(rank)
        if last is not None and last.segment == dying.segment and now - last.at < REPEAT_S:
            return
        self._answered[rank] = _Answered(dying.segment, now)
        self.unsent[rank] = Reclaim(dying.segment, self._survivors(rank, dying.keys))

    def _survivors(self, rank: int, dying: Sequence[PageKey]) -> tuple[PageKey, ...]:
        fresh = [key for key in dying if key not in self._verdicts]
        kept = set(survivors(fresh, self._pages.was_used, self._chance))
        self._pages.on_rewritten(kept)
        everybody = range(self._ranks)
        self._verdicts.update({key: _Verdict(key in kept, set(everybody)) for key in fresh})
        surviving = []
        for key in dying:
            verdict = self._verdicts[key]
            verdict.waiting.discard(rank)
            if not verdict.waiting:
                del self._verdicts[key]
            if verdict.survives:
                surviving.append(key)
        return tuple(surviving)

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Drop the verdicts on pages that are gone."""
        for key in keys:
            self._verdicts.pop(key, None)

    def clear(self) -> None:
        """Drop everything: a new generation of pages begins."""
        self.unsent.clear()
        self._answered.clear()
        self._verdicts.clear()
