"""The routes in vLLM's own application, added by vLLM's plugin loader and called over ASGI."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.plugins.endpoint_plugins.interface import (
    attach_endpoint_plugins,
    init_endpoint_plugins_state,
)

from tests.vllm.routes.engines import FakeClient, FakeCore
from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.connectors.vllm.middleware import JobMiddleware
from tiered_kv.connectors.vllm.routes.endpoints import MIDDLEWARE

Ask = Callable[..., httpx.Response]
ODD = "a/b?c=1&d#e%2F\n\r\x00 ü 🎉 <script>"


def serve(monkeypatch: pytest.MonkeyPatch, core: Any, **given: Any) -> tuple[FastAPI, Ask]:
    """Return vLLM's application with its plugins, and a function that sends it a request. ``given``
    are arguments of its server."""
    monkeypatch.setenv("VLLM_PLUGINS", "tiered_kv")
    args = Namespace(
        **{
            "host": "127.0.0.1",
            "middleware": [],
            "allowed_origins": ["*"],
            "allow_credentials": False,
            "allowed_methods": ["*"],
            "allowed_headers": ["*"],
            "api_key": None,
            "enable_request_id_headers": False,
            **given,
        }
    )
    app = FastAPI()
    app.state.args = args
    attach_endpoint_plugins(app, ("generate",))
    init_entrypoints_middleware(args, app, ())
    asyncio.run(init_endpoint_plugins_state(FakeClient(core) if core else None, app.state, args))

    def ask(path: str, method: str = "GET", **kwargs: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(once())

    return app, ask


def job(number: int, engine: int = 0) -> dict[str, Any]:
    return {"id": f"job {number}", "engine": engine, "number": number}


def test_each_engine_reports_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ask = serve(monkeypatch, FakeCore({"engine": 0}, {"engine": 1}))
    answer = ask("/tiered_kv/status")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["engines"] == [{"engine": 0}, {"engine": 1}]
    assert answer.json().keys() == {"version", "vllm_version", "engines"}


def test_a_page_of_jobs_covers_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"now": 5.0, "known": 2, "jobs": [job(3), job(8)]}
    second = {"now": 6.0, "known": 7, "jobs": [job(1, 1), job(2, 1)]}
    core = FakeCore(second, first)
    _, ask = serve(monkeypatch, core)
    said = ask("/tiered_kv/jobs?limit=3&after=0.2").json()
    assert core.asked == [{"ask": "jobs", "limit": 3, "after": [0, 2]}]
    assert [(one["engine"], one["number"]) for one in said["jobs"]] == [(0, 3), (0, 8), (1, 1)]
    assert (said["next"], said["known"], said["now"]) == ("1.1", 9, 6.0)
    said = ask("/tiered_kv/jobs").json()
    assert len(said["jobs"]) == 4
    assert said["next"] is None, "there are no more"


def test_a_long_page_is_requested_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine returns at most 100 jobs per call, so a longer page of the list takes several
    calls."""

    class Engine(FakeCore):
        async def call_utility_all_async(self, method: str, question: dict[str, Any]) -> list[str]:
            self.asked.append(question)
            after, limit = question["after"][1], question["limit"]
            jobs = [job(number) for number in range(after + 1, min(after + limit, 230) + 1)]
            return [json.dumps({"now": 1.0, "known": 230, "jobs": jobs})]

    core = Engine()
    _, ask = serve(monkeypatch, core)
    said = ask("/tiered_kv/jobs?limit=210").json()
    assert [one["number"] for one in said["jobs"]] == list(range(1, 211))
    assert said["next"] == "0.210"
    assert [one["limit"] for one in core.asked] == [100, 100, 10]
    said = ask("/tiered_kv/jobs?limit=1000").json()
    assert len(said["jobs"]) == 230
    assert said["next"] is None


