"""The trace records evicted pages of a waiting job with its last turn, by the tier that evicted
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.between_turns.waiting import CONTEXT, FORECAST, JOB, traced
from tests.runtime.conftest import MakeRig
from tiered_kv.policies.base import Decision, GapClass, Tier
from tiered_kv.testing.checked_kv import CELL, text
from tiered_kv.testing.policies import Always
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.trace.job_story import story

LAST = {**JOB, "is_last_step": True}
PAGES = 320 // 16 + 1
"""Number of pages of the job's context, including the partial block at the end of the answer."""


def small_rig(make_rig: MakeRig, tmp_path: Path, tier: Tier, **extra: Any) -> Rig:
    """Create an engine whose CPU memory has space for three contexts."""
    given = {"cpu_gib": 64 * 16 * CELL / 2**30, "trace": str(tmp_path / "trace.jsonl"), **extra}
    rig = make_rig(blocks=64, max_model_len=512, extra=given)
    rig.policy = Always(Decision(tier, 0.0, GapClass.SLOW, FORECAST))
    return rig


def rivals(rig: Rig, first: int, last: int) -> None:
    """Run one turn of each of several other jobs, which then wait too."""
    for n in range(first, last):
        rig.ask(f"rival-{n}", text(320, seed=100 + n), params={"job_id": f"rival-{n}"})
        rig.wait_for_worker()
        rig.now += 5


def test_pages_evicted_from_cpu_memory_in_the_gap_are_recorded(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = small_rig(make_rig, tmp_path, Tier.CPU)
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += 1
    rivals(rig, 0, 12)
    rig.ask("t2", CONTEXT + text(9, seed=2), params=LAST)
    evictions = rig.index.evictions
    records = traced(rig)
    first = records["t1"]
    assert first.pages.evicted == {"cpu": PAGES}, "all, as it waited for longest"
    assert records["t2"].tokens.recomputed >= 320
    assert f"Of its pages, {PAGES} in CPU memory were evicted." in " ".join(story(first))
    told = sum(one.pages.evicted.get("cpu", 0) for one in records.values())
    assert 0 < told <= evictions


def test_a_job_whose_pages_stay_reports_no_evictions(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = small_rig(make_rig, tmp_path, Tier.CPU)
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += 1
    rig.ask("t2", CONTEXT + text(9, seed=2), params=LAST)
    rivals(rig, 0, 12)  # the finished job's pages are evicted now
    records = traced(rig)
    assert records["t1"].pages.evicted == records["t2"].pages.evicted == {}


@pytest.mark.slow
def test_pages_that_a_store_evicts_are_reported_too(make_rig: MakeRig, tmp_path: Path) -> None:
    below = {"ssd_path": str(tmp_path / "ssd"), "ssd_gib": 0.004, "codec": "raw"}
    rig = small_rig(make_rig, tmp_path, Tier.STORE, **below)
    rig.ask("t1", CONTEXT, params=JOB)
    rig.wait_for_worker()
    # Long after its forecast return, the job is no longer expected, so its pages do not survive.
    rig.now += 200
    rivals(rig, 0, 90)
    assert rig.count("ssd_pages_reclaimed") > 0
    rig.now += 200
    rivals(rig, 90, 140)
    rig.ask("t2", CONTEXT + text(9, seed=2), params=LAST)
    reclaimed = rig.count("ssd_pages_reclaimed")
    records = traced(rig)
    told = {tier for one in records.values() for tier in one.pages.evicted}
    assert told == {"cpu", "ssd"}
    assert records["t1"].pages.evicted["ssd"] > 0
    assert sum(one.pages.evicted.get("ssd", 0) for one in records.values()) <= reclaimed
