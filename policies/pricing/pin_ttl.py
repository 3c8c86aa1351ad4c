"""Value of a pin over time, U(τ), and the class of a gap.

    U(τ) = P(X <= τ) B - λ E[min(X, τ)]

X is the gap, B the time that a pin saves if the job returns to it, and λ the price of a second in
VRAM (``Costs.benefit_s`` and ``Costs.vram_price``). A pin is charged for the time that it is
actually held. With λ = 1, U rises while the hazard rate of the job's return is at least 1/B.
Continuum (arXiv 2511.02230) charges the whole τ instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import Costs, GapClass
from tiered_kv.policies.distribution import GRID, Forecast

from .estimators import SHORTEST_S

Array = NDArray[np.float64]

WORTHWHILE = 0.02
"""Minimum gain of a pin, as a fraction of B. No forecast is accurate to the last percent."""
LATER_PRICE, LATER_S = 1.0, 60.0
"""``LATER_PRICE``: minimum λ for the part of a pin after ``LATER_S`` seconds (or after B, if
longer), because a low price does not last."""


def utility(forecast: Forecast, benefit_s: float, vram_price: float) -> Array:
    """Return U at every grid point, seconds. Shape (points,).

    Args:
        benefit_s: B, time that a pin saves if the job returns to it, seconds.
        vram_price: λ, seconds charged per second in VRAM.
    """
    held_s = forecast.held_s
    gains: Array = forecast.cdf * benefit_s
    gains -= vram_price * held_s
    if vram_price < LATER_PRICE:
        later = held_s - forecast.held(max(benefit_s, LATER_S))
        gains -= (LATER_PRICE - vram_price) * np.maximum(later, 0.0)
    return gains


def best_wait(forecast: Forecast, benefit_s: float, vram_price: float) -> float:
    """Return τ*, the shortest time at which U is highest, seconds; 0 if no wait pays off."""
    if benefit_s <= 0:
        return 0.0
    gains = utility(forecast, benefit_s, vram_price)
    best = int(gains.argmax())
    return float(GRID[best]) if gains[best] > WORTHWHILE * benefit_s else 0.0


def saved_s(forecast: Forecast, benefit_s: float, wait_s: float) -> float:
    """Return P(X <= τ) B, the time that a pin until τ is expected to save, seconds. ``wait_s`` is
    τ, and ``benefit_s`` is B."""
    return benefit_s * forecast.within(wait_s)


def saved_per_second(forecast: Forecast, costs: Costs, wait_s: float) -> float:
    """Return the mean time that a pin until τ (``wait_s``) saves, summed over all requests, in
    seconds per second held: the restore of its own job, and the delay of other requests while the
    context is recomputed."""
    saved = saved_s(forecast, costs.work_s, wait_s)
    return saved / max(forecast.held(wait_s), SHORTEST_S)


def held_up(
    copy_s: float, recompute_s: float, *, wait_s: float, survival: float, running: int
) -> float:
    """Return the effective number of requests that lose B without a pin: the time that all requests
    lose together, divided by the time that the job's own request loses.

    Recomputing KV also delays every other request of the batch. Waiting and copying delay only the
    job's own request.

    Args:
        copy_s: time to restore the context from CPU memory, seconds.
        recompute_s: time to recompute it, seconds.
        wait_s: T η, admission wait that a pin saves, seconds.
        survival: fraction of the KV outside VRAM that still exists when it is needed.
        running: number of running requests.
    """
    copied = survival if copy_s <= recompute_s else 0.0
    alone_s = wait_s + copied * copy_s
    computed_s = (1 - copied) * recompute_s
    return (alone_s + max(1, running) * computed_s) / max(alone_s + computed_s, SHORTEST_S)


def gap_class(best_wait_s: float, benefit_s: float) -> GapClass:
    """Return the class of a gap: SLOW if no pin pays off, FAST if a pin pays off for at least
    ``benefit_s`` seconds, otherwise UNCERTAIN."""
    if best_wait_s <= 0:
        return GapClass.SLOW
    return GapClass.FAST if best_wait_s >= benefit_s else GapClass.UNCERTAIN
