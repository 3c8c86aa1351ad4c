"""Trees may speak for commands that nobody has seen, once they were right about others."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cpu_time import loops
from tests.policies.turn_ends import turn_end
from tiered_kv.policies.base import ToolUse, TurnEnd
from tiered_kv.policies.forecast.command_features import FEATURES, features_of
from tiered_kv.policies.forecast.gap_model import GapModel
from tiered_kv.policies.forecast.learned_rules import LearnedRules
from tiered_kv.policies.forecast.trees import ENOUGH, TREES, Trees, grown

KINDS = {"check": 20.0, "show": 0.2, "install": 60.0}


def command(rng: random.Random, kind: str) -> ToolUse:
    """A program of its own: nothing but its task says how long it takes."""
    program = f"prog{rng.randint(0, 10**6)}"
    text = f"{program} {kind} --color target{rng.randint(0, 99)}"
    return ToolUse(("bash", program, f"{program} {kind} <text>"), command=text)


def gap(rng: random.Random, kind: str) -> float:
    return KINDS[kind] * rng.lognormvariate(0, 0.4)


def teach(model: GapModel, rng: random.Random, times: int) -> None:
    for number in range(times):
        kind = rng.choice(list(KINDS))
        model.observe(turn_end(f"{number}", tool=command(rng, kind)), gap(rng, kind), ended=True)


def medians(model: GapModel, rng: random.Random) -> dict[str, float]:
    return {
        kind: model.forecast(turn_end("new", tool=command(rng, kind))).quantile(0.5)
        for kind in KINDS
    }


# -- with the extra ----------------------------------------------------------------------


def test_trees_tell_unknown_commands_apart_and_earn_their_say() -> None:
    pytest.importorskip("lightgbm")
    rng = random.Random(0)
    model = GapModel()
    teach(model, rng, 600)
    before = medians(model, random.Random(1))
    assert before["show"] == pytest.approx(before["install"], rel=0.5), "nothing tells them apart"
    assert model.refit()
    assert medians(model, random.Random(1)) == before, "they were right about nothing yet"
    teach(model, rng, 100)
    after = medians(model, random.Random(1))
    assert after["show"] < 1 < 10 < after["install"]


def test_trees_that_were_saved_need_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightgbm")
    rng = random.Random(0)
    model = GapModel()
    teach(model, rng, 600)
    model.refit()
    teach(model, rng, 100)
    saved = json.loads(json.dumps(model.dump()))
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    other = GapModel()
    other.load(saved)
    assert medians(other, random.Random(1)) == medians(model, random.Random(1))


@pytest.mark.parametrize("objective", ["regression", "binary"])
def test_the_walk_through_the_trees_is_lightgbm_s(
    objective: Literal["regression", "binary"], monkeypatch: pytest.MonkeyPatch
) -> None:
    lightgbm: Any = pytest.importorskip("lightgbm")
    rng = np.random.default_rng(0)
    rows = rng.random((500, FEATURES)) * 5
    values = rows[:, 0] * rows[:, 7]
    if objective == "binary":
        values = (values > 5.0).astype(np.float64)
    train, models = lightgbm.train, []

    def spied(*args: Any) -> Any:
        models.append(train(*args))
        return models[-1]

    monkeypatch.setattr(lightgbm, "train", spied)
    trees = grown(rows, values, objective)
    assert trees is not None
    tool = ToolUse(("bash",), command="git clone http://x && make -j4 2>&1 | tail -3")
    features = np.array([features_of("bash", tool.command)])
    assert trees.score(tool) == pytest.approx(models[0].predict(features, raw_score=True)[0])


# -- without it ----------------------------------------------------------------------------


def test_without_the_extra_nothing_is_grown_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    model = GapModel()
    teach(model, random.Random(0), ENOUGH + 10)
    before = model.dump()
    assert not model.refit()
    assert model.dump() == before


def stump(low_log_s: float, high_log_s: float) -> Any:
    """A tree that splits commands at 20 characters, as it is saved."""
    return {
        "trees": [
            {"nodes": [[2, math.log1p(20), -1, -2]], "leaves": [low_log_s, high_log_s]},
            {"nodes": [], "leaves": [0.0]},
        ],
        "judged": [0.5, 0, 0.0],
    }


SHORT = ToolUse(("bash", "a", "a"), command="a")
LONG = ToolUse(("bash", "b", "b <text>"), command="b" + " x" * 30)


def with_trees(low_log_s: float, high_log_s: float) -> GapModel:
    model = GapModel()
    model.load({**model.dump(), "learned": stump(low_log_s, high_log_s)})
    return model


def trusts_trees(model: GapModel) -> bool:
    return LearnedRules.loaded(model.dump()["learned"]).trusted


def test_a_tree_is_walked_to_its_leaf() -> None:
    rules = LearnedRules.loaded(stump(0.0, 2.0))
    for _ in range(2):  # the second time from memory
        short, long = rules.rule(SHORT), rules.rule(LONG)
        assert short is not None
        assert long is not None
        assert (short.median_s, short.sigma) == (1.0, 0.5)
        assert long.median_s == pytest.approx(math.exp(2.0))
    assert rules.rule(ToolUse(("Read",))) is None, "trees know of commands only"


def tell(model: GapModel, rng: random.Random, times: int, long_s: float) -> None:
    for number in range(times):
        name = f"{rng.randint(0, 10**6)}"
        long = ToolUse(("bash", name, name), command=name + " x" * 30)
        short = ToolUse(("bash", name + "s", name), command=name)
        model.observe(turn_end(f"{number}", tool=long), long_s * rng.uniform(0.8, 1.2), ended=True)
        model.observe(turn_end(f"{number}s", tool=short), 0.1 * rng.uniform(0.8, 1.2), ended=True)


def new_long(model: GapModel) -> float:
    turn: TurnEnd = turn_end("new", tool=ToolUse(("bash", "n", "n"), command="n" + " y" * 30))
    return model.forecast(turn).within(5)


def test_trees_that_lower_regret_are_trusted_and_others_are_not() -> None:
    right, wrong = with_trees(math.log(0.1), math.log(60)), with_trees(math.log(60), math.log(0.1))
    without = GapModel()
    for model in (right, wrong, without):
        tell(model, random.Random(0), 60, long_s=60.0)
    assert trusts_trees(right)
    assert not trusts_trees(wrong)
    assert new_long(right) < 0.1
    assert new_long(wrong) == pytest.approx(new_long(without), abs=1e-6)


def test_trust_is_lost_when_the_tools_change() -> None:
    model = with_trees(math.log(0.1), math.log(60))
    tell(model, random.Random(0), 60, long_s=60.0)
    tell(model, random.Random(1), 200, long_s=0.1)
    assert not trusts_trees(model)


def test_a_command_that_was_seen_often_enough_speaks_for_itself() -> None:
    model = with_trees(math.log(0.1), math.log(60))
    tell(model, random.Random(0), 60, long_s=60.0)
    known = ToolUse(("bash", "known", "known"), command="known" + " x" * 30)
    for number in range(60):
        model.observe(turn_end(f"k{number}", tool=known), 0.1, ended=True)
    assert model.forecast(turn_end("new", tool=known)).within(1) > 0.9


def test_a_prediction_is_no_slower_than_a_decision_may_be() -> None:
    """24 trees of 8 leaves: under 50 µs on an idle core."""
    rng = random.Random(0)
    nodes = [[rng.randrange(FEATURES), 0.5, at * 2 + 1, at * 2 + 2] for at in range(3)]
    nodes += [[rng.randrange(FEATURES), 0.5, -at * 2 - 1, -at * 2 - 2] for at in range(4)]
    leaves = [rng.random() for _ in range(8)]
    trees = Trees([nodes] * TREES, [leaves] * TREES)
    new = itertools.count()

    def predict() -> float:
        return trees.score(ToolUse(("bash",), command=f"cd x{next(new)} && pytest -k x | tail"))

    assert loops(lambda: [predict() for _ in range(50)], calls=50) < 6


@pytest.mark.parametrize(
    "spoilt",
    [
        {},
        {"trees": [{"nodes": [], "leaves": []}], "judged": [1, 0, 0]},
        {"trees": [{"nodes": [[0, 1, 0, -1]], "leaves": [1.0]}], "judged": [1, 0, 0]},
        {"trees": [{"nodes": [[0, 1, -1, -3]], "leaves": [1.0, 2.0]}], "judged": [1, 0, 0]},
        {"trees": [{"nodes": [[999, 1, -1, -2]], "leaves": [1.0, 2.0]}], "judged": [1, 0, 0]},
        {"trees": [], "judged": [0, 0, 0]},
        {"trees": [], "judged": [1, 0]},
    ],
)
def test_trees_that_would_never_end_or_lead_nowhere_are_refused(spoilt: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        LearnedRules.loaded(spoilt)


@given(st.text(max_size=50), st.text(max_size=300))
def test_any_command_has_features(tool: str, text: str) -> None:
    found = features_of(tool, text)
    assert len(found) == FEATURES
    assert all(math.isfinite(value) for value in found)
