"""``HitFinder`` finds the longest prefix whose pages are available. The tests compare it with a
search through all lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.pages.hits import Found, HitFinder, aligned_tail, run_of
from tiered_kv.connectors.runtime.turn import Turn, TurnPages
from tiered_kv.keys import PageKey, tail_key
from tiered_kv.page_group import KvKind, KvReach, PageGroup, Placement, page_layout
from tiered_kv.pages.partial_blocks import Tail, TailIndex
from tiered_kv.policies.jobs.hints import TurnHints
from tiered_kv.storage.notebook import NoNotebook

LENGTH, UNIT = 120, 4
KINDS = [
    KvReach(),
    KvReach(KvKind.WINDOW, 10),
    KvReach(KvKind.WINDOW, 33, 2),
    KvReach(KvKind.CHUNK, 24),
    KvReach(KvKind.STATE),
]


def group(index: int, size: int, reach: KvReach, draft_tokens: int = 0) -> PageGroup:
    layout = page_layout([Placement(1, 640, 64, 0)], 10)
    return PageGroup(index, size, layout, reach=reach, draft_tokens=draft_tokens)


def facts_of(groups: Sequence[PageGroup]) -> EngineFacts:
    return EngineFacts(1, groups[0].block_size, UNIT, UNIT, 100, tuple(groups))


def turn_of(facts: EngineFacts, tokens: Sequence[int]) -> Turn:
    hashes = [b"%032d" % (i + 1) for i in range(len(tokens) // UNIT)]
    request: Any = SimpleNamespace(
        request_id="r",
        block_hashes=hashes,
        all_token_ids=list(tokens),
        text_only=True,
        reads_cache=True,
        extra_key=lambda _: None,
    )
    pages = TurnPages(
        tuple(b"%016d" % at for at in range(len(facts.groups))),
        tuple(group.block_size // UNIT for group in facts.groups),
        UNIT,
    )
    return Turn(request=request, hints=TurnHints(), job=None, number=1, arrived_at=0.0, pages=pages)


class Searched:
    """A prompt, and a random set of available pages for it."""

    def __init__(self, rng: random.Random) -> None:
        reaches = rng.choices(KINDS, k=rng.randint(1, 3))
        reaches.sort(key=lambda reach: reach.kind is not KvKind.FULL)
        sizes = [rng.choice([4, 8, 16]) for _ in reaches]
        self.groups = [group(i, *pair) for i, pair in enumerate(zip(sizes, reaches, strict=True))]
        self.facts = facts_of(self.groups)
        tokens = [rng.randrange(1000) for _ in range(LENGTH)]
        self.turn = turn_of(self.facts, tokens)
        self.start = rng.choice([0, 0, 16, 48])
        self.limit = rng.randint(self.start, LENGTH - 1)
        self.tails = TailIndex(NoNotebook())
        self.ends: list[tuple[int, Tail]] = []
        for _ in range(rng.randint(0, 4)):
            end = rng.randrange(1, LENGTH)
            self.add_tail(end, tokens, differs=rng.random() < 0.3)
        self.there = {key for key in self.all_keys() if rng.random() < rng.choice([0.8, 0.97, 1])}

    def add_tail(self, end: int, tokens: Sequence[int], *, differs: bool) -> None:
        begin = end // UNIT * UNIT
        place = self.turn.tail_place(begin)
        if place is None or begin == end:
            return
        text = list(tokens[begin:end])
        if differs:
            text.append(5000)
        self.ends.append((begin, self.tails.add(*place, text)))

    def all_keys(self) -> list[PageKey]:
        found = list[PageKey]()
        for at, one in enumerate(self.groups):
            found += self.turn.page_keys(at)
            for tokens in range(UNIT, LENGTH, UNIT):
                keys = [aligned_tail(self.turn, at, tokens)]
                if one.reach.kind is KvKind.STATE:
                    keys.append(self.turn.state_key(at, tokens))
                found += [key for key in keys if key is not None]
            found += [self.turn.in_group(tail.key, at) for _, tail in self.ends]
        return found

    def last_pages(self, at: int, tokens: int) -> list[PageKey | None]:
        """Return the alternative pages for the last block of a prefix."""
        one, turn = self.groups[at], self.turn
        state, aligned = one.reach.kind is KvKind.STATE, tokens % UNIT == 0
        found: list[PageKey | None] = []
        if state and aligned:
            found.append(turn.state_key(at, tokens))
        if not state:
            block = tokens // one.block_size
            found += turn.page_keys(at)[block : block + 1]
            found.append(aligned_tail(turn, at, tokens))
        return found

    def holds(self, tokens: int, tail: Tail | None) -> bool:
        """Return True if all pages of a prefix are available."""
        for at, one in enumerate(self.groups):
            needed, whole = one.needs(tokens), tokens // one.block_size
            state = one.reach.kind is KvKind.STATE
            for block in needed:
                if block < self.start // one.block_size:
                    continue
                if block < whole and not state:
                    keys = self.turn.page_keys(at)
                    candidates: list[PageKey | None] = list(keys[block : block + 1])
                else:
                    candidates = self.last_pages(at, tokens)
                    if tail is not None:
                        candidates = [self.turn.in_group(tail.key, at)]
                        if not state:
                            candidates += self.last_pages(at, tokens)[:1]
                if not any(key in self.there for key in candidates):
                    return False
        return True

    def longest(self) -> int:
        """Return the length of the longest available prefix beyond the start, found by trying all
        lengths."""
        for tokens in range(self.limit, self.start, -1):
            ends: list[Tail | None] = [None]
            text = self.turn.request.all_token_ids
            for begin, tail in self.ends:
                length = tokens - begin
                exact = length == len(tail.tokens) or not self.facts.has_states
                same = list(tail.tokens[:length]) == list(text[begin:tokens])
                if 0 < length <= len(tail.tokens) and exact and same:
                    ends.append(tail)
            aligned = tokens % UNIT == 0 or tokens == self.limit
            if any(self.holds(tokens, tail) for tail in ends if tail is not None or aligned):
                return tokens
        return self.start


@pytest.mark.parametrize("seed", range(400))
def test_the_longest_prefix_is_found(seed: int) -> None:
    case = Searched(random.Random(seed))
    there = case.there.__contains__
    finder = HitFinder(case.facts, case.tails)
    found = finder.find(case.turn, case.start, case.limit, there, run_of(there))
    assert (found.tokens if found is not None else case.start) == case.longest()
    if found is not None:
        check_pages(case, found)


def check_pages(case: Searched, found: Found) -> None:
    """Check that the pages fill the blocks that the prefix needs, and are all available."""
    parts = {part.group: part for part in found.parts}
    for at, one in enumerate(case.groups):
        blocks = [i for i in one.needs(found.tokens) if i >= case.start // one.block_size]
        part = parts.get(at)
        assert (len(part.keys) if part else 0) == len(blocks)
        if part is not None:
            assert part.first == blocks[0]
            assert case.there.issuperset(part.keys)


def test_the_last_tokens_are_left_out_if_drafts_depend_on_the_next_one() -> None:
    facts = facts_of([group(0, 8, KvReach(), draft_tokens=1)])
    turn, tails = turn_of(facts, range(100)), TailIndex(NoNotebook())
    place = turn.tail_place(96)
    assert place is not None
    there = set(turn.page_keys())
    finder = HitFinder(facts, tails)

    def found() -> int:
        hit = finder.find(turn, 0, 99, there.__contains__, run_of(there.__contains__))
        assert hit is not None
        return hit.tokens

    assert found() == 95, "the token after the last page need not be the one it was made with"
    tails.add(*place, [96, 97])
    there.add(tail_key(place[0], [96, 97], place[1]))
    assert found() == 97
