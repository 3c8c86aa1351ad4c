"""The figures of a trace, compared with manual calculations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.records import record, records
from tiered_kv.trace.analysis import MOST_TOOLS, OTHERS, Decisions, Pins, Spread, analyze
from tiered_kv.trace.comparison import compare
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
    WouldHave,
)
from tiered_kv.trace.turn_table import TurnTable


def turn(job: str | None, number: int, at: float, took: float = 1.0, **fields: Any) -> TurnRecord:
    times = fields.pop("times", TurnTimes(admitted_s=0.25, first_token_s=0.5, end_s=took))
    return record(job=job, turn=number, arrived=1e9 + at, times=times, **fields)


def returned(gap_s: float, **fields: Any) -> GapStory:
    return GapStory(StoryEnd.RETURNED, gap_s, **fields)


def of(*turns: TurnRecord) -> TurnTable:
    return TurnTable(turns)


# -- jobs -------------------------------------------------------------------------------------


def test_a_job_lasts_from_its_first_arrival_to_the_end_of_its_last_turn() -> None:
    """The times of two jobs (14 s and 2 s) are correct, although the records are sorted by the end
    of their gaps, not by arrival."""
    found = analyze(
        of(turn("a", 2, 10.0, 5.0), turn("b", 1, 3.0, 2.0), turn("a", 1, 1.0), turn(None, 1, 0))
    )
    assert (found.turns, found.alone, found.span_s) == (4, 1, 15.0)
    assert (found.jobs.jobs, found.jobs.cut) == (2, 0)
    assert found.jobs.completion_s is not None
    assert found.jobs.completion_s.mean == (14.0 + 2.0) / 2
    assert found.jobs.completion_s.p99 == pytest.approx(2 + 0.99 * 12)


def test_a_name_that_starts_over_or_of_another_client_is_another_job() -> None:
    table = of(
        turn("a", 1, 0.0),
        turn("a", 2, 2.0),
        turn("a", 1, 100.0),
        turn("a", 1, 1.0, 7.0, client="other"),
        turn("a", 1, 1.0, 9.0, replica=1),
    )
    jobs = TracedJobs.of(table)
    assert jobs.completion_s.tolist() == [3.0, 1.0, 7.0, 9.0]
    assert jobs.number.tolist() == [0, 1, 0, 0]
    assert jobs.turns.tolist() == [2, 1, 1, 1]


def test_jobs_that_began_before_the_trace_have_no_completion_time() -> None:
    found = analyze(of(turn("old", 7, 0.0, 500.0), turn("old", 8, 600.0), turn("new", 1, 1.0)))
    assert (found.jobs.jobs, found.jobs.cut) == (2, 1)
    assert found.jobs.completion_s == Spread(1.0, 1.0, 1.0, 1.0, 1.0)


def test_jobs_that_are_open_at_the_end_are_counted() -> None:
    found = analyze(
        of(
            turn("a", 1, 0.0, gap=returned(1.0)),
            turn("a", 2, 2.0, gap=GapStory(StoryEnd.CLOSED, 1.0)),
            turn("b", 1, 0.0, gap=GapStory(StoryEnd.OVER)),
        )
    )
    assert found.jobs.waiting == 1


def test_waits_leave_out_turns_that_were_never_admitted() -> None:
    found = analyze(
        of(
            turn("a", 1, 0.0, times=TurnTimes(2.0, 0.5, 4.0, 4.0, 5.0, 6.0)),
            turn("b", 1, 0.0, times=TurnTimes(9.0, end_s=9.0)),
        )
    )
    assert found.waits.queue_s == Spread(4.0, 4.0, 4.0, 4.0, 4.0)
    assert (found.waits.held_s, found.waits.pages_s) == (11.0, 0.5)
    assert found.waits.first_token_s == Spread(5.0, 5.0, 5.0, 5.0, 5.0)


# -- tokens and pages -------------------------------------------------------------------------


def test_cached_tokens_save_their_share_of_the_prefill_time() -> None:
    tokens = TurnTokens(prompt=900, vram=400, cpu=200, ssd=100, recomputed=200, lost=90, output=100)
    one = turn("a", 1, 0.0, tokens=tokens, decision=PricedDecision("cpu", recompute_s=10.0))
    prompts = analyze(of(one)).prompts
    assert prompts.tokens == 900
    assert (prompts.vram, prompts.cpu, prompts.ssd) == (4 / 9, 2 / 9, 1 / 9)
    assert (prompts.recomputed, prompts.lost) == (2 / 9, 0.1)
    assert prompts.prefill_saved_s == pytest.approx(7.0)


def test_unused_pages_are_waste() -> None:
    moves = PageMoves(promoted=10, promoted_bytes=10 << 20, used=6, ahead=2, demoted=3)
    found = analyze(of(turn("a", 1, 0.0, pages=moves), turn("b", 1, 0.0, pages=PageMoves(used=3))))
    assert found.promotions.pages == 12
    assert (found.promotions.used, found.promotions.nbytes) == (9, 10 << 20)
    assert found.promotions.waste == 0.25
    assert found.demoted == 3


def test_pins_are_shown_by_their_end() -> None:
    ends = [(PinEnd.RETURNED, 1.0), (PinEnd.RETURNED, 3.0), (PinEnd.EXPIRED, 8.0)]
    pins = [PinStory(4, held_s, end) for end, held_s in ends]
    found = analyze(
        of(*[turn("a", n, n, pin=pin) for n, pin in enumerate(pins, 1)], turn("b", 1, 0))
    )
    assert {end: one.pins for end, one in found.pins.items()} == {"returned": 2, "expired": 1}
    assert found.pins["expired"] == Pins(1, Spread(8.0, 8.0, 8.0, 8.0, 8.0))


# -- decisions --------------------------------------------------------------------------------


def test_regret_is_the_difference_to_the_best_decision_in_hindsight() -> None:
    priced = PricedDecision("pin", "fast", benefit_s=5.0, vram_price=1.0)
    gaps = [
        # Pinning for the whole gap gains 3 s: no regret.
        returned(2.0, in_vram=True, saved_s=5.0, cost_s=2.0),
        returned(4.0, cost_s=1.0),  # pinned for 1 s: a loss of 1 s instead of a gain of 1 s
        returned(9.0),  # too long to be worth a pin: no regret
        # The job did not return: a loss of 3 s instead of 0.
        GapStory(StoryEnd.GIVEN_UP, 100.0, cost_s=3.0),
        # The trace ended first, so the best choice is unknown.
        GapStory(StoryEnd.CLOSED, 1.0, cost_s=7.0),
        GapStory(StoryEnd.OVER),
    ]
    found = analyze(
        of(*[turn("a", n, n, decision=priced, gap=gap) for n, gap in enumerate(gaps, 1)])
    )
    made = found.decisions
    assert made.gaps == 4
    assert made.in_vram == 1 / 3
    assert (made.saved_s, made.cost_s, made.best_s) == (5.0, 6.0, 4.0)
    assert made.regret_s == 0.0 + 2.0 + 0.0 + 3.0


def test_forecasts_are_calibrated_if_half_of_the_gaps_are_below_their_median() -> None:
    def gap(q50: float | None, q90: float | None, gap_s: float) -> TurnRecord:
        decision = PricedDecision("cpu", q50_s=q50, q90_s=q90)
        return turn("a", 1, 0.0, decision=decision, gap=returned(gap_s))

    made = analyze(
        of(gap(2, 5, 1), gap(2, 5, 4), gap(2, 5, 6), gap(2, None, 99), gap(None, None, 1))
    )
    assert (made.decisions.below_q50, made.decisions.below_q90) == (1 / 4, 3 / 4)


def test_decisions_are_shown_by_tool_and_by_class() -> None:
    tools = [("bash", "ls"), ("bash", "pytest"), ("search",), ()]
    turns = [
        turn("a", n, n, tool=tool, decision=PricedDecision("cpu", kind), gap=returned(n))
        for n, (tool, kind) in enumerate(zip(tools, ("fast", "fast", "slow", ""), strict=True), 1)
    ]
    found = analyze(of(*turns))
    assert {name: one.gaps for name, one in found.by_tool.items()} == {
        "bash": 2,
        "search": 1,
        "(none)": 1,
    }
    assert {name: one.gaps for name, one in found.by_class.items()} == {
        "(none)": 1,
        "fast": 2,
        "slow": 1,
    }


def test_rare_tools_are_shown_together() -> None:
    names = [f"tool-{n}" for n in range(MOST_TOOLS + 5)] + ["tool-0"]
    turns = [turn("a", n, n, tool=(name,), gap=returned(1.0)) for n, name in enumerate(names, 1)]
    by_tool = analyze(of(*turns)).by_tool
    assert len(by_tool) == MOST_TOOLS + 1
    assert by_tool["tool-0"].gaps == 2
    assert by_tool[OTHERS].gaps == 5


def test_an_empty_trace_has_figures_without_values() -> None:
    found = analyze(of())
    assert (found.turns, found.jobs.jobs, found.jobs.completion_s) == (0, 0, None)
    assert found.decisions == Decisions(0, None, None, None, None, 0.0, 0.0, 0.0, 0.0)
    assert found.prompts.vram is None


@given(st.lists(records, max_size=12))
def test_any_trace_can_be_analyzed_and_compared(turns: list[TurnRecord]) -> None:
    table = TurnTable(turns)
    found = analyze(table)
    assert found.turns == len(turns)
    assert found.turns - found.alone == TracedJobs.of(table).turns.sum()
    compared = compare(table, table)
    assert compared.jobs == found.jobs.jobs - found.jobs.cut
    assert all(one.difference == 0 for one in compared.differences.values())


# -- two traces -------------------------------------------------------------------------------


def test_jobs_of_two_traces_are_compared_one_by_one() -> None:
    random = np.random.default_rng(1)
    first, second = [], []
    for n in range(50):
        long, less = random.uniform(10, 1000), random.uniform(1.0, 3.0)
        first.append(turn(f"j{n}", 1, n, long, tokens=TurnTokens(recomputed=100)))
        second.append(turn(f"j{n}", 1, n, long - less, tokens=TurnTokens(recomputed=40)))
    first.append(turn("only here", 1, 0.0))
    second += [turn("j0", 1, 500.0), turn("cut", 2, 0.0)]
    found = compare(of(*first), of(*second))
    assert (found.jobs, found.only_first, found.only_second) == (50, 1, 1)
    took = found.differences["completion_s"]
    assert -3.0 < took.low < took.difference < took.high < -1.0, "jobs differ by far more"
    assert took.second - took.first == pytest.approx(took.difference)
    computed = found.differences["recomputed_tokens"]
    assert (computed.first, computed.second, computed.low, computed.high) == (100, 40, -60, -60)
    assert found.differences["queue_s"].difference == 0.0


def test_traces_without_a_job_in_common_have_no_differences() -> None:
    found = compare(of(turn("a", 1, 0.0)), of(turn("b", 1, 0.0)))
    assert (found.jobs, found.differences) == (0, {})


def test_a_spread_leaves_out_what_is_unknown() -> None:
    assert Spread.of(np.array([math.nan, 1.0, 3.0])) == Spread(2.0, 2.0, 2.8, 2.9, 2.98)
    assert Spread.of(np.array([math.nan])) is None


# -- what an observed engine would have saved -----------------------------------------------


def test_would_be_savings_are_reported_by_tier_and_as_time() -> None:
    prompt = TurnTokens(prompt=100, vram=20, recomputed=80, output=100)
    decided = PricedDecision("cpu", recompute_s=4.0)
    seen = [WouldHave(vram=16, cpu=32), WouldHave(ssd=2)]
    found = analyze(
        of(
            *(
                turn("a", n, n, tokens=prompt, would_have=one, decision=decided)
                for n, one in enumerate(seen, 1)
            )
        )
    ).would_have_saved
    assert (found.tokens, found.vram, found.cpu, found.ssd) == (50, 16, 32, 2)
    assert found.share == 50 / 200
    assert found.prefill_s == pytest.approx(4.0 * 50 / 200), "as a share of each context"


def test_a_managed_engine_has_no_would_be_savings() -> None:
    found = analyze(of(turn("a", 1, 0.0, tokens=TurnTokens(prompt=9, recomputed=9))))
    assert found.would_have_saved.tokens == 0
    assert found.would_have_saved.prefill_s == 0
