"""Policies are asked for by name."""

from __future__ import annotations

import pytest

from tiered_kv.config import TierConfig
from tiered_kv.errors import ConfigError
from tiered_kv.policies.occupancy import Occupancy
from tiered_kv.policies.registry import POLICIES, policy


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


def test_ours_is_the_default() -> None:
    assert isinstance(policy(TierConfig().policy), Occupancy)


@pytest.mark.parametrize(
    ("wrong", "close"),
    [("ocupancy", "occupancy"), ("continuum_fixed", "continuum-fixed"), ("LRU", None)],
)
def test_a_name_that_is_none_is_answered_with_the_ones_that_are(
    wrong: str, close: str | None
) -> None:
    with pytest.raises(ConfigError) as raised:
        policy(wrong)
    said = str(raised.value)
    assert repr(wrong) in said
    assert all(name in said for name in POLICIES)
    assert (f"did you mean {close}?" in said) if close else "did you mean" not in said
