"""Policies are found by built-in name or by module."""

from __future__ import annotations

import pytest

from tiered_kv.config import TierConfig
from tiered_kv.errors import ConfigError
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.registry import EVICTION, POLICIES, eviction, policy
from tiered_kv.policies.tier_choice import Occupancy
from tiered_kv.testing.policies import FixedPin


def test_all_policies_by_name() -> None:
    assert set(POLICIES) == {
        "occupancy",
        "contextserve",
        "continuum",
        "continuum-fixed",
        "infercept",
        "lru",
        "none",
    }
    for name, make in POLICIES.items():
        assert type(policy(name)) is make
        assert policy(name) is not policy(name), "two engines share nothing"


def test_defaults_are_this_projects_policies() -> None:
    assert isinstance(policy(TierConfig().policy), Occupancy)
    assert eviction(TierConfig().eviction) is ByWorth


def test_a_policy_of_another_package_is_named_with_its_module() -> None:
    assert isinstance(policy("tiered_kv.testing.policies:FixedPin"), FixedPin)
    assert eviction("tiered_kv.policies.cache.eviction:ByWorth") is ByWorth


class Forgetful(FixedPin):
    """A policy that lacks a required attribute."""

    reads_tools = property()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("tiered_kv.policies.tier_choice:Ocupancy", "has no class Ocupancy"),
        ("tiered_kv.policies.base:TurnEnd", "it lacks decide, dump, load, observe"),
        (f"{__name__}:Forgetful", "it lacks reads_tools. Set reads_tools to True"),
        ("no_such_package:Policy", "ModuleNotFoundError"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(wrong: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r".") as raised:
        policy(wrong)
    assert said in str(raised.value)


def test_an_eviction_rule_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a known eviction rule: Use worth, lru, or"):
        eviction("fifo")
    with pytest.raises(ConfigError, match="it lacks __iter__"):
        eviction("tiered_kv.pages.base:EvictionOrder")
    assert set(EVICTION) == {"worth", "lru"}


@pytest.mark.parametrize(
    ("wrong", "close"),
    [("ocupancy", "occupancy"), ("continuum_fixed", "continuum-fixed"), ("LRU", None)],
)
def test_an_unknown_name_is_answered_with_the_valid_ones(wrong: str, close: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        policy(wrong)
    said = str(raised.value)
    assert repr(wrong) in said
    assert all(name in said for name in POLICIES)
    assert (f"did you mean {close}?" in said) if close else "did you mean" not in said
