"""All sources of a run's figures agree, and a false figure is detected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.traced_run import Seen, accounts, disagreements, run_script

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.fixture(scope="module")
def seen(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run_script(small_model, tmp_path_factory.mktemp("traced"), 0, lambda _: None)


def test_trace_metrics_routes_and_clients_agree(seen: Seen) -> None:
    every = accounts(seen)
    assert [one.to_json() for one in every if not one.agrees] == []
    assert len(every) > 20
    assert len(seen.records) > 40


def metric(name: str) -> Callable[[Seen], Seen]:
    """Return a change that adds one to a counter on ``/metrics``."""
    return lambda run: replace(run, metrics={**run.metrics, name: run.metrics[name] + 1})


def status(name: str, value: int) -> Callable[[Seen], Seen]:
    def change(run: Seen) -> Seen:
        counters = {**run.status["counters"], name: value}
        return replace(run, status={**run.status, "counters": counters})

    return change


def longer_answer(run: Seen) -> Seen:
    """Return the run with one more token in the client's count for the first job's first turn."""
    job, *others = run.played
    first, *rest = job.turns
    first = replace(first, output_tokens=first.output_tokens + 1)
    return replace(run, played=(replace(job, turns=(first, *rest)), *others))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (metric("prompt_tokens_vram"), "tokens of prompts, vram"),
        (metric("turns"), "turns"),
        (metric("preemptions"), "preemptions"),
        (metric("answer_tokens"), "tokens of answers"),
        (metric("cpu_pages"), "gauge cpu_pages"),
        (metric("save_failures"), "faults"),
        (status("pages_promoted", 0), "promoted pages"),
        (status("pages_demoted", 0), "counters that did not move"),
        (status("pins_ended_expired", -1), "pins that expired, or were held to the end"),
        (lambda run: replace(run, records=run.records[1:]), "turns"),
        (lambda run: replace(run, open_jobs=[]), "open jobs and their turns"),
        (lambda run: replace(run, left_open=[]), "jobs"),
        (longer_answer, "turns that client and trace report differently"),
    ],
)
def test_a_false_report_is_detected(seen: Seen, change: Callable[[Seen], Seen], what: str) -> None:
    assert what in disagreements(change(seen))
