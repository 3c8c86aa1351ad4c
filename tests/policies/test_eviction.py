"""Least recently used, against a list; and by worth, as jobs come and go."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiered_kv.keys import PageKey
from tiered_kv.policies.eviction import RANK_EVERY_S, ByWorth, LeastRecentlyUsed
from tiered_kv.policies.forecast import GRID, Forecast

KEYS = [PageKey(bytes([n])) for n in range(8)]


class LeastRecentlyUsedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = LeastRecentlyUsed()
        self.model: list[PageKey] = []

    @rule(key=st.sampled_from(KEYS))
    def add(self, key: PageKey) -> None:
        if key not in self.model:
            self.order.added(key)
            self.model.append(key)

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.model))
        self.order.touched(key)
        self.model.remove(key)
        self.model.append(key)

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.model))
        self.order.removed(key)
        self.model.remove(key)

    @invariant()
    def the_one_used_longest_ago_comes_first(self) -> None:
        assert list(self.order) == self.model


TestLeastRecentlyUsed = LeastRecentlyUsedMachine.TestCase
TestLeastRecentlyUsed.settings = settings(max_examples=50, stateful_step_count=30)


def test_pages_nobody_added_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        LeastRecentlyUsed().removed(KEYS[0])


# -- by worth -----------------------------------------------------------------------------

SOON = Forecast((GRID >= 5).astype(float))
LATER = Forecast((GRID >= 600).astype(float))


class Pool:
    """An order with a clock, and pages that were added."""

    def __init__(self, *pages: PageKey, stay_s: float = 60.0) -> None:
        self.now = 0.0
        self.order = ByWorth(lambda: self.now, lambda: stay_s)
        self.order.added_all(pages)

    def waits(
        self, job: str, pages: list[PageKey], forecast: Forecast, page_s: float = 1.0
    ) -> None:
        self.order.waits(job, pages, forecast, self.now, page_s)

    def ranked(self) -> list[PageKey]:
        self.now += RANK_EVERY_S
        return list(self.order)


A, B, C, D, E, F, G, H = KEYS


def test_pages_of_no_job_go_by_use() -> None:
    pool = Pool(A, B, C)
    pool.order.touched(A)
    assert pool.ranked() == [B, C, A]


def test_the_job_that_returns_last_goes_first_and_from_its_end() -> None:
    pool = Pool(A, B, C, D, E)
    pool.waits("soon", [A, B], SOON)
    pool.waits("later", [C, D], LATER)
    assert pool.ranked() == [D, C, B, A, E], "what a running turn has goes last"


def test_a_job_whose_time_has_passed_is_not_expected() -> None:
    pool = Pool(A, B)
    pool.waits("gone", [A], SOON)
    pool.now += 30.0
    pool.waits("here", [B], SOON)
    assert pool.ranked() == [A, B]


def test_dear_pages_stay_longer() -> None:
    """The end of a long context costs more to compute again than a short one."""
    pool = Pool(A, B)
    pool.waits("dear", [A], SOON, page_s=3.0)
    pool.waits("cheap", [B], SOON, page_s=1.0)
    assert pool.ranked() == [B, A]


def test_a_shared_prefix_goes_with_the_job_most_worth_waiting_for() -> None:
    pool = Pool(A, B, C)
    pool.waits("later", [A, B], LATER)
    pool.waits("soon", [A, C], SOON)
    assert pool.ranked() == [B, C, A]
    pool.order.over("soon")
    assert pool.ranked() == [C, B, A], "a third job may have the prefix as well"


def test_a_next_turn_takes_the_place_of_the_last() -> None:
    pool = Pool(A, B, C)
    pool.waits("job", [A, B], LATER)
    pool.waits("job", [A, B, C], SOON)
    assert pool.ranked() == [C, B, A]
    pool.waits("job", [A, C], SOON)
    assert pool.ranked() == [C, A, B], "the history was rewritten: B is nobody's"


def test_what_only_a_job_that_is_over_had_goes_first() -> None:
    pool = Pool(A, B, C)
    pool.waits("over", [A], SOON)
    pool.waits("later", [B], LATER)
    pool.order.over("over")
    pool.order.over("never seen")
    assert pool.ranked() == [A, B, C]


def test_pages_may_come_and_go_while_a_job_waits() -> None:
    pool = Pool(A, B)
    pool.waits("job", [A, B, C], SOON)
    assert pool.ranked() == [B, A]
    pool.order.removed(B)
    pool.order.added(C)
    assert pool.ranked() == [C, A]


def test_chances_are_those_of_the_likeliest_job() -> None:
    pool = Pool(A)
    pool.waits("later", [A, B], LATER)
    assert pool.order.chance(B, 60.0) == 0.0
    assert pool.order.chance(B, math.inf) == 1.0
    pool.waits("soon", [A], SOON)
    assert pool.order.chance(A, 60.0) == 1.0
    assert pool.order.chance(C, math.inf) == 0.0, "nobody waits for it"


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_page_is_there_once(seed: int) -> None:
    rng = random.Random(seed)
    keys = [PageKey(bytes([n])) for n in range(40)]
    pool, there = Pool(stay_s=rng.choice([1.0, 60.0, math.inf])), set[PageKey]()
    for _ in range(400):
        what, key = rng.random(), rng.choice(keys)
        if what < 0.3 and key not in there:
            there.add(key)
            pool.order.added(key)
        elif what < 0.5 and key in there:
            there.remove(key)
            pool.order.removed(key)
        elif what < 0.6 and key in there:
            pool.order.touched(key)
        elif what < 0.8:
            pages = keys[: rng.randrange(5)] + rng.sample(keys[5:], rng.randrange(8))
            cdf = np.sort([rng.random() for _ in GRID])
            pool.waits(f"job{rng.randrange(6)}", pages, Forecast(cdf), rng.random())
        elif what < 0.9:
            pool.order.over(f"job{rng.randrange(6)}")
        pool.now += rng.choice([0.0, 0.1, 2.0])
        order = list(pool.order)
        assert len(order) == len(there)
        assert set(order) == there
    for n in range(6):
        pool.order.over(f"job{n}")
    for key in there:
        pool.order.removed(key)
    assert not pool.order._claims, "a page is claimed by a job that is over"
    assert not pool.order._shared
