"""Names of a context's pages, computed from its tokens alone.

The engine names the pages of its requests. A context that is not a request gets its names from a
request that is made for them and never runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.connectors.runtime.base import EngineFacts, MakeRequest
from tiered_kv.connectors.runtime.pages.hits import PageNames
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import tail_key
from tiered_kv.kv_reach import KvKind
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.pages.snapshot_orders import ContextPage
from tiered_kv.policies.jobs.hints import TurnHints


class ContextNames:
    """Names contexts. May be used on any thread: hashing a long context takes a while.

    Args:
        make_request: makes requests of the engine.
    """

    def __init__(self, facts: EngineFacts, names: PageNames, make_request: MakeRequest) -> None:
        self._facts = facts
        self._names = names
        self._make_request = make_request

    def name(self, token_ids: Sequence[int], salt: str | None) -> Turn:
        """A turn of these tokens that never runs."""
        request = self._make_request(token_ids, salt, self._facts.hash_tokens)
        pages = self._names.of(request, 0)
        named = Turn(
            request=request, hints=TurnHints(), job=None, number=1, arrived_at=0.0, pages=pages
        )
        for group in range(len(pages.fingerprints)):
            named.page_keys(group)
        return named


def context_pages(named: Turn, facts: EngineFacts) -> tuple[ContextPage, ...]:
    """All pages that a context of exactly the named tokens needs.

    A page that its tokens fill in part has the name of a tail.
    """
    tokens = named.request.num_tokens
    end = _tail(named, facts)
    tail = tail_key(end[0], end[2], end[1]) if end is not None else None
    found = list[ContextPage]()
    for at, group in enumerate(facts.groups):
        needed, keys = group.needs(tokens), named.page_keys(at)
        last = None if tail is None else named.in_group(tail, at)
        if group.reach.kind is KvKind.STATE:
            whole = tokens % facts.hash_tokens == 0
            named_pages = [(needed.start, named.state_key(at, tokens) if whole else last)]
        else:
            full = tokens // group.block_size
            named_pages = [(block, keys[block] if block < full else last) for block in needed]
        found += (ContextPage(at, block, key) for block, key in named_pages if key is not None)
    return tuple(found)


def _tail(named: Turn, facts: EngineFacts) -> tuple[bytes, object, Sequence[int]] | None:
    """Place of the tail, and its tokens; None for inputs that tokens do not tell apart."""
    tokens = named.request.num_tokens
    start = tokens // facts.hash_tokens * facts.hash_tokens
    place = named.tail_place(start)
    return None if place is None else (*place, named.request.all_token_ids[start:tokens])


def remember_tail(named: Turn, facts: EngineFacts, tails: TailIndex) -> None:
    """Have the end of a context found that fills no block hash."""
    tail = _tail(named, facts)
    if tail is not None and tail[2]:
        tails.add(*tail)
