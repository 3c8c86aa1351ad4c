"""A job needs its whole context while it runs, and less the longer it is away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.admission.working_set import (
    JobDemand,
    TurnPace,
    away_demand,
    mean_context,
    running_demand,
)
from tiered_kv.policies.jobs.silence import SOON_S

times = st.lists(st.floats(0, 1e4))


def away(*, left: float = 3.0) -> JobDemand:
    return away_demand(10.0, 2.0, left, 4.0, chance=0.5, weight=0.125)


def test_a_job_that_runs_needs_all_of_its_context() -> None:
    assert running_demand(10.0, 2.0, 3.0, 4.0) == JobDemand(
        10.0, 2.0, 3.0, weight=1.0, chance=1.0, shared=4.0
    )


def test_a_job_that_is_away_is_counted_as_it_comes_back() -> None:
    assert away() == JobDemand(12.0, 2.0, 2.0, weight=0.125, chance=0.5, shared=4.0)
    assert away(left=0.0).left == 0.0, "perhaps it does not"


def test_before_the_first_turn_ended_jobs_are_taken_to_need_vram_all_the_time() -> None:
    assert TurnPace().vram_share(100.0) == 1.0


def test_a_job_needs_vram_for_its_turns() -> None:
    pace = TurnPace()
    pace.on_turn(2.0, served_s=1.5)
    pace.on_gap(6.0)
    assert pace.vram_share(0.0) == 0.25
    assert pace.vram_share(18.0) == pytest.approx(0.1), "it has been away for longer than most"


def test_a_turn_returns_after_it_was_served_and_its_gap_has_passed() -> None:
    pace = TurnPace()
    pace.on_turn(10.0, served_s=2.0)
    pace.on_gap(6.0)
    assert pace.cycle_s == 8.0, "its wait for blocks is no part of that"


def test_the_mean_context_lies_between_the_first_and_the_last() -> None:
    assert mean_context(JobDemand(10.0, 2.0, 4.0)) == 14.0


def test_jobs_that_one_client_leaves_open_do_not_lengthen_gaps() -> None:
    pace = TurnPace()
    for _ in range(100):
        pace.on_gap(1e6)
    assert pace.gap_s == pytest.approx(SOON_S)


@given(
    st.lists(st.floats(0, 1e4)), st.lists(st.floats(0, 1e4)), st.floats(0, 1e6), st.floats(0, 1e6)
)
def test_a_job_needs_vram_the_less_the_longer_it_is_away(
    turns: list[float], gaps: list[float], away_s: float, more_s: float
) -> None:
    pace = TurnPace()
    for seconds in turns:
        pace.on_turn(seconds, seconds)
    for seconds in gaps:
        pace.on_gap(seconds)
    assert 0 <= pace.vram_share(away_s + more_s) <= pace.vram_share(away_s) <= 1
