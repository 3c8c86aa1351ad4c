"""Replay of recorded gaps: what a policy's decisions were worth once the gaps are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import Costs, Decision, Tier, TurnPolicy

from .clairvoyant import Clairvoyant
from .folds import Fold

BENEFITS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
BOOTSTRAPS = 2000

Array = NDArray[np.float64]
Row = dict[str, object]


def utility(decision: Decision, gap_s: float, benefit_s: float) -> float:
    """Value of a decision once the gap is known, seconds."""
    if decision.tier is not Tier.PIN:
        return 0.0
    saved_s = benefit_s if gap_s <= decision.ttl_s else 0.0
    return saved_s - min(gap_s, decision.ttl_s)


def returns_within(decision: Decision, benefit_s: float) -> bool:
    """True if the decision says that X <= B."""
    if decision.forecast is not None:
        return decision.forecast.within(benefit_s) >= 0.5
    return decision.tier is Tier.PIN


@dataclass(slots=True)
class Outcome:
    """One policy at one B, over all tested gaps of a source.

    Attributes:
        utilities: of every gap, seconds.
        best: what the clairvoyant would have had, seconds.
        sessions: the id of the session of every gap, a sub-agent's being its parent's.
    """

    utilities: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    _right: int = 0
    _forecasts: int = 0
    _below50: int = 0
    _below90: int = 0
    _ns: int = 0

    def add(
        self, session: str, decision: Decision, gap_s: float, benefit_s: float, took_ns: int
    ) -> None:
        """Add a decision, and the gap that came."""
        self.utilities.append(utility(decision, gap_s, benefit_s))
        self.best.append(max(0.0, benefit_s - gap_s))
        self.sessions.append(session)
        self._ns += took_ns
        self._right += returns_within(decision, benefit_s) == (gap_s <= benefit_s)
        if decision.forecast is not None:
            self._forecasts += 1
            self._below50 += gap_s <= decision.forecast.quantile(0.5)
            self._below90 += gap_s <= decision.forecast.quantile(0.9)

    def row(self) -> Row:
        """The figures, with a 95% interval over sessions for the share of the clairvoyant's."""
        tested, forecasts = len(self.utilities), self._forecasts
        share, low, high = _ratio(self.utilities, self.best, self.sessions)
        return {
            "utility": float(np.mean(self.utilities)),
            "share": share,
            "low": low,
            "high": high,
            "accuracy": self._right / tested,
            "cover50": self._below50 / forecasts if forecasts else None,
            "cover90": self._below90 / forecasts if forecasts else None,
            "us": self._ns / tested / 1e3,
        }


def replay(make: Callable[[], TurnPolicy], folds: Iterable[Fold]) -> dict[float, Outcome]:
    """Outcomes by B: a new policy learns each fold's other sessions, then is tested.

    Each tested turn is decided, then its gap is told, as a server would hear of it before the job's
    next turn: so it goes on learning. What is learned besides, it learns once, before the tests.
    """
    found = {benefit_s: Outcome() for benefit_s in BENEFITS_S}
    costs = {benefit_s: Costs(recompute_s=benefit_s) for benefit_s in BENEFITS_S}
    for fold in folds:
        policy = make()
        for session in fold.learned:
            for gap in session.gaps:
                policy.observe(gap.turn, gap.gap_s, ended=True)
        for session in fold.tested:
            for gap in session.gaps:
                if isinstance(policy, Clairvoyant):
                    policy.gap_s = gap.gap_s
                for benefit_s, outcome in found.items():
                    begin = time.thread_time_ns()
                    decision = policy.decide(gap.turn, costs[benefit_s])
                    took_ns = time.thread_time_ns() - begin
                    outcome.add(session.split_by, decision, gap.gap_s, benefit_s, took_ns)
                policy.observe(gap.turn, gap.gap_s, ended=True)
    return found


def difference(ours: Outcome, other: Outcome) -> Row:
    """Ours minus theirs, mean utility per gap, and a 95% interval over sessions."""
    differences = np.subtract(ours.utilities, other.utilities)
    mean, low, high = _ratio(differences, np.ones(len(differences)), ours.sessions)
    return {"difference": mean, "low": low, "high": high}


def _ratio(
    above: Sequence[float] | Array, below: Sequence[float] | Array, sessions: Sequence[str]
) -> tuple[float | None, float | None, float | None]:
    """Sum over sum, with a 95% interval from ``BOOTSTRAPS`` samples of the sessions; None if there
    is nothing below the line."""
    number = {name: n for n, name in enumerate(dict.fromkeys(sessions))}
    numbers = [number[name] for name in sessions]
    tops, bottoms = np.bincount(numbers, above), np.bincount(numbers, below)
    if not bottoms.sum():
        return None, None, None
    drawn = np.random.default_rng(0).integers(len(number), size=(BOOTSTRAPS, len(number)))
    sums = bottoms[drawn].sum(axis=1)
    ratios = tops[drawn].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(tops.sum() / bottoms.sum()), float(low), float(high)
