"""Trees learn across jobs what a moment says of the gap, and speak only while they are right."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.turn_ends import gaps_s, turn_end, turn_ends
from tiered_kv.policies.base import TurnEnd
from tiered_kv.policies.forecast import boosting, rank_trees
from tiered_kv.policies.forecast.gap_model import GapModel
from tiered_kv.policies.forecast.job_moments import FEATURES, LAST, UNKNOWN, Moments
from tiered_kv.policies.forecast.rank_trees import RankTrees
from tiered_kv.policies.forecast.ranks import EVEN, KNOTS, ranks_of, tilted

LONG, SHORT = 1000, 50


def day(seed: int, jobs: int, *, long_s: float, short_s: float) -> Iterator[tuple[TurnEnd, float]]:
    """Jobs of three turns: too short to learn anything from their own past."""
    rng = random.Random(seed)
    for number in range(jobs):
        for turn in range(3):
            length = rng.choice((LONG, SHORT))
            median_s = long_s if length == LONG else short_s
            made = turn_end(f"{seed} {number}", turn, output=length + rng.randrange(20))
            yield made, median_s * rng.lognormvariate(0, 0.3)


def taught(jobs: int = 1000) -> GapModel:
    model = GapModel()
    for turn, gap_s in day(0, jobs, long_s=60.0, short_s=3.0):
        model.observe(turn, gap_s, ended=True)
    return model


def median(model: GapModel, output: int) -> float:
    return model.forecast(turn_end("new", output=output)).quantile(0.5)


def test_what_the_length_of_an_answer_means_is_learned_from_other_jobs() -> None:
    model = taught()
    assert median(model, LONG) == median(model, SHORT), "before it has grown trees"
    assert model.refit()
    assert median(model, SHORT) == pytest.approx(3, rel=0.3)
    assert median(model, LONG) == pytest.approx(60, rel=0.3)


def test_a_few_gaps_grow_no_trees() -> None:
    model = taught(jobs=100)
    assert not model.refit()
    assert model.dump()["trees"] is None


def test_trees_are_not_grown_again_from_the_same_gaps() -> None:
    model = taught()
    assert model.refit()
    assert not model.refit()


def test_where_a_moment_says_nothing_trees_stay_few() -> None:
    rng = np.random.default_rng(0)
    bins = rng.integers(0, boosting.BINS, (FEATURES, 4000)).astype(np.uint8)
    targets = rng.dirichlet(EVEN, 4000)
    trees = boosting.grown(bins[:, :3000].copy(), targets[:3000], EVEN, 30)
    losses = boosting.losses(trees, bins[:, 3000:], targets[3000:], EVEN)
    assert losses[0] < losses[-1], "they learned noise"
    assert losses.argmin() < 5


def test_trees_that_became_wrong_are_not_asked_until_new_ones_are_grown() -> None:
    model = taught()
    model.refit()
    for turn, gap_s in day(1, 300, long_s=3.0, short_s=60.0):
        model.observe(turn, gap_s, ended=True)
    assert median(model, LONG) == median(model, SHORT)
    for turn, gap_s in day(2, 3000, long_s=3.0, short_s=60.0):
        model.observe(turn, gap_s, ended=True)
    model.refit()
    assert median(model, LONG) < median(model, SHORT)


def test_after_a_restart_trees_of_many_gaps_are_not_replaced_by_trees_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_trees, "ENOUGH", 200)
    model, again = taught(), GapModel()
    model.refit()
    again.load(json.loads(json.dumps(model.dump())))
    assert median(again, LONG) == median(model, LONG)
    for turn, gap_s in day(3, 100, long_s=60.0, short_s=3.0):
        again.observe(turn, gap_s, ended=True)
    assert not again.refit()
    for turn, gap_s in day(4, 1000, long_s=60.0, short_s=3.0):
        again.observe(turn, gap_s, ended=True)
    assert again.refit()


def test_samples_are_bounded_and_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_trees, "MAX_SAMPLES", 2000)
    model = taught()
    for turn, gap_s in day(1, 700, long_s=3.0, short_s=60.0):
        model.observe(turn, gap_s, ended=True)
    model.refit()
    assert median(model, LONG) < median(model, SHORT), "what was true before is gone"


def spoilt() -> list[Any]:
    model = taught()
    model.refit()
    good: Any = json.loads(json.dumps(model.dump()))["trees"]

    def spoil(key: str, to: object) -> Any:
        made = copy.deepcopy(good)
        made[key] = to
        return made

    asked = np.array(good["features"])
    return [
        3,
        {},
        spoil("splits", [[1.0]]),
        spoil("splits", [["x"] * 4]),
        spoil("features", (asked + FEATURES).tolist()),
        spoil("features", (asked - FEATURES).tolist()),
        spoil("features", asked[:-1].tolist()),
        spoil("leaves", []),
        {key: (good[key] * 200 if key != "samples" else 1) for key in good},
        spoil("samples", -1),
        spoil("samples", [1]),
        {"features": [], "splits": [], "leaves": [], "samples": 1},
    ]


@pytest.mark.parametrize("saved", spoilt())
def test_what_are_no_trees_is_refused(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        RankTrees.loaded(saved)


# -- moments of a job -------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(turn_ends, gaps_s), max_size=12), turn_ends)
def test_features_are_numbers_whatever_the_turns_were(
    past: list[tuple[TurnEnd, float]], turn: TurnEnd
) -> None:
    moments = Moments()
    for told, gap_s in past:
        if 0 <= gap_s < math.inf:
            moments.observe(told, gap_s)
    features = moments.features(turn)
    assert len(features) == FEATURES
    assert np.isfinite(features).all()
    assert features == moments.features(turn), "asking changes nothing"


def test_a_job_s_last_gaps_come_latest_first() -> None:
    moments = Moments()
    assert moments.features(turn_end())[4 : 4 + LAST] == [UNKNOWN] * LAST
    for gap_s in range(1, LAST + 2):
        moments.observe(turn_end(), gap_s)
    last = moments.features(turn_end())[4 : 4 + LAST]
    assert [round(math.exp(x)) for x in last] == list(range(LAST + 1, 1, -1))


# -- tilting ----------------------------------------------------------------------------


@given(
    st.lists(st.floats(1e-9, 1), min_size=2, max_size=40),
    st.lists(st.floats(-30, 30), min_size=len(KNOTS), max_size=len(KNOTS)),
)
def test_a_tilted_forecast_is_what_the_formula_says(
    weights: list[float], heights: list[float]
) -> None:
    masses = np.array(weights) / sum(weights)
    made = tilted(masses, np.array(heights))
    expected = masses * np.exp(np.interp(ranks_of(masses), KNOTS, heights) - max(heights))
    assert made == pytest.approx(expected / expected.sum(), rel=1e-6, abs=1e-12)
    assert made.sum() == pytest.approx(1)
