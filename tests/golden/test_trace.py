"""A trace written by commit 913b4b9: two turns, one of them with every field set, and a step."""

from __future__ import annotations

import json
from pathlib import Path

from tests.golden.conftest import Copy
from tests.golden.written import changes
from tiered_kv.trace.rotation import steps_of
from tiered_kv.trace.steps.step_record import StepRecord
from tiered_kv.trace.steps.step_tracks import StepReader
from tiered_kv.trace.trace_header import SCHEMA, TraceHeader
from tiered_kv.trace.trace_reader import TraceReader
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
    started=1000.25,
    clock=7.5,
    model="org/model",
    policy="occupancy",
    replica=1,
    block_size=16,
    vram_blocks=500,
    tiers_bytes={"cpu": 1 << 30, "ssd": 1 << 36},
    mode="observe",
    page_bytes=4096,
    groups=("full", "window"),
    step_tokens=2048,
    running=128,
    context_tokens=32768,
    job_order=True,
    admission="auto",
    eviction="worth",
)
WHOLE = TurnRecord(
    job="agent",
    client="5f",
    replica=1,
    turn=1,
    request="r1",
    arrived=1001.5,
    finish="FINISHED_STOPPED",
    tool=("bash", "pytest", "pytest <path>"),
    times=TurnTimes(
        held_s=0.5,
        pages_s=0.25,
        admitted_s=0.75,
        scheduled_s=0.875,
        first_token_s=1.5,
        end_s=9.125,
    ),
    preempted=Preemptions(count=1, at_s=(2.0,), back_s=(2.5,), found=(64,)),
    tokens=TurnTokens(
        prompt=300, vram=100, cpu=50, ssd=25, recomputed=125, lost=10, new=30, output=8
    ),
    would_have=WouldHave(vram=1, cpu=2, ssd=3),
    decision=PricedDecision(
        tier="pin",
        gap_class="fast",
        ttl_s=60.0,
        back_s=5.0,
        q50_s=0.5,
        q90_s=4.5,
        benefit_s=7.0,
        restore_s=0.5,
        recompute_s=0.25,
        cpu_s=0.125,
        tiers_s={"ssd": 0.75},
        cpu_stay_s=30.0,
        survival=0.5,
        queue_s=2.0,
        memoryfulness=0.5,
        vram_price=0.25,
    ),
    pin=PinStory(blocks=19, held_s=3.25, end=PinEnd.RETURNED),
    pages=PageMoves(
        promoted=4, promoted_bytes=4096, used=3, ahead=2, demoted=5, evicted={"cpu": 6}
    ),
    gap=GapStory(end=StoryEnd.RETURNED, gap_s=3.25, in_vram=True, saved_s=0.5, cost_s=0.125),
)
BARE = TurnRecord(turn=1, request="r2", arrived=1003.0)
STEP = StepRecord(
    step=1,
    at=1001.5,
    replica=1,
    running=1,
    waiting=2,
    held=3,
    scheduled=4,
    prefill=300,
    decode=5,
    free=6,
    cached=7,
    pinned=8,
    nbytes={"cpu": 9, "ssd": 10},
    orders={"save": 11, "lookup": 12},
)


def test_every_record_is_read(written: Path) -> None:
    path = written / "trace" / "trace.jsonl"
    reader, steps = TraceReader(path), StepReader(path)
    assert list(reader) == [WHOLE, BARE]
    assert list(steps) == [STEP]
    assert reader.bad_lines == steps.bad_lines == 0
    header = json.loads(path.read_text().splitlines()[0])
    assert header.pop("schema") == SCHEMA == 1
    assert TraceHeader.from_json(header) == HEADER


def test_records_are_written_in_the_same_format(written: Path) -> None:
    path = written / "trace" / "trace.jsonl"
    assert path.read_text().splitlines() == [HEADER.to_line(), WHOLE.to_line(), BARE.to_line()]
    assert steps_of(path).read_text().splitlines() == [HEADER.to_line(), STEP.to_line()]


def test_a_changed_byte_of_a_record_is_noticed(copy: Copy) -> None:
    path = copy("trace") / "trace.jsonl"
    content = path.read_bytes()
    for at, bad in changes(content, range(content.index(b"\n") + 1, len(content) - 1, 3)):
        path.write_bytes(bad)
        assert list(TraceReader(path)) != [WHOLE, BARE], f"the change at {at} went unnoticed"
