"""The trace records a turn's preemptions: their number and times, and the tokens found
afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.between_turns.waiting import traced
from tests.runtime.conftest import MakeRig
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.trace.job_story import story
from tiered_kv.trace.perfetto import perfetto_events
from tiered_kv.trace.trace_header import recorder_events
from tiered_kv.trace.turn_record import FIRST_PREEMPTIONS, TurnRecord

SIZE: dict[str, Any] = {"blocks": 20, "max_model_len": 256, "max_batched_tokens": 256}
LAST = {"is_last_step": True}


def crowd(rig: Rig) -> dict[str, int]:
    """Run three turns whose answers do not fit into VRAM together. Returns how often vLLM preempted
    each."""
    requests: dict[str, Any] = {}
    for name in ("one", "two", "three"):
        rig.now += 1
        params = {"job_id": name, **LAST}
        requests[name] = rig.add(name, text(80, seed=ord(name[1])), max_tokens=60, params=params)
        rig.step()
    while len(rig.finished) < len(requests):
        rig.now += 0.5
        rig.step()
    for name, prompt in rig.prompts.items():
        assert rig.outputs[name] == expected(prompt, 60)
    return {name: request.num_preemptions for name, request in requests.items()}


def with_trace(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {**SIZE, "extra": {"cpu_gib": 0.001, "trace": str(tmp_path / "trace.jsonl")}, **options}


@pytest.mark.parametrize("in_job_order", [False, True], ids=["vllm", "continuum"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_every_preemption_is_traced(
    make_rig: MakeRig, tmp_path: Path, in_job_order: bool, ahead: bool
) -> None:
    rig = make_rig(**with_trace(tmp_path, in_job_order=in_job_order, ahead=ahead))
    often = crowd(rig)
    assert any(often.values()), "there was room for all"
    records = traced(rig)
    assert {name: one.preempted.count for name, one in records.items()} == often
    for one in records.values():
        told = min(one.preempted.count, FIRST_PREEMPTIONS)
        assert len(one.preempted.at_s) == len(one.preempted.back_s) == told, "all went on"
        moments = [*zip(one.preempted.at_s, one.preempted.back_s, strict=True)]
        assert moments == sorted(moments)
        for (away_s, back_s), found in zip(moments, one.preempted.found, strict=True):
            assert (one.times.scheduled_s or 0.0) < away_s < back_s <= one.times.end_s
            assert 0 <= found < one.tokens.prompt + one.tokens.output
            assert found % 16 == 0, "what is found is found by blocks"


def preempted_one(make_rig: MakeRig, tmp_path: Path) -> TurnRecord:
    rig = make_rig(**with_trace(tmp_path))
    crowd(rig)
    return max(traced(rig).values(), key=lambda one: one.preempted.count)


def test_exports_for_other_tools_contain_preemptions(make_rig: MakeRig, tmp_path: Path) -> None:
    one = preempted_one(make_rig, tmp_path)
    count, at_s, back_s = one.preempted.count, one.preempted.at_s[0], one.preempted.back_s[0]

    (events,) = recorder_events([one]).values()
    away = [event for event in events if "Request_evicted_from_running_queue_time" in event]
    back = [event for event in events if "evicted_to_running" in event]
    assert len(away) == len(back) == min(count, FIRST_PREEMPTIONS)
    assert away[0] == {"Request_evicted_from_running_queue_time": one.arrived + at_s}
    assert back[0] == {
        "evicted_to_running": one.arrived + back_s,
        "prompt_length": 80,
        "hit_length": one.preempted.found[0],
    }
    moments = [next(iter(event.values())) for event in events]
    assert moments == sorted(moments)

    slices = [event for event in perfetto_events([one]) if event["name"] == "preempted"]
    assert len(slices) == min(count, FIRST_PREEMPTIONS)
    assert slices[0]["dur"] == pytest.approx(1e6 * (back_s - at_s), abs=1)

    told = " ".join(story(one))
    often = "once" if count == 1 else f"{count} times"
    assert f"It was preempted {often}" in told
    assert f"It continued after {back_s:.3g} s, with {one.preempted.found[0]} tokens found." in told


def test_a_turn_that_ends_while_preempted_has_no_resume_time(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(**with_trace(tmp_path))
    requests = {}
    for name in ("one", "two", "three"):
        params = {"job_id": name, **LAST}
        requests[name] = rig.add(name, text(80, seed=ord(name[1])), max_tokens=60, params=params)
    while not any(request.num_preemptions for request in requests.values()):
        rig.now += 0.5
        rig.step()
    (away,) = (name for name, request in requests.items() if request.num_preemptions)
    rig.now += 0.5
    rig.abort(away)
    rig.run()
    assert not rig.half.gaps.log.trace.preemptions._of, "nothing is kept of it"  # noqa: SLF001
    one = traced(rig)[away].preempted
    assert (one.count, len(one.at_s), one.back_s, one.found) == (1, 1, (), ())


def test_a_cache_reset_preempts_running_requests(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(**with_trace(tmp_path, blocks=64))
    rig.add("r", text(80, seed=1), max_tokens=20, params={"job_id": "j", **LAST})
    for _ in range(3):
        rig.now += 1
        rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    rig.run()
    assert rig.outputs["r"] == expected(rig.prompts["r"], 20)
    one = traced(rig)["r"].preempted
    assert (one.count, one.found) == (1, (0,))
    assert one.at_s == one.back_s, "in the very next step"
