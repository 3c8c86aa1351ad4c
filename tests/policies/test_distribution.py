"""A forecast is a distribution over the grid, and its methods are consistent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.distribution import CELL_LOG_S, CELLS, GRID, Forecast, cell_of

masses = st.lists(st.floats(0, 1), min_size=CELLS, max_size=CELLS).filter(lambda m: sum(m) > 0.01)
forecasts = masses.map(lambda m: Forecast.of_masses(np.array(m) / sum(m)))
times = st.floats(0, 20_000)


def at(gap_s: float) -> Forecast:
    """Return the forecast of a gap of known length."""
    made = np.zeros(CELLS)
    made[cell_of(gap_s)] = 1.0
    return Forecast.of_masses(made)


def test_the_grid_covers_milliseconds_to_hours_in_small_steps() -> None:
    assert GRID[0] <= 0.05
    assert GRID[-1] >= 2 * 3600
    assert (np.diff(GRID) > 0).all()
    assert (GRID[1:] / GRID[:-1]).max() <= 1.5


@pytest.mark.parametrize("round_s", [0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 3600])
def test_round_waits_of_programs_are_points_of_the_grid(round_s: float) -> None:
    """Durations for which programs often wait are grid points. A time to live that ends just before
    ``sleep 30`` does would be wasted."""
    assert round_s in GRID.tolist()


def test_a_cell_holds_its_end() -> None:
    assert cell_of(0) == 0
    assert cell_of(float(GRID[7])) == 7
    assert cell_of(float(GRID[7]) * 1.0001) == 8
    assert cell_of(math.inf) == CELLS - 1
    assert all(cell_of(math.exp(log_s)) == cell for cell, log_s in enumerate(CELL_LOG_S.tolist()))


@given(forecasts, times, times)
def test_more_time_is_never_less_likely(forecast: Forecast, one: float, other: float) -> None:
    low, high = sorted([one, other])
    assert 0 <= forecast.within(low) <= forecast.within(high) <= 1 + 1e-12
    assert forecast.held(low) <= forecast.held(high) + 1e-9
    assert forecast.held(high) <= high + 1e-9, "the expected time is within the limit"


@given(forecasts)
def test_values_at_grid_points_equal_the_arrays(
    forecast: Forecast,
) -> None:
    assert [forecast.within(t) for t in GRID] == pytest.approx(forecast.cdf.tolist())
    assert [forecast.held(t) for t in GRID] == pytest.approx(forecast.held_s.tolist())
    assert Forecast.of_masses(forecast.masses).cdf == pytest.approx(forecast.cdf)


@given(forecasts, st.floats(0.1, 9_000))
def test_held_is_the_area_above_the_distribution(forecast: Forecast, t: float) -> None:
    lattice = np.concatenate([np.linspace(0, t, 1001), GRID[t > GRID]])
    lattice.sort()
    later = np.array([1 - forecast.within(s) for s in lattice])
    area = ((later[1:] + later[:-1]) / 2 * np.diff(lattice)).sum()
    assert forecast.held(t) == pytest.approx(area, rel=1e-6, abs=1e-9)


@given(forecasts, st.floats(0.01, 0.99))
def test_a_quantile_is_as_near_as_the_grid_allows(forecast: Forecast, q: float) -> None:
    found = forecast.quantile(q)
    if math.isinf(found):
        assert forecast.cdf[-1] < q
    else:
        others = np.abs(np.concatenate([[0.0], forecast.cdf]) - q)
        assert abs(forecast.within(found) - q) <= others.min() + 1e-9


def test_a_known_gap() -> None:
    forecast = at(30)
    assert forecast.within(29) == pytest.approx(0.5)  # linear between 28 and 30
    assert (forecast.within(28), forecast.within(30)) == (0.0, 1.0)
    assert forecast.held(1000) == pytest.approx(29)
    assert forecast.quantile(0.9) == 30


def test_time_that_passed_is_ruled_out_and_the_rest_becomes_likelier() -> None:
    cdf = np.interp(GRID, [0, 10, 90], [0, 0.5, 0.75])
    later = Forecast(cdf).after(10)
    assert later.within(10) == 0
    assert later.within(90) == pytest.approx(0.5)
    assert later.quantile(0.9) == math.inf


@given(forecasts, times, times, times)
def test_waiting_twice_is_waiting_longer(
    forecast: Forecast, first: float, second: float, t: float
) -> None:
    low, high = sorted(
        [float(GRID[cell_of(s) - 1]) if s > GRID[0] else 0.0 for s in (first, second)]
    )
    if forecast.within(high) < 1 - 1e-6:
        twice = forecast.after(low).after(high)
        assert twice.within(t) == pytest.approx(forecast.after(high).within(t), abs=1e-6)


def test_a_gap_beyond_its_forecast_may_never_end() -> None:
    assert at(5).after(60) == Forecast(np.zeros(len(GRID)))


def test_bounds_that_a_command_sets_itself() -> None:
    forecast = Forecast(np.interp(GRID, [0, 100], [0, 1]))
    assert forecast.between(0, math.inf) is forecast
    slept = forecast.between(30, 30)
    assert (slept.within(30), slept.within(32)) == (0, 1)
    stopped = forecast.between(0, 60)
    assert stopped.within(40) == pytest.approx(forecast.within(40))
    assert stopped.within(75) == 1
    assert forecast.between(100_000, math.inf).cdf[-1] == 0


def test_equal_forecasts_are_equal_and_cannot_be_changed() -> None:
    one, other = at(3), at(3)
    assert one == other
    assert hash(one) == hash(other)
    assert one != at(4)
    assert one != 3
    with pytest.raises(ValueError, match="read-only"):
        one.cdf[0] = 1


def test_a_scaled_forecast_gives_up_on_a_gap_that_outlasts_it() -> None:
    forecast = Forecast(np.where(GRID < 10, 0.0, np.where(GRID < 1000, 0.9, 1.0)))
    scaled = forecast.scaled(0.8)
    assert scaled.within(100) == pytest.approx(0.8 * forecast.within(100))
    for one, chance in ((forecast, 1.0), (scaled, 0.08 / 0.28)):
        later = one.within(10_000) - one.within(100)
        assert later / (1 - one.within(100)) == pytest.approx(chance)
