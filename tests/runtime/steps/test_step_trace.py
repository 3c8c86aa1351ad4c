"""If enabled, the trace contains every step, with the engine's load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.between_turns.waiting import JOB
from tests.runtime.conftest import MakeRig
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.trace.steps.step_figures import step_figures
from tiered_kv.trace.steps.step_record import StepRecord
from tiered_kv.trace.steps.step_tracks import StepReader, has_steps
from tiered_kv.trace.trace_reader import TraceReader

PAGE = 16 * CELL


def options(tmp_path: Path, **extra: Any) -> dict[str, Any]:
    given = {"cpu_gib": 64 * PAGE / 2**30, "trace": str(tmp_path / "trace.jsonl")}
    return {"blocks": 64, "extra": {**given, "trace_steps": "1", **extra}}


def steps_of(rig: Rig, tmp_path: Path) -> list[StepRecord]:
    """Close the engine, and return the steps in its trace."""
    rig.close()
    reader = StepReader(tmp_path / "trace.jsonl")
    found = list(reader)
    assert not reader.bad
    return found


def test_a_request_is_seen_in_each_of_its_steps(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(**options(tmp_path), max_batched_tokens=64)
    usable = rig.free_blocks
    rig.add("r", text(100, seed=1), max_tokens=5, params=JOB)
    rig.run()
    pinned = rig.pins.held_blocks
    found = steps_of(rig, tmp_path)
    assert [one.step for one in found] == list(range(1, len(found) + 1))
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert [(one.prefill, one.decode) for one in found if one.scheduled] == [
        (64, 0),
        (36, 0),
        *[(0, 1)] * 4,
    ]
    busy = [one for one in found if one.scheduled]
    assert {(one.running, one.waiting, one.held, one.scheduled) for one in busy} == {(1, 0, 0, 1)}
    assert [one.free for one in busy[:3]] == [usable - 4, usable - 7, usable - 7]
    assert [one.cached for one in busy[:3]] == [4, 6, 6], "full blocks, as vLLM caches them"
    assert any(one.orders.get("save") for one in found), "its full blocks are copied"
    assert max(one.nbytes.get("cpu", 0) for one in found) == 7 * PAGE, "the last one is partial"
    assert pinned == found[-1].pinned == 6
    assert (found[-1].running, found[-1].scheduled) == (0, 0), "an idle engine is seen to be idle"


def test_waiting_and_held_requests_are_distinguished(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(
        **options(tmp_path, admission="auto", cpu_gib=0), max_num_seqs=1, in_job_order=True
    )
    for name in ("a", "b", "c", "d"):
        rig.add(name, text(400, seed=ord(name)), max_tokens=8, params={"job_id": name})
        rig.step()
    held, running = len(rig.admission.gate.held), rig.turns.running
    waiting = 4 - held - running
    assert held
    found = steps_of(rig, tmp_path)
    last = found[-1]
    assert (last.running, last.waiting, last.held) == (running, waiting, held)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_tokens_add_up_to_the_computed_ones_with_and_without_preemption(
    make_rig: MakeRig, tmp_path: Path, ahead: bool
) -> None:
    rig = make_rig(
        **{**options(tmp_path, cpu_gib=0), "blocks": 20},
        max_model_len=256,
        max_batched_tokens=96,
        ahead=ahead,
    )
    lengths, requests = {"one": 80, "two": 75, "three": 90}, {}
    for name, tokens in lengths.items():
        requests[name] = rig.add(name, text(tokens, seed=tokens), max_tokens=60)
        rig.step()
    rig.run()
    again = sum(request.num_preemptions for request in requests.values())
    assert again
    assert all(rig.outputs[name] == expected(rig.prompts[name], 60) for name in lengths)
    figures = step_figures(steps_of(rig, tmp_path))
    prompts = sum(lengths.values())
    assert figures.prefill_tokens > prompts, "what was lost was computed again"
    # The last token of a prompt produces the first token of its answer, and the last token of a
    # recomputed context produces the next one. With async scheduling, a token computed just before
    # a preemption may be discarded.
    ended = 60 * len(lengths) - len(lengths) - again
    assert figures.decode_tokens == ended if not ahead else figures.decode_tokens >= ended
    assert figures.levels["scheduled"].peak == 3


def test_without_the_setting_there_are_no_steps(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(**options(tmp_path, trace_steps="0"))
    rig.ask("r", text(40, seed=1), params=JOB)
    rig.close()
    assert not has_steps(tmp_path / "trace.jsonl")
    assert [one.request for one in TraceReader(tmp_path / "trace.jsonl")] == ["r"]


def test_a_step_that_cannot_be_traced_changes_nothing(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    rig = make_rig(**options(tmp_path))

    def fail() -> int:
        raise RuntimeError("no such count")

    monkeypatch.setattr(rig.half.pool, "num_cached", fail)
    answer = rig.ask("r", text(40, seed=1), params=JOB)
    assert answer == expected(rig.prompts["r"], 4)
    assert rig.pins.held_blocks == 2, "nothing was given up"
    assert rig.half.counters.totals["hook_errors"] > 1
    assert len([one for one in caplog.records if "tracing a step failed" in one.message]) == 1


def test_tracing_a_step_examines_no_decoding_request(make_rig: MakeRig, tmp_path: Path) -> None:
    """Tracing a step examines only requests that are still in their prefill. None is left once all
    requests generate their answers."""
    rig = make_rig(**options(tmp_path), max_num_seqs=32)
    for n in range(20):
        rig.add(f"r{n}", text(20, seed=n), max_tokens=12, params={"job_id": f"j{n}"})
    for _ in range(4):
        rig.step()
    prefills = rig.half.gaps.log.steps._prefills  # noqa: SLF001
    assert rig.turns.running == 20
    assert not prefills._until, "requests that answer are not looked at"  # noqa: SLF001
    rig.run()
    assert not prefills._until  # noqa: SLF001
