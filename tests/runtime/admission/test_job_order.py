"""The order in which requests are admitted and preempted, and the cases in which vLLM's own order
remains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.admission.admitting import TOKENS, begin, holding_rig, running
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.admission.queue import TIGHT_TOKENS
from tiered_kv.errors import UnsupportedError
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.pins.release_order import PinState, PinValue
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.engine import make_scheduler
from tiered_kv.testing.vllm.rig import Rig


def test_requests_are_admitted_in_the_order_of_their_jobs(make_rig: MakeRig) -> None:
    """A turn of an old job precedes the first turn of a newer job, although it arrived later."""
    rig = make_rig(blocks=200, max_model_len=512, max_num_seqs=1, in_job_order=True)
    begin(rig, "old", tokens=20, last=False)
    rig.run()
    begin(rig, "running", tokens=20)
    rig.step()
    rig.now += 1
    begin(rig, "young", tokens=20)
    rig.now += 1
    context = rig.prompts["old"] + rig.outputs["old"]
    rig.add("old2", context, max_tokens=4, params={"job_id": "old"})
    rig.run()
    finished = list(rig.finished)
    assert finished.index("old2") < finished.index("young")


@pytest.mark.parametrize("in_job_order", [False, True])
def test_a_pin_outlasts_younger_jobs_while_a_request_runs(
    make_rig: MakeRig, in_job_order: bool
) -> None:
    """Under ``ContinuumScheduler``, requests of one job take the blocks of a younger job's pin, and
    an older job's pin is kept. vLLM's own scheduler may queue an older job behind a younger one, so
    there pins are released for the first request in the queue."""
    rig = make_rig(blocks=56, max_model_len=256, extra={"cpu_gib": 0.0}, in_job_order=in_job_order)
    for name in ("old", "middle", "young"):
        rig.ask(name, text(200, seed=len(name)), params={"job_id": name})
        rig.now += 0.1
    rig.add("busy", text(60, seed=9), max_tokens=60)
    rig.step()

    old, young = JobKey("", "old"), JobKey("", "young")
    rig.pins.revise(young, rig.now + 60.0, PinValue(PinState.HELD, 1.0, 0.9))
    for seed in (5, 6, 7):
        rig.add(f"middle{seed}", text(240, seed=seed), params={"job_id": "middle"})
    rig.step()
    if in_job_order:
        assert old in rig.pins
        assert young not in rig.pins
        assert len(rig.scheduler.waiting) == 1, "the room of the youngest is enough for two"
    else:
        assert old not in rig.pins
        assert not rig.scheduler.waiting
    rig.run()
    assert rig.outputs["middle7"] == expected(text(240, seed=7), 4)


def test_blocks_of_a_finished_job_are_evicted_before_blocks_of_others(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(blocks=64, max_model_len=512, extra={"cpu_gib": 0.0, "pin_fraction": 0})
    for name, last in (("goes on", False), ("ends", True)):
        context = text(100, seed=len(name))
        rig.ask(f"{name}1", context, max_tokens=40, params={"job_id": name})
        context += rig.outputs[f"{name}1"] + text(60, seed=9)
        params = {"job_id": name, "is_last_step": last}
        rig.ask(f"{name}2", context, max_tokens=100, params=params)
    rig.ask("rival", text(450, seed=77), max_tokens=4)
    hits = {}
    for name in ("goes on", "ends"):
        context = rig.prompts[f"{name}2"] + rig.outputs[f"{name}2"]
        hits[name] = cached_blocks(rig, context)
    assert hits["goes on"] > 16, "though it was used before the other"
    assert 6 <= hits["ends"] <= 7, "its first prompt, which others may begin with"


def cached_blocks(rig: Rig, context: list[int]) -> int:
    """Return the number of leading blocks of a context that VRAM still has."""
    request = rig.add("probe", context, max_tokens=1)
    rig.abort("probe")
    found = [rig.pool.get_cached_block(one, [0]) is not None for one in request.block_hashes]
    del rig.prompts["probe"]
    return found.index(False) if False in found else len(found)


def test_the_newest_job_is_preempted_unless_it_is_in_its_last_turn(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=20, max_model_len=256, max_batched_tokens=256, in_job_order=True)
    for name, last in (("old", False), ("ends", True), ("young", False)):
        rig.now += 1
        params = {"job_id": name, "is_last_step": last}
        rig.add(name, text(80, seed=ord(name[0])), max_tokens=60, params=params)
        rig.step()
    order = [request.request_id for request in sorted(rig.scheduler.running, key=rank(rig))]
    assert order == ["ends", "old", "young"]
    requests = dict(rig.scheduler.requests)
    rig.run()
    assert requests["young"].num_preemptions > 0
    assert requests["ends"].num_preemptions == 0
    for name, prompt in rig.prompts.items():
        assert rig.outputs[name] == expected(prompt, 60)


def rank(rig: Rig) -> Any:
    return rig.admission.queue.running_rank


def test_running_requests_are_sorted_only_while_a_step_may_take_all_that_is_free(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(blocks=400, extra={"cpu_gib": 0.0})
    free, a_step = rig.pool.get_num_free_blocks(), TIGHT_TOKENS // 16
    assert not rig.admission.queue.is_tight(free - a_step)
    assert rig.admission.queue.is_tight(free - a_step + 1)


def test_a_job_whose_kv_is_held_goes_before_older_ones(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=200, max_model_len=512, max_num_seqs=1, in_job_order=True)
    begin(rig, "older", tokens=40, last=False)
    rig.now += 1
    begin(rig, "pinned", tokens=40, last=False)
    rig.run()
    rig.pins.release(JobKey("", "older"))
    begin(rig, "running", tokens=20)
    rig.step()
    for name in ("older", "pinned"):
        context = rig.prompts[name] + rig.outputs[name]
        rig.add(f"{name}2", context, max_tokens=4, params={"job_id": name})
    rig.run()
    finished = list(rig.finished)
    assert finished.index("pinned2") < finished.index("older2")


def test_a_scheduler_that_cannot_query_the_connector_continues_as_vllm_s_own(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    assert rig.held() == ["d"]

    def broken(_: str) -> bool:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.admission.queue, "holds", broken)
    rig.step()
    assert rig.held() == []
    assert rig.count("hook_errors") == 1
    rig.run()
    assert rig.outputs["d"] == expected(text(TOKENS, seed=ord("d")), 40)


def test_without_progress_everything_held_is_released(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test simulates a fault: a job is held back although nothing runs. After a while without
    progress, the watchdog releases all pins and admits the job."""
    rig = holding_rig(make_rig, in_job_order=True)
    begin(rig, "pinned", last=False)
    rig.run()
    monkeypatch.setattr(rig.gate, "holds", lambda turn, behind=False: turn.hold.new)
    monkeypatch.setattr(rig.gate, "lets_overdue_in", lambda turn: not turn.hold.new)
    begin(rig, "stuck")
    for _ in range(10):  # an idle engine that occasionally runs a step
        rig.step()
        rig.now += 5
    assert rig.held() == ["stuck"]
    for _ in range(100):
        rig.step()
        rig.now += 0.5
    assert rig.held() == []
    assert rig.pins.held_blocks == 0
    assert rig.count("watchdog_barks") == 1
    rig.run()
    assert rig.outputs["stuck"] == expected(text(TOKENS, seed=sum(b"stuck")), 40)


