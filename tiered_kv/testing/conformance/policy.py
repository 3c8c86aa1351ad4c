"""The conformance suite of policies."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from tiered_kv.policies.base import (
    NO_TOOL,
    Costs,
    Decision,
    JobKey,
    Rule,
    Tier,
    ToolUse,
    TurnEnd,
    TurnPolicy,
)
from tiered_kv.tiers import SSD

TURN = TurnEnd(
    job=JobKey("", "job"),
    turn=3,
    is_last_step=False,
    aborted=False,
    context_tokens=3000,
    new_tokens=200,
    output_tokens=100,
    ended_at=50.0,
)
"""A turn of a known job that continues."""
COSTS = Costs(recompute_s=10.0, cpu_s=0.5, tiers_s={SSD: 1.0})
"""Costs with all tiers, each of them faster than recomputing the context."""
TOOLS: tuple[ToolUse | None, ...] = (
    None,
    NO_TOOL,
    ToolUse(("bash", "ls", "ls <path>"), "ls /tmp", Rule(0.1, 0.5)),
    ToolUse(("bash", "pytest", "pytest <path>"), "pytest tests", Rule(60.0, 1.5)),
    ToolUse(("bash", "sleep", "sleep <n>"), "sleep 30", least_s=30.0),
    ToolUse(("bash", "timeout", "timeout <n>"), "timeout 10 make", most_s=10.0),
    ToolUse(("web", "fetch"), expected_s=2.5),
)
ODD_TOOLS: tuple[ToolUse, ...] = (
    ToolUse(()),
    ToolUse(("",)),
    ToolUse(("\x00", "\U0001f980", "\n" * 50), "rm -rf '"),
    ToolUse(("x" * 5000,), "x" * 5000),
    ToolUse(("t",), rule=Rule(1e-9, 1e-9), least_s=1e9, most_s=0.0),
    ToolUse(("t",), rule=Rule(1e9, 30.0), least_s=0.0, most_s=0.0),
    *(ToolUse(("t",), expected_s=s) for s in (0.0, -1.0, 1e12, math.inf, -math.inf, math.nan)),
)
ODD_GAPS_S = (0.0, -1.0, 1e-12, 1e12, math.inf, -math.inf, math.nan)


def turns() -> Iterator[TurnEnd]:
    """Yield turns of every kind, including unusual ones."""
    for tool in (*TOOLS, *ODD_TOOLS):
        yield replace(TURN, tool=tool)
        yield replace(TURN, tool=tool, job=None)
        yield replace(TURN, tool=tool, aborted=True)
    for last, aborted in itertools.product((True, False), repeat=2):
        yield replace(TURN, is_last_step=last, aborted=aborted)
    yield replace(TURN, job=JobKey("\x00", ""), turn=1)
    for tokens in (0, 1, 10**8):
        yield replace(TURN, context_tokens=tokens, new_tokens=-5, output_tokens=tokens)
    yield replace(TURN, turn=10**6, new_tokens=10**8, output_tokens=-5, ended_at=1e12)


def all_costs() -> Iterator[Costs]:
    """Yield costs of every kind: with and without tiers, low and high, with and without demand for
    VRAM.
    """
    for recompute_s, cpu_s, tiers_s, price in itertools.product(
        (0.0, 1e-9, 10.0, 1e6), (None, 0.0, 1e5), ({}, {SSD: 0.0}, {SSD: 1e5}), (0.0, 1.0, 1e9)
    ):
        yield Costs(recompute_s, cpu_s, tiers_s, vram_price=price)
    for stay_s, survival in itertools.product((0.0, 60.0, math.inf), (0.0, 1.0)):
        yield replace(COSTS, cpu_stay_s=stay_s, survival=survival)
    yield replace(COSTS, queue_s=1e6, memoryfulness=0.0, held_up=0.0)
    yield replace(COSTS, queue_s=1e6, memoryfulness=1.0, held_up=1e3)


def check(decision: Decision, turn: TurnEnd, costs: Costs) -> None:
    """Check that the runtime can carry out the decision.

    Raises:
        AssertionError: the runtime cannot carry out the decision.
    """
    said = f"{decision} for {turn} at {costs}"
    if turn.is_last_step:
        assert decision.tier is Tier.DROP, f"kept although no turn follows: {said}"
    if decision.tier is Tier.PIN:
        assert turn.job is not None, f"pinned without a job: {said}"
        assert not turn.aborted, f"pinned for a client that disconnected: {said}"
        assert 0.0 < decision.ttl_s < math.inf, f"a pin needs a deadline: {said}"
    else:
        assert decision.ttl_s == 0.0, f"a deadline without a pin: {said}"
    if decision.tier is Tier.STORE:
        assert costs.tiers_s, f"there is no tier below CPU memory: {said}"
    if decision.back_s is not None:
        assert 0.0 <= decision.back_s < math.inf, f"not a time: {said}"
    if decision.forecast is not None:
        for t in (0.0, 1.0, 1e6):
            assert 0.0 <= decision.forecast.within(t) <= 1.0, f"not a distribution: {said}"


class PolicyConformance:
    """Conformance suite of policies. Create a subclass, name it ``Test…`` and set ``policy`` to the
    class of your policy.
    """

    policy: Callable[[], TurnPolicy]

    def make(self, *, told: bool = False) -> TurnPolicy:
        """Create a policy. With ``told``, the policy has already observed gaps after each tool."""
        policy = type(self).policy()
        if told:
            self._tell(policy, random.Random(0))
        return policy

    def _tell(self, policy: TurnPolicy, rng: random.Random) -> None:
        for turn, tool in itertools.product(range(1, 41), TOOLS):
            end = replace(TURN, turn=turn, tool=tool, job=JobKey("", f"job{turn % 3}"))
            policy.observe(end, rng.lognormvariate(1, 1), ended=rng.random() < 0.9)

    def _decisions(self, policy: TurnPolicy) -> list[Decision]:
        costs = [COSTS, replace(COSTS, vram_price=0.01), Costs(1.0), Costs(5.0, 0.1)]
        return [policy.decide(turn, one) for turn in turns() for one in costs]

    def test_it_says_whether_tools_matter(self) -> None:
        assert isinstance(self.make().reads_tools, bool)

    @pytest.mark.parametrize("told", [False, True])
    def test_every_decision_can_be_carried_out(self, told: bool) -> None:
        policy = self.make(told=told)
        for turn, costs in itertools.product(turns(), all_costs()):
            check(policy.decide(turn, costs), turn, costs)

    def test_a_policy_that_reads_no_tools_decides_without_them(self) -> None:
        policy = self.make(told=True)
        if policy.reads_tools:
            pytest.skip("the policy reads tools")
        assert len({policy.decide(replace(TURN, tool=tool), COSTS) for tool in TOOLS}) == 1

    def test_odd_gaps_do_no_harm(self) -> None:
        policy = self.make()
        for turn, gap_s, ended in itertools.product(turns(), ODD_GAPS_S, (True, False)):
            policy.observe(turn, gap_s, ended=ended)
        for turn in turns():
            check(policy.decide(turn, COSTS), turn, COSTS)

    def test_deciding_changes_nothing(self) -> None:
        policy = self.make(told=True)
        before = json.dumps(policy.dump())
        assert self._decisions(policy) == self._decisions(policy)
        assert json.dumps(policy.dump()) == before

    def test_who_was_told_the_same_decides_the_same(self) -> None:
        one, other = self.make(told=True), self.make(told=True)
        assert self._decisions(one) == self._decisions(other)

    def test_two_policies_share_nothing(self) -> None:
        fresh, told = self.make(), self.make()
        before = self._decisions(fresh)
        self._tell(told, random.Random(1))
        assert self._decisions(fresh) == before

    @pytest.mark.parametrize("told", [False, True])
    def test_what_it_learned_survives_a_restart(self, told: bool) -> None:
        policy, other = self.make(told=told), self.make()
        other.load(json.loads(json.dumps(policy.dump())))
        assert other.dump() == policy.dump()
        # The job's own history is not saved, so another job is used.
        new = [replace(TURN, job=JobKey("", "new"), turn=1, tool=tool) for tool in TOOLS]
        assert [other.decide(turn, COSTS) for turn in new] == [
            policy.decide(turn, COSTS) for turn in new
        ]

    def test_what_is_not_its_own_is_refused_and_changes_nothing(self) -> None:
        policy = self.make(told=True)
        before = policy.dump()
        if not before:
            pytest.skip("the policy saves no state")
        for wrong in ({}, *({**before, key: "nonsense"} for key in before)):
            with pytest.raises(ValueError, match=r"."):
                policy.load(wrong)
            assert policy.dump() == before

    def test_odd_files_are_refused_or_usable(self) -> None:
        """A policy loads the state that another version saved, or raises a ValueError."""
        policy = self.make(told=True)
        before = policy.dump()
        odd: list[object] = [None, 0, -1, math.nan, [], {}, [None], [[1]], {"a": None}, {"a": [1]}]
        for key, value in itertools.product(before, odd):
            fresh = self.make()
            with suppress(ValueError):
                fresh.load({**before, key: value})
            for turn in turns():
                check(fresh.decide(turn, COSTS), turn, COSTS)
