"""Pages are compressed only together with pages that are adjacent in a context."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.keys import PageKey
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.policies.distribution import GRID, Forecast

SOON = Forecast(np.ones(len(GRID)))


def pages(text: str) -> list[PageKey]:
    """Return a page for each letter."""
    return [PageKey(letter.encode()) for letter in text]


class Order(ByWorth):
    """The eviction rule under test. All pages are in CPU memory."""

    def __init__(self, **contexts: str) -> None:
        super().__init__(lambda: 0.0, 1000)
        for job, text in contexts.items():
            self.waits(job, text)

    def saves(self, keys: list[PageKey]) -> None:
        self.added_all([key for key in keys if key not in self._resident])

    def waits(self, job: str, text: str) -> None:
        self.saves(pages(text))
        self.on_gap_begun(job, pages(text), SOON, 0.0, 1.0)

    def said(self, text: str) -> list[str]:
        """Return the stretches of these pages as words."""
        return [b"".join(found).decode() for found in self.stretches(pages(text))]


def test_pages_that_follow_each_other_are_one_stretch_in_the_order_of_the_context() -> None:
    assert Order(job="abcdef").said("dbca") == ["abcd"]


def test_a_missing_page_separates_two_stretches() -> None:
    assert Order(job="abcdefgh").said("hgeba") == ["ab", "e", "gh"]


def test_pages_of_two_jobs_are_never_in_one_stretch() -> None:
    assert sorted(Order(one="abc", other="xyz").said("axbycz")) == ["abc", "xyz"]


def test_a_prefix_of_several_jobs_is_a_separate_stretch() -> None:
    order = Order(one="abcde", other="abcxy")
    assert sorted(order.said("abcdexy")) == ["abc", "de", "xy"]
    assert sorted(order.said("yxcb")) == ["bc", "xy"]


def test_a_prefix_of_a_prefix_is_separate_too() -> None:
    order = Order(one="abcde", two="abcxy", three="apq")
    assert sorted(order.said("edcbaxypq")) == ["a", "bc", "de", "pq", "xy"]


def test_pages_without_a_context_are_left_out() -> None:
    order = Order(job="abc")
    order.added_all(pages("st"))
    assert order.said("satbu") == ["ab"]
    assert order.said("stu") == order.said("") == []


def test_a_finished_job_leaves_no_context() -> None:
    order = Order(one="abcde", other="abcxy")
    order.on_job_ended("one")
    assert sorted("".join(order.said("abcdexy"))) == sorted("abcxy")
    order.on_job_ended("other")
    assert order.said("abcdexy") == []


def test_a_longer_context_is_one_stretch_again() -> None:
    order = Order(job="abc")
    order.waits("job", "abcdef")
    assert "".join(order.said("fedcba")) == "abcdef"


def test_asking_changes_nothing() -> None:
    order = Order(one="abcde", other="abcxy")
    before = list(order)
    order.said("abcdexy")
    assert list(order) == before


def test_least_recently_used_knows_no_context() -> None:
    order = LeastRecentlyUsed()
    order.added_all(pages("abc"))
    assert order.stretches(pages("abc")) == []


TEXTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 3)), max_size=6)


@given(TEXTS, st.integers(0, 1 << 30))
def test_each_stretch_is_a_piece_of_a_context(jobs: list[tuple[int, int, int]], seed: int) -> None:
    """Contexts are paths in a tree, because the key of a page identifies all tokens before it. Each
    known page is in one stretch, and each stretch is a contiguous part of a context."""
    rng, order, contexts = random.Random(seed), Order(), dict[int, list[PageKey]]()
    for job, length, branch in jobs:
        # Pages of one branch share a context. The first three pages belong to all branches.
        keys = [PageKey(b"%d/%d" % (branch if i > 2 else 0, i)) for i in range(length)]
        order.saves(keys)
        order.on_gap_begun(job, keys, SOON, 0.0, 1.0)
        contexts[job] = keys
        if rng.random() < 0.2:
            order.on_job_ended(gone := rng.choice(list(contexts)))
            del contexts[gone]
    known = list(dict.fromkeys(key for keys in contexts.values() for key in keys))
    wanted = [key for key in known if rng.random() < 0.7] + [PageKey(b"unknown")]
    rng.shuffle(wanted)

    found = order.stretches(wanted)

    assert sorted(key for stretch in found for key in stretch) == sorted(
        key for key in wanted if key != b"unknown"
    )
    for stretch in found:
        assert any(
            keys[at : at + len(stretch)] == stretch
            for keys in contexts.values()
            for at in range(len(keys))
        )


@pytest.mark.parametrize("length", [1, 32, 33])
def test_one_page_is_a_stretch(length: int) -> None:
    order = ByWorth(lambda: 0.0, 1000)
    keys = [PageKey(bytes([n])) for n in range(length)]
    order.added_all(keys)
    order.on_gap_begun("job", keys, SOON, 0.0, 1.0)
    assert order.stretches(keys[-1:]) == [keys[-1:]]
