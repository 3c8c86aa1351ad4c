"""Requests to the snapshot routes."""

from __future__ import annotations

from typing import Any

import httpx
from fastapi import FastAPI

from tests.vllm.routes.test_endpoints import Ask

SNAPSHOTS, RESTORES, FORKS = "/tiered_kv/snapshots", "/tiered_kv/restores", "/tiered_kv/forks"
BODIES: dict[str, dict[str, Any]] = {
    SNAPSHOTS: {"job": "j", "name": "n"},
    RESTORES: {"name": "n"},
    FORKS: {"job": "j", "as": ["k"]},
}
JSON = {"Content-Type": "application/json"}


def post(ask: Ask, path: str, **body: Any) -> httpx.Response:
    """Post the path's default body with the given changes."""
    return ask(path, "POST", json={**BODIES[path], **body})


def sentence(answer: httpx.Response, status: int) -> str:
    """Return the message of an error response with this status."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    assert error["message"].endswith(".")
    return str(error["message"])


async def with_client(app: FastAPI, story: Any) -> None:
    """Run a coroutine with an HTTP client of the application."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await story(client)
