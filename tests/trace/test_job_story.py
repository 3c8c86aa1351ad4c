"""A job's timeline in sentences."""

from __future__ import annotations

import json

from hypothesis import given

from tests.trace.records import record, records
from tiered_kv.trace.job_story import of_job, story
from tiered_kv.trace.turn_record import (
    GapStory,
    PageMoves,
    PinEnd,
    PinStory,
    PricedDecision,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
    WouldHave,
)


def test_a_turn_in_observe_mode() -> None:
    one = record(
        times=TurnTimes(admitted_s=0.25, end_s=1.0),
        tokens=TurnTokens(prompt=1000, vram=100, recomputed=900, output=5),
        would_have=WouldHave(vram=64, ssd=512),
    )
    sentences = story(one)
    assert "Of its 1,000 prompt tokens, 100 were in VRAM and 900 were computed." in sentences
    would = "In observe mode, the connector would have found 64 in VRAM and 512 on SSD."
    assert would in sentences


def test_a_turn_that_was_held_back_and_pinned_before_its_job_returned() -> None:
    one = record(
        turn=3,
        arrived=1_790_000_000.5,
        finish="FINISHED_STOPPED",
        tool=("bash", "pytest <path>"),
        times=TurnTimes(1.0, 0.5, 1.75, 2.0, 2.25, 12.0),
        tokens=TurnTokens(4210, 3000, 900, 100, 210, 64, 300, 91),
        decision=PricedDecision(
            "pin", "fast", 60.0, q50_s=4.5, q90_s=7.0, benefit_s=2.5, vram_price=1
        ),
        pin=PinStory(134, 3.25, PinEnd.RETURNED),
        pages=PageMoves(8, 1 << 20, 7),
        gap=GapStory(StoryEnd.RETURNED, 3.25, True, 2.5, 3.25),
    )
    assert story(one) == [
        "Turn 3 (r0) arrived at 2026-09-21 14:13:20.500 UTC.",
        "It waited 1.75 s, of which 1 s because its new job was held back and 0.5 s for pages "
        "being promoted.",
        "Of its 4,210 prompt tokens, 3,000 were in VRAM, 900 were in CPU memory, 100 were on SSD "
        "and 210 were computed. The KV of 64 of these had been evicted.",
        "Its first token arrived after 2.25 s, and it finished after 12 s with 91 tokens "
        "(FINISHED_STOPPED).",
        "Then its tool ran: pytest <path>.",
        "The next turn was expected after 4.5 s (1 in 2) and 7 s (9 in 10).",
        "So its KV was pinned in VRAM for at most 60 s: finding it in VRAM saves 2.5 s, and each "
        "second in VRAM costs 1 s.",
        "134 blocks were pinned for 3.25 s, until the next turn arrived.",
        "8 pages were promoted for it, and it used 7.",
        "The next turn arrived after 3.25 s.",
        "That saved 2.5 s and cost 3.25 s.",
    ]


def test_a_turn_that_was_never_admitted() -> None:
    one = record(times=TurnTimes(end_s=30.0), decision=PricedDecision("cpu"))
    assert story(one)[1:] == [
        "It was never admitted, and ended after 30 s.",
        "No gap followed.",
    ]


def test_a_job_is_found_by_a_name_of_any_length_with_its_turns_in_order() -> None:
    name = "x" * 500
    turns = [record(n, job=name, turn=n, arrived=float(n)) for n in (3, 1, 2)]
    found = [TurnRecord.from_json(json.loads(one.to_line())) for one in turns]
    assert [one.turn for one in of_job([record(9), *found], name)] == [1, 2, 3]


@given(records)
def test_any_timeline_is_one_line_without_control_characters(one: TurnRecord) -> None:
    told = " ".join(story(one))
    assert told.isprintable()
    assert told.startswith("Turn ")
