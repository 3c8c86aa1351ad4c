"""``tiered-kv top`` shows a real server."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.asking import ask, job
from tests.top.made import shown
from tiered_kv.bench.servers.vllm_server import VllmServer
from tiered_kv.status import JobState
from tiered_kv.top.route_client import RouteClient
from tiered_kv.top.watch import Watch

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_real_server_is_shown(server: VllmServer, client: httpx.Client) -> None:
    watch = Watch(RouteClient(server.url, None))
    before = watch.look()
    ask(client, list(range(100, 500)), **job("looked at"))
    seen = watch.look()
    (found,) = (one for one in seen.jobs if one.id == "looked at")
    assert (found.state, found.turn) == (JobState.WAITING, 1)
    assert seen.total.counters["turns"] == before.total.counters["turns"] + 1
    vram = seen.total.tiers.vram
    assert vram.blocks > vram.cached_blocks > 0
    lines = shown(seen, 120, 40 + len(seen.jobs))  # other tests' jobs are listed too
    assert [line for line in lines if line.startswith("looked at ")]
    assert lines[0].startswith(f"{server.url}  tiered-kv ")
