"""Counter tracks of a trace's steps, for Perfetto and Chrome's ``chrome://tracing``, and the reader
of the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tiered_kv.trace.perfetto import Event
from tiered_kv.trace.rotation import files_to_read, steps_to_read
from tiered_kv.trace.trace_reader import RecordReader

from .step_record import StepRecord

STEPS = 3
"""Number of the first replica's group of tracks. The groups of other replicas follow."""
TRACKS = {
    "requests": ("running", "waiting", "held"),
    "tokens of a step": ("prefill", "decode"),
    "blocks": ("free", "cached", "pinned"),
}


def step_events(records: Iterable[StepRecord]) -> Iterator[Event]:
    """Yield the events of steps. Each replica has one group of tracks, with counters for requests,
    tokens, blocks, bytes and orders.
    """
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
            known.update(dict.fromkeys(counts, 0))  # missing counts are 0
            if known:
                yield _counter(one, track, {**known, **counts})


def _counter(one: StepRecord, track: str, counts: Mapping[str, int]) -> dict[str, Any]:
    pid, at = STEPS + one.replica, round(1e6 * one.at)
    return {"ph": "C", "pid": pid, "name": track, "ts": at, "args": dict(counts)}


class StepReader(RecordReader[StepRecord]):
    """The steps of a trace, each once, in the order in which they were written.

    Args:
        path: trace file (the value of ``TIERED_KV_TRACE``).
    """

    def __init__(self, path: Path) -> None:
        super().__init__(steps_to_read(path), StepRecord.from_json)


def has_steps(path: Path) -> bool:
    """Return True if the trace at ``path`` has steps."""
    return any(True for _ in files_to_read(steps_to_read(path)))
