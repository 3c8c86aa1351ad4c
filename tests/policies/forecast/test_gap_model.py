"""The gap model combines the gaps of all calls, of each tool, of each command and of each job."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.turn_ends import gaps_s, turn_end, turn_ends
from tiered_kv.policies.base import NO_TOOL, JobKey, Rule, ToolUse, TurnEnd
from tiered_kv.policies.distribution import GRID
from tiered_kv.policies.forecast import gap_model
from tiered_kv.policies.forecast import job_history as history
from tiered_kv.policies.forecast import tool_hierarchy as hierarchy
from tiered_kv.policies.forecast.gap_model import GapModel
from tiered_kv.policies.forecast.ranks import EVEN, KNOTS, at_knots, ranks_of, tilted

PYTEST = ToolUse(("bash", "pytest", "pytest <path>"))
LS = ToolUse(("bash", "ls", "ls <path>"))


def taught(
    gaps: dict[ToolUse | None, float], times: int = 40, spread: float = 0.3, seed: int = 0
) -> GapModel:
    """Return a model that observed each tool ``times`` times, each gap from a different job."""
    model, rng = GapModel(), random.Random(seed)
    for number in range(times):
        for tool, median_s in gaps.items():
            turn = turn_end(f"{tool and tool.path} {number}", tool=tool)
            model.observe(turn, median_s * rng.lognormvariate(0, spread), ended=True)
    return model


def median(model: GapModel, tool: ToolUse | None, job: str = "new", output: int = 100) -> float:
    return model.forecast(turn_end(job, tool=tool, output=output)).quantile(0.5)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_ranks_are_distributed_between_knots_without_loss(pairs: list[tuple[float, float]]) -> None:
    ranks, weights = np.array(pairs).T
    shared = at_knots(ranks, weights)
    assert shared.sum() == pytest.approx(weights.sum())
    assert shared @ KNOTS == pytest.approx(weights @ ranks)
    assert (shared >= 0).all()
    assert EVEN.sum() == pytest.approx(1)


@given(
    st.lists(st.floats(1e-9, 1), min_size=2, max_size=40),
    st.lists(st.floats(-30, 30), min_size=len(KNOTS), max_size=len(KNOTS)),
    st.floats(-30, 30),
)
def test_a_tilt_shifts_odds_by_the_difference_of_heights(
    weights: list[float], heights: list[float], raised: float
) -> None:
    masses = np.array(weights) / sum(weights)
    made = tilted(masses, np.array(heights))
    assert made.sum() == pytest.approx(1)
    assert tilted(masses, np.array(heights) + raised) == pytest.approx(made, rel=1e-6)
    assert tilted(masses, np.full(len(KNOTS), raised)) == pytest.approx(masses)
    s = np.interp(ranks_of(masses), KNOTS, heights)
    likeliest = s.argmax()
    odds = masses / masses[likeliest] * np.exp(s - s[likeliest])
    assert made / made[likeliest] == pytest.approx(odds, rel=1e-6)


def test_each_tool_takes_its_own_time() -> None:
    model = taught({PYTEST: 20.0, LS: 0.2})
    assert median(model, PYTEST) == pytest.approx(20, rel=0.3)
    assert median(model, LS) == pytest.approx(0.2, rel=0.3)


def test_an_unknown_command_takes_what_the_subcommand_took() -> None:
    model = taught({PYTEST: 20.0, LS: 0.2})
    assert median(model, ToolUse(("bash", "pytest", "pytest -k <word>"))) == pytest.approx(
        20, rel=0.4
    )


def test_an_unknown_subcommand_is_forecast_like_its_tool_but_less_certainly() -> None:
    model = taught({PYTEST: 20.0, LS: 0.2, ToolUse(("Read",)): 0.01})
    forecast = model.forecast(turn_end(tool=ToolUse(("bash", "awk", "awk"))))
    assert forecast.quantile(0.1) < 1 < forecast.quantile(0.9)


def test_a_tool_call_that_is_not_read_yet_is_forecast_like_all_tools() -> None:
    model = taught({PYTEST: 20.0, LS: 0.2})
    forecast = model.forecast(turn_end(tool=None))
    assert forecast.within(1) == pytest.approx(0.5, abs=0.1), "one gap in two was an `ls`"


def test_two_modes_are_found_after_enough_observations() -> None:
    """Gaps alternate between 0.1 s and 100 s. The forecast puts little probability between the two,
    where a unimodal posterior of ln X would put most of it."""
    model = GapModel()
    for number in range(100):
        gap_s = 0.1 if number % 2 else 100.0
        model.observe(turn_end(f"{number}", tool=LS), gap_s, ended=True)
    forecast = model.forecast(turn_end(tool=LS))
    assert forecast.within(80) - forecast.within(0.2) < 0.2


def test_a_rule_applies_until_there_are_observations() -> None:
    slow = Rule(median_s=30.0, sigma=0.5)
    model = taught({LS: 0.2})
    make = ToolUse(("bash", "make", "make all"), rule=slow)
    assert median(model, make) == pytest.approx(30, rel=0.3)
    for number in range(20):
        model.observe(turn_end(f"m{number}", tool=make), 1.0, ended=True)
    assert median(model, make) < 2


def test_forgetting_follows_a_tool_that_became_slow() -> None:
    model = taught({PYTEST: 1.0}, times=200)
    for number in range(200):
        model.observe(turn_end(f"later {number}", tool=PYTEST), 60.0, ended=True)
    assert model.forecast(turn_end(tool=PYTEST)).within(10) < 0.55


def test_bounds_of_the_command_hold_whatever_was_learned() -> None:
    model = taught({PYTEST: 20.0})
    slept = ToolUse(PYTEST.path, least_s=60, most_s=60)
    assert model.forecast(turn_end(tool=slept)).within(60) == 0
    assert model.forecast(turn_end(tool=slept)).within(75) == pytest.approx(1)
    stopped = ToolUse(PYTEST.path, most_s=5)
    assert model.forecast(turn_end(tool=stopped)).within(6) == pytest.approx(1)


def test_a_clients_estimate_mostly_counts() -> None:
    model = taught({PYTEST: 20.0}, spread=1.0)
    said = ToolUse(PYTEST.path, expected_s=90.0)
    assert median(model, PYTEST) < median(model, said) <= 90
    for nonsense in (0.0, -1.0, math.nan, math.inf):
        assert median(model, ToolUse(PYTEST.path, expected_s=nonsense)) == median(model, PYTEST)


def test_a_job_that_has_been_quick_so_far_is_expected_back_sooner() -> None:
    model = taught({None: 20.0}, times=100, spread=1.5)
    for number in range(10):
        model.observe(turn_end("quick", number), 2.0, ended=True)
        model.observe(turn_end("slow", number), 200.0, ended=True)
    assert median(model, None, "quick") < median(model, None) < median(model, None, "slow")


def test_every_gap_changes_the_forecast_for_new_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached forecast for new jobs is valid only until the next gap."""
    monkeypatch.setattr(gap_model, "MOST_KEPT", 1)
    model = taught({LS: 1.0, PYTEST: 60.0})
    before = model.forecast(turn_end("new", tool=LS))
    assert model.forecast(turn_end("other", tool=LS)) is before
    assert model.forecast(turn_end("new", tool=PYTEST)) != before
    model.observe(turn_end("old", tool=LS), 500.0, ended=True)
    after = model.forecast(turn_end("new", tool=LS))
    assert after.within(100.0) < before.within(100.0)
    learned = GapModel()
    assert learned.forecast(turn_end("new", tool=LS)) != after
    learned.load(json.loads(json.dumps(model.dump())))
    assert learned.forecast(turn_end("new", tool=LS)) == after


