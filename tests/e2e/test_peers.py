"""Peers installed by ``scripts/install-peers`` play jobs on real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.agents.client import Hints
from tiered_kv.bench.agents.jobs import Job, Turn
from tiered_kv.bench.replay.kinds import make_kinds, size_for
from tiered_kv.bench.replay.measure import Replay, Workload
from tiered_kv.bench.replay.names import BEHIND_ROUTER, LMCACHE, PRESSURE, ROUTER, TIERED
from tiered_kv.bench.servers import peers
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.server_costs import ServerCosts

pytestmark = pytest.mark.e2e

COSTS = ServerCosts(first=0.06, token=1.7e-4, pair=1.5e-7, step=0.03, seq=5e-4, kv=1.8e-6)
JOBS = tuple(
    Job(
        f"job-{number}",
        "",
        (
            Turn(tuple(range(1_000 * number + 1_000, 1_000 * number + 1_600)), (7, 8, 9, 10), 0.2),
            Turn(tuple(range(500, 564)), (11, 12, 13, 14), 0.0),
        ),
    )
    for number in range(3)
)
INSTALLED_AS = {LMCACHE: LMCACHE, ROUTER: "vllm-router", BEHIND_ROUTER: "vllm-router"}


@pytest.mark.parametrize("name", INSTALLED_AS)
def test_a_peer_generates_the_recorded_answers_and_finds_earlier_prompts(
    name: str, tmp_path: Path
) -> None:
    if not (peers.FOLDER / INSTALLED_AS[name]).is_dir():
        pytest.skip(f"{INSTALLED_AS[name]} is not installed: scripts/install-peers")
    kinds = make_kinds(small_model(), size_for([job.context for job in JOBS], 2_048), peers=True)
    (kind,) = (one for one in kinds if one.name == name)
    workload = Workload(JOBS, len(JOBS), 0, Hints.KV_PARAMS, forced=True)
    kept = Replay(workload, tmp_path)(kind, PRESSURE, 0, 2.0, COSTS)
    assert [job.error for job in kept.run.jobs] == [None] * len(JOBS)
    second = [job.turns[1] for job in kept.run.jobs]
    assert sum(turn.cached_tokens for turn in second) >= 512, "one context at least"
    if name.startswith(TIERED):
        assert list((tmp_path / "traces").iterdir()), "its trace is kept"
