"""Pages on which a running server tells its model, and its counts of cached tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tiered_kv.doctor.running_server import UnreachableError, fetch, totals

COUNTERS: Mapping[str, str] = {
    "vllm:prefix_cache_queries_total": "asked",
    "vllm:prefix_cache_hits_total": "vram",
    "vllm:external_prefix_cache_hits_total": "connector",
}
"""Counters of vLLM's page, in prompt tokens: all that were looked up, those found in VRAM, and
those that a connector brought."""


class ServerPageError(Exception):
    """A server that cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model that a server serves.

    Attributes:
        longest: most tokens of a context; None if the server does not tell.
    """

    model: str
    longest: int | None


def served(base_url: str, wanted: str | None, api_key: str) -> Served:
    """The model of a server.

    Args:
        wanted: its name; None: the only one, or the first of several names for one.

    Raises:
        ServerPageError: the server does not answer, or has no such model.
    """
    try:
        said = json.loads(fetch(f"{base_url}/v1/models", token=api_key))
        models = {one["id"]: one.get("max_model_len") for one in said["data"]}
    except UnreachableError as error:
        raise ServerPageError(f"{base_url} does not answer: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerPageError(f"{base_url}/v1/models is no list of models") from error
    if not models or (wanted is not None and wanted not in models):
        raise ServerPageError(f"{base_url} serves {', '.join(models) or 'nothing'}, not {wanted}")
    name = wanted or next(iter(models))
    longest = models[name]
    return Served(name, longest if isinstance(longest, int) and longest > 0 else None)


def cached_counts(base_url: str, api_key: str) -> dict[str, float]:
    """Counts of ``COUNTERS`` so far, over all engines; those that are missing are not on its page.
    Empty if there is no such page."""
    try:
        found = totals(fetch(f"{base_url}/metrics", token=api_key))
    except UnreachableError:
        return {}
    return {ours: found[name] for name, ours in COUNTERS.items() if name in found}


def since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Counts between two readings; empty where a server was started in between."""
    counts = {name: round(after[name] - before[name]) for name in before.keys() & after.keys()}
    return counts if all(count >= 0 for count in counts.values()) else {}
