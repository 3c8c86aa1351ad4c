"""New jobs are held back until they fit next to the started jobs. Turns of started jobs are never
held back for space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.admission.admitting import (
    BLOCKS,
    TOKENS,
    begin,
    holding_rig,
    prefills_take,
    running,
)
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.admission import active_jobs
from tiered_kv.connectors.runtime.admission.queue import MOST_HELD_IN_QUEUE, MOST_LET_IN
from tiered_kv.connectors.vllm import engine_scheduler
from tiered_kv.policies.admission.working_set import MOST
from tiered_kv.policies.jobs.lineage import Lineage
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.policies import FixedPin
from tiered_kv.testing.vllm.rig import Rig


@pytest.mark.parametrize("in_job_order", [True, False], ids=["parked", "in vLLM's queue"])
def test_a_job_waits_until_another_has_ended(make_rig: MakeRig, in_job_order: bool) -> None:
    rig = holding_rig(make_rig, in_job_order=in_job_order)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    for _ in range(5):
        rig.step()
    assert rig.held() == ["d"]
    assert running(rig) == ["a", "b", "c"]
    rig.run()
    assert rig.outputs["d"] == expected(text(TOKENS, seed=ord("d")), 40)
    assert len(rig.gate.jobs) == 0, "every job said that it was over"
    rig.check_clean()


def test_a_small_job_does_not_overtake_one_that_is_held(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    rig.add("small", text(8, seed=1), max_tokens=4, params={"job_id": "small"})
    rig.step()
    assert rig.held() == ["d", "small"]
    rig.run()
    assert rig.gate.refused == 2


@pytest.mark.parametrize("in_job_order", [True, False])
def test_without_admission_control_no_job_is_held(make_rig: MakeRig, in_job_order: bool) -> None:
    rig = holding_rig(make_rig, in_job_order=in_job_order, admission="off")
    for name in "abcdefgh":
        begin(rig, name)
        rig.step()
    assert rig.held() == []
    rig.run()
    rig.check_clean()


def test_a_started_job_is_never_held_for_space(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    begin(rig, "a", last=False)
    rig.run()
    for name in "bcd":
        begin(rig, name)
        rig.step()
    begin(rig, "e")
    assert "e" in rig.held()
    context = rig.prompts["a"] + rig.outputs["a"] + text(20, seed=99)
    rig.add("a2", context, max_tokens=4, params={"job_id": "a", "is_last_step": True})
    assert "a2" not in rig.held()
    rig.run()
    assert rig.outputs["a2"] == expected(context, 4)
    rig.check_clean()


def goes_on(rig: Rig, name: str) -> None:
    """Add the second turn of a job, whose context has 25 blocks."""
    context = rig.prompts[name] + rig.outputs[name] + text(60, seed=ord(name))
    rig.add(f"{name}2", context, max_tokens=20, params={"job_id": name, "is_last_step": True})


def after_a_turn(make_rig: MakeRig, **settings: Any) -> Rig:
    """Return a rig on which three jobs have finished their first turn. Their contexts will exceed
    the pool of 63 blocks."""
    rig = holding_rig(make_rig, in_job_order=True, pin_fraction=0, **settings)
    rig.policy = FixedPin(60.0)
    for name in "abc":
        begin(rig, name, last=False)
        rig.run()
    return rig


def test_a_job_is_not_held_while_cpu_memory_can_hold_waiting_contexts(make_rig: MakeRig) -> None:
    """With 40 slots, CPU memory holds two jobs of 19 blocks and VRAM a third, so the fourth is held
    back. 200 slots hold all four jobs."""
    for slots, waiting in ((40, ["d"]), (200, [])):
        rig = holding_rig(make_rig, in_job_order=True, cpu_gib=slots * 16 * 8 / 2**30)
        for name in "abcd":
            begin(rig, name)
            rig.step()
        assert rig.held() == waiting
        rig.run()
        rig.check_clean()


def test_vram_is_overcommitted_but_cpu_memory_is_not(make_rig: MakeRig) -> None:
    """Four jobs of 19 blocks do not fit into 62 slots, so the fourth is held back, although they
    would fit into 1.25 times as many. With 80 slots it is admitted."""
    for slots, waiting in ((62, ["d"]), (80, [])):
        rig = holding_rig(make_rig, in_job_order=True, cpu_gib=slots * 16 * 8 / 2**30)
        rig.gate.overcommit.share = MOST
        for name in "abcd":
            begin(rig, name)
            rig.step()
        assert rig.held() == waiting
        rig.run()
        rig.check_clean()


def test_a_job_waits_until_all_started_jobs_fit_somewhere(make_rig: MakeRig) -> None:
    """Jobs between two turns need no VRAM now, but a new job is held back unless VRAM and CPU
    memory together can hold the contexts of all jobs."""
    for slots, waiting in ((40, ["d"]), (120, [])):
        rig = holding_rig(
            make_rig, in_job_order=True, pin_fraction=0, cpu_gib=slots * 16 * 8 / 2**30
        )
        for name in "abc":
            begin(rig, name, last=False)
            rig.step()
            rig.now += 1
            rig.run()
        rig.now += 9
        goes_on(rig, "a")
        rig.step()
        begin(rig, "d", tokens=60)
        assert rig.gate.jobs.peak() + 5 < BLOCKS - 1
        assert rig.held() == waiting
        rig.run()
        rig.check_clean()


def held_behind_others(rig: Rig) -> list[str]:
    """Return the names of the turns held back once all three jobs continue and a new one has
    arrived."""
    rig.now += 5
    for name in "abc":
        goes_on(rig, name)
        rig.now += 1
        rig.step()
    begin(rig, "d")
    return rig.held()


def test_a_job_is_admitted_if_displaced_contexts_are_recomputed_quickly(make_rig: MakeRig) -> None:
    """If prefills are slow, a new job is held back. If they take almost no time, it is admitted,
    although contexts of other jobs may have to be recomputed. Turns and gaps take some seconds in
    both cases."""
    for token_s, waiting in ((1e3, ["d"]), (1e-6, [])):
        rig = after_a_turn(make_rig)
        prefills_take(rig, token_s)
        assert held_behind_others(rig) == waiting
        rig.run()
        rig.check_clean()


def test_a_job_is_admitted_if_displaced_contexts_are_on_ssd(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """Prefills are slow. Without SSD, a new job is held back. With SSD, it is admitted, because
    displaced contexts are not recomputed."""
    ssd: dict[str, Any] = {"cpu_gib": 8 * 16 * 8 / 2**30, "ssd_path": str(tmp_path), "ssd_gib": 1.0}
    for tiers, waiting in (({}, ["d"]), (ssd, [])):
        rig = after_a_turn(make_rig, **tiers)
        assert held_behind_others(rig) == waiting
        rig.run()
        rig.check_clean()


def test_a_job_that_waited_too_long_is_admitted(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True, admission_max_wait_s=5)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    assert rig.held() == ["d"]
    rig.now += 4.9
    rig.step()
    assert rig.held() == ["d"]
    rig.now += 0.2
    rig.step()
    assert rig.held() == []
    rig.run()
    rig.check_clean()


def test_a_job_is_not_held_on_an_idle_engine(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    for name in "abc":
        begin(rig, name, last=False)
        rig.run()
    assert len(rig.gate.jobs) == 3, "none of them has ended"
    begin(rig, "d")
    rig.step()
    assert running(rig) == ["d"]
    rig.run()


def test_jobs_that_arrive_together_are_counted_before_they_run(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    for name in "abcdef":
        begin(rig, name)
    assert rig.held() == ["d", "e", "f"]
    rig.run()
    rig.check_clean()


@pytest.mark.parametrize("whose", ["d", None], ids=["one", "all"])
def test_an_aborted_request_is_no_longer_held(make_rig: MakeRig, whose: str | None) -> None:
    from vllm.v1.request import RequestStatus

    rig = holding_rig(make_rig, in_job_order=True)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    assert rig.scheduler.get_request_counts() == (3, 1)
    rig.scheduler.finish_requests(whose, RequestStatus.FINISHED_ABORTED)
    assert rig.held() == []
    rig.run()
    assert rig.outputs["d"] == []
    assert len(rig.gate.jobs) == 0
    rig.check_clean()


def test_vllm_s_own_queue_holds_eight_jobs(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=False)
    for number in range(3 + 10):
        begin(rig, f"job{number}", seed=100 + number)
        rig.step()
    # job11 was one too many, so job3 was admitted. It finds no blocks yet, so vLLM stops there and
    # does not ask about job12.
    assert rig.held() == sorted(f"job{number}" for number in range(4, 12))
    rig.run()
    rig.check_clean()


def test_blocks_that_jobs_share_are_counted_once(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    shared = text(256, seed=5)
    for number in range(8):
        own = shared + text(30, seed=200 + number)
        rig.add(f"job{number}", own, max_tokens=40, params={"job_id": f"job{number}"})
        for _ in range(3):
            rig.step()
    assert rig.held() == [], "sixteen blocks of each are the same"
    assert rig.gate.jobs.peak() < BLOCKS
    rig.run()


def test_a_silent_job_no_longer_reserves_space(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    begin(rig, "a", last=False)
    rig.run()
    before = rig.gate.jobs.peak()
    rig.now += 3600
    rig.pins.release_all()
    assert before > 15
    assert rig.gate.jobs.peak() == 0
    context = rig.prompts["a"] + rig.outputs["a"]
    rig.add("a2", context, max_tokens=4, params={"job_id": "a"})
    assert rig.gate.jobs.peak() > 15, "it is back"
    rig.run()


def test_many_jobs_are_counted_over_several_queries(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    shared = text(64, seed=5)
    for number in range(7):
        own = shared + text(20 + number, seed=200 + number)
        rig.ask(f"job{number}", own, params={"job_id": f"job{number}"})
    rig.pins.release_all()
    rig.now += 1
    before = rig.gate.jobs.peak()
    monkeypatch.setattr(active_jobs, "TOGETHER", 3)
    monkeypatch.setattr(active_jobs, "PART", 3)
    rig.gate.jobs.job_forecast.growth.observe(40.0)
    rig.now += 1
    queries = []
    for _ in range(3):
        queries.append(rig.gate.jobs.peak())
        rig.now += 3.5 * active_jobs.COUNTED_S
    assert queries[:2] == [before, before], "the last count holds until every job was counted"
    monkeypatch.undo()
    rig.now += 1
    assert queries[2] == rig.gate.jobs.peak() > before
    monkeypatch.setattr(active_jobs, "TOGETHER", 3)
    monkeypatch.setattr(active_jobs, "PART", 3)
    rig.now += 3600
    left = []
    for _ in range(3):
        rig.gate.jobs.peak()
        left.append(len(rig.gate.jobs))
        rig.now += 3.5 * active_jobs.COUNTED_S
    assert left == [4, 1, 0], "three of the silent jobs in each query"
    assert rig.gate.jobs.peak() == 0


def test_one_step_admits_a_bounded_number_of_queued_requests(make_rig: MakeRig) -> None:
    """Under vLLM's own scheduler, older requests are admitted if too many newer ones are held back.
    One step admits at most ``MOST_LET_IN`` requests in this way."""
    rig = holding_rig(make_rig, in_job_order=False)
    for name in "abc":
        begin(rig, name)
        rig.step()
    for number in range(3 * MOST_LET_IN):
        begin(rig, f"crowd{number}")
    rig.step()
    assert len(rig.gate.jobs.entering) == MOST_LET_IN
    assert len(rig.held()) == MOST_HELD_IN_QUEUE


def test_many_parked_jobs_are_admitted_over_several_steps(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    monkeypatch.setattr(engine_scheduler, "MOST_UNPARKED", 2)
    for name in "abcdefghi":
        begin(rig, name)
        rig.step()
    assert rig.held() == list("defghi")
    rig.admission.queue.let_all_in()
    rig.step()
    assert rig.held() == list("hi"), "two in turn, and two as overdue"
    rig.run()


def test_a_job_that_returns_late_comes_after_active_jobs(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    for name in "ab":
        begin(rig, name, last=False, tokens=100)
        rig.run()
    rig.now += 3600
    rig.pins.release_all()
    begin(rig, "young", tokens=100)
    rig.step()
    assert rig.gate.jobs.peak() < 15, "they are taken to have ended"
    for name in "ba":
        rig.now += 1
        context = rig.prompts[name] + rig.outputs[name]
        rig.add(f"{name}2", context, params={"job_id": name, "is_last_step": True})
    active = [key for key, _ in rig.gate.jobs.items()]
    by_start = sorted(rig.gaps.manager.jobs.after(0, 9), key=lambda job: job.started_at)
    for order in (active, [job.key for job in by_start]):
        assert [key.name for key in order] == ["young", "b", "a"]
    rig.run()


def test_requests_without_a_job_count_while_they_run(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    # No jobs are inferred for these requests.
    monkeypatch.setattr(Lineage, "arrived", lambda *_: None)
    for name in "abcd":
        rig.add(name, text(TOKENS, seed=ord(name)), max_tokens=40)
        rig.step()
    assert rig.held() == ["d"]
    rig.run()
    assert len(rig.gate.jobs) == 0
    rig.check_clean()