def test_a_job_s_answers_of_one_length_are_followed_by_gaps_of_one_length() -> None:
    """Forecasts depend on the length of the answer, because calls of one tool have similar lengths
    even if no tool is named."""
    model = taught({None: 10.0}, times=100, spread=1.5)
    for number in range(15):
        model.observe(turn_end("job", number, output=40), 1.0, ended=True)
        model.observe(turn_end("job", number, output=900), 100.0, ended=True)
    assert median(model, None, "job", output=45) < 0.3 * median(model, None, "job", output=800)


def test_jobs_of_the_same_name_under_different_salts_are_unrelated() -> None:
    model = taught({None: 20.0}, times=100, spread=1.5)
    mine = TurnEnd(JobKey("mine", "job"), 1, False, False, 3000, 200, 100)
    for _ in range(10):
        model.observe(mine, 2.0, ended=True)
    other = TurnEnd(JobKey("other", "job"), 1, False, False, 3000, 200, 100)
    new = TurnEnd(JobKey("other", "new"), 1, False, False, 3000, 200, 100)
    assert model.forecast(other) == model.forecast(new)


def test_gaps_that_had_not_ended_count_as_longer_not_as_nothing() -> None:
    """Half of the gaps are abandoned after 10 s. The other half alone would make all gaps seem
    short."""
    rng = random.Random(1)
    told, cut = GapModel(), GapModel()
    for number in range(400):
        gap_s = rng.lognormvariate(math.log(10), 1.0)
        turn = turn_end(f"{number}", tool=PYTEST)
        told.observe(turn, min(gap_s, 10.0), ended=gap_s <= 10)
        if gap_s <= 10:
            cut.observe(turn, gap_s, ended=True)
    new = turn_end("new", tool=PYTEST)
    assert told.forecast(new).within(10) == pytest.approx(0.5, abs=0.08)
    assert cut.forecast(new).within(10) > 0.9


