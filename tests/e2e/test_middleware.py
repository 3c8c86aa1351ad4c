"""Continuum's clients against a real server: their top-level fields name jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.server import CONNECTOR, MODEL_NAME, ServerOptions, VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MIDDLEWARE = "tiered_kv.connectors.vllm.middleware.JobMiddleware"
BASE = {"model": MODEL_NAME, "temperature": 0}
CHAT = {**BASE, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello, " * 60}]}
COMPLETION = {**BASE, "max_tokens": 4, "prompt": "Once upon a time " * 40}
RESPONSE = {**BASE, "max_output_tokens": 4, "input": "Tell me of the sea. " * 30}


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    options = ServerOptions(
        model=small_model,
        kv_blocks=160,
        max_model_len=2048,
        kv_transfer_config=CONNECTOR,
        env={"TIERED_KV_CPU_GIB": "1", "TIERED_KV_TRACE": str(folder / "trace.jsonl")},
        extra_args=("--middleware", MIDDLEWARE),
    )
    with VllmServer(options, folder / "server.log") as running:
        yield running


def turns(server: VllmServer, job: str, count: int) -> list[dict[str, Any]]:
    """The job's turns in the trace, once there are so many: it is written behind the answers."""
    path = Path(server.options.env["TIERED_KV_TRACE"])
    deadline = time.monotonic() + 10
    while True:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        found = [e for e in events if e["event"] == "turn" and e["job_id"] == job]
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def test_jobs_named_at_the_top_level_are_known_to_the_connector(server: VllmServer) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        asked = [
            ("/v1/chat/completions", {**CHAT, "job_id": "swe-1", "is_last_step": False}),
            ("/v1/completions", {**COMPLETION, "job_id": "swe-1"}),
            ("/v1/responses", {**RESPONSE, "job_id": "swe-1"}),
        ]
        answers = [client.post(path, json=body).raise_for_status() for path, body in asked]
        assert answers[0].json()["kv_transfer_params"]["tiered_kv"]["prompt_tokens"] > 0

        streamed = {**CHAT, "stream": True, "job_id": "swe-1", "is_last_step": True}
        with client.stream("POST", "/v1/chat/completions", json=streamed) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 4, "token by token"

        found = turns(server, "swe-1", 4)
        assert [turn["turn"] for turn in found] == [1, 2, 3, 4]
        assert found[-1]["tier"] == "drop"

        body = json.dumps({**CHAT, "job_id": "cut"}).encode()
        pieces = (body[start : start + 100] for start in range(0, len(body), 100))
        client.post(
            "/v1/chat/completions", content=pieces, headers={"content-type": "application/json"}
        ).raise_for_status()
        assert len(turns(server, "cut", 1)) == 1

        plain = client.post("/v1/chat/completions", json=CHAT).raise_for_status().json()
        assert plain["choices"], "a client that names no job is served as ever"
    server.check()
