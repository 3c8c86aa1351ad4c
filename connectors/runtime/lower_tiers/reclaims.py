"""Replies to the stores of a tier: which pages of a segment are rewritten before the segment is
deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal, Reclaim
from tiered_kv.pages.tier_index import TierIndex

LIKELY = 0.5
"""Minimum probability of a job's return at which a page is worth rewriting."""
SURVIVING_SHARE = 2
"""One page in ``SURVIVING_SHARE`` may survive, so that deleting a segment frees at least half of
it."""


def survivors(
    dying: Sequence[PageKey], used: Callable[[PageKey], bool], chance: Callable[[PageKey], float]
) -> tuple[PageKey, ...]:
    """Return the pages of a segment to be rewritten before its deletion: pages that a job between
    turns is likely to return for, and pages that were used. If there are too many, the pages with
    the highest chance are returned; of pages with equal chance, those written last.

    Args:
        dying: the segment's pages, in the order in which they were written.
        used: returns True if a page was used since it was last written.
        chance: probability that a job returns for a page; 0 if unknown.
    """
    chances = {key: chance(key) for key in dying}
    kept = [key for key in dying if used(key) or chances[key] >= LIKELY]
    kept.sort(key=chances.__getitem__)
    chosen = set(kept[len(kept) - min(len(kept), len(dying) // SURVIVING_SHARE) :])
    return tuple(key for key in dying if key in chosen)


REPEAT_S = 5.0
"""Seconds after which a repeated proposal is answered again, because the store has not acted."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """The last reply to a rank: the number of the segment, and the time of the reply, seconds."""

    segment: int
    at: float


@dataclass(slots=True)
class _Verdict:
    """The decision for a page, which is the same for every rank.

    Attributes:
        survives: True if the page is rewritten.
        waiting: ranks that have not asked for the decision yet.
    """

    survives: bool
    waiting: set[int]


class Reclaims:
    """Decides which pages of a tier survive the deletion of their segment, and keeps the unsent
    replies to the tier's stores.

    Args:
        pages: the tier's index.
        ranks: number of workers, each of which has a store.
        chance: probability that a job between turns returns for a page.
        clock: monotonic seconds.

    Attributes:
        unsent: unsent replies by rank.
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
        """Return the unsent replies, by rank."""
        unsent = self.unsent.copy()
        self.unsent.clear()
        return unsent

    def answer(self, rank: int, dying: Proposal) -> None:
        """Queue the reply to a rank's proposal to delete a segment, unless it was answered
        recently."""
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
        """Drop the decisions for deleted pages."""
        for key in keys:
            self._verdicts.pop(key, None)

    def clear(self) -> None:
        """Drop all decisions and replies, because a new generation of pages starts."""
        self.unsent.clear()
        self._answered.clear()
        self._verdicts.clear()
