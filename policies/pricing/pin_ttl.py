"""Value of a pin over time, U(τ), and the class of a gap.

    U(τ) = P(X <= τ) B - λ E[min(X, τ)]

A pin is charged for the time that it is really held. With λ = 1, U rises while the hazard of the
job's return is at least 1/B. Continuum (arXiv 2511.02230) charges the whole τ instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import Costs, GapClass
from tiered_kv.policies.distribution import GRID, Forecast

from .estimators import SHORTEST_S

Array = NDArray[np.float64]

WORTHWHILE = 0.02
"""Share of B that a pin must be expected to gain. No forecast is exact to its last percents."""
LATER_PRICE, LATER_S = 1.0, 60.0
"""λ after a wait of a minute (or of B, if longer) where it is lower now: a low price does not
last."""


def utility(forecast: Forecast, benefit_s: float, vram_price: float) -> Array:
    """U in seconds at every point of the grid. Shape (points,).

    Args:
        benefit_s: B, what a pin saves if the job returns to it.
        vram_price: λ, seconds charged for a second in VRAM.
    """
    held_s = forecast.held_s
    gains: Array = forecast.cdf * benefit_s
    gains -= vram_price * held_s
    if vram_price < LATER_PRICE:
        later = held_s - forecast.held(max(benefit_s, LATER_S))
        gains -= (LATER_PRICE - vram_price) * np.maximum(later, 0.0)
    return gains


def best_wait(forecast: Forecast, benefit_s: float, vram_price: float) -> float:
    """Return τ*, the shortest time at which U is highest, in seconds; 0 if no wait pays."""
    if benefit_s <= 0:
        return 0.0
    gains = utility(forecast, benefit_s, vram_price)
    best = int(gains.argmax())
    return float(GRID[best]) if gains[best] > WORTHWHILE * benefit_s else 0.0


def saved_s(forecast: Forecast, benefit_s: float, wait_s: float) -> float:
    """P(X <= τ) B: seconds that a pin until τ is expected to save."""
    return benefit_s * forecast.within(wait_s)


def saved_per_second(forecast: Forecast, costs: Costs, wait_s: float) -> float:
    """Mean seconds of requests that a pin until τ saves per second held: its own job's restore,
    and the delay of others while that is computed."""
    saved = saved_s(forecast, costs.work_s, wait_s)
    return saved / max(forecast.held(wait_s), SHORTEST_S)


def held_up(
    copy_s: float, recompute_s: float, *, wait_s: float, survival: float, running: int
) -> float:
    """Requests that lose B without a pin, the job's own included.

    KV that is computed again holds up every other request of the batch as well; waiting and copies
    hold up none.

    Args:
        copy_s: time to copy the context back from CPU memory, seconds.
        recompute_s: time to compute it again, seconds.
        wait_s: T η, wait for admission that a pin saves, seconds.
        survival: share of the KV outside VRAM that is still there when it is needed.
        running: running requests.
    """
    copied = survival if copy_s <= recompute_s else 0.0
    alone_s = wait_s + copied * copy_s
    computed_s = (1 - copied) * recompute_s
    return (alone_s + max(1, running) * computed_s) / max(alone_s + computed_s, SHORTEST_S)


def gap_class(best_wait_s: float, benefit_s: float) -> GapClass:
    """SLOW if no wait pays, FAST if waiting for all of B pays, else UNCERTAIN."""
    if best_wait_s <= 0:
        return GapClass.SLOW
    return GapClass.FAST if best_wait_s >= benefit_s else GapClass.UNCERTAIN
