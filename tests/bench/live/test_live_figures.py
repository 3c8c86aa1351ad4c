"""Figures computed from measured runs, and paired comparisons of servers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tiered_kv.bench.agents.results import JobDone, Run, TurnDone
from tiered_kv.bench.live.report import live_pairs, live_rows

LOAD = "jps 0.5"


def turn(number: int = 1, ttft_s: float = 0.5, cached: int = 30) -> TurnDone:
    return TurnDone(number, 0.0, ttft_s, 2 * ttft_s, 100, cached, 20)


def job(name: str, seconds: float, error: str | None = None, turns: int = 2) -> JobDone:
    return JobDone(name, 1.0, 1.0 + seconds, tuple(turn(at + 1) for at in range(turns)), error)


def run(server: str, number: int, *jobs: JobDone, **more: Any) -> Run:
    return Run(server, LOAD, number, 0, 0.5, jobs, **more)


def test_times_carry_the_names_of_continuums_analysis() -> None:
    (row,) = live_rows([run("a", 0, job("x", 1.0), job("y", 3.0)), run("a", 1, job("x", 2.0))])
    assert row["num_jobs"] == 3
    assert row["average_duration"] == pytest.approx(2.0)
    assert row["median_duration"] == row["percentile_50"] == pytest.approx(2.0)
    assert row["percentile_95"] == pytest.approx(2.9)
    assert (row["min_duration"], row["max_duration"]) == (1.0, 3.0)
    assert row["jps"] == 0.5
    assert [one["turn"] for one in row["by_turn"]] == [1, 2]
    assert row["by_turn"][0] == {
        "turn": 1,
        "requests": 3,
        "ttft": 0.5,
        "latency": 1.0,
        "prompt_tokens": 100.0,
    }


def test_failed_jobs_are_counted_and_excluded_from_times() -> None:
    (row,) = live_rows([run("a", 0, job("x", 1.0), job("y", 9.0, "turn 2: gone"))])
    assert (row["num_jobs"], row["unfinished"], row["first_error"]) == (1, 1, "turn 2: gone")
    assert row["average_duration"] == 1.0


def test_rates_are_over_the_time_from_start_to_end_with_sub_agents() -> None:
    agents = (job("agent", 1.0, turns=1),)
    (row,) = live_rows([run("a", 0, job("x", 3.0), job("y", 4.0, turns=1), agents=agents)])
    assert row["turns_per_s"] == pytest.approx(4 / 4)
    assert row["tokens_per_s"] == pytest.approx(4 * 120 / 4)
    assert row["num_jobs"] == 2


def test_hits_are_reported_if_the_server_reports_them() -> None:
    counts = {"asked": 200, "vram": 50, "connector": 100}
    (row,) = live_rows([run("a", 0, job("x", 1.0), counts=counts)])
    assert row["hit_ratio"] == pytest.approx(0.3)
    assert row["hits_by_counter"] == {"vram": 0.25, "connector": 0.5}
    (dumb,) = live_rows([run("a", 0, job("x", 1.0), reports_cached=False)])
    assert dumb["hit_ratio"] is None
    assert dumb["hits_by_counter"] is None


def test_servers_are_compared_with_the_first_over_jobs_that_finished_on_both() -> None:
    runs = []
    for number, factor in enumerate((1.1, 1.2, 1.3)):
        runs += [
            run("a", number, job("x", 10.0), job("y", 20.0), job("only a", 99.0)),
            run("b", number, job("x", 10 * factor), job("y", 20 * factor), job("z", 5, "gone")),
        ]
    (pair,) = live_pairs(runs)
    assert (pair["server"], pair["over"], pair["rounds"], pair["jobs"]) == ("b", "a", 3, 6)
    middle = (1.1 * 1.2 * 1.3) ** (1 / 3)
    assert pair["mean_ratio"]["value"] == pytest.approx(middle)
    found = pair["paired_difference"]
    assert found["percent"] == pytest.approx(100 * (middle - 1))
    assert found["low"] < 10 < 30 < found["high"], "three rounds are not many"
    assert pair["ttft_ratio"]["value"] == pytest.approx(1.0)
    assert pair["tpot_ratio"]["value"] == pytest.approx(1.0)


def test_throughput_and_the_time_between_tokens_are_paired_too() -> None:
    quick = JobDone("x", 0.0, 10.0, (TurnDone(1, 0.0, 2.0, 10.0, 180, 0, 20),))
    slow = JobDone("x", 0.0, 20.0, (TurnDone(1, 0.0, 1.0, 20.0, 180, 0, 20),))
    (row, other) = live_rows([run("a", 0, quick), run("b", 0, slow)])
    assert row["tpot"]["mean"] == pytest.approx(8 / 19)
    assert other["tpot"]["p90"] == pytest.approx(1.0)
    (pair,) = live_pairs([run("a", 0, quick), run("b", 0, slow)])
    assert pair["tpot_ratio"]["value"] == pytest.approx(19 / 8)
    assert pair["tokens_per_s_ratio"]["value"] == pytest.approx(0.5)


def test_answers_that_come_in_one_piece_have_no_time_between_tokens() -> None:
    whole = JobDone("x", 0.0, 10.0, (TurnDone(1, 0.0, 10.0, 10.0, 180, 0, 20),))
    short = JobDone("x", 0.0, 10.0, (TurnDone(1, 0.0, 10.0, 10.0, 180, 0, 1),))
    assert math.isnan(live_rows([run("a", 0, short)])[0]["tpot"]["mean"])
    for one in (whole, short):
        (pair,) = live_pairs([run("a", 0, one), run("b", 0, job("x", 2.0))])
        assert "tpot_ratio" not in pair
        assert pair["ttft_ratio"]["value"] == pytest.approx(0.05)
