"""vLLM's router in front of two engines, measured by a short run of the benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tiered_kv.bench.cluster import router
from tiered_kv.bench.servers import peers

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

LOAD = replace(router.Size().load, jobs=4, turns=3, task=400, gap_s=0.5, apart_s=5.0)


@pytest.mark.skipif(
    not (peers.FOLDER / peers.ROUTER).is_dir(), reason="vllm-router: scripts/install-peers"
)
def test_jobs_return_to_their_engine_and_survive_its_death(
    small_model: Path, tmp_path: Path
) -> None:
    size = router.Size(returning=10, context=300, rounds=1, load=LOAD, vram=2_048, killed=2)
    found = router.measure(small_model, size, 1, tmp_path, lambda _: None)

    returned = found["returned_to_holder"]
    assert returned[router.OURS] >= 0.9, returned
    assert returned[router.NONE] <= 0.7, returned

    times = found["mean_job_time"]["kv_aware_over_vllm_events"]
    assert times["cached_share"][router.OURS] >= 0.9, "no turn left its context behind"

    killed = found["killed"]
    assert killed["jobs"] >= size.killed
    assert killed["remote_share"] > 0
    assert killed["equal"], killed
