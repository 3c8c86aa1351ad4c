"""Policy files of earlier versions are still read: a user's files outlive the program."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.policies.turn_ends import turn_end
from tiered_kv.connectors.runtime.gaps.policy_state import PolicyState
from tiered_kv.policies.base import Costs, ToolUse, TurnPolicy
from tiered_kv.policies.baselines.contextserve import ContextServe
from tiered_kv.policies.tier_choice import Occupancy

SAVED = Path(__file__).parent / "saved"
"""Files that were written while policies had trees, each cut to one or two of them."""
PYTEST = ToolUse(("bash", "pytest", "pytest <path>"), command="runner tests")
LS = ToolUse(("bash", "ls", "ls <path>"), command="runner list")
COSTS = Costs(recompute_s=1.0)


@pytest.mark.parametrize(
    ("name", "make", "gone"),
    [("occupancy", Occupancy, "learned"), ("contextserve", ContextServe, "trees")],
)
def test_files_with_trees_are_read_without_them(
    name: str, make: Callable[[], TurnPolicy], gone: str, tmp_path: Path
) -> None:
    shutil.copy(SAVED / f"policy-{name}.json", tmp_path)
    policy = make()
    keeper = PolicyState(policy, tmp_path, name)
    assert keeper.load()
    keeper.close()
    quick, slow = (policy.decide(turn_end("new", tool=tool), COSTS) for tool in (LS, PYTEST))
    assert quick.ttl_s > 0 == slow.ttl_s, "it knows which of both takes longer"
    assert gone not in policy.dump()

    again = make()
    keeper = PolicyState(again, tmp_path, name)
    assert keeper.load(), "and what it writes in turn is read as well"
    keeper.close()
    assert again.dump() == policy.dump()
