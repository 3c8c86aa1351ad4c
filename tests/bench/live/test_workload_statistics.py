"""Statistics of a workload's jobs, turns, tokens and tools."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.live.live_jobs import LiveJobs, Unit, load_jobs
from tiered_kv.bench.live.workload_statistics import (
    statistics_lines,
    statistics_table,
    workload_statistics,
)
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn

AGENT = SimJob("agent", 0.0, (SimTurn(0, 400, 50, 0.0),))
JOBS = LiveJobs(
    "two jobs",
    (
        SimJob(
            "a",
            0.0,
            (
                SimTurn(0, 100, 10, 1.0, "git status"),
                SimTurn(110, 90, 20, 3.0, tool_name="browser", agents=(AGENT,)),
                SimTurn(220, 30, 30, 0.0),
            ),
        ),
        SimJob("b", 0.0, (SimTurn(0, 500, 40, 8.0, "git diff"), SimTurn(540, 60, 5, 0.0))),
    ),
    Unit.TOKENS,
    left_out={"cut": LeftOut(3, 7)},
)


def test_jobs_turns_and_sub_agents_are_counted() -> None:
    found = workload_statistics(JOBS)
    assert (found["jobs"], found["sub_agents"], found["turns"]) == (2, 1, 6)
    told = found["quantiles"]
    assert told["turns_per_job"] == pytest.approx(
        {"mean": 2.0, "p10": 1.2, "p50": 2.0, "p90": 2.8, "p99": 2.98, "most": 3.0}
    )
    assert told["longest_context"]["most"] == 605
    assert told["prompt"]["mean"] == pytest.approx((100 + 200 + 250 + 400 + 500 + 600) / 6)
    assert told["added"]["most"] == 500
    assert told["output"]["p50"] == 25
    assert told["reused"]["most"] == pytest.approx(0.9)


def test_tools_are_named_by_their_name_or_first_word() -> None:
    assert workload_statistics(JOBS)["tools"] == pytest.approx({"git": 2 / 3, "browser": 1 / 3})


def test_the_output_fits_a_terminal() -> None:
    found = workload_statistics(load_jobs("swe-agent", count=20, seed=0))
    assert max(map(len, text(found).splitlines())) <= 80
    assert any(line.startswith("tools: cat") for line in statistics_lines(found))
    assert "left out, cut: 3 sessions" in statistics_lines(workload_statistics(JOBS))


def text(found: dict[str, object]) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(statistics_table(found))
    return out.getvalue()
