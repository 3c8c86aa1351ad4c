"""Settings of LMCache, and their equivalents in tiered-kv.

Names, defaults and units come from LMCache's ``lmcache/v1/config.py``. There, sizes are in GB per
worker. In tiered-kv, they are in GiB for the whole engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from .finding import Finding, warn

PREFIX = "LMCACHE_"
Advice = Callable[[str, int], str]
"""Function that returns the advice, given the value of a variable and the number of ranks."""


def _local_cpu(value: str, ranks: int) -> str:
    if value.lower() in ("false", "0", "no"):
        return "Set TIERED_KV_CPU_GIB=0 to turn CPU memory off; pages on SSD need CPU memory."
    return "Nothing to set: CPU memory is on unless TIERED_KV_CPU_GIB=0."


def _disk(value: str, ranks: int) -> str:
    path = value.strip("'\"").removeprefix("file://")
    if path.lower() in ("", "false", "none"):
        return "Nothing to set: SSD is off without TIERED_KV_SSD_PATH."
    return f"Set TIERED_KV_SSD_PATH={path}, one folder for all ranks."


def _sized(setting: str) -> Advice:
    return lambda value, ranks: f"Set {setting}={_gib(value, ranks)} ({_WHOLE})."


def _gib(value: str, ranks: int) -> str:
    """Convert GB per worker to GiB for the engine."""
    try:
        return f"{float(value) * 1e9 * ranks / (1 << 30):.1f}"
    except ValueError:
        return "GIB"


def _policy(value: str, ranks: int) -> str:
    if value.upper() == "LRU":
        return (
            "Set TIERED_KV_EVICTION=lru. The default, worth, evicts the least valuable page first."
        )
    return "Nothing to set: the default rule, worth, evicts the least valuable page first."


def _always(sentence: str) -> Advice:
    return lambda value, ranks: sentence


_WHOLE = "GiB for the whole engine, not GB per worker"
_NO_SHARING = "No equivalent: pages stay on this machine, and servers do not share CPU memory."

EQUIVALENTS: Mapping[str, Advice] = {
    "MAX_LOCAL_CPU_SIZE": _sized("TIERED_KV_CPU_GIB"),
    "LOCAL_CPU": _local_cpu,
    "LOCAL_DISK": _disk,
    "MAX_LOCAL_DISK_SIZE": _sized("TIERED_KV_SSD_GIB"),
    "CACHE_POLICY": _policy,
    "CHUNK_SIZE": _always("Nothing to set: pages are vLLM's blocks."),
    "SAVE_DECODE_CACHE": _always("Nothing to set: answers are always saved."),
    "SAVE_UNFULL_CHUNK": _always("Nothing to set: partly filled blocks are saved at a turn's end."),
    "REMOTE_SERDE": _always("Set TIERED_KV_CODEC to select the codec of pages."),
    "REMOTE_URL": _always(
        "Set TIERED_KV_REMOTE to a Valkey or Redis server, or to a shared folder."
    ),
    "USE_LAYERWISE": _always("Nothing to set: copies overlap the forward pass."),
    "PRE_CACHING_HASH_ALGORITHM": _always(
        "Nothing to set: pages are identified by vLLM's block hashes."
    ),
    "CONFIG_FILE": _always(
        "Use environment variables or kv_connector_extra_config (see docs/configuration.md)."
    ),
    "LOCAL_CPU_USE_HUGEPAGES": _always("Nothing to set: huge pages are requested."),
    "ENABLE_P2P": _always(_NO_SHARING),
    "ENABLE_PD": _always(_NO_SHARING),
    "ENABLE_CONTROLLER": _always(_NO_SHARING),
    "ENABLE_BLENDING": _always(
        "No equivalent: only prefixes are restored, so answers do not change."
    ),
}
"""Advice about equivalents, by the name of LMCache's variable without ``LMCACHE_``."""


def check_lmcache(env: Mapping[str, str], ranks: int) -> Iterator[Finding]:
    """Report the equivalent of each LMCache variable in the environment.

    Args:
        ranks: number of ranks, by which sizes per worker are multiplied.
    """
    for name in sorted(env):
        if not name.startswith(PREFIX):
            continue
        tell = EQUIVALENTS.get(name.removeprefix(PREFIX))
        advice = tell(env[name], ranks) if tell else "tiered-kv has no equivalent."
        yield warn(name, f"{env[name]}: tiered-kv does not read this variable", advice)
