"""Settings of LMCache, and their equivalents here.

Names, defaults and units come from LMCache's ``lmcache/v1/config.py``: sizes are in GB per worker,
whereas sizes here are in GiB of the whole engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from .finding import Finding, warn

PREFIX = "LMCACHE_"
Advice = Callable[[str, int], str]
"""Returns the advice for a value and a number of ranks."""


def _local_cpu(value: str, ranks: int) -> str:
    if value.lower() in ("false", "0", "no"):
        return "TIERED_KV_CPU_GIB=0 turns CPU memory off; pages on SSD need some."
    return "Nothing to set: CPU memory is on unless TIERED_KV_CPU_GIB=0."


def _disk(value: str, ranks: int) -> str:
    path = value.strip("'\"").removeprefix("file://")
    if path.lower() in ("", "false", "none"):
        return "Nothing to set: SSD is off without TIERED_KV_SSD_PATH."
    return f"TIERED_KV_SSD_PATH={path}: one folder for all ranks."


def _sized(setting: str) -> Advice:
    return lambda value, ranks: f"{setting}={_gib(value, ranks)}: {_WHOLE}."


def _gib(value: str, ranks: int) -> str:
    """Convert GB per worker to GiB of the engine."""
    try:
        return f"{float(value) * 1e9 * ranks / (1 << 30):.1f}"
    except ValueError:
        return "GIB"


def _policy(value: str, ranks: int) -> str:
    if value.upper() == "LRU":
        return "TIERED_KV_EVICTION=lru for the same; the default evicts what is least worth."
    return "Nothing to set: pages leave CPU memory by what they are worth."


def _always(sentence: str) -> Advice:
    return lambda value, ranks: sentence


_WHOLE = "GiB of the whole engine, not GB of a worker"
_NO_SHARING = "Nothing: pages stay on this machine, and servers do not share CPU memory."

EQUIVALENTS: Mapping[str, Advice] = {
    "MAX_LOCAL_CPU_SIZE": _sized("TIERED_KV_CPU_GIB"),
    "LOCAL_CPU": _local_cpu,
    "LOCAL_DISK": _disk,
    "MAX_LOCAL_DISK_SIZE": _sized("TIERED_KV_SSD_GIB"),
    "CACHE_POLICY": _policy,
    "CHUNK_SIZE": _always("Nothing to set: pages are vLLM's blocks."),
    "SAVE_DECODE_CACHE": _always("Nothing to set: answers are always saved."),
    "SAVE_UNFULL_CHUNK": _always("Nothing to set: partly filled blocks are saved at a turn's end."),
    "REMOTE_SERDE": _always("TIERED_KV_CODEC picks the codec of pages on SSD."),
    "REMOTE_URL": _always("TIERED_KV_TIERS names a tier of another package: docs/extending.md."),
    "USE_LAYERWISE": _always("Nothing to set: copies overlap the forward pass."),
    "PRE_CACHING_HASH_ALGORITHM": _always("Nothing to set: pages go by vLLM's block hashes."),
    "CONFIG_FILE": _always("Settings are variables or kv_connector_extra_config: see the docs."),
    "LOCAL_CPU_USE_HUGEPAGES": _always("Nothing to set: huge pages are requested."),
    "ENABLE_P2P": _always(_NO_SHARING),
    "ENABLE_PD": _always(_NO_SHARING),
    "ENABLE_CONTROLLER": _always(_NO_SHARING),
    "ENABLE_BLENDING": _always("Nothing: only whole prefixes are restored, so answers stay equal."),
}
"""Advice about equivalents, by name without the prefix, from the value and the number of ranks."""


def check_lmcache(env: Mapping[str, str], ranks: int) -> Iterator[Finding]:
    """Report the equivalent of each LMCache variable."""
    for name in sorted(env):
        if not name.startswith(PREFIX):
            continue
        tell = EQUIVALENTS.get(name.removeprefix(PREFIX))
        advice = tell(env[name], ranks) if tell else "Nothing here does the same."
        yield warn(name, f"{env[name]}: the connector does not read it", advice)
