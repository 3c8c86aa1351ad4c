"""The status of an engine is what its parts hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.admission.admitting import begin, holding_rig
from tests.runtime.conftest import MakeRig
from tests.runtime.gaps.waiting import CONTEXT, JOB, LONG, reader, waiting_rig
from tiered_kv.connectors.runtime.views.engine_status import status
from tiered_kv.metrics import COUNTERS, GAUGES
from tiered_kv.testing.checked_kv import CELL, text
from tiered_kv.testing.vllm.rig import Rig


def tier(said: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in said["tiers"] if one["tier"] == name)
    return dict(found)


def test_a_new_engine_has_everything_and_holds_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=64)
    said = json.loads(json.dumps(status(rig.half), allow_nan=False))
    assert tier(said, "vram")["free_blocks"] == tier(said, "vram")["blocks"] == 63
    cpu = tier(said, "cpu")
    assert cpu["free_slots"] == cpu["slots"] == rig.index.num_slots
    assert cpu["used_bytes"] == cpu["pages"] == cpu["compressed_share"] == 0
    assert said["mode"] == "offload"
    assert set(said["counters"]) == set(COUNTERS)
    assert set(said["gauges"]) == {name for name in GAUGES if not name.startswith("ssd_")}
    assert not any(said["jobs"].values())
    assert not any(said["queues"].values())
    assert said["transfers"] == {}
    assert said["decisions"] == {"last": 0, "since": None, "counts": []}
    assert tier(said, "vram")["cached_blocks"] == 0


def test_without_cpu_memory_there_are_pins_alone(make_rig: MakeRig) -> None:
    said = status(make_rig(extra={"cpu_gib": 0.0}).half)
    assert said["mode"] == "vram"
    assert tier(said, "cpu")["bytes"] == 0
    assert [one["tier"] for one in said["tiers"]] == ["vram", "cpu"]


def test_a_job_between_two_turns_is_seen_in_every_tier(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = waiting_rig(make_rig, tmp_path)
    rig.ask("t1", CONTEXT, params=JOB)
    said = status(rig.half)
    assert said["pins"] == {"jobs": 1, "blocks": 20, "most_blocks": 127}
    assert tier(said, "vram")["pinned_blocks"] == 20
    assert tier(said, "vram")["free_blocks"] == 127 - 20
    assert tier(said, "vram")["cached_blocks"] == 20
    assert tier(said, "cpu")["pages"] == len(rig.index) == 21
    assert tier(said, "cpu")["free_slots"] == 200 - 21
    assert said["jobs"] == {"known": 1, "begun": 0, "waiting": 1, "held": 0}
    assert said["decisions"]["last"] == 0, "not before the tool call was read"

    reader(rig).says("t1", LONG)
    rig.step()
    assert status(rig.half)["transfers"]["demote"] == {"orders": 1, "pages": 21}
    rig.wait_for_worker()
    rig.step()
    said = status(rig.half)
    assert said["pins"]["blocks"] == 0
    ssd = tier(said, "ssd")
    assert ssd["pages"] == said["gauges"]["ssd_pages"] == 21
    assert ssd["bytes"] == 1 << 30
    assert said["queues"]["prefetches"] == 1
    assert said["transfers"] == {}
    decided = said["decisions"]
    assert decided["counts"] == [{"class": "slow", "tier": "store", "count": 1}]
    assert decided["last"] == 1
    assert decided["since"] == pytest.approx(said["now"], abs=1)


def test_counters_are_those_of_the_metrics(make_rig: MakeRig) -> None:
    """Counters that components keep themselves are up to date, and nothing is taken from the
    metrics."""
    rig = make_rig(blocks=24, max_model_len=256, extra={"cpu_gib": 40 * 16 * CELL / 2**30})
    for at in range(6):
        rig.ask(f"r{at}", text(200, seed=at))
    before = status(rig.half)["counters"]
    assert before["pages_evicted"] == rig.index.evictions > 0
    assert status(rig.half)["counters"] == before, "asking changes nothing"
    rig.half.stats.take()
    assert status(rig.half)["counters"] == before == rig.half.counters.totals


@pytest.mark.parametrize("in_job_order", [False, True])
def test_jobs_that_are_held_are_told_from_those_that_run(
    make_rig: MakeRig, in_job_order: bool
) -> None:
    rig: Rig = holding_rig(make_rig, in_job_order=in_job_order)
    for name in "abcde":
        begin(rig, name)
        rig.step()
    rig.step()
    said = status(rig.half)
    assert said["queues"]["running"] == said["jobs"]["begun"] == 3
    assert said["queues"]["held"] == said["jobs"]["held"] == 2
    assert said["queues"]["queued"] == 0
    rig.run()
    said = status(rig.half)
    assert said["queues"]["held"] == said["jobs"]["held"] == said["jobs"]["known"] == 0