def test_stock_vllm_s_priorities_are_left_alone(make_rig: MakeRig) -> None:
    rig = make_rig(
        blocks=200, max_model_len=512, max_num_seqs=1, policy="priority", in_job_order=True
    )
    begin(rig, "running", tokens=20)
    rig.step()
    rig.add("late", text(20, seed=3), max_tokens=2, priority=5)
    rig.add("urgent", text(20, seed=4), max_tokens=2, priority=1)
    rig.run()
    finished = list(rig.finished)
    assert finished.index("urgent") < finished.index("late")


def test_urgent_requests_are_parked_before_others(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True, priority=True)
    for name in "abc":
        begin(rig, name)
    for name, priority in (("late", 5), ("urgent", 1), ("later", 5)):
        rig.add(name, text(TOKENS, seed=priority), max_tokens=2, priority=priority)
    rig.step()
    assert rig.held() == ["urgent", "late", "later"]
    rig.add("small", text(20, seed=3), max_tokens=2, priority=0)
    assert "small" not in rig.held(), "no request of its priority is held back"
    rig.run()
    assert list(rig.finished).index("urgent") < list(rig.finished).index("late")


def test_vllm_shares_a_step_among_its_queued_requests(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While vLLM schedules a step, its request counts leave out parked requests, so that the step
    is shared only among the other requests."""
    rig = holding_rig(make_rig, in_job_order=True)
    counts = []
    match = rig.half.match

    def watched(*args: Any) -> Any:
        counts.append(rig.scheduler.get_request_counts())
        return match(*args)

    monkeypatch.setattr(rig.half, "match", watched)
    for name in "abcde":
        begin(rig, name)
    while len(running(rig)) < 3:
        rig.step()
    assert {sum(both) for both in counts} == {3}
    assert rig.scheduler.get_request_counts() == (3, 2)
    rig.run()


def test_without_the_connector_it_is_vllm_s_scheduler(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=64, max_model_len=256, extra=None, in_job_order=True)
    assert rig.ask("a", text(50, seed=1)) == expected(text(50, seed=1), 4)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_scheduler_that_vllm_has_for_diffusion_models_is_not_replaced(
    make_rig: MakeRig, ahead: bool
) -> None:
    """vLLM has a scheduler of its own for diffusion models, but would use the class that
    --scheduler-cls names instead. The start is therefore refused."""
    rig = make_rig(extra=None, ahead=ahead)
    rig.config.diffusion_config = object()
    with pytest.raises(UnsupportedError, match=r"separate scheduler: remove --scheduler-cls\.$"):
        make_scheduler(
            rig.config, rig.scheduler.kv_cache_config, log_stats=False, in_job_order=True
        )


class NobodyWalks(dict[str, Any]):
    """Parked requests by id. The test fails if they are iterated instead of looked up."""

    def items(self) -> Any:
        raise AssertionError("all that are parked are looked at")

    values = items


def test_an_abort_examines_no_other_parked_request(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    begin(rig, "running")
    rig.step()
    for i in range(4):
        begin(rig, f"held{i}")
    parked = rig.scheduler.parked = NobodyWalks(rig.scheduler.parked)
    assert len(parked) > 1
    rig.abort("running")
    rig.abort(last := next(reversed(parked)))
    assert last not in parked
