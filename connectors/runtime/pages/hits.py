"""Search for the longest prefix of a prompt whose pages are available, and computation of page
keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from tiered_kv.connectors.runtime.base import EngineFacts, Fingerprints, Request
from tiered_kv.connectors.runtime.turn import GroupPages, Turn, TurnPages
from tiered_kv.keys import PageKey, tail_key
from tiered_kv.page_group import CONTEXT, KvKind, PageGroup
from tiered_kv.pages.partial_blocks import Tail, TailIndex

There = Callable[[PageKey], bool]
"""Returns True if a page is available."""
Run = Callable[[Sequence[PageKey], int, int], int]
"""Returns the end of the run of available pages from a start index, at most a stop index."""


@dataclass(frozen=True, slots=True)
class Found:
    """A prefix of ``tokens`` tokens, and its pages beyond the VRAM prefix."""

    tokens: int
    parts: tuple[GroupPages, ...]

    @property
    def keys(self) -> Iterator[PageKey]:
        """Yield all pages of the prefix beyond the VRAM prefix."""
        return chain.from_iterable(part.keys for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Query:
    """The state of a search.

    Attributes:
        start: tokens of the VRAM prefix, whole blocks of every group.
        ends: for each group, number of tokens up to which pages are available; 0 for groups that
            keep only a part of the context.
    """

    turn: Turn
    start: int
    there: There
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Lacks:
    """Result for a prefix with missing pages.

    Attributes:
        below: no complete prefix is longer than this number of tokens and shorter than the prefix.
    """

    below: int


def run_of(there: There) -> Run:
    """Return a function that finds the run of pages for which a test is true."""

    def run(keys: Sequence[PageKey], start: int, stop: int) -> int:
        while start < stop and there(keys[start]):
            start += 1
        return start

    return run


class HitFinder:
    """Finds the longest prefixes whose pages are available.

    In a group that keeps the whole context, the available pages form one run. Other groups have
    pages at some boundaries only. A prefix as long as the run is tried first. Shorter prefixes
    follow, at multiples of ``hash_tokens`` and at the ends of turns just after these multiples.

    Args:
        tails: partial pages at the ends of turns.
    """

    def __init__(self, facts: EngineFacts, tails: TailIndex) -> None:
        self._facts = facts
        self._tails = tails
        # Recurrent states first: there are few of them, so they are checked quickly.
        self._order = sorted(
            range(len(facts.groups)), key=lambda at: facts.groups[at].reach.kind is not KvKind.STATE
        )

    def find(self, turn: Turn, start: int, limit: int, there: There, run: Run) -> Found | None:
        """Find the longest available prefix beyond ``start`` tokens; None if there is none.

        Args:
            start: tokens of the VRAM prefix.
            limit: maximum length of the prefix, tokens.
        """
        unit, whole = self._facts.hash_tokens, self._facts.whole_blocks
        if whole:
            unit = self._facts.block_size
            limit = limit // unit * unit
        ends = tuple(
            self._end(turn, at, start, limit, run) if self._keeps_all(at) else 0
            for at in range(len(self._facts.groups))
        )
        query = _Query(turn, start, there, ends)
        longest = min(
            (
                end + self._facts.groups[at].block_size - 1
                for at, end in enumerate(ends)
                if self._keeps_all(at)
            ),
            default=limit,
        )
        ends_anywhere = not self._facts.has_states
        if ends_anywhere and limit > start:
            found = self._at(query, limit)  # a full page of which the last token is unused
            if isinstance(found, Found):
                return found
        # With a drafter, also try without the last tokens, whose drafter KV may be outdated.
        unsure = min((end for at, end in enumerate(ends) if self._keeps_all(at)), default=0)
        at = min(limit, longest) // unit * unit
        while at >= start:
            if not whole and (tail := self._in_tail(query, at, limit)) is not None:
                return tail
            if at == start:
                return None
            found = self._at(query, at)
            if isinstance(found, Found):
                return found
            below = min(found.below // unit, at // unit - 1) * unit
            if ends_anywhere and not whole and below < unsure < at and unsure > start:
                found = self._at(query, unsure)
                if isinstance(found, Found):
                    return found
            at = below
        return None

    def _keeps_all(self, group: int) -> bool:
        return self._facts.groups[group].reach.kind is KvKind.FULL

    def _end(self, turn: Turn, at: int, start: int, limit: int, run: Run) -> int:
        """Return the number of tokens that the run of a group's pages covers.

        The last tokens are excluded if a drafter's KV depends on later tokens, because the later
        tokens may have changed since the KV was computed.
        """
        group, keys = self._facts.groups[at], turn.page_keys(at)
        first = start // group.block_size
        end = run(keys, first, min(len(keys), limit // group.block_size))
        return max(first * group.block_size, end * group.block_size - group.draft_tokens)

    def _in_tail(self, query: _Query, at: int, limit: int) -> Found | None:
        """Return the longest prefix that ends in a partial page after ``at`` tokens; None if there
        is no such prefix."""
        turn, drafts = query.turn, self._facts.draft_tokens
        parent = turn.state_key(CONTEXT, at) if at else turn.pages.fingerprints[CONTEXT]
        if parent is None or not self._tails.has_any(parent):
            return None
        place = turn.tail_place(at)
        wanted = turn.request.all_token_ids[at : min(at + self._facts.block_size, limit)]
        if place is None or not wanted:
            return None
        best: list[Found] = []

        def usable(tail: Tail, shared: int) -> bool:
            if self._facts.has_states and shared < len(tail.tokens):
                return False  # a recurrent state covers all tokens of the tail
            tokens = at + shared - drafts
            found = self._at(query, tokens, tail.key)
            if tokens > query.start and isinstance(found, Found):
                best[:] = [found]
                return True
            return False

        return best[0] if self._tails.longest(*place, wanted, usable) else None

    def _at(self, query: _Query, tokens: int, tail: PageKey | None = None) -> Found | _Lacks:
        """Return the pages of a prefix of exactly ``tokens`` tokens. If pages are missing, returns
        the greatest length that a shorter complete prefix can have.

        Args:
            tail: the first group's key of a partial page whose first tokens fill the last block.
        """
        parts: list[GroupPages | None] = [None] * len(self._facts.groups)
        for at in self._order:
            group = self._facts.groups[at]
            if group.reach.kind is KvKind.STATE:
                part = self._state(query, at, group, tokens, tail)
            else:
                part = self._blocks(query, at, group, tokens, tail)
            if isinstance(part, _Lacks):
                return part
            parts[at] = part
        return Found(tokens, tuple(part for part in parts if part is not None and part.keys))

    def _state(
        self, query: _Query, at: int, group: PageGroup, tokens: int, tail: PageKey | None
    ) -> GroupPages | _Lacks:
        turn = query.turn
        key = turn.in_group(tail, at) if tail is not None else turn.state_key(at, tokens)
        if key is None or not query.there(key):
            return _Lacks(tokens - 1)
        return GroupPages(at, group.needs(tokens).start, (key,))

    def _blocks(
        self, query: _Query, at: int, group: PageGroup, tokens: int, tail: PageKey | None
    ) -> GroupPages | _Lacks:
        size, keys = group.block_size, query.turn.page_keys(at)
        needed, whole = group.needs(tokens), tokens // size
        first = max(needed.start, query.start // size)
        # The tail's tokens follow the last page of a run.
        end = query.ends[at] + (group.draft_tokens if tail is not None else 0)
        if group.reach.kind is KvKind.FULL and whole * size > max(end, query.start):
            return _Lacks(min(tokens, end + size) - 1)
        last: tuple[PageKey, ...] = ()
        if needed.stop > whole:
            partial = self._partial(query, at, tokens, tail)
            if partial is None:
                return _Lacks(tokens - 1)
            last = (partial,)
        if group.reach.kind is not KvKind.FULL:
            for block in range(min(whole, needed.stop) - 1, first - 1, -1):
                if block >= len(keys) or not query.there(keys[block]):
                    return _Lacks(min(tokens, (block + 1) * size) - 1)
        return GroupPages(at, first, (*keys[first : min(whole, needed.stop)], *last))

    def _partial(self, query: _Query, at: int, tokens: int, tail: PageKey | None) -> PageKey | None:
        """Return the key of an available page for the last, partially filled block; None if there
        is none."""
        turn, keys = query.turn, query.turn.page_keys(at)
        block = tokens // self._facts.groups[at].block_size
        if block < len(keys) and query.there(keys[block]):
            return keys[block]
        key = turn.in_group(tail, at) if tail is not None else aligned_tail(turn, at, tokens)
        return key if key is not None and query.there(key) else None


def aligned_tail(turn: Turn, group: int, tokens: int) -> PageKey | None:
    """Return the key of a group's partial page that ends at a multiple of ``hash_tokens``; None if
    ``tokens`` is not such a multiple, or token ids alone do not identify the page."""
    if tokens % turn.pages.hash_tokens or (place := turn.tail_place(tokens)) is None:
        return None
    return turn.in_group(tail_key(place[0], (), place[1]), group)


def _common(pages: TurnPages, hashes: Sequence[bytes], before: Sequence[PageKey]) -> list[PageKey]:
    """Return the leading keys that an earlier context shares with a prompt with these hashes. A
    hash covers all tokens before it, so the last common key is found by bisection.
    """
    (fingerprint,), (stride,) = pages.fingerprints, pages.strides
    last = min(len(before), len(hashes) // stride)
    common = bisect_left(
        range(last),
        True,
        key=lambda at: before[at] != fingerprint + hashes[(at + 1) * stride - 1],
    )
    return list(before[:common])


class PageNames:
    """Computes page keys of requests.

    Args:
        fingerprints: fingerprints of the engine's pages.
        slots: number of pages that CPU memory holds; with 0, pages get no keys.
    """

    def __init__(self, facts: EngineFacts, fingerprints: Fingerprints, slots: int) -> None:
        self._fingerprints = fingerprints
        self._groups = range(len(facts.groups) if slots else 0)
        self._hash_tokens = facts.hash_tokens
        self._strides = tuple(group.block_size // facts.hash_tokens for group in facts.groups)

    def of(self, request: Request, shared_tokens: int, before: Sequence[PageKey] = ()) -> TurnPages:
        """Return the keys of a new request's pages.

        Args:
            shared_tokens: tokens of its job's last context that its prompt begins with.
            before: pages of that context, first to last.
        """
        pages = TurnPages(
            self.fingerprints(request),
            self._strides,
            self._hash_tokens,
            shared_tokens=shared_tokens,
        )
        if before and len(pages.fingerprints) == 1:
            pages.keys.append(_common(pages, request.block_hashes, before))
        return pages

    def fingerprints(self, request: Request) -> tuple[bytes, ...]:
        """Return the first part of the request's page keys, by group; empty until the request's
        adapter is identified."""
        found = [self._fingerprints.of(request.adapter, group) for group in self._groups]
        return tuple(one for one in found if one is not None) if None not in found else ()