def test_a_job_is_found_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeCore({"now": 1.0, "jobs": []}, {"now": 1.0, "jobs": [job(1, 1)]})
    _, ask = serve(monkeypatch, core)
    for name in (ODD, "..", "jobs", "status", "x" * 512, "٣", "\n", "a\n", " "):
        answer = ask(f"/tiered_kv/jobs/{quote(name, safe='').replace('.', '%2E')}")
        assert answer.json()["jobs"] == [job(1, 1)]
        assert core.asked[-1] == {"ask": "job", "id": name}


def test_a_missing_job_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeCore({"now": 1.0, "jobs": []})
    _, ask = serve(monkeypatch, core)
    answer = ask(f"/tiered_kv/jobs/{quote(ODD, safe='')}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == 404
    assert "script" not in answer.text
    assert len(core.asked) == 1
    for name in ("", "x" * 513, "x" * 60_000):
        assert ask(f"/tiered_kv/jobs/{name}").status_code == 404
    assert len(core.asked) == 1, "no job has such a name, so nobody is asked"


@pytest.mark.parametrize(
    "path",
    [
        "/tiered_kv/status?x=1",
        "/tiered_kv/jobs?limit=0",
        "/tiered_kv/jobs?limit=1001",
        "/tiered_kv/jobs?limit=%00",
        "/tiered_kv/jobs?after=1",
        "/tiered_kv/jobs?after=%FF%FE",
        "/tiered_kv/jobs?all",
        "/tiered_kv/jobs/j?salt=s",
    ],
)
def test_invalid_queries_are_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    core = FakeCore({"now": 1.0, "known": 0, "jobs": []})
    _, ask = serve(monkeypatch, core)
    assert ask(path).status_code == 400
    assert not core.asked


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "TRACE", "NONSENSE"])
def test_other_methods_are_refused(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    core = FakeCore({"engine": 0})
    _, ask = serve(monkeypatch, core)
    job = ("/tiered_kv/jobs/j",) if method != "DELETE" else ()  # DELETE releases a job
    for path in ("/tiered_kv/status", "/tiered_kv/jobs", *job):
        assert ask(path, method, content=b"x" * 1000).status_code == 405
    assert not core.asked


def test_a_server_without_an_engine_answers_501(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ask = serve(monkeypatch, None)
    answer = ask("/tiered_kv/status")
    assert answer.status_code == 501
    assert "vLLM" in answer.json()["error"]["message"]


def test_beyond_loopback_no_client_is_answered_without_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = FakeCore({"engine": 0})
    _, ask = serve(monkeypatch, core, host="0.0.0.0")
    for path in ("/tiered_kv/status", "/tiered_kv/jobs", "/tiered_kv/jobs/j"):
        answer = ask(path)
        assert answer.status_code == 403
        assert ADMIN_TOKEN in answer.json()["error"]["message"]
    assert not core.asked

    monkeypatch.setenv(ADMIN_TOKEN, "s3cret")
    _, ask = serve(monkeypatch, core, host="0.0.0.0")
    answer = ask("/tiered_kv/status")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert ask("/tiered_kv/status", headers={"Authorization": "Bearer no"}).status_code == 401
    assert not core.asked
    assert ask("/tiered_kv/status", headers={"Authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.parametrize("named", [[], [MIDDLEWARE]])
def test_the_middleware_is_added_once(monkeypatch: pytest.MonkeyPatch, named: list[str]) -> None:
    app, ask = serve(monkeypatch, FakeCore({"engine": 0}), middleware=named)
    classes = [one.cls for one in app.user_middleware]
    assert classes.count(JobMiddleware) == 1  # type: ignore[arg-type]

    @app.post("/v1/completions")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    said = ask("/v1/completions", "POST", json={"job_id": "j", "prompt": "x"})
    assert said.json()["kv_transfer_params"] == {"job_id": "j"}


def test_vllm_loads_the_routes_only_if_the_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    app = FastAPI()
    app.state.args = Namespace(middleware=[])
    attach_endpoint_plugins(app, ("generate",))
    assert not [route for route in app.routes if "tiered_kv" in getattr(route, "path", "")]
    assert not app.user_middleware
