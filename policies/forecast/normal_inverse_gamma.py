"""Normal-Inverse-Gamma posteriors of ln X, and the Student-t distributions that they predict.

The conjugate prior of a normal distribution with unknown mean and variance (K. Murphy, "Conjugate
Bayesian analysis of the Gaussian distribution", 2007, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NormalInverseGamma:
    """Posterior of the mean and variance of ln X.

    Attributes:
        mu: expected mean.
        lam: weight of the mean, in observations.
        alpha: half the weight of the variance, in observations; above 0.5.
        beta: approximately alpha times the expected variance.
    """

    mu: float
    lam: float
    alpha: float
    beta: float

    def updated(self, n: float, mean: float, squares: float) -> NormalInverseGamma:
        """Return the posterior after ``n`` observations with this mean and sum of squared
        deviations from it. ``n`` need not be an integer."""
        lam = self.lam + n
        off = mean - self.mu
        return NormalInverseGamma(
            mu=self.mu + off * n / lam,
            lam=lam,
            alpha=self.alpha + n / 2,
            beta=self.beta + squares / 2 + self.lam * n * off * off / (2 * lam),
        )

    def capped(self, n: float) -> NormalInverseGamma:
        """Return the same posterior with at most the weight of ``n`` observations."""
        alpha = min(self.alpha, n / 2)
        return NormalInverseGamma(self.mu, min(self.lam, n), alpha, self.beta * alpha / self.alpha)

    def cdf(self, log_s: Array) -> Array:
        """Return P(ln X <= ``log_s``) for the next X. ln X has a Student-t distribution with 2
        alpha degrees of freedom, centre mu and scale sqrt(beta (lam + 1) / (alpha lam))."""
        scale = math.sqrt(self.beta * (self.lam + 1) / (self.alpha * self.lam))
        z = log_s - self.mu
        z /= max(scale, 1e-6)
        return student_t_cdf(z, 2 * self.alpha)


_INVERSE_DF = np.linspace(0.0, 1.0, 41)


def _make_table() -> tuple[Array, Array]:
    """Tabulate the CDF at points z for each 1/df of ``_INVERSE_DF`` (0 is the normal distribution).
    The density is integrated by Simpson's rule. Shapes (points,), (1/df, points)."""
    z = np.sinh(np.linspace(0.0, 7.0, 1601))
    middle = (z[1:] + z[:-1]) / 2
    rows = []
    for inverse in _INVERSE_DF.tolist():

        def density(at: Array, inverse: float = inverse) -> Array:
            if inverse == 0:
                return np.exp(-at * at / 2) / math.sqrt(2 * math.pi)
            df = 1 / inverse
            log_factor = math.lgamma((df + 1) / 2) - math.lgamma(df / 2)
            powers = np.exp(log_factor - (df + 1) / 2 * np.log1p(at * at / df))
            return powers / math.sqrt(df * math.pi)

        areas = (density(z[1:]) + 4 * density(middle) + density(z[:-1])) * np.diff(z) / 6
        above = np.concatenate([[0.5], 0.5 + np.cumsum(areas)])[::4]
        rows.append(np.concatenate([1 - above[:0:-1], above]))
    z = z[::4]
    return np.concatenate([-z[:0:-1], z]), np.array(rows)


_Z, _CDF = _make_table()
_STEPS = np.diff(_CDF, axis=0)


def student_t_cdf(z: Array, df: float) -> Array:
    """Return P(T <= z) of Student's t-distribution with ``df`` >= 1 degrees of freedom, with an
    error below 1e-4."""
    row = (len(_INVERSE_DF) - 1) / max(df, 1.0)
    low = min(int(row), len(_INVERSE_DF) - 2)
    curve: Array = _STEPS[low] * (row - low)
    curve += _CDF[low]
    return np.interp(z, _Z, curve)
