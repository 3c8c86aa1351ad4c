"""Pages that survive the deletion of a segment: used pages, and pages of jobs that are likely to
return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.runtime.lower_tiers.reclaims import LIKELY, survivors
from tiered_kv.keys import PageKey

KEYS = [PageKey(bytes([65 + n]) * 20) for n in range(8)]


def surviving(
    used: Collection[PageKey], chances: Mapping[PageKey, float] | None = None
) -> tuple[PageKey, ...]:
    known = chances or {}
    return survivors(KEYS, used.__contains__, lambda key: known.get(key, 0.0))


def test_used_pages_survive() -> None:
    assert surviving([KEYS[1], KEYS[6]]) == (KEYS[1], KEYS[6])


def test_pages_of_jobs_that_are_likely_to_return_survive() -> None:
    assert surviving([], {KEYS[0]: 0.9, KEYS[3]: LIKELY, KEYS[5]: 0.4}) == (KEYS[0], KEYS[3])


def test_at_most_half_survive_and_those_are_the_newest() -> None:
    assert surviving(KEYS) == tuple(KEYS[4:])
    assert survivors(KEYS[:1], lambda _: True, lambda _: 1.0) == ()


def test_of_more_than_half_the_likeliest_to_be_used_survive() -> None:
    chances = dict(zip(KEYS, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], strict=True))
    assert surviving(KEYS, chances) == tuple(KEYS[:4])


def table(values: st.SearchStrategy[float]) -> st.SearchStrategy[Callable[[PageKey], float]]:
    lists = st.lists(values, min_size=len(KEYS), max_size=len(KEYS))
    return lists.map(lambda found: dict(zip(KEYS, found, strict=True)).__getitem__)


@given(table(st.booleans()), table(st.floats(0, 1)), st.integers(0, len(KEYS)))
def test_no_deleted_page_was_likelier_to_be_used_than_a_survivor(
    used: Callable[[PageKey], bool], chance: Callable[[PageKey], float], length: int
) -> None:
    dying = KEYS[:length]
    kept = survivors(dying, used, chance)
    worth_it = [key for key in dying if used(key) or chance(key) >= LIKELY]
    assert len(kept) == min(len(worth_it), length // 2)
    assert list(kept) == [key for key in dying if key in kept], "in the order of the segment"
    left = [chance(key) for key in worth_it if key not in kept]
    assert all(chance(key) >= one for key in kept for one in left)
