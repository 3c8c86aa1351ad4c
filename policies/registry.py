"""All policies by name, as TIERED_KV_POLICY gives it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tiered_kv.errors import ConfigError
from tiered_kv.policies.baselines.contextserve import ContextServe
from tiered_kv.policies.baselines.continuum import Continuum, ContinuumFixed
from tiered_kv.policies.baselines.infercept import InferCept
from tiered_kv.policies.baselines.unpinned import Lru, Nowhere

from .base import TurnPolicy
from .occupancy import Occupancy

POLICIES: Mapping[str, Callable[[], TurnPolicy]] = MappingProxyType(
    {
        "occupancy": Occupancy,
        "contextserve": ContextServe,
        "continuum": Continuum,
        "continuum-fixed": ContinuumFixed,
        "infercept": InferCept,
        "lru": Lru,
        "none": Nowhere,
    }
)


def policy(name: str) -> TurnPolicy:
    """A new policy of that name.

    Raises:
        ConfigError: there is none.
    """
    made = POLICIES.get(name)
    if made is None:
        close = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        known = ", ".join(POLICIES)
        raise ConfigError(f"TIERED_KV_POLICY={name!r} is no policy: {hint}Write one of {known}.")
    return made()
