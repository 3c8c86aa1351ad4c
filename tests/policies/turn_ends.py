"""Ends of turns, for the tests of this folder."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from tiered_kv.policies.base import NO_TOOL, JobKey, Rule, ToolUse, TurnEnd
from tiered_kv.policies.distribution import CELL_LOG_S, Forecast


def turn_end(
    job: str | None = "job",
    turn: int = 1,
    *,
    tool: ToolUse | None = None,
    output: int = 100,
    last: bool = False,
    aborted: bool = False,
) -> TurnEnd:
    """Return the end of a turn of this job, or of no job if it is None."""
    return TurnEnd(
        job=None if job is None else JobKey("", job),
        turn=turn,
        is_last_step=last,
        aborted=aborted,
        context_tokens=3000,
        new_tokens=200,
        output_tokens=output,
        tool=tool,
    )


def forecast_of(gaps: dict[float, float]) -> Forecast:
    """Return a forecast from gaps in seconds and their probabilities. The remaining probability is
    that the gap never ends."""
    masses = np.zeros(len(CELL_LOG_S))
    for gap_s, probability in gaps.items():
        masses[np.abs(CELL_LOG_S - math.log(gap_s)).argmin()] += probability
    masses[-1] += 1 - sum(gaps.values())
    return Forecast.of_masses(masses)


paths = st.lists(st.text(max_size=8), max_size=4).map(tuple)
tools = st.builds(
    ToolUse,
    path=paths,
    command=st.text(max_size=30),
    rule=st.none() | st.builds(Rule, st.floats(1e-3, 1e5), st.floats(0.05, 3)),
    least_s=st.floats(0, 1e5),
    most_s=st.floats(0, 1e5) | st.just(math.inf),
    expected_s=st.none() | st.floats(),
)
turn_ends = st.builds(
    TurnEnd,
    job=st.none() | st.builds(JobKey, st.text(max_size=4), st.text(max_size=4)),
    turn=st.integers(1, 10**6),
    is_last_step=st.booleans(),
    aborted=st.booleans(),
    context_tokens=st.integers(0, 10**7),
    new_tokens=st.integers(-5, 10**7),
    output_tokens=st.integers(-5, 10**7),
    tool=st.none() | st.just(NO_TOOL) | tools,
    ended_at=st.floats(0, 1e9),
)
gaps_s = st.floats() | st.floats(0, 1e5)
