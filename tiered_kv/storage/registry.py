"""Lower tiers by the names with which an engine is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiered_kv.config import TierConfig
from tiered_kv.errors import ConfigError
from tiered_kv.plugins import load
from tiered_kv.tiers import TierSpec

from .base import StoreTier
from .remote_tier import RemoteTier
from .ssd import SsdTier

TIERS: Mapping[str, Callable[[TierConfig], StoreTier]] = {"ssd": SsdTier, "remote": RemoteTier}
"""The tiers of this package, by the name in ``TIERED_KV_TIERS``."""


def make_tiers(config: TierConfig) -> tuple[StoreTier, ...]:
    """Create the configured tiers, fastest first.

    Raises:
        ConfigError: a tier does not exist or lacks a setting, or two tiers have the same name.
    """
    tiers = tuple(load("tier", name, TIERS)(config) for name in config.tier_names)
    names = [tier.spec.tier for tier in tiers]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two tiers have the same name ({', '.join(names)}): remove one from TIERED_KV_TIERS"
        )
    return tiers


def tiers_below(config: TierConfig) -> tuple[TierSpec, ...]:
    """Return the specs of the configured tiers, fastest first.

    Raises:
        ConfigError: as in ``make_tiers``.
    """
    return tuple(tier.spec for tier in make_tiers(config))
