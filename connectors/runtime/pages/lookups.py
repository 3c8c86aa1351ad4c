"""Lookups: stores that others write to as well are asked for pages of a prompt that are nowhere
else.

The first pages are asked for first, the others once all of these are there. Groups that need not
all of a context have pages at some boundaries only, and only the engine that made them knows which.
They are asked for last, before the end of what there is of the other groups: the end of the context
that was left is not far from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Tiers
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import LowerTier
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.page_group import KvKind
from tiered_kv.policies.pricing.estimators import PrefillFit
from tiered_kv.tiers import Knowledge

from .hits import HitFinder, There, run_of

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


class _Question(NamedTuple):
    """Pages that a tier is asked for.

    Attributes:
        context: pages of their group from the beginning, as far as there are any.
        start, tokens: tokens before the pages; tokens that may be spared, those of pages that a
            later question asks for included: without an answer to this one they are computed too.
    """

    tier: LowerTier
    keys: Sequence[PageKey]
    context: Sequence[PageKey]
    start: int
    tokens: int


class Lookups:
    """Asks stores for turns.

    Args:
        tiers: the tiers, fastest first.
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

    def ask(self, turn: Turn, in_vram: Callable[[Turn, int], int], fit: PrefillFit) -> bool:
        """Ask for pages that are nowhere; True if the turn waits for an answer.

        Args:
            in_vram: gives the tokens that VRAM holds of the first so many of a prompt.
        """
        state = turn.tiers
        beginning = state.lookups < LOOKUPS
        ends = self._facts.narrow and not state.ends_asked
        if not self._asked or not (beginning or ends):
            return False
        vram, somewhere = in_vram(turn, turn.request.num_tokens - 1), self._tiers.somewhere()
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
        """Put the questions; gives the orders and the longest wait for their answers, seconds."""
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
        """Tiers that may be asked, and their groups."""
        return ((tier, tier.store.group) for tier in self._asked if tier.answers)

    def _beginning(self, turn: Turn, vram: int, somewhere: There) -> Iterator[_Question]:
        """Pages of the groups that keep all of a context, behind the first that is nowhere."""
        limit = turn.request.num_tokens - 1
        for tier, at in self._answering():
            group, keys = self._facts.groups[at], turn.page_keys(at)
            if group.reach.kind is not KvKind.FULL:
                continue
            size = group.block_size
            stop, end = min(len(keys), limit // size + 1), vram // size
            while end < stop and somewhere(keys[end]):
                end += 1
            if not tier.pages.index.unanswered(keys[end : min(end + 1, stop)]):
                continue  # the next one is known not to be there: those behind it are of no use
            unknown = keys[end : end + pages_asked(turn.tiers.lookups, stop - end)]
            if unknown:
                yield _Question(tier, unknown, keys, end * size, (stop - end) * size)

    def _ends(self, turn: Turn, vram: int, somewhere: There) -> Iterator[_Question]:
        """Pages of the other groups at boundaries before the end of what there is of those."""
        limit, unit = turn.request.num_tokens - 1, self._facts.hit_tokens
        runs = [
            run_of(somewhere)(keys := turn.page_keys(at), 0, len(keys)) * group.block_size
            for at, group in enumerate(self._facts.groups)
            if group.reach.kind is KvKind.FULL
        ]
        found = self._finder.find(turn, vram, limit, somewhere, run_of(somewhere))
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
