"""Lookups: stores that other engines also write to are queried for pages of a prompt that no local
tier has.

The first pages are queried first, and further pages once all earlier pages are found. Groups that
keep only a part of the context have pages at some boundaries only, and only the engine that wrote
them knows which. Their pages are queried last, near the end of the other groups' pages, because the
stored context ends close to that point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Somewhere, Tiers
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import LowerTier
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.page_group import KvKind
from tiered_kv.policies.pricing.estimators import PrefillFit
from tiered_kv.remote.address import RUN_PAGES
from tiered_kv.tiers import Knowledge

from .hits import HitFinder

LOOKUPS = 6
"""Maximum number of queries for a turn's pages."""
FIRST_LOOKUP, LATER_LOOKUP = 64, 16_384
"""Maximum numbers of pages in a turn's first query and in each of its other queries. The next query
follows once all pages of a query are found."""
MOST_BOUNDARIES = 64
"""Maximum number of boundaries of a prompt at which a store is queried for window pages and
recurrent states. These are the last boundaries, because the stored context is assumed to end
there."""
FOUND_PER_PREFILLED = 1024
"""Number of tokens whose blocks the engine finds in VRAM in about the time in which it prefills one
token. When a turn waits for a reply, the engine searches VRAM for its prefix again, so a query has
to be able to save more than the time of that search."""
LOOKUP_S = 0.05
"""Maximum wait of a turn for a store's reply, seconds. It is shorter if prefilling takes less
time."""
LOOKUP_SHARE = 0.05
"""Maximum wait for a store's reply, as a fraction of the time to prefill the rest of the prompt, if
that is longer than ``LOOKUP_S``. After a late reply, no further queries are sent for the turn."""


def pages_asked(lookups: int, unknown: int) -> int:
    """Return how many unknown pages to query now, from the first on.

    Args:
        lookups: number of previous queries for the turn.
        unknown: number of pages of which it is unknown whether a store has them.
    """
    if lookups >= LOOKUPS:
        return 0
    return min(unknown, LATER_LOOKUP if lookups else FIRST_LOOKUP)


def answer_wait_s(compute_s: float, *, measured: bool) -> float:
    """Return the longest wait for a store's reply, seconds.

    Args:
        compute_s: prefill time that the reply may save, seconds; 0 if unknown.
        measured: True if a prefill was measured. An estimate assumes ideal speed, so it may only
            lengthen the wait.
    """
    longest = max(LOOKUP_S, LOOKUP_SHARE * compute_s)
    return min(longest, compute_s) if measured else longest


class _Question(NamedTuple):
    """A query to a tier for pages.

    Attributes:
        context: the queried pages after the pages before them, from the start of a run.
        start: number of tokens before the queried pages.
        tokens: number of tokens that need no prefill if the pages are found. Includes the tokens of
            pages that a later query covers, because without a reply to this query these tokens are
            prefilled too.
    """

    tier: LowerTier
    keys: Sequence[PageKey]
    context: Sequence[PageKey]
    start: int
    tokens: int


class Lookups:
    """Queries stores for the pages of turns.

    Args:
        tiers: lower tiers, fastest first.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tiers: Tiers,
        facts: EngineFacts,
        finder: HitFinder,
        clock: Callable[[], float],
    ) -> None:
        asked = Knowledge.ASKED
        self._tiers = tiers
        self._asked = [tier for tier in tiers.values() if tier.spec.knowledge is asked]
        self._facts = facts
        self._finder = finder
        self._clock = clock

    def ask(self, turn: Turn, in_vram: Callable[[], int], fit: PrefillFit) -> bool:
        """Query stores for pages that no tier is known to have. Returns True if the turn waits for
        a reply.

        Args:
            in_vram: returns how many of the prompt's first tokens are in VRAM.
        """
        state = turn.tiers
        beginning = state.lookups < LOOKUPS
        ends = self._facts.narrow and not state.ends_asked
        if not self._asked or not (beginning or ends):
            return False
        vram, somewhere = in_vram(), self._tiers.somewhere()
        orders, waits = set[OrderId](), 0.0
        if beginning:
            orders, waits = self._put(self._beginning(turn, vram, somewhere), fit)
            state.lookups += bool(orders)
        if ends and not orders:
            orders, waits = self._put(self._ends(turn, vram, somewhere), fit)
            state.ends_asked = bool(orders)
        if not orders:
            return False
        state.asking = True
        state.awaits |= orders
        state.answers_until = self._clock() + waits
        return True

    def _put(self, questions: Iterator[_Question], fit: PrefillFit) -> tuple[set[OrderId], float]:
        """Send the queries. Returns the orders and the longest wait for their replies, seconds."""
        orders, waits = set[OrderId](), 0.0
        for tier, keys, context, start, tokens in questions:
            compute_s = fit.seconds(start, tokens)
            wait_s = answer_wait_s(compute_s, measured=fit.measured)
            order = tier.ask(keys, context, wait_s)
            if order is not None:
                orders.add(order)
                waits = max(waits, wait_s)
        return orders, waits

    def _answering(self) -> Iterator[tuple[LowerTier, int]]:
        """Yield the tiers that may be queried, and their groups."""
        return ((tier, tier.store.group) for tier in self._asked if tier.answers)

    def _beginning(self, turn: Turn, vram: int, somewhere: Somewhere) -> Iterator[_Question]:
        """Yield the queries for groups that keep the whole context: pages from the first missing
        page on."""
        limit = turn.request.num_tokens - 1
        for tier, at in self._answering():
            group, keys = self._facts.groups[at], turn.page_keys(at)
            if group.reach.kind is not KvKind.FULL:
                continue
            size = group.block_size
            stop, end = min(len(keys), limit // size + 1), vram // size
            end = somewhere.run(keys, end, stop)
            if (stop - end) * size * FOUND_PER_PREFILLED < vram:
                continue  # searching VRAM again takes longer than prefilling these pages
            if not tier.pages.index.unanswered(keys[end : min(end + 1, stop)]):
                continue  # the next page is known to be missing, so later pages are useless
            unknown = keys[end : end + pages_asked(turn.tiers.lookups, stop - end)]
            if unknown:
                context = keys[end - end % RUN_PAGES : end + len(unknown)]
                yield _Question(tier, unknown, context, end * size, (stop - end) * size)

    def _ends(self, turn: Turn, vram: int, somewhere: Somewhere) -> Iterator[_Question]:
        """Yield the queries for the other groups: pages at boundaries up to the end of the full
        groups' pages."""
        limit, unit = turn.request.num_tokens - 1, self._facts.hit_tokens
        runs = [
            somewhere.run(keys := turn.page_keys(at), 0, len(keys)) * group.block_size
            for at, group in enumerate(self._facts.groups)
            if group.reach.kind is KvKind.FULL
        ]
        found = self._finder.find(turn, vram, limit, somewhere, somewhere.run)
        had = max(vram, found.tokens if found is not None else 0)
        top = min([limit, *runs]) // unit * unit if runs else 0
        boundaries = [*range(top, had, -unit)][:MOST_BOUNDARIES]
        if not boundaries:
            return
        for tier, at in self._answering():
            group = self._facts.groups[at]
            if group.reach.kind is KvKind.STATE:
                states = (turn.state_key(at, tokens) for tokens in boundaries)
                wanted: Sequence[PageKey] = [key for key in states if key is not None]
            elif group.reach.kind is not KvKind.FULL:
                first, stop = group.needs(boundaries[-1]).start, group.needs(top).stop
                wanted = turn.page_keys(at)[first:stop]
            else:
                continue
            yield _Question(tier, wanted, (), had, top - had)
