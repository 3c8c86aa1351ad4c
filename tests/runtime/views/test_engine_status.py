"""An engine's status matches the state of its components."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.admission.admitting import begin, holding_rig
from tests.runtime.between_turns.waiting import CONTEXT, JOB, LONG, reader, waiting_rig
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.views import engine_status
from tiered_kv.metrics import COUNTERS, GAUGES
from tiered_kv.status import (
    DecisionCount,
    Decisions,
    EngineStatus,
    JobCounts,
    Pins,
    Queues,
    Transfers,
)
from tiered_kv.testing.checked_kv import CELL, text
from tiered_kv.testing.vllm.rig import Rig


def status(rig: Rig) -> EngineStatus:
    """Return the status. Asserts that clients can parse it without loss."""
    found = engine_status.status(rig.half)
    said = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert EngineStatus.from_json(said) == found
    return found


def test_the_status_of_a_new_engine_shows_all_tiers_empty(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=64)
    found = status(rig)
    vram, cpu = found.tiers.vram, found.tiers.cpu
    assert vram.free_blocks == vram.blocks == 63
    assert vram.cached_blocks == 0
    assert cpu.free_slots == cpu.slots == rig.index.num_slots
    assert cpu.used_bytes == cpu.pages == cpu.compressed_share == 0
    assert found.mode == "offload"
    assert set(found.counters) == set(COUNTERS)
    assert set(found.gauges) == {name for name in GAUGES if not name.startswith("ssd_")}
    assert found.jobs == JobCounts(0, 0, 0, 0)
    assert found.queues == Queues(0, 0, 0, 0, 0)
    assert found.transfers == {}
    assert found.decisions == Decisions(0, None, ())


def test_without_cpu_memory_the_status_has_only_pins(make_rig: MakeRig) -> None:
    found = status(make_rig(extra={"cpu_gib": 0.0}))
    assert found.mode == "vram"
    assert found.tiers.cpu.bytes == 0
    assert found.tiers.lower == ()


def test_a_job_between_two_turns_is_seen_in_every_tier(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = waiting_rig(make_rig, tmp_path)
    rig.ask("t1", CONTEXT, params=JOB)
    found = status(rig)
    assert found.pins == Pins(jobs=1, blocks=20, most_blocks=127)
    vram, cpu = found.tiers.vram, found.tiers.cpu
    assert (vram.pinned_blocks, vram.cached_blocks, vram.free_blocks) == (20, 20, 127 - 20)
    assert cpu.pages == len(rig.index) == 21
    assert cpu.free_slots == 200 - 21
    assert found.jobs == JobCounts(known=1, begun=0, waiting=1, held=0)
    assert found.decisions.last == 0, "not before the tool call was read"

    reader(rig).says("t1", LONG)
    rig.step()
    assert status(rig).transfers["demote"] == Transfers(orders=1, pages=21)
    rig.wait_for_worker()
    rig.step()
    found = status(rig)
    assert found.pins.blocks == 0
    (ssd,) = found.tiers.lower
    assert (ssd.tier, ssd.bytes) == ("ssd", 1 << 30)
    assert ssd.pages == found.gauges["ssd_pages"] == 21
    assert found.queues.prefetches == 1
    assert found.transfers == {}
    assert found.decisions.counts == (DecisionCount("slow", "store", 1),)
    assert found.decisions.last == 1
    assert found.decisions.since == pytest.approx(found.now, abs=1)


def test_counters_are_those_of_the_metrics(make_rig: MakeRig) -> None:
    """Counters that components keep themselves are up to date. Reading the status removes nothing
    from the metrics."""
    rig = make_rig(blocks=24, max_model_len=256, extra={"cpu_gib": 40 * 16 * CELL / 2**30})
    for at in range(6):
        rig.ask(f"r{at}", text(200, seed=at))
    before = status(rig).counters
    assert before["pages_evicted"] == rig.index.evictions > 0
    assert status(rig).counters == before, "asking changes nothing"
    rig.half.stats.take()
    assert status(rig).counters == before == rig.half.counters.totals


@pytest.mark.parametrize("in_job_order", [False, True])
def test_held_back_jobs_are_distinguished_from_running_ones(
    make_rig: MakeRig, in_job_order: bool
) -> None:
    rig: Rig = holding_rig(make_rig, in_job_order=in_job_order)
    for name in "abcde":
        begin(rig, name)
        rig.step()
    rig.step()
    found = status(rig)
    assert found.queues.running == found.jobs.begun == 3
    assert found.queues.held == found.jobs.held == 2
    assert found.queues.queued == 0
    rig.run()
    found = status(rig)
    assert found.queues.held == found.jobs.held == found.jobs.known == 0