def test_forecasts_are_calibrated() -> None:
    rng = random.Random(3)
    model = GapModel()
    below: dict[float, list[bool]] = {0.5: [], 0.9: []}
    for number in range(2000):
        tool = (PYTEST, LS)[number % 2]
        turn = turn_end(f"{number // 20}", number % 20, tool=tool, output=rng.randint(20, 500))
        gap_s = (20 if tool is PYTEST else 0.2) * rng.lognormvariate(0, 1.0)
        if number >= 500:
            for q, hits in below.items():
                hits.append(gap_s <= model.forecast(turn).quantile(q))
        model.observe(turn, gap_s, ended=True)
    for q, hits in below.items():
        assert np.mean(hits) == pytest.approx(q, abs=0.03)


def test_memory_for_invented_tool_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "MAX_NODES", 20)
    monkeypatch.setattr(history, "MAX_JOBS", 10)
    model = taught({PYTEST: 20.0}, times=5)
    before = median(model, PYTEST)
    for number in range(50):
        model.observe(turn_end(f"{number}", tool=ToolUse((f"tool {number}",))), 1.0, ended=True)
        model.observe(turn_end("used", tool=PYTEST), 20.0, ended=True)
    saved: Any = model.dump()
    assert len(saved["tools"]) <= 21
    assert median(model, PYTEST) == pytest.approx(before, rel=0.5), "what is used is kept"


@settings(max_examples=60)
@given(st.lists(st.tuples(turn_ends, gaps_s, st.booleans()), max_size=12), turn_ends)
def test_whatever_is_observed_a_forecast_stays_a_distribution(
    past: list[tuple[TurnEnd, float, bool]], turn: TurnEnd
) -> None:
    model = GapModel()
    for told, gap_s, ended in past:
        model.observe(told, gap_s, ended=ended)
    cdf = model.forecast(turn).cdf
    assert cdf.shape == GRID.shape
    assert np.isfinite(cdf).all()
    assert (np.diff(cdf) >= 0).all()
    assert cdf[0] >= 0
    assert cdf[-1] <= 1
    assert model.forecast(turn) == model.forecast(turn), "asking changes nothing"


def test_what_was_learned_survives_a_restart() -> None:
    model = taught({PYTEST: 20.0, LS: 0.2, None: 3.0, NO_TOOL: 500.0})
    saved = json.loads(json.dumps(model.dump()))
    other = GapModel()
    other.load(saved)
    for tool in (PYTEST, LS, None, NO_TOOL, ToolUse(("new",))):
        assert other.forecast(turn_end("new", tool=tool)) == model.forecast(
            turn_end("new", tool=tool)
        )
    for which in (model, other):
        which.observe(turn_end("fresh", tool=LS), 5.0, ended=True)
    assert other.dump() == model.dump(), "and both go on learning alike"


def _spoilt() -> list[Any]:
    good = json.loads(json.dumps(taught({PYTEST: 20.0}, times=3).dump()))

    def spoil(*path: Any, to: object) -> Any:
        made = copy.deepcopy(good)
        at: Any = made
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to
        return made

    return [
        {},
        {"version": 1},
        spoil("version", to=1),
        spoil("version", to=0),
        spoil("tools", to=[]),
        spoil("tools", to={"path": []}),
        spoil("tools", 0, to=None),
        spoil("tools", 0, "path", to=["no root"]),
        spoil("tools", 1, "path", to=[7]),
        spoil("tools", 1, "observed", to=[1, 2, 3]),
        spoil("tools", 1, "observed", to=[1, -1, 0, 0]),
        spoil("tools", 1, "observed", to=[1, math.nan, 0, 0]),
        spoil("tools", 1, "observed", to="four"),
        spoil("tools", 1, "cells", to=[10**6]),
        spoil("tools", 1, "cells", to=[-1]),
        spoil("tools", 1, "weights", to=[1.0, 2.0, 3.0, 4.0]),
        spoil("tools", 1, "weights", to=[[1.0], 2.0]),
        spoil("tilt", to=None),
        spoil("tilt", "weights", to=[[0.0]]),
        spoil("tilt", "weights", 0, 0, to=math.inf),
        spoil("tilt", "squares", 0, 0, to=0.0),
    ]


@pytest.mark.parametrize("spoilt", _spoilt())
def test_what_is_not_a_model_is_refused_and_changes_nothing(spoilt: Any) -> None:
    model = taught({LS: 0.2}, times=3)
    before = model.dump()
    with pytest.raises(ValueError, match=r"."):
        model.load(spoilt)
    assert model.dump() == before
