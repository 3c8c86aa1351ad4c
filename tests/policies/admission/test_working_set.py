"""The projected demand of active jobs, and the fraction of the pool that may be committed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.policies.admission.working_set import (
    JOBS,
    LEARN_EVERY_S,
    LEAST,
    MOMENTS,
    MOST,
    Demand,
    Growth,
    JobDemand,
    JobLengths,
    Overcommit,
    TurnCadence,
)

amounts = st.floats(0, 1000)
demands = st.tuples(amounts, amounts, st.integers(0, 50).map(float)).map(
    lambda one: JobDemand(*one)
)


def test_jobs_of_one_age_peak_together_and_others_in_turn() -> None:
    grown = JobDemand(blocks=10, grows=5, left=4)
    assert Demand([grown]).peak() == 30
    assert Demand([grown, grown]).peak() == 60
    ends_soon = JobDemand(blocks=30, grows=5, left=0)
    assert Demand([grown, ends_soon]).peak() == 40, "when the one is at its end the other is gone"


@given(st.lists(demands, max_size=12))
def test_the_peak_is_that_of_all_moments(found: list[JobDemand]) -> None:
    moments = [0.0, *(share.left for share in found)]
    wanted = max(sum(one.blocks + one.grows * t for one in found if one.left >= t) for t in moments)
    assert Demand(found).peak() == pytest.approx(wanted)


def test_jobs_that_differ_in_pace_meet_at_their_largest() -> None:
    ahead, behind = JobDemand(10, 10, 4), JobDemand(10, 10, 5)
    assert Demand([ahead, behind]).peak() == 100
    assert Demand([ahead, behind], spread=0.5).peak() == 110, (
        "the one may stay until the other ends"
    )


def test_only_some_of_many_moments_are_evaluated() -> None:
    jobs = [JobDemand(10, 1, left) for left in range(1, 500)]
    assert Demand(jobs).peak() == pytest.approx(
        max(sum(10 + t for one in jobs if one.left >= t) for t in range(500)), rel=0.02
    )


def test_pace_is_derived_from_differences_between_turns() -> None:
    pace = TurnCadence()
    assert pace.spread == 0
    for _ in range(200):
        pace.observe(2.0)
    assert pace.spread == pytest.approx(0, abs=1e-6)
    for n in range(400):
        pace.observe(1.0 if n % 2 else 3.0)
    assert pace.spread == pytest.approx(0.5, rel=0.05)


@given(st.lists(demands, max_size=8), demands)
def test_another_job_never_lowers_the_peak(found: list[JobDemand], more: JobDemand) -> None:
    both = Demand([*found, more])
    assert both.peak() >= Demand(found).peak() * (1 - 1e-9)
    again = Demand([*found, more._replace(blocks=0.0, grows=0.0)])
    assert again.peak(more) == pytest.approx(both.peak())


def test_a_job_that_waits_elsewhere_counts_for_the_time_that_it_runs() -> None:
    demand = Demand([JobDemand(100, 0, 3, weight=0.25, chance=0.5, shared=2)])
    assert (demand.peak(), demand.peak(anywhere=True)) == (27, 52)


@given(st.lists(demands, min_size=1, max_size=150), st.data())
@settings(max_examples=30, deadline=None)
def test_changed_jobs_count_as_if_all_jobs_were_counted_again(
    found: list[JobDemand], data: st.DataObject
) -> None:
    """After jobs have changed one by one, the peak is the same as if all were counted again. The
    peak of the first jobs in order is checked too."""
    had = data.draw(st.integers(1, len(found)))
    demand = Demand([share._replace(blocks=7.0) for share in found[:had]])
    for place, share in enumerate(found):
        demand.put(place, share)
        if data.draw(st.booleans()):
            demand.peak()
    for anywhere in (False, True):
        assert demand.peak(anywhere=anywhere) <= demand.most[anywhere] * (1 + 1e-9)
    assert demand.most == pytest.approx(Demand(found).most)
    first = data.draw(st.integers(0, len(found)))
    wanted = Demand(found[:first]).peak()
    assert len(demand) == len(found)
    assert demand.peak(first=first) <= wanted * (1 + 1e-9)
    if had == len(found) < MOMENTS:
        assert demand.peak(first=first) == pytest.approx(wanted)


def test_remaining_turns_are_those_of_jobs_that_reached_this_turn() -> None:
    lengths = JobLengths()
    assert lengths.left(6) == 6, "nothing is known: the same number again"
    for turns in (2, 4, 8, 8):
        lengths.ended(turns)
    assert lengths.left(1) == pytest.approx((2 + 4 + 8 + 8) / 4 - 1)
    assert lengths.left(4) == pytest.approx((4 + 8 + 8) / 3 - 4)
    assert lengths.left(8) == 0
    assert lengths.left(9) == 9


def test_only_the_latest_jobs_count() -> None:
    lengths = JobLengths()
    rng = random.Random(0)
    for _ in range(3 * JOBS):
        lengths.ended(rng.randint(50, 90))
    for _ in range(JOBS):
        lengths.ended(3)
    assert lengths.left(1) == 2


def test_a_job_of_one_turn_counts_and_a_job_without_turns_displaces_none() -> None:
    lengths = JobLengths()
    for turns in (1, 3):
        lengths.ended(turns)
    assert lengths.left(1) == 1
    lengths = JobLengths()
    for turns in (9, *[3] * (JOBS - 1)):
        lengths.ended(turns)
    lengths.ended(0)
    assert lengths.left(4) == 5, "the one of nine is remembered"
    lengths.ended(3)
    assert lengths.left(4) == 4, "and now it is not"


def test_growth_is_that_of_recent_turns() -> None:
    growth = Growth()
    assert growth.mean == 0
    for _ in range(300):
        growth.observe(10)
    for _ in range(300):
        growth.observe(20)
    assert growth.mean == pytest.approx(20, rel=0.01)
    growth.observe(-5)
    assert growth.mean < 20, "a context that was cut has not grown"


def test_the_committed_share_falls_with_losses_and_rises_with_spare_space() -> None:
    overcommit = Overcommit()
    assert overcommit.share == 1
    overcommit.returned(found=0.1, lost=0.02)
    fallen = overcommit.share
    assert fallen == pytest.approx(0.98), "by what was lost of the pool"
    overcommit.spare(0.0)
    assert fallen < overcommit.share < 1
    for _ in range(100):
        overcommit.returned(found=0.1, lost=0.02)
    assert overcommit.share == LEAST
    for second in range(1, 1000):
        overcommit.spare(second * LEARN_EVERY_S)
    assert overcommit.share == MOST > 1


def test_the_share_rises_at_most_once_per_second() -> None:
    often, seldom = Overcommit(), Overcommit()
    for look in range(41):
        often.spare(look * LEARN_EVERY_S / 4)
    for second in range(11):
        seldom.spare(second * LEARN_EVERY_S)
    assert often.share == seldom.share > 1


@pytest.mark.parametrize("context", [0.01, 0.1, 1.0, 3.0])
def test_the_share_recovers_as_contexts_are_found_whole(context: float) -> None:
    """The recovery depends on the fraction of the pool that was found, not on the number of
    contexts. The share never exceeds 1."""
    overcommit = Overcommit()
    overcommit.returned(found=0.0, lost=0.3)
    for _ in range(round(3 / context)):
        overcommit.returned(found=context, lost=0.0)
    assert 0.97 < overcommit.share <= 1


def test_the_share_settles_where_as_much_recovers_as_is_lost() -> None:
    """One context of ten is lost, so the committed share settles about a ninth below 1."""
    overcommit = Overcommit()
    for turn in range(2_000):
        overcommit.returned(*((0.0, 0.01) if turn % 10 == 0 else (0.01, 0.0)))
    assert overcommit.share == pytest.approx(1 - 1 / 9, abs=0.01)
