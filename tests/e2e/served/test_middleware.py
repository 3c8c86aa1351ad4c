"""Continuum's clients against a real server: their top-level fields name jobs."""

from __future__ import annotations

import json

import httpx
import pytest

from bench.server import MODEL_NAME, VllmServer
from tests.e2e.asking import PATIENCE_S, Events, trace

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BASE = {"model": MODEL_NAME, "temperature": 0}
CHAT = {**BASE, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello, " * 60}]}
COMPLETION = {**BASE, "max_tokens": 4, "prompt": "Once upon a time " * 40}
RESPONSE = {**BASE, "max_output_tokens": 4, "input": "Tell me of the sea. " * 30}


def turns(server: VllmServer, job: str, count: int) -> Events:
    """The job's turns in the trace, once there are so many."""

    def of_job(events: Events) -> Events:
        return [event for event in events if event["job_id"] == job]

    return of_job(trace(server, lambda events: len(of_job(events)) >= count))


def test_jobs_named_at_the_top_level_are_known_to_the_connector(server: VllmServer) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
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
