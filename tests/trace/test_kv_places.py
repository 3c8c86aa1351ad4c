"""Locations of a job's KV over time, compared with results worked out by hand from its turns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.records import record, records
from tiered_kv.trace.page.charts import OverTime
from tiered_kv.trace.page.kv_places import (
    MOST_LANES,
    MOST_TURNS,
    PLACES,
    Lanes,
    Phase,
    Place,
    Stays,
)
from tiered_kv.trace.traced_jobs import TracedJobs
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
)
from tiered_kv.trace.turn_table import TurnTable

PINNED = PinStory(4, 2.0, PinEnd.EXPIRED)


def turn(number: int, at: float, gap_s: float | None = None, **fields: Any) -> TurnRecord:
    """Return a turn that waits for 1 s, is restored for 1 s, computes for 1 s and decodes for 1
    s."""
    usual: dict[str, Any] = {
        "turn": number,
        "arrived": 1e9 + at,
        "times": TurnTimes(0, 0, 1.0, 2.0, 3.0, 4.0),
        "tokens": TurnTokens(prompt=90, recomputed=90, output=10),
        "gap": GapStory(StoryEnd.RETURNED if gap_s else StoryEnd.OVER, gap_s),
    }
    return record(**{**usual, **fields})


def lain(*turns: TurnRecord) -> list[tuple[Place, float, float]]:
    """Return the locations of the KV between turns with their start and end times, sorted by
    start."""
    table = TurnTable(turns)
    stays = Stays.of(table, TracedJobs.of(table))
    found = [
        (PLACES[place], begin, end)
        for place, begin, end in zip(stays.place, stays.begin, stays.end, strict=True)
        if PLACES[place] is not Place.RUNNING
    ]
    return sorted(found, key=lambda stay: stay[1])


def test_kv_is_pinned_first_and_then_is_where_the_next_turn_finds_it() -> None:
    found = TurnTokens(prompt=120, vram=10, cpu=80, recomputed=30, lost=10)
    assert lain(turn(1, 0.0, 6.0, pin=PINNED), turn(2, 10.0, tokens=found)) == [
        (Place.PINNED, 4.0, 6.0),
        (Place.CPU, 6.0, 11.0),  # until the next turn is admitted
    ]


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        (TurnTokens(prompt=100, vram=60, ssd=40), Place.VRAM),
        (TurnTokens(prompt=100, vram=40, ssd=60), Place.SSD),
        (TurnTokens(prompt=100, cpu=40, recomputed=60, lost=50), Place.NOWHERE),
    ],
)
def test_the_location_is_where_most_of_the_kv_is_found(tokens: TurnTokens, place: Place) -> None:
    assert lain(turn(1, 0.0, 6.0), turn(2, 10.0, tokens=tokens)) == [(place, 4.0, 11.0)]


@pytest.mark.parametrize(
    ("tier", "place"),
    [
        ("cpu", Place.CPU),
        ("store", Place.SSD),
        ("drop", Place.NOWHERE),
        ("pin", Place.UNKNOWN),
        ("of another policy", Place.UNKNOWN),
    ],
)
def test_kv_of_a_job_that_never_returned_is_where_it_was_placed(tier: str, place: Place) -> None:
    gap = GapStory(StoryEnd.GIVEN_UP, 6.0)
    assert lain(turn(1, 0.0, gap=gap, decision=PricedDecision(tier))) == [(place, 4.0, 10.0)]


def test_kv_that_was_promoted_ahead_was_on_ssd_until_then() -> None:
    decision, pages = PricedDecision("store", back_s=4.0), PageMoves(ahead=3)
    found = TurnTokens(prompt=100, cpu=100)
    first = turn(1, 0.0, 6.0, decision=decision, pages=pages)
    assert lain(first, turn(2, 10.0, tokens=found)) == [
        (Place.SSD, 4.0, 8.0),
        (Place.CPU, 8.0, 11.0),
    ]


def test_curves_count_the_tokens_in_each_location_over_time() -> None:
    """A context of 100 tokens is pinned for 2 s and then stays in CPU memory for 5 s. The curves
    add up to these times and tokens."""
    turns = turn(1, 0.0, 6.0, pin=PINNED), turn(2, 10.0, tokens=TurnTokens(prompt=70, cpu=70))
    table = TurnTable(turns)
    curves = OverTime.of(table, Stays.of(table, TracedJobs.of(table)))
    width = float(curves.at[1] - curves.at[0])
    tokens = {place: float(curve.sum()) * width for place, curve in curves.resting.items()}
    assert tokens[Place.PINNED] == pytest.approx(2.0 * 100)
    assert tokens[Place.CPU] == pytest.approx(5.0 * 100)
    assert tokens[Place.RUNNING] == pytest.approx(3.0 * 100 + 3.0 * 70)
    assert tokens[Place.SSD] == 0.0
    during = curves.resting[Place.PINNED][(curves.at > 4.1) & (curves.at < 5.9)]
    assert during == pytest.approx(100.0)
    prompts = {name: float(curve.sum()) * width for name, curve in curves.prompts.items()}
    assert prompts["tokens.cpu"] == pytest.approx(70)
    assert prompts["tokens.recomputed"] == pytest.approx(90)


def lanes_of(turns: list[TurnRecord]) -> tuple[Lanes, TurnTable, TracedJobs]:
    table = TurnTable(turns)
    jobs = TracedJobs.of(table)
    return Lanes.of(table, jobs, Stays.of(table, jobs)), table, jobs


def test_a_lane_has_the_phases_of_its_turns() -> None:
    lanes, _, _ = lanes_of([turn(1, 5.0, job="b"), turn(1, 0.0, job="a")])
    assert lanes.job.tolist() == [1, 0], "in the order of their begin"
    assert (lanes.left_out, lanes.slowest, lanes.apart) == (0, 0, False)
    found = {kind: bars for kind, bars in lanes.bars.items() if len(bars.lane)}
    assert list(found) == [*Phase]
    for at, phase in enumerate(Phase):
        begins = dict(zip(found[phase].lane.tolist(), found[phase].begin.tolist(), strict=True))
        assert begins == {0: at, 1: 5.0 + at}


def test_a_turn_that_was_never_admitted_waits_to_its_end() -> None:
    lanes, _, _ = lanes_of([turn(1, 0.0, times=TurnTimes(end_s=7.0))])
    assert {kind: bars.end.tolist() for kind, bars in lanes.bars.items() if len(bars.lane)} == {
        Phase.WAITING: [7.0]
    }


def test_of_many_jobs_the_slowest_and_an_even_sample_have_lanes() -> None:
    """Every hundredth of 4,000 jobs takes a minute longer. Half of the lanes show the slowest jobs,
    and the others show an even sample."""
    count = 4_000
    turns = [
        turn(1, 10.0 * n, job=f"job-{n}", times=TurnTimes(0, 0, 0, 0, 1, 2 + 60 * (n % 100 == 7)))
        for n in range(count)
    ]
    lanes, table, jobs = lanes_of(turns)
    names = [table.job_name(int(jobs.name[job])).job for job in lanes.job]
    numbers = [int(name.removeprefix("job-")) for name in names]
    assert len(numbers) == MOST_LANES
    assert numbers == sorted({*numbers})
    slow = [number for number in numbers if number % 100 == 7]
    others = [number for number in numbers if number % 100 != 7]
    assert len(slow) >= lanes.slowest == MOST_LANES // 2
    apart = [after - before for before, after in pairwise(others)]
    assert max(apart) < 1.5 * count / len(others)
    assert lanes.left_out == count - MOST_LANES
    assert lanes.apart, "a job is a dot in a trace that long"
    assert max(bars.begin.max(initial=0.0) for bars in lanes.bars.values()) < 62


def test_a_job_of_very_many_turns_is_drawn_in_part() -> None:
    lanes, _, _ = lanes_of([turn(n, 10.0 * n, 6.0) for n in range(1, MOST_TURNS + 500)])
    assert lanes.drawn.tolist() == [MOST_TURNS]
    assert lanes.bars[Phase.ANSWERING].turn.max() == MOST_TURNS


@given(st.lists(records, min_size=1, max_size=12))
def test_any_trace_has_lanes_and_curves(turns: list[TurnRecord]) -> None:
    lanes, table, jobs = lanes_of(turns)
    stays = Stays.of(table, jobs)
    assert (stays.end > stays.begin).all()
    assert int(lanes.drawn.sum()) == len(table) - int((table.job < 0).sum())
    curves = OverTime.of(table, stays)
    assert all(np.isfinite(curve).all() for curve in curves.resting.values())
    rate = sum(curve.sum() for curve in curves.prompts.values())
    assert rate * (curves.at[1] - curves.at[0]) <= 1.001 * sum(
        table[name].sum() for name in curves.prompts
    )
