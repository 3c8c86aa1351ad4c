"""Records for tests of the trace, and random records for property tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tiered_kv.trace.trace_header import TraceHeader
from tiered_kv.trace.turn_record import (
    GapStory,
    PageMoves,
    PinEnd,
    PinStory,
    Preemptions,
    PricedDecision,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
    WouldHave,
)

HEADER = TraceHeader(
    version="0.1.0",
    started=1.79e9,
    clock=1000.0,
    model="/models/small",
    policy="occupancy",
    block_size=16,
    vram_blocks=640,
    tiers_bytes={"cpu": 4 << 30, "ssd": 32 << 30},
    page_bytes=16 * 23_040,
    groups=("full",),
    step_tokens=2048,
    running=64,
    context_tokens=8192,
    admission="auto",
    eviction="worth",
)


def record(n: int = 0, **fields: Any) -> TurnRecord:
    """Return a record with a distinct request ID."""
    given: dict[str, Any] = {"job": "j", "turn": 1, "request": f"r{n}", "arrived": 1.79e9 + n}
    return TurnRecord(**{**given, **fields})


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def requests_of(path: Path) -> list[str]:
    """Return the request IDs of the records in a file, without its headers."""
    return [line["request"] for line in lines_of(path) if "schema" not in line]


seconds = st.floats(0, 1e7, allow_nan=False)
perhaps = st.none() | seconds
counts = st.integers(0, 10**9)
texts = st.text(max_size=600) | st.text('\x00"\\\u20ac\U0001f600', max_size=600)
words = st.sampled_from(["", "pin", "store", "uncertain"]) | texts

records = st.builds(
    TurnRecord,
    job=st.none() | texts,
    session=st.none() | texts,
    agent=st.none() | texts,
    parent=st.none() | texts,
    client=st.sampled_from(["", "0123abcd"]),
    replica=st.integers(0, 1000),
    turn=counts,
    request=texts,
    arrived=st.floats(0, 1e11),
    finish=words,
    tool=st.lists(texts, max_size=4).map(tuple),
    times=st.builds(TurnTimes, seconds, seconds, perhaps, perhaps, perhaps, seconds),
    preempted=st.builds(
        Preemptions,
        counts,
        st.lists(seconds, max_size=5).map(tuple),
        st.lists(seconds, max_size=5).map(tuple),
        st.lists(counts, max_size=5).map(tuple),
    ),
    tokens=st.builds(TurnTokens, *[counts] * 8),
    would_have=st.builds(WouldHave, counts, counts, counts),
    decision=st.builds(
        PricedDecision,
        words,
        words,
        seconds,
        perhaps,
        perhaps,
        perhaps,
        seconds,
        seconds,
        seconds,
        perhaps,
        st.dictionaries(texts, seconds, max_size=6),
        perhaps,
        st.floats(0, 1),
        seconds,
        st.floats(0, 1),
        seconds,
    ),
    pin=st.builds(PinStory, counts, seconds, st.none() | st.sampled_from(PinEnd)),
    pages=st.builds(
        PageMoves,
        counts,
        st.integers(0, 10**16),
        counts,
        counts,
        counts,
        st.dictionaries(texts, counts, max_size=6),
    ),
    gap=st.builds(GapStory, st.sampled_from(StoryEnd), perhaps, st.booleans(), seconds, seconds),
)
"""Any turn record."""
