"""The doctor checks a real server."""

from __future__ import annotations

import httpx
import pytest

from tests.doctor.told import by_check
from tests.e2e.asking import ask, count, job, tick
from tiered_kv.bench.servers.vllm_server import VllmServer
from tiered_kv.doctor.running_server import check_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_real_server_is_healthy(server: VllmServer, client: httpx.Client) -> None:
    ask(client, list(range(100, 500)), **job("doctor"))
    tick(client)
    found = by_check(check_server(f"{server.url}/v1"))
    assert {"server", "connector", "tiers"} <= set(found)
    for name in ("server", "connector", "tiers"):
        assert found[name].verdict.value == "ok", found[name]
    assert f"{count(client, 'turns'):,.0f} turns" in found["connector"].seen
