"""Streamed answers of a real server report the sources of their prompt, like complete answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.asking import PATIENCE_S, count, job
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PARTS = ("vram_tokens", "cpu_tokens", "recomputed_tokens")
TEXT = "The sea was calm and the night was long. " * 20
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "max_tokens": 6,
        "messages": [{"role": "user", "content": f"Chat. {TEXT}"}],
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"max_tokens": 6, "prompt": f"Complete. {TEXT}", "n": 2, "temperature": 1},
    "/v1/responses": {"max_output_tokens": 6, "input": f"Respond. {TEXT}"},
    "/v1/messages": {"max_tokens": 6, "messages": [{"role": "user", "content": f"Msg. {TEXT}"}]},
}


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON objects of a streamed answer."""
    found = list[dict[str, Any]]()
    with client.stream(
        "POST", path, json={"model": MODEL_NAME, "temperature": 0, "stream": True, **body}
    ) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")))
    return found


def reports(found: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Return the reports in events, including a complete answer that is sent as one event."""
    params = [
        one.get("kv_transfer_params") or one.get("response", {}).get("kv_transfer_params")
        for one in found
    ]
    return [one["tiered_kv"] for one in params if one and "tiered_kv" in one]


@pytest.mark.parametrize("path", BODIES)
def test_a_streamed_answer_has_its_report(client: httpx.Client, path: str) -> None:
    body = {**BODIES[path], **job(f"stream {path}")}
    found = events(client, path, body)
    assert len(found) > 4, "token by token"
    said = reports(found)
    # vLLM merges outputs of several answers that wait to be sent, and can drop one's report then.
    assert 1 <= len(said) <= body.get("n", 1)
    for one in said:
        assert one["prompt_tokens"] > 100
        assert sum(one[part] for part in PARTS) == one["prompt_tokens"]
    # The same prompt again: all but its last block is cached, and the report says so.
    (again, *_) = reports(events(client, path, body))
    assert again["vram_tokens"] + again["cpu_tokens"] > 100
    assert again["prompt_tokens"] == said[0]["prompt_tokens"]


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_without_a_job_is_streamed_unchanged(client: httpx.Client, path: str) -> None:
    assert reports(events(client, path, BODIES[path])) == []


def test_openais_client_reads_the_report_with_the_answer(server: VllmServer) -> None:
    body = BODIES["/v1/chat/completions"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as made:
        whole = made.chat.completions.create(
            model=MODEL_NAME,
            messages=body["messages"],
            max_tokens=6,
            temperature=0,
            extra_body=job("sdk"),
        )
        chunks = list(
            made.chat.completions.create(
                model=MODEL_NAME,
                messages=body["messages"],
                max_tokens=6,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=job("sdk"),
            )
        )
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == whole.choices[0].message.content
    (last,) = [one for one in chunks if (one.model_extra or {}).get("kv_transfer_params")]
    assert last.choices[0].finish_reason == "length"
    assert last.model_extra is not None
    said = last.model_extra["kv_transfer_params"]["tiered_kv"]
    assert whole.model_extra is not None
    assert said.keys() == whole.model_extra["kv_transfer_params"]["tiered_kv"].keys()
    assert chunks[-1].usage is not None
    assert said["prompt_tokens"] == chunks[-1].usage.prompt_tokens


def test_a_client_that_disconnects_ends_its_request(
    client: httpx.Client, server: VllmServer
) -> None:
    """If a client disconnects during a streamed answer, its request ends, and other requests are
    answered as before."""
    body = {"model": MODEL_NAME, "prompt": [7] * 200, "max_tokens": 1500, "ignore_eos": True}
    turns = count(client, "turns")
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as leaving,
        leaving.stream(
            "POST", "/v1/completions", json={**body, "stream": True, **job("left", last=True)}
        ) as stream,
    ):
        next(stream.iter_lines())
    while client.get("/tiered_kv/status").json()["engines"][0]["queues"]["running"]:
        pass
    said = events(client, "/v1/completions", {"prompt": [8] * 40, "max_tokens": 2, **job("next")})
    assert reports(said)
    assert count(client, "turns") >= turns + 1
    server.check()
