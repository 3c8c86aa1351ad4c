"""Tails (partial blocks) are found by the key of the previous page, and by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.keys import PageKey, tail_key
from tiered_kv.pages.partial_blocks import (
    MAX_TAILS_PER_PARENT,
    PREFIX,
    Tail,
    TailIndex,
    _digest,
)
from tiered_kv.storage.notebook import Fact, NoNotebook

PARENT, OTHER = b"parent".ljust(16), b"other".ljust(16)


def always(tail: Tail, shared: int) -> bool:
    return True


def never(tail: Tail, shared: int) -> bool:
    return False


def shared(tails: TailIndex, tokens: Sequence[int], parent: bytes = PARENT) -> int:
    found = tails.longest(parent, None, tokens, always)
    return found[1] if found else 0


def test_a_tail_is_found_by_what_follows_it() -> None:
    tails = TailIndex(NoNotebook())
    tail = tails.add(PARENT, None, [1, 2, 3])

    found = tails.longest(PARENT, None, [1, 2, 3, 4, 5], always)

    assert found == (tail, 3)
    assert tail.key == tail_key(PARENT, [1, 2, 3], None)


def test_a_tail_under_other_extra_keys_is_another_tail() -> None:
    """A tail that was added under some extra keys is not found under others. Extra keys contain the
    cache salt and the adapter."""
    tails = TailIndex(NoNotebook())
    mine = tails.add(PARENT, ("mine",), [1, 2, 3])
    assert tails.longest(PARENT, ("yours",), [1, 2, 3], always) is None
    assert tails.longest(PARENT, None, [1, 2, 3], always) is None
    assert tails.longest(PARENT, ("mine",), [1, 2, 3], always) == (mine, 3)


def test_the_oldest_fork_of_a_context_is_forgotten() -> None:
    tails = TailIndex(NoNotebook())
    for first in range(MAX_TAILS_PER_PARENT + 1):
        tails.add(PARENT, None, [100 + first])
    assert shared(tails, [100]) == 0
    assert all(shared(tails, [101 + i]) == 1 for i in range(MAX_TAILS_PER_PARENT))
    assert len(tails) == MAX_TAILS_PER_PARENT


def test_a_tail_added_again_becomes_the_newest_and_counts_once() -> None:
    tails = TailIndex(NoNotebook())
    for first in range(MAX_TAILS_PER_PARENT):
        tails.add(PARENT, None, [100 + first])
    tails.add(PARENT, None, [100])
    assert len(tails) == MAX_TAILS_PER_PARENT

    tails.add(PARENT, None, [999])

    assert shared(tails, [100]) == 1
    assert shared(tails, [101]) == 0


def test_tails_whose_pages_were_evicted_are_pruned() -> None:
    tails = TailIndex(NoNotebook())
    kept = tails.add(PARENT, None, [1])
    tails.add(PARENT, None, [2])
    tails.add(OTHER, None, [3])

    tails.prune(lambda key: key == kept.key)

    assert len(tails) == 1
    assert shared(tails, [1]) == 1
    assert shared(tails, [2]) == shared(tails, [3], OTHER) == 0
    tails.add(OTHER, None, [3])
    assert len(tails) == 2


def test_clear_forgets_everything() -> None:
    tails = TailIndex(NoNotebook())
    tails.add(PARENT, None, [1])
    tails.clear()
    assert len(tails) == 0
    assert shared(tails, [1]) == 0


SHORT_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(st.sampled_from([PARENT, OTHER]), SHORT_TOKENS), max_size=30),
    SHORT_TOKENS,
    st.sets(st.integers(0, 29)),
)
def test_the_longest_tail_equals_an_exhaustive_search(
    added: list[tuple[bytes, list[int]]], wanted: list[int], unreadable: set[int]
) -> None:
    tails = TailIndex(NoNotebook())
    model: dict[bytes, list[tuple[int, ...]]] = {PARENT: [], OTHER: []}
    hidden = set()
    for i, (parent, tokens) in enumerate(added):
        tail = tails.add(parent, None, tokens)
        mine = model[parent]
        if tail.tokens in mine:
            mine.remove(tail.tokens)
        mine.append(tail.tokens)
        del mine[:-MAX_TAILS_PER_PARENT]
        if i in unreadable:
            hidden.add(tail.key)
    assert len(tails) == sum(map(len, model.values()))

    for parent, mine in model.items():
        best = 0
        for tokens_of in mine:
            if tail_key(parent, tokens_of, None) in hidden:
                continue
            agree = [i for i in range(len(wanted) + 1) if tokens_of[:i] == tuple(wanted[:i])]
            best = max(best, min(agree[-1], len(tokens_of)))
        found = tails.longest(parent, None, wanted, lambda tail, _: tail.key not in hidden)
        assert (found[1] if found else 0) == best


def facts(key: bytes, tokens: Sequence[object], extra: object = None) -> NoNotebook:
    """Return a notebook whose only note names a page for these tokens."""
    noted = {"parent": PARENT.hex(), "extra": _digest(extra).hex(), "tokens": list(tokens)}

    class Noted(NoNotebook):
        def facts(self, prefix: str) -> dict[str, Fact]:
            return {PREFIX + key.hex(): noted}

    return Noted()


@pytest.mark.parametrize("extra", [None, ("policy-7",)])
def test_a_noted_tail_is_found_only_under_the_key_of_its_tokens(extra: object) -> None:
    right, wrong = (tail_key(PARENT, tokens, extra) for tokens in ([7, 8, 9], [1, 2, 3]))
    for key, length in ((right, 3), (wrong, 0), (PARENT + bytes(32), 0)):
        tails = TailIndex(facts(key, [7, 8, 9], extra))
        found = tails.longest(PARENT, extra, [7, 8, 9, 10], always)
        assert (found[1] if found else 0) == length


@pytest.mark.parametrize("token", ["7", 7.5, -1, 1 << 63, None, True])
def test_a_noted_tail_with_invalid_tokens_is_ignored(token: object) -> None:
    assert not len(TailIndex(facts(tail_key(PARENT, [7], None), [token])))


def test_a_tail_in_a_full_page_is_not_noted() -> None:
    """A tail that has the key of a full page is not noted, and another tail is. The key of a full
    page is the engine's hash, from which a tail's tokens cannot be verified."""
    noted = list[str]()

    class Noting(NoNotebook):
        stores = True

        def note(self, name: str, fact: Fact) -> None:
            noted.append(name)

    tails = TailIndex(Noting())
    tails.add(PARENT, None, [1, 2, 3], key=PageKey(bytes(48)))
    tail = tails.add(PARENT, None, [1, 2])
    assert noted == [PREFIX + tail.key.hex()]
    assert shared(tails, [1, 2, 3]) == 3
