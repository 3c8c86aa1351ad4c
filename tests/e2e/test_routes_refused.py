"""The routes without the connector, and with a token: each error names what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.asking import PATIENCE_S, ask
from tiered_kv.bench.servers.vllm_server import ServerOptions, VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MIDDLEWARE = "tiered_kv.connectors.vllm.middleware.JobMiddleware"
ROUTES = ("status", "jobs", "jobs/j")


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Stock vLLM with this project's plugin, which loads the middleware. ``--middleware`` loads it
    a second time."""
    options = ServerOptions(
        model=small_model,
        kv_blocks=60,
        max_model_len=1024,
        env={"VLLM_PLUGINS": "tiered_kv", "TIERED_KV_ADMIN_TOKEN": "s3cret"},
        extra_args=("--middleware", MIDDLEWARE),
    )
    log = tmp_path_factory.mktemp("server") / "server.log"
    with VllmServer(options, log, start_timeout_s=PATIENCE_S) as running:
        yield running


@pytest.fixture
def client(server: VllmServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as made:
        yield made


def test_without_the_connector_the_routes_say_what_to_do(
    client: httpx.Client, server: VllmServer
) -> None:
    for path in ROUTES:
        answer = client.get(f"/tiered_kv/{path}", headers={"Authorization": "Bearer s3cret"})
        assert answer.status_code == 501
        assert "--kv-transfer-config" in answer.json()["error"]["message"]
    assert ask(client, [5, 6, 7], job_id="j")["choices"], "it serves as ever"
    server.check()


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer s3cre", "Basic s3cret", "Bearer ü"])
def test_without_the_token_no_request_is_answered(client: httpx.Client, given: str | None) -> None:
    headers = {} if given is None else {b"Authorization": given.encode()}
    for path in ROUTES:
        answer = client.get(f"/tiered_kv/{path}", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"


def test_the_token_is_not_in_the_log(server: VllmServer) -> None:
    assert "s3cret" not in server.log_text()
