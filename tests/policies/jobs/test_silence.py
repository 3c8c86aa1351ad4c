"""Most jobs end without notice. The longer a job is silent, the less space is reserved for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.turn_ends import forecast_of
from tiered_kv.policies.distribution import Forecast
from tiered_kv.policies.jobs.silence import ReturnRate, soon_chance

QUICK, HOURS = forecast_of({1.0: 1.0}), forecast_of({10_000.0: 1.0})
NEVER = forecast_of({})


def test_a_job_returns_soon_as_its_tool_does() -> None:
    assert soon_chance(QUICK, 0.0, 1.0) == pytest.approx(1.0)
    assert soon_chance(HOURS, 0.0, 1.0) == pytest.approx(0.0, abs=0.01)
    assert soon_chance(NEVER, 0.0, 1.0) == 0.0


def test_a_job_that_should_have_returned_has_probably_ended() -> None:
    """The job's tool takes a second, and 5% of the client's jobs end without notice. The longer the
    job is away, the less likely its return."""
    chances = [soon_chance(QUICK, away_s, 0.95) for away_s in (0.0, 1.0, 100.0)]
    assert chances[0] == pytest.approx(0.95)
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.05


@given(st.sampled_from([QUICK, HOURS, NEVER]), st.floats(0, 1e5), st.floats(0.01, 1))
def test_a_chance_is_between_0_and_1(forecast: Forecast, away_s: float, goes_on: float) -> None:
    assert 0 <= soon_chance(forecast, away_s, goes_on) <= 1 + 1e-9


def test_the_return_rate_follows_how_a_clients_jobs_end() -> None:
    rate = ReturnRate()
    assert rate.share == 0.95
    for _ in range(300):
        rate.observe(returned=False)
    assert rate.share < 0.01
    for _ in range(300):
        rate.observe(returned=True)
    assert rate.share > 0.99


@given(st.lists(st.booleans()))
def test_no_client_is_ever_certain_to_return(returned: list[bool]) -> None:
    rate = ReturnRate()
    for one in returned:
        rate.observe(returned=one)
    assert 0 < rate.share < 1
