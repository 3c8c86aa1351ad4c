"""The best duration of a pin, and its worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.turn_ends import forecast_of
from tiered_kv.policies.base import Costs, GapClass
from tiered_kv.policies.distribution import CELLS, GRID, Forecast, cell_of
from tiered_kv.policies.pricing.pin_ttl import (
    WORTHWHILE,
    best_wait,
    gap_class,
    held_up,
    saved_per_second,
    utility,
)

masses = st.lists(st.floats(0, 1), min_size=CELLS, max_size=CELLS).filter(lambda m: sum(m) > 0.01)
forecasts = masses.map(lambda m: Forecast.of_masses(np.array(m) / sum(m)))
benefits = st.floats(0.5, 60)


@given(forecasts, benefits, st.floats(0, 5))
def test_utility_is_what_a_pin_saves_less_what_it_holds(
    forecast: Forecast, benefit_s: float, price: float
) -> None:
    gains = utility(forecast, benefit_s, price)
    for t, gain in zip(GRID[:60:7].tolist(), gains[:60:7].tolist(), strict=True):
        if t <= benefit_s or price >= 1:
            held = forecast.held(t)
            assert gain == pytest.approx(forecast.within(t) * benefit_s - price * held, abs=1e-6)


@given(forecasts, benefits, st.floats(0, 5))
def test_no_other_wait_is_better(forecast: Forecast, benefit_s: float, price: float) -> None:
    wait_s = best_wait(forecast, benefit_s, price)
    gains = utility(forecast, benefit_s, price)
    if wait_s == 0:
        assert gains.max() <= WORTHWHILE * benefit_s
    else:
        assert float(gains[cell_of(wait_s)]) == gains.max() > 0


@given(forecasts, benefits, st.floats(1, 5), st.floats(1, 5))
def test_a_higher_vram_price_shortens_the_wait(
    forecast: Forecast, benefit_s: float, one: float, other: float
) -> None:
    cheap, dear = sorted([one, other])
    assert best_wait(forecast, benefit_s, dear) <= best_wait(forecast, benefit_s, cheap)


def test_a_pin_is_charged_for_the_time_it_is_held_not_for_its_deadline() -> None:
    """Half of the gaps last 1 s, and half 19 s. A pin for 19 s is held for 10 s on average, and is
    charged for that. Continuum would charge it for all 19 s, and would pin for only 1 s."""
    forecast = forecast_of({1.0: 0.5, 19.0: 0.5})
    assert best_wait(forecast, 20.0, 1.0) == pytest.approx(19, abs=1)
    assert utility(forecast, 20.0, 1.0).max() == pytest.approx(20 - 10, abs=0.5)


def test_no_wait_lasts_through_a_lull_that_costs_more_than_it_saves() -> None:
    forecast = forecast_of({1.0: 0.6, 300.0: 0.4})
    assert best_wait(forecast, 10.0, 1.0) <= 1.25
    assert best_wait(forecast_of({300.0: 1.0}), 10.0, 1.0) == 0
    assert best_wait(forecast_of({}), 10.0, 1.0) == 0, "it never comes"


def test_unused_space_is_free_but_not_forever() -> None:
    forecast = forecast_of({5.0: 0.5, 3000.0: 0.5})
    assert best_wait(forecast, 20.0, 1.0) == pytest.approx(5, abs=0.5)
    assert best_wait(forecast_of({15.0: 0.1}), 20.0, 1.0) == 0
    assert best_wait(forecast_of({15.0: 0.1}), 20.0, 0.0) == pytest.approx(15, abs=1)
    assert best_wait(forecast, 20.0, 0.0) < 3000, "beyond B, another job needs the space"


def test_an_insignificant_gain_counts_as_none() -> None:
    assert best_wait(forecast_of({0.06: 0.015}), 20.0, 0.0) == 0
    assert best_wait(forecast_of({0.06: 0.03}), 20.0, 0.0) > 0


@pytest.mark.parametrize("benefit_s", [0.0, -0.5, -1.0])
def test_without_savings_there_is_no_wait(benefit_s: float) -> None:
    assert best_wait(forecast_of({1.0: 1.0}), benefit_s, 1.0) == 0
    assert best_wait(forecast_of({1.0: 1.0}), benefit_s, 0.0) == 0


@pytest.mark.parametrize(
    ("wait_s", "kind"),
    [
        (0.0, GapClass.SLOW),
        (3.0, GapClass.UNCERTAIN),
        (10.0, GapClass.FAST),
        (12.0, GapClass.FAST),
    ],
)
def test_the_class_of_a_gap_depends_on_what_a_restore_costs(wait_s: float, kind: GapClass) -> None:
    assert gap_class(wait_s, 10.0) is kind


def test_a_pin_earns_what_it_saves_over_the_time_that_it_is_held() -> None:
    costs = Costs(recompute_s=6.0, held_up=4.0)
    soon = forecast_of({1.0: 1.0})
    assert saved_per_second(soon, costs, 60.0) == pytest.approx(4 * 6.0 / soon.held(60.0))
    never = Forecast(np.zeros(len(GRID)))
    assert saved_per_second(never, costs, 60.0) == 0


def test_a_pin_earns_nothing_by_letting_its_job_overtake_others() -> None:
    """A pin saves its own job ten seconds in the queue, but other jobs then queue ten seconds
    longer. So only the copy or recomputation that the pin avoids counts."""
    soon = forecast_of({1.0: 1.0})
    copied = Costs(recompute_s=6.0, cpu_s=0.5, queue_s=10.0)
    assert saved_per_second(soon, copied, 60.0) == pytest.approx(0.5 / soon.held(60.0))
    # Four others run while the context is recomputed, and none while the job queues: (10 + 5 * 6) /
    # (10 + 6).
    computed = Costs(recompute_s=6.0, queue_s=10.0, held_up=40 / 16)
    assert saved_per_second(soon, computed, 60.0) == pytest.approx(5 * 6.0 / soon.held(60.0))


@pytest.mark.parametrize(
    ("copy_s", "survival", "wait_s", "expected"),
    [
        (0.5, 1.0, 5.0, 1.0),  # the whole context is copied
        (0.5, 0.0, 0.0, 8.0),  # the whole context is recomputed
        (0.0, 0.5, 5.0, (5 + 8 * 5) / 10),
        (20.0, 1.0, 0.0, 8.0),  # copying takes longer than recomputing
    ],
)
def test_recomputing_delays_all_running_requests(
    copy_s: float, survival: float, wait_s: float, expected: float
) -> None:
    found = held_up(copy_s, 10.0, wait_s=wait_s, survival=survival, running=8)
    assert found == pytest.approx(expected)


@given(st.floats(0, 60), st.floats(1e-3, 60), benefits, st.floats(0, 1), st.integers(0, 100))
def test_a_restore_delays_at_least_its_own_job_and_at_most_all_running(
    copy_s: float, recompute_s: float, wait_s: float, survival: float, running: int
) -> None:
    found = held_up(copy_s, recompute_s, wait_s=wait_s, survival=survival, running=running)
    assert 0.999 < found < max(1, running) * 1.001


def test_if_nothing_takes_time_no_request_is_delayed() -> None:
    assert held_up(0.0, 0.0, wait_s=0.0, survival=1.0, running=8) == 0
