"""Contexts that should still be cached when their job returns, and what is learned if they are
not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.testing.checked_kv import CELL, text
from tiered_kv.testing.policies import Always, FixedPin
from tiered_kv.testing.vllm.rig import Rig

JOB = {"job_id": "j"}
CONTEXT = text(320, seed=1)
PIN_S = 20.0


def make(make_rig: MakeRig, **settings: Any) -> Rig:
    extra = {"cpu_gib": 0.0, "admission": "auto", **settings}
    return make_rig(blocks=128, max_model_len=512, extra=extra)


def comes_back(rig: Rig, gap_s: float) -> None:
    """Run a turn of the job, wait, fill VRAM with other requests, and run the job's next turn."""
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += gap_s
    rig.step()
    rig.pins.release_all()
    rig.fill()
    rig.ask("t2", CONTEXT, params=JOB)
    assert rig.count("prompt_tokens_vram") == 0


@pytest.mark.parametrize(
    ("gap_s", "lost"), [(0.0, True), (PIN_S - 1, True), (PIN_S, False), (PIN_S + 1, False)]
)
def test_a_pin_released_before_its_deadline_counts_as_a_loss(
    make_rig: MakeRig, gap_s: float, lost: bool
) -> None:
    rig = make(make_rig)
    rig.policy = FixedPin(PIN_S)
    comes_back(rig, gap_s)
    assert (rig.gate.overcommit.share < 1.0) is lost


@pytest.mark.parametrize(
    ("tier", "slots", "lost"),
    [
        (Tier.CPU, 10, True),
        (Tier.CPU, 0, False),  # the context was never saved
        (Tier.DROP, 10, False),
        (Tier.CPU, 1000, False),  # the context is still in CPU memory
    ],
)
def test_saved_pages_that_are_missing_count_as_a_loss(
    make_rig: MakeRig, tier: Tier, slots: int, lost: bool
) -> None:
    rig = make(make_rig, cpu_gib=slots * 16 * 8 / 2**30)
    rig.policy = Always(Decision(tier))
    comes_back(rig, 1.0)
    assert (rig.gate.overcommit.share < 1.0) is lost


@pytest.mark.parametrize(("gone", "lost"), [(0, False), (1, False), (2, True)])
def test_one_missing_block_is_not_a_loss(make_rig: MakeRig, gone: int, lost: bool) -> None:
    """The context has 16 blocks that are known to agree with the prompt. One block fewer may be
    found, because the block of the last token need not be cached. Two blocks fewer count as a
    loss."""
    rig = make(make_rig)
    rig.policy = FixedPin(PIN_S)
    prompt = text(256, seed=1)
    rig.ask("t1", prompt, params=JOB)
    blocks = [block.block_id for block in rig.pool.blocks if block.ref_cnt and not block.is_null]
    assert len(blocks) == 16, "pinned, in the order in which they were taken"
    rig.pins.release_all()
    rig.pool.evict_blocks(set(blocks[16 - gone :]))
    rig.ask("t2", prompt + text(40, seed=2), params=JOB)
    assert rig.count("prompt_tokens_vram") == (16 - gone) * 16
    assert (rig.gate.overcommit.share < 1.0) is lost


def test_a_complete_hit_restores_some_of_the_overcommit(make_rig: MakeRig) -> None:
    rig = make(make_rig)
    rig.policy = FixedPin(PIN_S)
    comes_back(rig, 1.0)
    overcommit = rig.gate.overcommit
    fallen = overcommit.share
    rig.ask("t3", CONTEXT, params=JOB)
    assert overcommit.share == pytest.approx(fallen + (1 - fallen) * 16 / 127), "known to agree"
    rig.half.counters.add("turns")
    assert rig.half.stats.take()["room_ratio"] == overcommit.share < 1


def test_a_pin_over_budget_is_counted(make_rig: MakeRig) -> None:
    rig = make(make_rig, pin_fraction=0.25)
    rig.ask("small", text(200, seed=1), params={"job_id": "a"})
    assert (rig.count("pins"), rig.count("pins_refused")) == (1, 0)
    rig.ask("cut", text(400, seed=2), params={"job_id": "b"})
    assert (rig.count("pins"), rig.count("pins_refused")) == (2, 1)
    rig.ask("none", text(400, seed=3), params={"job_id": "c"})
    assert (rig.count("pins"), rig.count("pins_refused")) == (2, 2)


def test_jobs_that_ended_without_notice_give_their_space_to_jobs_that_return(
    make_rig: MakeRig,
) -> None:
    """VRAM has space for one context, and CPU memory for five. Groups of three jobs run four turns
    each, and then stay silent. In every group, each later turn finds its job's whole context in CPU
    memory."""
    cpu_gib = 5 * 28 * 16 * CELL / 2**30
    rig = make_rig(blocks=34, max_model_len=512, extra={"cpu_gib": cpu_gib, "policy": "occupancy"})
    found = list[float]()
    for group in range(8):
        contexts = {f"{group}-{n}": text(320, seed=10 * group + n) for n in range(3)}
        for turn in range(4):
            for job, context in contexts.items():
                before = rig.count("prompt_tokens_cpu")
                rig.ask(f"{job}-{turn}", context, params={"job_id": job})
                rig.wait_for_worker()
                rig.now += 1
                if turn:
                    found.append(rig.count("prompt_tokens_cpu") - before)
                contexts[job] = context + text(32, seed=1000 + turn)
    assert found == 8 * [320, 320, 320, 352, 352, 352, 384, 384, 384]
