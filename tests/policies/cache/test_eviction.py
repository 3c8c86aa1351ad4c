"""LRU eviction compared with a list, and eviction by worth as jobs return and end."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiered_kv.keys import PageKey
from tiered_kv.policies.cache.eviction import HALF_S, RANK_EVERY_S, ByWorth
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.policies.registry import EVICTION
from tiered_kv.testing.conformance.eviction import EvictionConformance

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


def test_pages_that_were_not_added_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        LeastRecentlyUsed().removed(KEYS[0])


class TestLeastRecentlyUsedAsAnyRule(EvictionConformance):
    rule = LeastRecentlyUsed


class TestByWorthAsAnyRule(EvictionConformance):
    rule = ByWorth


def test_every_eviction_rule_has_a_conformance_test() -> None:
    assert {LeastRecentlyUsed, ByWorth} == set(EVICTION.values())


# -- by worth -----------------------------------------------------------------------------

SOON = Forecast((GRID >= 5).astype(float))
LATER = Forecast((GRID >= 600).astype(float))


class Pool:
    """A ``ByWorth`` order with a clock and the given pages, which is ranked as often as the page
    index would rank it."""

    def __init__(self, *pages: PageKey, stay_s: float = 60.0, most_pages: int = 1000) -> None:
        self.now = 0.0
        self.order = ByWorth(lambda: self.now, most_pages)
        self.order.added_all(pages)
        self._stay_s = stay_s
        self._ranked_at = -math.inf

    def waits(
        self, job: str, pages: list[PageKey], forecast: Forecast, page_s: float = 1.0
    ) -> None:
        self.order.on_gap_begun(job, pages, forecast, self.now, page_s)

    def pages(self) -> Iterator[PageKey]:
        if self.now - self._ranked_at >= RANK_EVERY_S:
            self._ranked_at = self.now
            self.order.rank(self.now, self._stay_s)
        return iter(self.order)

    def ranked(self) -> list[PageKey]:
        self.now += RANK_EVERY_S + 0.1
        return list(self.pages())


A, B, C, D, E, F, G, H = KEYS


def test_pages_of_no_job_are_evicted_in_lru_order() -> None:
    pool = Pool(A, B, C)
    pool.order.touched(A)
    assert pool.ranked() == [B, C, A]


def test_pages_of_the_job_that_returns_last_are_evicted_first_from_the_end() -> None:
    pool = Pool(A, B, C, D, E)
    pool.waits("soon", [A, B], SOON)
    pool.waits("later", [C, D], LATER)
    assert pool.ranked() == [D, C, E, B, A], "no job waits for E, which a running turn may have"


def test_pages_used_after_the_ranking_are_evicted_last() -> None:
    pool = Pool(A, B)
    pool.waits("soon", [A], SOON)
    pool.waits("later", [B], LATER)
    assert list(pool.pages()) == [B, A]
    pool.order.touched(B)
    assert list(pool.pages()) == [A, B], "used since"


def test_a_job_whose_time_has_passed_is_not_expected() -> None:
    pool = Pool(A, B)
    pool.waits("gone", [A], SOON)
    pool.now += 30.0
    pool.waits("here", [B], SOON)
    assert pool.ranked() == [A, B]


def test_pages_that_take_longer_to_recompute_are_kept_longer() -> None:
    """Recomputing the end of a long context takes longer than recomputing the end of a short one,
    so it is evicted later."""
    pool = Pool(A, B)
    pool.waits("dear", [A], SOON, page_s=3.0)
    pool.waits("cheap", [B], SOON, page_s=1.0)
    assert pool.ranked() == [B, A]


def test_a_shared_prefix_has_the_worth_of_its_most_valuable_job() -> None:
    pool = Pool(A, B, C)
    pool.waits("later", [A, B], LATER)
    pool.waits("soon", [A, C], SOON)
    assert pool.ranked() == [B, C, A]
    pool.order.on_job_ended("soon")
    assert pool.ranked() == [C, B, A], "a third job may share the prefix"


def test_pages_are_private_to_the_jobs_whose_contexts_have_them() -> None:
    pool = Pool(A, B, C, D, E)
    pool.waits("one", [A, B, C], SOON)
    pool.waits("two", [A, B, D], SOON)
    private = pool.order.private
    assert private([A, B, C, E], lambda job: job == "one") == [C, E], "no job has E"
    assert private([D, C, B], lambda job: True) == [D, C, B]
    pool.order.on_job_ended("two")
    assert private([A, B, C, D], lambda job: job == "one") == [A, B, C, D]


def test_a_next_turn_takes_the_place_of_the_last() -> None:
    pool = Pool(A, B, C)
    pool.waits("job", [A, B], LATER)
    pool.waits("job", [A, B, C], SOON)
    assert pool.ranked() == [C, B, A]
    pool.waits("job", [A, C], SOON)
    pool.now += 300.0
    pool.waits("job", [A, C], SOON)
    assert pool.ranked() == [B, C, A], "the history was rewritten: no job needs B"


def test_a_context_without_a_forecast_is_evicted_like_pages_of_no_job() -> None:
    """A context loses its forecast when its job's next turn runs, because it is then in VRAM. Its
    pages count as just used, and their worth halves every half minute."""
    pool = Pool(A, B, C, D)
    pool.waits("running", [A, B], SOON)
    pool.waits("soon", [C], SOON)
    pool.order.on_forecast_lost("running")
    assert pool.order.waiting_job(A) is None
    assert pool.order.return_chance(A, math.inf) == 0.0
    pool.now += 1.0
    pool.order.touched(D)
    assert pool.ranked() == [B, A, D, C], "D was used later"
    pool.waits("running", [A, B], SOON)
    assert pool.ranked()[:1] == [D], "no job waits for it, and the job waits again"


def test_a_context_without_a_forecast_is_remembered() -> None:
    pool = Pool(A, B, C)
    pool.waits("job", [A, B], SOON)
    pool.order.on_forecast_lost("job")
    assert pool.order.context("job") == [A, B], "its next turn need not list these pages again"


def test_pages_of_finished_jobs_alone_are_evicted_first() -> None:
    pool = Pool(A, B, C)
    pool.waits("over", [A], SOON)
    pool.waits("later", [B], LATER)
    pool.order.on_job_ended("over")
    pool.order.on_job_ended("never seen")
    assert pool.ranked() == [A, B, C]


def test_pages_of_the_last_turn_are_evicted_first_unless_other_jobs_have_them() -> None:
    pool = Pool(A, B, C, D, E)
    pool.waits("over", [A, B], SOON)
    pool.waits("later", [A, C], LATER)
    pool.order.on_job_ended("over", [B, C, D])
    assert pool.ranked()[:2] == [B, D]
    pool.order.on_job_ended("of one turn", [E])
    assert pool.ranked()[:3] == [B, D, E]


def test_pages_can_be_added_and_removed_while_a_job_waits() -> None:
    pool = Pool(A, B)
    pool.waits("job", [A, B, C], SOON)
    assert pool.ranked() == [B, A]
    pool.order.removed(B)
    assert pool.ranked() == [A]
    pool.order.added(C)
    assert list(pool.pages()) == [A, C], "used since they were ranked"
    assert pool.ranked() == [C, A]


def test_a_job_whose_next_turn_is_queued_keeps_its_pages() -> None:
    pool = Pool(A, B)
    pool.waits("back", [A], SOON)
    pool.now += 5.0
    pool.order.on_gap_ended("back")
    pool.waits("waiting", [B], SOON)
    pool.now += 4.0
    pool.now += 60.0
    assert pool.ranked() == [B, A], "its forecast is of no more use"


def test_the_worth_of_a_page_of_no_job_halves_every_half_minute() -> None:
    pool = Pool(A, B)
    pool.waits("job", [B], Forecast(np.minimum(GRID / 600, 1.0)), page_s=1.0)
    assert pool.ranked() == [B, A], "it was just used"
    pool.now += 10 * HALF_S
    pool.waits("job", [B], Forecast(np.minimum(GRID / 600, 1.0)), page_s=1.0)
    assert pool.ranked() == [A, B]


def test_pages_shared_by_finished_jobs_are_evicted() -> None:
    """Two finished jobs shared pages A and B. A third job is expected back and needs C, so A and B
    are evicted first."""
    pool = Pool(A, B, C)
    pool.waits("one", [A, B], SOON)
    pool.waits("two", [A, B], SOON)
    pool.order.on_job_ended("one")
    pool.order.on_job_ended("two")
    pool.now += 20 * HALF_S
    pool.waits("here", [C], SOON)
    assert pool.ranked() == [B, A, C]


def test_contexts_beyond_the_limit_are_forgotten_least_recent_first() -> None:
    pool = Pool(A, B, C, most_pages=2)
    pool.waits("first", [A], SOON)
    pool.waits("second", [B], SOON)
    pool.waits("first", [A], SOON)
    pool.waits("third", [C], SOON)
    pool.order.added(C)
    assert [pool.order.return_chance(key, 60.0) for key in (A, B, C)] == [1.0, 0.0, 1.0]


def test_contexts_are_forgotten_although_no_page_is_added() -> None:
    """While copies hang, turns still end, but no page becomes readable."""
    pool = Pool(most_pages=4)
    for number in range(20):
        pool.waits(f"{number}", [PageKey(b"%02d" % number), PageKey(b"%02d end" % number)], SOON)
    known = [number for number in range(20) if pool.order.context(f"{number}")]
    assert known == [17, 18, 19], "the limit, and the last context"


def test_evicting_one_page_takes_no_longer_in_a_large_pool() -> None:
    """The test compares a thousand waiting jobs with ten. Each job has 300 pages, of which the pool
    holds two."""
    assert eviction_s(jobs=1000) < 10 * eviction_s(jobs=10)


def eviction_s(jobs: int) -> float:
    """Return the seconds that the fastest of several evictions takes, because other processes
    affect it least."""
    keys = [[PageKey(f"{job}-{n}".encode()) for n in range(300)] for job in range(jobs)]
    pool = Pool(stay_s=60.0, most_pages=10**6)
    pool.order.added_all([key for pages in keys for key in pages[:2]])
    for job, pages in enumerate(keys):
        pool.waits(f"{job}", pages, SOON)
    next(pool.pages())

    def once() -> float:
        pool.now += 0.001
        began = time.perf_counter()
        pool.order.removed(next(pool.pages()))
        return time.perf_counter() - began

    return min(once() for _ in range(15))


def test_a_return_chance_is_that_of_the_likeliest_job() -> None:
    pool = Pool(A)
    pool.waits("later", [A, B], LATER)
    assert pool.order.return_chance(B, 60.0) == 0.0
    assert pool.order.return_chance(B, math.inf) == 1.0
    pool.waits("soon", [A], SOON)
    assert pool.order.return_chance(A, 60.0) == 1.0
    pool.order.on_job_ended("later")
    assert pool.order.return_chance(B, math.inf) == 0.0
    assert pool.order.return_chance(C, math.inf) == 0.0, "no job waits for it"


@pytest.mark.parametrize("seed", range(20))
def test_pages_are_evicted_in_the_order_of_their_worth(seed: int) -> None:
    """The test computes the worth of each page from its definition. Pages are evicted in ascending
    order of this worth."""
    rng = random.Random(seed)
    pool, stay_s = Pool(stay_s=60.0, most_pages=10_000), 60.0
    waiting = dict[str, tuple[list[PageKey], Forecast, float, float]]()
    for n in range(40):
        pages = [PageKey(f"{n % 4 if i < 3 else n} {i}".encode()) for i in range(rng.randrange(12))]
        forecast = Forecast(np.minimum(GRID / rng.choice([5.0, 60.0, 600.0]), 1.0))
        page_s = rng.random()
        there = set(pool.pages())
        pool.order.added_all([page for page in pages if page not in there])
        pool.waits(f"job{n}", pages, forecast, page_s)
        waiting[f"job{n}"] = pages, forecast, pool.now, page_s
        pool.now += rng.random()
    order = pool.ranked()

    def worth(page: PageKey) -> tuple[float, float]:
        return max(
            (
                soon := (forecast.within(waited + stay_s) - gone) / (1 - gone) * page_s
                if (gone := forecast.within(waited := pool.now - since)) < 1
                else 0.0,
                soon or (float(gone < 1) * page_s),
            )
            for pages, forecast, since, page_s in waiting.values()
            if page in pages
        )

    worths = [worth(page) for page in order]
    assert worths == sorted(worths)
    for pages, *_ in waiting.values():
        places = [order.index(page) for page in pages]
        assert places == sorted(places, reverse=True), "the end goes first"


# -- superseded ---------------------------------------------------------------------------


def leaves(pool: Pool, *contexts: list[PageKey]) -> float:
    """End turns of a job with these contexts, one per second. Returns the start of the last gap."""
    for context in contexts:
        pool.now += 1.0
        pool.waits("job", context, SOON)
    return pool.now


def test_superseded_pages_go_before_those_of_finished_jobs() -> None:
    pool = Pool(A, B, C, D, E)
    pool.waits("over", [E], SOON)
    pool.order.on_job_ended("over")
    since = leaves(pool, [A, B, C], [A, D])
    assert pool.order.on_extended("job", since) == [C, B], "first to be evicted first"
    assert pool.ranked() == [C, B, E, D, A]


def test_only_what_was_left_by_then_is_superseded() -> None:
    pool = Pool(A, B, C, D)
    since = leaves(pool, [A, B], [A, C])
    leaves(pool, [A, D])
    assert pool.order.on_extended("job", since) == [B]
    assert not pool.order.superseded(C), "no second turn has gone on from D"


def test_a_job_that_is_back_on_a_branch_has_not_left_it() -> None:
    pool = Pool(A, B, C, D, E)
    since = leaves(pool, [A, B, C, D], [A, E], [A, B, C])
    assert pool.order.on_extended("job", since) == [D, E], "the end of the branch is left still"


def test_pages_that_another_job_had_are_not_superseded() -> None:
    pool = Pool(A, B, C, D)
    pool.waits("another", [A, B], SOON)
    since = leaves(pool, [A, B, C], [D])
    pool.order.on_job_ended("another")
    assert pool.order.on_extended("job", since) == [C]


def test_pages_that_were_used_meanwhile_are_not_superseded() -> None:
    pool = Pool(A, B, C, D)
    since = leaves(pool, [A, B, C], [A, D])
    pool.now += 1.0
    pool.order.touched(B)
    assert pool.order.on_extended("job", since) == [C]
    pool.order.touched(C)
    assert not pool.order.superseded(C)


def test_pages_outside_cpu_memory_are_superseded_in_the_tiers_below() -> None:
    pool = Pool(A, B, C)
    since = leaves(pool, [A, B], [A, C])
    pool.order.removed(B)
    assert pool.order.on_extended("job", since) == [B]
    assert not pool.order.superseded(B)
    pool.order.added(B)
    assert not pool.order.superseded(B), "a request has computed or promoted it"


def test_the_branches_left_longest_ago_are_forgotten_first() -> None:
    pool = Pool(*KEYS, most_pages=2)
    since = leaves(pool, [A, B], [A])
    for page in (C, D):
        pool.waits("other", [page], SOON)
        pool.waits("other", [E], SOON)
    assert pool.order.on_extended("job", since) == (), "three pages, and two are remembered"
    assert set(pool.order.on_extended("other", pool.now)) == {C, D}
