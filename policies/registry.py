"""Policies and eviction rules by name, or by ``module:Class`` from other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tiered_kv.errors import ConfigError
from tiered_kv.pages.base import EvictionOrder, EvictionRule
from tiered_kv.plugins import load
from tiered_kv.policies.baselines.contextserve import ContextServe
from tiered_kv.policies.baselines.continuum import Continuum, ContinuumFixed
from tiered_kv.policies.baselines.infercept import InferCept
from tiered_kv.policies.baselines.unpinned import Lru, NoOffload
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.cache.lru import LeastRecentlyUsed

from .base import TurnPolicy
from .tier_choice import Occupancy

POLICIES: Mapping[str, Callable[[], TurnPolicy]] = MappingProxyType(
    {
        "occupancy": Occupancy,
        "contextserve": ContextServe,
        "continuum": Continuum,
        "continuum-fixed": ContinuumFixed,
        "infercept": InferCept,
        "lru": Lru,
        "none": NoOffload,
    }
)
EVICTION: Mapping[str, EvictionRule] = MappingProxyType(
    {"worth": ByWorth, "lru": LeastRecentlyUsed}
)


def policy(name: str) -> TurnPolicy:
    """Create the policy of that name.

    Raises:
        ConfigError: the policy does not exist, or cannot be used.
    """
    made = load("policy", name, POLICIES, TurnPolicy)()
    if not hasattr(made, "reads_tools"):
        raise ConfigError(
            f"policy {name!r} cannot be used: it lacks reads_tools. Set reads_tools to True "
            "if the policy uses a turn's tool, otherwise to False."
        )
    return made


def eviction(name: str) -> EvictionRule:
    """Return the eviction rule of that name.

    Raises:
        ConfigError: the rule does not exist, or cannot be used.
    """
    return load("eviction rule", name, EVICTION, EvictionOrder)
