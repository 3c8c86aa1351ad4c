"""The conformance suite of eviction rules."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tiered_kv.keys import PageKey
from tiered_kv.pages.base import EvictionOrder, EvictionRule, PageState, ReturnForecast
from tiered_kv.pages.cpu_index import PageIndex

A, B, C, D = PAGES = tuple(PageKey(name.encode() * 20) for name in "ABCD")


@dataclass(frozen=True, slots=True)
class Evenly:
    """A gap whose length is uniformly distributed up to ``most_s`` seconds; 0 means that the gap
    never ends.
    """

    most_s: float

    def within(self, t: float) -> float:
        return min(max(t, 0.0) / self.most_s, 1.0) if self.most_s else 0.0


class Pool:
    """An eviction rule with an index and a clock.

    Args:
        rule: creates the eviction order.
        num_slots: capacity of the index in pages.
    """

    def __init__(self, rule: EvictionRule, num_slots: int) -> None:
        self.now = 1000.0
        self.order = rule(lambda: self.now, 2 * num_slots)
        self.index = PageIndex(num_slots, self.order, lambda: self.now)

    def save(self, *keys: PageKey) -> None:
        slots = self.index.reserve_all(keys)
        assert len(slots) == len(keys)
        self.index.commit_all(keys, slots)

    def pages(self) -> list[PageKey]:
        """Return the pages in eviction order."""
        return list(self.index.least_valuable(1 << 30))

    def wait(self, job: str, keys: Sequence[PageKey], forecast: ReturnForecast) -> None:
        self.order.on_gap_begun(job, keys, forecast, self.now, 0.01)


class EvictionConformance:
    """Conformance suite of eviction rules. Create a subclass, name it ``Test…`` and set ``rule`` to
    the class of your rule.

    No test depends on which page a rule evicts first.
    """

    rule: type[EvictionOrder]

    @pytest.fixture
    def pool(self) -> Pool:
        """A pool with eight slots."""
        return Pool(self.rule, 8)

    # -- pages ----------------------------------------------------------------------

    def test_there_is_nothing_to_evict_at_first(self, pool: Pool) -> None:
        assert pool.pages() == []

    def test_every_page_is_there_once(self, pool: Pool) -> None:
        pool.save(A, B, C)
        pool.index.touch([B, A])
        assert sorted(pool.pages()) == [A, B, C]

    def test_a_page_that_is_gone_is_not_offered(self, pool: Pool) -> None:
        pool.save(A, B)
        pool.index.forget(A)
        assert pool.pages() == [B]
        pool.save(A)
        assert sorted(pool.pages()) == [A, B], "the page can be saved again"

    def test_looking_changes_nothing(self, pool: Pool) -> None:
        pool.save(A, B, C, D)
        pool.index.touch([C])
        assert pool.pages() == pool.pages()
        next(pool.index.least_valuable(4))
        assert len(pool.pages()) == 4, "a caller may stop early"

    def test_pages_are_told_of_together_or_one_by_one(self) -> None:
        one, other = Pool(self.rule, 4), Pool(self.rule, 4)
        one.order.added_all(PAGES)
        one.order.touched_all([C, A])
        for key in PAGES:
            other.order.added(key)
        other.order.touched(C)
        other.order.touched(A)
        assert list(one.order) == list(other.order)

    def test_the_first_in_the_order_makes_room(self) -> None:
        pool = Pool(self.rule, 3)
        pool.save(A, B, C)
        first = pool.pages()[0]
        pool.save(D)
        assert pool.index.state(first) is PageState.MISSING
        pool.index.check_integrity()

    def test_a_page_in_use_is_passed_over(self) -> None:
        pool = Pool(self.rule, 3)
        pool.save(A, B, C)
        first, second, _ = pool.pages()
        slot = pool.index.acquire(first)
        pool.save(D)
        assert pool.index.state(first) is not PageState.MISSING
        assert pool.index.state(second) is PageState.MISSING
        pool.index.release(first, slot)
        pool.index.check_integrity()

    # -- jobs -----------------------------------------------------------------------

    def test_jobs_that_nobody_knows_are_no_error(self, pool: Pool) -> None:
        pool.save(A)
        pool.order.on_gap_ended("stranger")
        pool.order.on_forecast_lost("stranger")
        assert not pool.order.on_extended("stranger", pool.now)
        pool.order.on_job_ended("stranger")
        pool.order.on_job_ended("stranger", [A, B])
        assert pool.pages() == [A]

    def test_a_page_is_told_of_its_job_or_of_none(self, pool: Pool) -> None:
        pool.save(A, B, C)
        assert pool.order.waiting_job(A) is None
        pool.wait("first", [A, B], Evenly(10.0))
        pool.now += 1
        pool.wait("second", [A, C], Evenly(10.0))
        told = [pool.order.waiting_job(key) for key in (A, B, C, D)]
        assert told in (["second", "first", "second", None], [None] * 4)
        pool.index.forget(A)
        assert pool.order.waiting_job(A) == told[0], "the job of an evicted page is still known"
        pool.order.on_job_ended("second")
        assert pool.order.waiting_job(A) == told[1], "the first job still waits"
        assert pool.order.waiting_job(C) is None

    def test_pages_are_private_to_the_jobs_that_have_them_or_to_all(self, pool: Pool) -> None:
        pool.save(A, B, C)
        pool.wait("first", [A, B], Evenly(10.0))
        pool.wait("second", [A, C], Evenly(10.0))
        private = pool.order.private([A, B, C, D], lambda job: job == "first")
        assert private in ([B, D], [A, B, C, D])
        pool.order.on_job_ended("second")
        assert pool.order.private([C, A], lambda job: job == "first") == [C, A]

    @pytest.mark.parametrize("forecast", [Evenly(0.0), Evenly(1e-3), Evenly(10.0), Evenly(1e9)])
    @pytest.mark.parametrize("keys", [[], [A], [A, B, C], [B, D]])
    def test_a_job_may_wait_for_any_pages_for_any_time(
        self, pool: Pool, keys: list[PageKey], forecast: Evenly
    ) -> None:
        pool.save(A, B, C)
        pool.wait("job", keys, forecast)
        for later_s in (0.0, 0.5, 30.0, 1e6):
            pool.now += later_s
            assert sorted(pool.pages()) == [A, B, C]
        pool.order.on_gap_ended("job")
        pool.wait("job", list(reversed(keys)), forecast)
        pool.order.on_job_ended("job", keys)
        assert sorted(pool.pages()) == [A, B, C]

    def test_pages_are_superseded_by_a_second_turn_that_leaves_them_out(self, pool: Pool) -> None:
        pool.save(A, B, C)
        pool.wait("job", [A, B], Evenly(10.0))
        pool.now += 1
        pool.wait("job", [A, C], Evenly(10.0))
        assert not pool.order.superseded(B), "the job may go back"
        found = pool.order.on_extended("job", pool.now)
        assert list(found) in ([], [B])
        assert pool.order.superseded(B) is bool(found)
        assert sorted(pool.pages()) == [A, B, C], "they are evicted first, but not deleted"
        assert not found or pool.pages()[0] == B
        assert not pool.order.on_extended("job", pool.now), "once"
        pool.index.touch([B])
        assert not pool.order.superseded(B), "it was of use after all"

    @pytest.mark.parametrize("within_s", [0.0, 1.0, 1e6, math.inf])
    def test_a_chance_is_a_probability(self, pool: Pool, within_s: float) -> None:
        pool.save(A, B)
        pool.wait("job", [A, C], Evenly(10.0))
        pool.now += 5.0
        for key in PAGES:
            assert 0.0 <= pool.order.return_chance(key, within_s) <= 1.0

    def test_pages_may_be_ranked_whenever_the_index_likes(self, pool: Pool) -> None:
        pool.save(A, B, C)
        pool.wait("job", [A, B], Evenly(10.0))
        for stay_s in (0.0, 60.0, math.inf):
            pool.order.rank(pool.now, stay_s)
            assert sorted(pool.order) == [A, B, C]

    # -- all of it --------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(20))
    def test_whatever_happens_every_page_is_there_once_and_the_same_again(self, seed: int) -> None:
        one, other = self._play(seed), self._play(seed)
        assert one == other, "the order depends on more than its calls"

    def _play(self, seed: int) -> list[list[PageKey]]:
        """Run a random script. Returns the eviction order after each step."""
        rng = random.Random(seed)
        pool = Pool(self.rule, rng.choice([4, 20, 100]))
        index, order = pool.index, pool.order
        orders = []
        for _ in range(200):
            what, job, context = rng.random(), f"job{rng.randrange(5)}", _context(rng)
            if what < 0.4:
                fresh = [key for key in context if index.state(key) is PageState.MISSING]
                slots = index.reserve_all(fresh)
                index.commit_all(fresh[: len(slots)], slots)
            elif what < 0.5:
                index.touch(context)
            elif what < 0.55:
                index.forget(rng.choice(context))
            elif what < 0.75:
                pool.wait(job, context, Evenly(rng.choice([0.0, 5.0, 600.0])))
            elif what < 0.85:
                order.on_gap_ended(job)
            elif what < 0.9:
                gone = order.on_extended(job, pool.now - rng.choice([0.0, 1.0, 5.0]))
                assert len(gone) == len(set(gone)), "a page twice"
            elif what < 0.96:
                order.on_job_ended(job, context)
            else:
                order.on_forecast_lost(job)
            pool.now += rng.choice([0.0, 0.1, 2.0])
            there = pool.pages()
            assert len(there) == len(set(there)), "a page twice"
            index.check_integrity()
            orders.append(there)
        index.clear()
        assert pool.pages() == []
        return orders


def _context(rng: random.Random) -> list[PageKey]:
    """Return the page keys of a random prefix of one of a few texts. A key stands for its page and
    all pages before it.
    """
    text = rng.choice(["x", "xy", "xyz"])
    return [PageKey(f"{text[:n]}{n}".encode()) for n in range(1, rng.randrange(2, 10))]
