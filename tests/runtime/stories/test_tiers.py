"""Pages are demoted to SSD before they are evicted, and promoted when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.stories.conftest import MakeEngine
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.policies import Always
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.stores import SSD

CONTEXT = text(320, seed=1)
"""A context of twenty pages."""
SLOTS = 64


def settings(make_engine: MakeEngine, path: Path, slots: int) -> dict[str, Any]:
    """Return settings for ``slots`` slots in CPU memory, and for pages on SSD under ``path``."""
    page = make_engine().half.facts.slot_bytes
    return {
        "cpu_gib": (slots * page + 1) / (1 << 30),
        "ssd_path": str(path / "ssd"),
        "ssd_gib": 0.02,
        "codec": "raw",
    }


@pytest.fixture
def rig(make_engine: MakeEngine, tmp_path: Path) -> EngineRig:
    extra = settings(make_engine, tmp_path, SLOTS)
    return make_engine(extra=extra, max_batched_tokens=64)


def push_out(rig: EngineRig) -> None:
    """Replace everything in VRAM and CPU memory with other contexts, and wait for the disk in every
    step."""
    for i in range(8):
        name = f"rival-{rig.steps}"
        rig.add(name, text(300, seed=rig.steps * 100 + i))
        while name not in rig.finished:
            rig.step()
            rig.wait_for_worker()
        rig.run()
    assert rig.index.evictions > 0, "CPU memory was not short"


def test_a_context_evicted_from_cpu_memory_is_promoted_from_ssd(rig: EngineRig) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    assert rig.count("pages_demoted") >= 20

    assert rig.ask("again", CONTEXT) == expected(CONTEXT, 4)

    assert rig.count("prompt_tokens_cpu") == 319, "all but the last token, from here or there"
    assert rig.count("prompt_tokens_ssd") >= 256
    assert rig.count("demotion_failures") == rig.count("promotion_failures") == 0
    rig.check_clean()


def test_a_restarted_engine_serves_the_earlier_contexts(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The first engine demotes no page while it runs, because CPU memory is large enough. It writes
    its pages when it is closed."""
    extra = settings(make_engine, tmp_path, 200)
    first = make_engine(extra=extra)
    first.ask("first", CONTEXT)
    assert first.count("pages_demoted") == 0
    first.close()

    second = make_engine(extra=extra)
    assert second.ask("again", CONTEXT) == expected(CONTEXT, 4)
    assert second.count("prompt_tokens_ssd") >= 304
    second.check_clean()


def test_a_damaged_page_on_ssd_is_recomputed(rig: EngineRig, tmp_path: Path) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    for segment in (tmp_path / "ssd").rglob("*.seg"):
        data = bytearray(segment.read_bytes())
        for position in range(4096, len(data), 512):  # leaves the segment headers intact
            data[position] ^= 1
        segment.write_bytes(data)

    assert rig.ask("again", CONTEXT) == expected(CONTEXT, 4)

    assert rig.count("prompt_tokens_ssd") == 0
    assert rig.count("promotion_failures") > 0
    assert rig.count("ssd_pages_bad") > 0
    rig.fill(1)
    assert rig.ask("third", CONTEXT) == expected(CONTEXT, 4)
    rig.check_clean()


def test_a_turn_with_a_long_forecast_is_demoted_immediately(rig: EngineRig) -> None:
    rig.policy = Always(Decision(Tier.STORE))
    rig.ask("first", CONTEXT, params={"job_id": "j"})
    assert rig.count("pages_demoted") >= 20
    assert rig.pins.held_blocks == 0
    rig.check_clean()


def test_pages_ordered_for_an_aborted_turn_still_arrive(rig: EngineRig) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    rig.add("again", CONTEXT)
    rig.step()
    rig.abort("again")
    rig.run()
    assert rig.ask("third", CONTEXT) == expected(CONTEXT, 4)
    assert rig.count("prompt_tokens_cpu") >= 304
    rig.check_clean()


def test_a_cache_reset_invalidates_pages_on_disk(rig: EngineRig) -> None:
    rig.ask("first", CONTEXT)
    push_out(rig)
    old = rig.worker_half.stores[SSD].io.store.options.folder
    assert list(old.glob("*.seg"))
    assert rig.reset_cache()
    assert rig.ask("again", CONTEXT) == expected(CONTEXT, 4)
    rig.wait_for_worker()

    assert rig.count("prompt_tokens_ssd") == rig.count("prompt_tokens_cpu") == 0
    assert not list(old.glob("*.seg"))
    push_out(rig)
    assert rig.ask("third", CONTEXT) == expected(CONTEXT, 4)
    assert rig.count("prompt_tokens_ssd") >= 256, "the new generation has its own pages"
    rig.check_clean()


def test_a_context_that_suddenly_is_worth_least_reaches_ssd_before_it_is_evicted(
    rig: EngineRig,
) -> None:
    """When a job ends, its pages become the next to be evicted, before the engine has searched
    again for pages to demote. Eviction spares them until they are on SSD."""
    push_out(rig)
    rig.policy = Always(Decision(Tier.CPU, forecast=Forecast(np.linspace(0.0, 1.0, len(GRID)))))
    rig.ask("first", CONTEXT[:190], params={"job_id": "first"})
    order, index = rig.half.pages.order, rig.index
    ssd = rig.half.pages.tiers.own[0].pages.index
    job = rig.half.gaps.manager.jobs.named("first", 1)[0].key
    pages = list(order.context(job))
    assert len(pages) == 13
    assert all(map(index.readable, pages))
    assert len(ssd.absent(pages)) >= 6, "they were the last to be evicted"

    order.on_job_ended(job)
    push_out(rig)

    assert not any(map(index.readable, pages))
    assert not ssd.absent(pages)
    assert index.spared > 0
    rig.check_clean()
