"""A run whose figures are all the same, and one of whom somebody tells another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tests.trace.records import record
from tiered_kv.bench.replay.results import JobDone, TurnDone
from tiered_kv.bench.trace.accounts import HAPPENED, accounts
from tiered_kv.bench.trace.names import COUNTED, FAULTS, GAUGED, OF_VLLM, read_metrics
from tiered_kv.bench.trace.script import Seen
from tiered_kv.metrics import COUNTERS, GAUGES
from tiered_kv.trace.steps.step_figures import StepFigures
from tiered_kv.trace.turn_record import (
    GapStory,
    PageMoves,
    PinEnd,
    PinStory,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
)


def turn(number: int) -> TurnDone:
    """A turn of a hundred tokens, of which 70 were found."""
    return TurnDone(number, 0.0, 1.0, 2.0, 100, 70, 8, tokens=(1,) * 8)


def traced(job: str, number: int, end: StoryEnd) -> TurnRecord:
    pinned = end is StoryEnd.RETURNED
    return record(
        job=job,
        turn=number,
        request=f"cmpl-{job}.{number}-0-0123abcd",
        arrived=1e9 + number,
        times=TurnTimes(admitted_s=0.0, scheduled_s=0.0, first_token_s=0.25, end_s=0.5),
        tokens=TurnTokens(100, 40, 20, 10, 30, 0, 0, 8),
        pin=PinStory(5, 0.25, PinEnd.RETURNED) if pinned else PinStory(),
        pages=PageMoves(promoted=3, used=2, evicted={"cpu": 1}),
        gap=GapStory(end),
    )


def seen() -> Seen:
    """Two turns of a job that is over, and one of a job that is left open."""
    counters = {
        **dict.fromkeys(COUNTED, 0),
        "turns": 3,
        "prompt_tokens_vram": 120,
        "prompt_tokens_cpu": 90,
        "prompt_tokens_ssd": 30,
        "prompt_tokens_recomputed": 90,
        "pages_promoted": 9,
        "pages_promoted_used": 6,
        "pages_demoted": 4,
        "pages_evicted": 7,
        "pins": 1,
    }
    gauges = dict.fromkeys(GAUGED, 2)
    of_vllm = {
        "prompt_tokens": 300,
        "cached_tokens": 210,
        "answer_tokens": 24,
        "requests": 3,
        "preemptions": 0,
    }
    return Seen(
        played=[JobDone("over", 0.0, 1.0, (turn(1), turn(2)))],
        left_open=[JobDone("open", 0.0, 1.0, (turn(1),))],
        metrics={**counters, **gauges, **of_vllm},
        status={
            "counters": counters,
            "gauges": gauges,
            "pins": {"jobs": 0},
            "jobs": {"known": 1},
        },
        open_jobs=[{"id": "open", "turn": 1}],
        trace=Path("trace.jsonl"),
        records=[
            traced("over", 1, StoryEnd.RETURNED),
            traced("over", 2, StoryEnd.OVER),
            traced("open", 1, StoryEnd.CLOSED),
        ],
        steps=StepFigures(10, 1.0, 90, 21, {}),
        idle_ms=[1.0] * 39 + [9.0],
    )


def disagreeing(run: Seen) -> list[str]:
    return [one.what for one in accounts(run) if not one.agrees]


def test_figures_that_are_the_same_agree() -> None:
    assert disagreeing(seen()) == []
    assert len(accounts(seen())) > 20


def with_metric(name: str, more: int) -> Callable[[Seen], Seen]:
    return lambda run: replace(run, metrics={**run.metrics, name: run.metrics[name] + more})


def with_status(name: str, value: int) -> Callable[[Seen], Seen]:
    def change(run: Seen) -> Seen:
        counters: dict[str, Any] = {**run.status["counters"], name: value}
        return replace(run, status={**run.status, "counters": counters})

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (with_metric("prompt_tokens_vram", 1), "tokens of prompts, vram"),
        (with_metric("turns", -1), "turns"),
        (with_metric("preemptions", 1), "preemptions"),
        (with_metric("answer_tokens", 1), "tokens of answers"),
        (with_metric("cpu_pages", 1), "gauge cpu_pages"),
        (with_metric("save_failures", 1), "faults"),
        (with_status("pages_promoted", 8), "pages that came up"),
        (with_status("pages_demoted", 0), "what did not happen"),
        (with_status("pins_ended_expired", 1), "pins that expired, or were held to the end"),
        (lambda run: replace(run, records=run.records[1:]), "turns"),
        (lambda run: replace(run, open_jobs=[]), "jobs that are waited for, and their turns"),
        (lambda run: replace(run, left_open=[]), "jobs"),
        (
            lambda run: replace(run, steps=replace(run.steps, prefill_tokens=91)),
            "tokens of prompts that were computed",
        ),
        (
            lambda run: replace(
                run, played=[JobDone("over", 0.0, 1.0, (turn(1), replace(turn(2), turn=3)))]
            ),
            "turns of which client and trace tell different things",
        ),
    ],
)
def test_one_who_tells_another_figure_is_found(change: Callable[[Seen], Seen], what: str) -> None:
    assert what in disagreeing(change(seen()))


def test_turns_that_differ_are_named() -> None:
    run = replace(
        seen(), left_open=[JobDone("open", 0.0, 1.0, (replace(turn(1), cached_tokens=64),))]
    )
    (found,) = [one for one in accounts(run) if one.about is not None]
    assert found.to_json()["about"] == [
        {"request": "open.1", "client": (1, 100, 64, 8), "trace": (1, 100, 70, 8)}
    ]


def test_the_idle_call_is_the_one_that_19_of_20_stay_below() -> None:
    assert seen().idle_call_ms == pytest.approx(1.0)
    assert replace(seen(), idle_ms=[1.0] * 30 + [9.0] * 10).idle_call_ms == pytest.approx(9.0)


def test_names_are_those_of_the_connector() -> None:
    assert set(COUNTED) <= COUNTERS.keys()
    assert set(GAUGED) <= GAUGES.keys()
    assert {*HAPPENED, *FAULTS} <= set(COUNTED)


def test_metrics_are_summed_over_engines() -> None:
    registry = CollectorRegistry()
    turns = Counter("vllm:tiered_kv_turns", "Turns.", ["engine"], registry=registry)
    pages = Gauge("vllm:tiered_kv_tier_pages", "Pages.", ["engine", "tier"], registry=registry)
    asked = Counter("vllm:prompt_tokens", "Tokens.", ["engine", "model"], registry=registry)
    for engine in ("0", "1"):
        turns.labels(engine).inc(3)
        pages.labels(engine, "cpu").set(4)
        pages.labels(engine, "cpu_compressed").set(1)
        asked.labels(engine, "model").inc(100)
    found = read_metrics(generate_latest(registry).decode())
    assert (found["turns"], found["cpu_pages"], found["prompt_tokens"]) == (6, 10, 200)
    assert found.keys() == {*COUNTED, *GAUGED, *OF_VLLM}
    assert found["pins"] == 0
