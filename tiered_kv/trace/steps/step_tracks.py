"""Counter tracks of a trace's steps, for Perfetto and Chrome's ``chrome://tracing``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tiered_kv.trace.perfetto import Event

from .step_record import StepRecord

STEPS = 3
"""Group of tracks of the first replica; the others follow."""
TRACKS = {
    "requests": ("running", "waiting", "held"),
    "tokens of a step": ("prefill", "decode"),
    "blocks": ("free", "cached", "pinned"),
}


def step_events(records: Iterable[StepRecord]) -> Iterator[Event]:
    """Events of steps: a group of tracks a replica, and a counter for requests, tokens, blocks,
    bytes and orders each."""
    seen = set[int]()
    names: dict[str, dict[str, int]] = {"bytes": {}, "orders": {}}
    for one in records:
        if one.replica not in seen:
            seen.add(one.replica)
            name = {"name": f"steps of replica {one.replica}"}
            group = STEPS + one.replica
            yield {"ph": "M", "pid": group, "name": "process_name", "args": name}
        for track, fields in TRACKS.items():
            yield _counter(one, track, {field: getattr(one, field) for field in fields})
        for track, counts in {"bytes": one.nbytes, "orders": one.orders}.items():
            known = names[track]
            known.update(dict.fromkeys(counts, 0))  # what is left out is 0
            if known:
                yield _counter(one, track, {**known, **counts})


def _counter(one: StepRecord, track: str, counts: Mapping[str, int]) -> dict[str, Any]:
    pid, at = STEPS + one.replica, round(1e6 * one.at)
    return {"ph": "C", "pid": pid, "name": track, "ts": at, "args": dict(counts)}
