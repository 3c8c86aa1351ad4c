"""Price of bringing contexts back that have a place neither in VRAM nor in CPU memory."""

from __future__ import annotations

import math

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.turn import LiveTurns
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.admission.holding import lost_s
from tiered_kv.policies.pricing.estimators import PrefillFit


class RestorePrice:
    """Tells what requests lose while contexts come back, from a tier below or computed again.

    Args:
        fit: seconds of prefills.
        turns: the live requests.
    """

    def __init__(
        self, facts: EngineFacts, book: OrderBook, fit: PrefillFit, turns: LiveTurns
    ) -> None:
        self._facts = facts
        self._book = book
        self._fit = fit
        self._turns = turns

    def lost_s(self, tokens: int, blocks: float) -> float:
        """Seconds that requests lose, all together; without end while no prefill is known.

        Args:
            tokens: length of the context.
            blocks: blocks of it that have to come back.
        """
        whole = self._facts.blocks(tokens)
        share = min(1.0, blocks / whole) if whole else 0.0
        if not share:
            return 0.0
        computed_s = share * (self._fit.seconds(0, tokens) or math.inf)
        copied_s = share * self._copied_s(tokens) if self._book.stores else None
        return lost_s(computed_s, copied_s, self._turns.running)

    def _copied_s(self, tokens: int) -> float:
        """Time in which a whole context comes up from the tiers below and into VRAM, seconds."""
        book, seconds = self._book, 0.0
        pages = [len(group.needs(tokens)) for group in self._facts.groups]
        by_tier = dict[str, float]()
        for group, count in enumerate(pages):
            seconds += book.copy_seconds(count, group)
        for store in book.stores:  # those of a tier share its disk
            up = book.promote_seconds(store, pages[store.group])
            by_tier[store.tier] = by_tier.get(store.tier, 0.0) + up
        return seconds + min(by_tier.values())
