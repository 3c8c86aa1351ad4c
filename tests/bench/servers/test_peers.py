"""Other projects' servers, which are started together with a measured server and stopped after
it."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.servers.test_server import running, scripted
from tiered_kv.bench.servers import peers as peers_module
from tiered_kv.bench.servers.peers import (
    BehindRouter,
    Setting,
    WithCacheServer,
    alone,
    program_scheduling,
)
from tiered_kv.bench.servers.server_costs import ServerCosts
from tiered_kv.bench.servers.service import ServerError
from tiered_kv.bench.servers.vllm_server import ServerOptions, VllmServer

COSTS = ServerCosts(first=0.05, token=3e-4, pair=4e-8, step=0.02, seq=0.004, kv=1e-6)

SERVES = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"up 1\\n")
    def log_message(self, *_): pass
print(sys.argv[1:], flush=True)
port = int(sys.argv[sys.argv.index(PORT) + 1]) if PORT in sys.argv else int(sys.argv[1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
SERVER = scripted("PORT = None\n" + SERVES)


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "peers"
    monkeypatch.setattr(peers_module, "FOLDER", folder)
    return folder


def install(peers: Path, peer: str, name: str, script: str) -> None:
    """Install a script under the name of a peer's program."""
    path = peers / peer / "bin" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def setting(tmp_path: Path, costs: ServerCosts | None = COSTS) -> Setting:
    log = tmp_path / "logs" / "pressure-0-peer.log"
    return Setting(lambda options: VllmServer(options, log, start_timeout_s=60), log, costs)


def said(log: Path) -> list[str]:
    """Return the arguments that a program was started with, from its log."""
    found: list[str] = json.loads(log.read_text().splitlines()[0].replace("'", '"'))
    return found


def test_a_server_alone_is_reached_directly(tmp_path: Path) -> None:
    with alone(SERVER, setting(tmp_path)) as deployed:
        assert deployed.url == deployed.server.url
        assert deployed.groups == (deployed.server.pid,)


def test_requests_go_to_the_router_which_ends_with_the_server(tmp_path: Path, peers: Path) -> None:
    install(peers, "vllm-router", "vllm-router", "PORT = '--port'\n" + SERVES)
    with BehindRouter(6_400, 1)(SERVER, setting(tmp_path)) as deployed:
        deployed.check()
        (router,) = deployed.around
        assert deployed.url == router.url != deployed.server.url
        groups = deployed.groups
        assert len(groups) == 2
        told = router.log_text()
        assert deployed.server.url in told
        assert '"token_capacity_per_target": 6400' in told
    assert not any(map(running, groups))


def test_a_router_that_ends_is_noticed(tmp_path: Path, peers: Path) -> None:
    install(peers, "vllm-router", "vllm-router", "print('ValueError: no such flag'); exit(2)")
    with (
        pytest.raises(ServerError) as failed,
        BehindRouter(6_400, 1)(SERVER, setting(tmp_path)),
    ):
        pass
    assert "no such flag" in failed.value.log


def test_a_router_without_this_machines_costs_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="cost models"),
        BehindRouter(6_400, 1)(SERVER, setting(tmp_path, None)),
    ):
        pass


def test_the_cache_server_starts_before_the_server_that_uses_it(
    tmp_path: Path, peers: Path
) -> None:
    install(peers, "lmcache", "lmcache", "PORT = '--http-port'\n" + SERVES)
    install_python(peers)
    seen = list[ServerOptions]()

    def start(options: ServerOptions) -> VllmServer:
        seen.append(options)
        return VllmServer(SERVER, tmp_path / "a.log", start_timeout_s=60)

    stock = ServerOptions(model="m", env={"A": "1"})
    with WithCacheServer(4.0)(stock, Setting(start, tmp_path / "a.log", None)) as deployed:
        (cache,) = deployed.around
        arguments = said(cache.log_path)
        assert deployed.url == deployed.server.url
    (told,) = seen
    assert told.python == str(peers / "lmcache" / "bin" / "python")
    assert told.env == {"A": "1", "PYTHONHASHSEED": "0"}
    config: Any = told.kv_transfer_config
    port = config["kv_connector_extra_config"]["lmcache.mp.port"]
    assert arguments[arguments.index("--port") + 1] == str(port)
    assert arguments[arguments.index("--l1-size-gb") + 1] == "4"


def install_python(peers: Path) -> None:
    (peers / "lmcache" / "bin" / "python").symlink_to(sys.executable)


def test_the_error_for_a_missing_peer_says_how_to_install_it(tmp_path: Path, peers: Path) -> None:
    for deploy, name in ((BehindRouter(1, 1), "vllm-router"), (WithCacheServer(1.0), "lmcache")):
        with (
            pytest.raises(ServerError, match=f"{name} is not installed.*scripts/install-peers"),
            deploy(SERVER, setting(tmp_path)),
        ):
            pass


def test_the_router_gets_the_machines_prefill_and_step_costs() -> None:
    told = program_scheduling(COSTS, 6_400, most_waiting=1)
    prefill, decode = told["prefill_cost_model"], told["decode_throughput_model"]
    for thousands in (0.5, 1.0, 4.0):
        tokens = 1_000 * thousands
        asked = (
            prefill["intercept_seconds"]
            + prefill["linear_seconds_per_1k_tokens"] * thousands
            + prefill["quadratic_seconds_per_1k_tokens_squared"] * thousands**2
        )
        assert asked == pytest.approx(0.05 + 3e-4 * tokens + 4e-8 * tokens**2 / 2)
    assert decode == {
        "fixed_step_seconds": 0.02,
        "batch_step_seconds_per_request": 0.004,
        "context_step_seconds_per_token": 1e-6,
    }
    # A step that prefills a thousand tokens takes 0.324 s. A step that only decodes takes 0.024 s.
    assert prefill["decode_throughput_alpha"] == pytest.approx(0.024 / 0.324)
