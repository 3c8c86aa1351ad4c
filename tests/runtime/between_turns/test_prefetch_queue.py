"""Prefetches for jobs that are expected back and whose pages are on SSD."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.between_turns.waiting import (
    CONTEXT,
    JOB,
    LONG,
    pinned,
    reader,
    waiting_rig,
)
from tests.runtime.conftest import MakeRig
from tiered_kv.policies.base import JobKey
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.stores import SSD
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return waiting_rig(make_rig, tmp_path)


# -- predicted returns --------------------------------------------------------------------


def long_gone(rig: Rig) -> None:
    """Create a job whose context is only on SSD, and which is expected back a minute after its
    turn."""
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", LONG)
    rig.run()
    rig.step()
    rig.run()
    assert len(rig.pages.book.stores[SSD].index) == 21
    assert pinned(rig) == 0
    rig.index.clear()
    rig.fill()
    for name in rig.gaps.manager.open.jobs():
        if name != JobKey("", "j"):
            rig.gaps.manager.give_up(name)


@pytest.mark.parametrize("began_later", [0.0, 900.0, -1e6])
def test_a_long_gap_takes_the_context_to_ssd_and_back_in_time(rig: Rig, began_later: float) -> None:
    """The context is promoted from SSD shortly before the job is expected back, and not earlier.
    This works even if the worker's clock has another origin than the scheduler's."""
    rig.worker_ahead_s = -began_later
    long_gone(rig)
    rig.now += 59.0
    rig.wait_for_worker()
    assert rig.count("pages_promoted") == 0, "it is not expected yet"
    rig.now += 1.5
    rig.wait_for_worker()  # no hook runs, so the I/O thread promotes the pages by itself
    rig.ask("else", text(17, seed=3))
    assert rig.count("pages_promoted_ahead") == 21
    assert rig.count("pages_promoted") == 21
    rig.now += 5.0
    rig.ask("t2", CONTEXT + text(9, seed=2), params=JOB)
    assert rig.count("prompt_tokens_cpu") == 320
    assert rig.outputs["t2"] == expected(CONTEXT + text(9, seed=2), 4)


def telling(rig: Rig, told: list[Any]) -> Callable[..., Any]:
    """Return a hook that calls the real one and records its results."""
    tell = rig.connector.get_external_cache_hit_sources

    def hook(*asked: Any) -> Any:
        told.append(tell(*asked))
        return told[-1]

    return hook


def test_vllm_receives_the_tier_that_tokens_came_from(
    rig: Rig, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 asks")
    long_gone(rig)
    with_cpu_memory = make_rig()
    with_cpu_memory.ask("t1", CONTEXT, params=JOB)
    with_cpu_memory.now += 10
    with_cpu_memory.fill()
    told: list[Any] = []
    for one in (rig, with_cpu_memory):
        monkeypatch.setattr(one.connector, "get_external_cache_hit_sources", telling(one, told))
        one.ask("t2", CONTEXT + text(9, seed=2), params=JOB)
        assert one.count("hook_errors") == 0
    assert told == [{sources.CacheHitSource.DISK: 320}, {sources.CacheHitSource.HOST: 320}]


def test_a_job_that_returns_early_is_served_immediately(rig: Rig) -> None:
    long_gone(rig)
    rig.now += 10.0
    rig.ask("t2", CONTEXT + text(9, seed=2), params=JOB)
    assert rig.count("prompt_tokens_cpu") == 320
    assert rig.count("pages_promoted") == 21, "its tail, too: that was ordered ahead"
    assert rig.count("promotions_overdue") == 0
    assert not rig.gaps.manager.prefetch


def test_prefetches_leave_most_slots_to_others(rig: Rig) -> None:
    slots = rig.index.num_slots
    for i in range(12):
        rig.ask(f"t{i}", text(320, seed=i), params={"job_id": f"j{i}"})
        reader(rig).says(f"t{i}", LONG)
        rig.run()
        rig.step()
    rig.run()
    rig.index.clear()
    rig.ask("now", text(320, seed=99), params=JOB)
    assert 0 < rig.pages.book.ahead() <= slots // 4
    assert rig.index.free_slots > slots // 2
    assert rig.pages.book.promote_seconds(SSD, 1) * 1e9 < 10 * rig.half.facts.slot_bytes


def test_a_finished_job_is_not_promoted(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.gaps.manager.prefetch.expect(JobKey("", "j"), rig.now + 1, ())
    rig.gaps.manager.give_up(JobKey("", "j"))
    assert not rig.gaps.manager.prefetch
