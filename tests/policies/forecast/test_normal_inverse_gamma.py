"""Conjugate updates add up, and the Student-t distribution matches its closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.forecast.normal_inverse_gamma import NormalInverseGamma, student_t_cdf

Z = np.linspace(-40, 40, 4001)
EXACT = {
    1: 0.5 + np.arctan(Z) / math.pi,
    2: 0.5 + Z / (2 * np.sqrt(2 + Z**2)),
    4: 0.5 + 3 / 8 * Z / np.sqrt(1 + Z**2 / 4) * (1 - Z**2 / (1 + Z**2 / 4) / 12),
    1e9: np.array([0.5 + math.erf(z / math.sqrt(2)) / 2 for z in Z]),
}


@pytest.mark.parametrize("df", EXACT)
def test_student_t_where_it_has_a_closed_form(df: float) -> None:
    assert np.abs(student_t_cdf(Z, df) - EXACT[df]).max() < 1e-4


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_more_degrees_of_freedom_are_lighter_tails(one: float, other: float) -> None:
    fewer, more = sorted([one, other])
    tail = np.array([-3.0])
    assert student_t_cdf(tail, fewer)[0] >= student_t_cdf(tail, more)[0] - 1e-4


observations = st.lists(st.floats(-5, 10), min_size=1, max_size=20)


def updated(belief: NormalInverseGamma, logs: list[float]) -> NormalInverseGamma:
    mean = float(np.mean(logs))
    return belief.updated(len(logs), mean, float(((np.array(logs) - mean) ** 2).sum()))


@given(observations, observations)
def test_observations_may_be_learned_in_any_number_of_parts(
    first: list[float], then: list[float]
) -> None:
    prior = NormalInverseGamma(0.0, 1.0, 1.0, 1.0)
    at_once, in_two = updated(prior, first + then), updated(updated(prior, first), then)
    assert at_once.mu == pytest.approx(in_two.mu)
    assert (at_once.lam, at_once.alpha) == (in_two.lam, in_two.alpha)
    assert at_once.beta == pytest.approx(in_two.beta)


def test_enough_observations_are_believed() -> None:
    logs = np.random.default_rng(0).normal(2.0, 0.5, 5000).tolist()
    belief = updated(NormalInverseGamma(0.0, 1.0, 1.0, 1.0), logs)
    assert belief.mu == pytest.approx(2.0, abs=0.03)
    at = np.array([2.0 - 0.5, 2.0, 2.0 + 0.5])
    assert belief.cdf(at) == pytest.approx([0.1587, 0.5, 0.8413], abs=0.01)


def test_weakened_beliefs_keep_their_mean_but_change_faster() -> None:
    firm = updated(NormalInverseGamma(0.0, 1.0, 1.0, 1.0), [2.0, 2.5] * 50)
    loose = firm.capped(4)
    assert loose.mu == firm.mu
    assert loose.beta / loose.alpha == pytest.approx(firm.beta / firm.alpha)
    assert updated(loose, [5.0] * 4).mu > updated(firm, [5.0] * 4).mu + 1
    assert NormalInverseGamma(0.0, 1.0, 1.0, 1.0).capped(4) == NormalInverseGamma(
        0.0, 1.0, 1.0, 1.0
    ), "never more firmly"
