"""Turns that end with a stop string or a disconnect, turns that are retried, and turns whose end
fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.runtime.admission.admitting import TOKENS, begin, holding_rig, running
from tests.runtime.conftest import MakeRig
from tiered_kv.policies.base import JobKey
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig

VRAM_ONLY = {"cpu_gib": 0.0}


def cut_short(rig: Rig, name: str, *, stop: tuple[str, ...] = ()) -> None:
    """Start a turn of a job, and abort it after two steps."""
    rig.add(name, text(100, seed=1), params={"job_id": name}, max_tokens=50, stop=stop)
    rig.step()
    rig.step()
    rig.abort(name)
    rig.run()


def test_a_turn_aborted_by_a_stop_string_counts_as_finished(make_rig: MakeRig) -> None:
    """vLLM's API server detects the stop string, and aborts the request in the engine. Such a turn
    is pinned, unlike the turn of a client that disconnects."""
    rig = make_rig(extra={**VRAM_ONLY, "admission": "auto"})
    cut_short(rig, "stopped", stop=("Observation:",))
    cut_short(rig, "hung up")
    assert JobKey("", "stopped") in rig.pins
    assert JobKey("", "hung up") not in rig.pins
    assert len(rig.gate.jobs) == 1


def test_a_request_with_stop_strings_and_no_output_was_cancelled(make_rig: MakeRig) -> None:
    rig = make_rig(extra=VRAM_ONLY)
    rig.add("j", text(100, seed=1), params={"job_id": "j"}, stop=("Observation:",))
    rig.abort("j")
    rig.run()
    assert rig.count("pins") == 0


def test_a_job_that_retries_after_an_abort_is_not_new(make_rig: MakeRig) -> None:
    """If a client aborts a turn of a started job and sends it again, the retry is not held back,
    although a new job is."""
    rig = holding_rig(make_rig, in_job_order=True)
    begin(rig, "patient", tokens=100, last=False)
    rig.run()
    context = rig.prompts["patient"] + rig.outputs["patient"]
    for name in "ab":
        begin(rig, name)
        rig.step()
    begin(rig, "new")
    assert rig.held() == ["new"]
    rig.add("try1", context, params={"job_id": "patient"})
    rig.abort("try1")
    assert len(rig.gate.jobs) == len(running(rig)), "it takes no room while it is away"
    rig.add("try2", context, params={"job_id": "patient", "is_last_step": True})
    assert rig.held() == ["new"]
    rig.run()
    assert rig.outputs["try2"] == expected(context, 4)
    rig.check_clean()


def test_aborted_jobs_are_eventually_forgotten(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.connectors.runtime.admission.active_jobs.MOST_SILENT", 3)
    rig = make_rig(extra={**VRAM_ONLY, "admission": "auto"})
    for number in range(5):
        cut_short(rig, f"j{number}")
    rig.add("other", text(20, seed=9), params={"job_id": "other"}, salt="another client's")
    rig.step()
    rig.abort("other")
    back = [n for n in range(5) if rig.gate.jobs.reactivate(JobKey("", f"j{n}"))]
    assert back == [2, 3, 4], "one client's push out none of another's"


def test_turns_of_a_job_that_arrive_together_start_with_the_first(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second turn of a new job waits until the first one runs. It then precedes new jobs, and
    aborting it does not free the space of the first."""
    rig = holding_rig(make_rig, in_job_order=True)
    for name in "ab":
        begin(rig, name)
    params = {"job_id": "both"}
    rig.add("both1", text(TOKENS, seed=1), max_tokens=20, params=params)
    begin(rig, "c")
    rig.add("both2", text(TOKENS, seed=2), max_tokens=20, params=params)
    assert rig.held() == ["c", "both2"]
    while "both1" not in running(rig):
        rig.step()
    with monkeypatch.context() as patch:
        patch.setattr(rig.admission.queue, "holds", lambda _: True)
        rig.step()
    assert rig.held() == ["both2", "c"], "it goes before new jobs now"
    active = len(rig.gate.jobs)
    rig.abort("both2")
    assert len(rig.gate.jobs) == active, "both1 runs"
    rig.run()


def test_streamed_input_is_ignored(make_rig: MakeRig) -> None:
    """Requests with streamed input are not saved and do not count as turns. When their next input
    chunk arrives, vLLM drops the last sampled token, and so changes hashes that it has already
    reported."""
    rig = make_rig()
    rig.add("stream", text(127, seed=1), max_tokens=1, params={"job_id": "j"}, resumable=True)
    for _ in range(5):
        rig.step()
    rig.abort("stream")
    rig.run()
    assert rig.count("turns") == rig.count("pages_saved") == rig.count("hook_errors") == 0
    rig.check_clean()


def test_waiting_jobs_do_not_store_their_own_page_lists(make_rig: MakeRig) -> None:
    """Thousands of jobs may wait for hours, each with thousands of pages, so waiting jobs keep no
    page lists of their own."""
    rig = make_rig()
    for number in range(3):
        rig.ask(f"t{number}", text(300, seed=number), params={"job_id": f"j{number}"})
    gaps = rig.gaps.manager.open
    waiting = [gaps[job] for job in gaps.jobs()]
    assert [(list(gap.pages), gap.saved) for gap in waiting] == [([], True)] * 3
    rig.ask("again", rig.prompts["t1"] + rig.outputs["t1"] + [1], params={"job_id": "j1"})
    assert rig.outputs["again"] == expected(rig.prompts["again"], 4)


def test_a_turn_whose_end_fails_does_not_count_as_running_forever(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(extra={"admission": "auto"})
    rig.ask("t1", text(100, seed=1), params={"job_id": "j"})

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(rig.pages.saves, "on_ended", broken)
        rig.ask("t2", text(150, seed=2), params={"job_id": "j"})
    assert rig.count("hook_errors") == 1
    assert len(rig.gate.jobs) == 0
    rig.ask("t3", text(170, seed=3), params={"job_id": "j"})
    assert JobKey("", "j") in rig.pins, "no other turn of it runs"


def test_a_failed_step_defers_no_request_forever(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(extra=VRAM_ONLY)

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.pages.saves, "step", broken)
    rig.add("running", text(50, seed=1), max_tokens=20)
    rig.step()
    rig.admission.pressure._deferred_at = rig.half.step  # noqa: SLF001 - running ones need blocks
    rig.add("next", text(50, seed=2))
    rig.step()
    rig.step()
    assert running(rig) == ["next", "running"]


def test_a_scheduler_that_cannot_query_logs_it_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = holding_rig(make_rig, in_job_order=True)

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.admission.queue, "is_tight", broken)
    with caplog.at_level(logging.ERROR):
        for name in "ab":
            begin(rig, name)
        rig.run()
    assert rig.count("hook_errors") > 10
    assert caplog.text.count("held-back requests are admitted") == 1
