"""The slowest turns of a trace, and why they were slow."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.trace.records import record, records
from tiered_kv.trace.page.trace_page import MOST_WORST, WorstTurns
from tiered_kv.trace.turn_record import (
    GapStory,
    PinEnd,
    PinStory,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
)


def found(*turns: TurnRecord) -> WorstTurns:
    worst = WorstTurns()
    assert list(worst.watch(turns)) == [*turns], "they are passed on"
    return worst


def reasons(*turns: TurnRecord) -> list[str]:
    """Return the reasons why the worst turn was slow."""
    return found(*turns).found()[0].reasons()


def waited(*moments: Any, **fields: Any) -> TurnRecord:
    return record(times=TurnTimes(*moments), **fields)


def test_the_turns_that_waited_longest_are_kept_worst_first() -> None:
    turns = [waited(0, 0, 0, 0, float(n * 7 % 50), 99.0, n=n) for n in range(50)]
    kept = found(*turns).found()
    assert [one.waited_s for one in kept] == [float(49 - at) for at in range(MOST_WORST)]


def test_a_turn_without_a_first_token_waited_to_its_end() -> None:
    assert reasons(waited(0, 0, None, None, None, 8.0)) == [
        "It was never admitted, and ended after 8 s.",
        "For 8 s (100%) it waited for blocks of VRAM.",
    ]
    assert (
        reasons(waited(0, 0, 2.0, 2.0, None, 8.0))[0] == "It ended after 8 s without a first token."
    )


def test_reasons_are_sorted_by_their_time_and_small_ones_are_left_out() -> None:
    tokens = TurnTokens(prompt=900, cpu=500, ssd=200, recomputed=200, new=190)
    turn = waited(6.0, 1.0, 7.1, 8.1, 10.0, 12.0, tokens=tokens)
    assert reasons(turn) == [
        "Its first token arrived after 10 s.",
        "For 6 s (60%) its new job was held back.",
        "For 1.9 s (19%) it computed 200 of its 900 prompt tokens, 190 of which were new.",
        "For 1 s (10%) it waited for pages to be promoted from the tiers below CPU memory.",
        "For 1 s (10%) its 700 tokens outside VRAM were restored.",
    ]


def test_lost_kv_is_reported_with_the_gap_before_the_turn() -> None:
    gap = GapStory(StoryEnd.RETURNED, 42.0)
    before = record(turn=1, gap=gap, pin=PinStory(4, 5.0, PinEnd.PRESSURE))
    after = waited(
        0, 0, 0, 0, 9.0, 9.5, turn=2, tokens=TurnTokens(prompt=90, recomputed=80, lost=70)
    )
    stranger = record(job="other", turn=1)
    assert reasons(before, stranger, after)[1] == (
        "For 9 s (100%) it computed 80 of its 90 prompt tokens, 70 of which had KV before: "
        "its KV was lost in the gap of 42 s, where its pin ended (pressure)."
    )
    assert "the gap of" not in reasons(stranger, after)[1], "another job's gap is none of its own"


@given(st.lists(records, min_size=1, max_size=20))
def test_any_turn_has_a_reason(turns: list[TurnRecord]) -> None:
    kept = found(*turns).found()
    assert len(kept) == min(len(turns), MOST_WORST)
    assert all(one.reasons() for one in kept)
