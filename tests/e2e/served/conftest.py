"""One server for all tests of this folder, because it takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.asking import BLOCKS, PATIENCE_S
from tiered_kv.bench.agents.forcing import SERVER_ARGS, server_env
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer


@pytest.fixture(scope="package")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's snapshot folder."""
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="package")
def server(
    small_model: Path, snapshots: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A server that reads Continuum's fields, accepts forced answers, writes a trace, and has the
    plugin's routes and middleware."""
    folder = tmp_path_factory.mktemp("server")
    options = ServerOptions(
        model=small_model,
        kv_blocks=BLOCKS,
        max_model_len=2048,
        kv_transfer_config=CONNECTOR,
        env={
            **server_env(),
            "TIERED_KV_CPU_GIB": "1",
            "TIERED_KV_TRACE": str(folder / "trace.jsonl"),
            "TIERED_KV_SNAPSHOT_PATH": str(snapshots),
            "VLLM_PLUGINS": "tiered_kv",
            "VLLM_SERVER_DEV_MODE": "1",  # for the reset and sleep endpoints
        },
        extra_args=SERVER_ARGS,
    )
    with VllmServer(options, folder / "server.log", start_timeout_s=PATIENCE_S) as running:
        yield running


@pytest.fixture(scope="package")
def client(server: VllmServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as made:
        yield made
