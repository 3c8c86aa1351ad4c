"""Bodies of snapshot requests. Invalid bodies are refused before an engine is called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.vllm.routes.engines import WorkingCore
from tests.vllm.routes.snapshot_asks import (
    BODIES,
    FORKS,
    JSON,
    RESTORES,
    SNAPSHOTS,
    post,
    sentence,
    with_client,
)
from tests.vllm.routes.test_endpoints import serve
from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.connectors.vllm.routes.snapshot_routes import MAX_BODY_BYTES

NO_IDS: tuple[Any, ...] = ("", 7, True, None, [])
NO_NAMES = (
    *("", ".", "..", ".making-1", "-n", "a/b", "a\\b", "/etc", "a\n", "a\0"),
    *("ü", "٣", "x" * 101, "a.zip"),
)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"timeout": 5},
        {"exact": 1},
        {"exact": "true"},
        {"exact": None},
        {"timeout_s": True},
        {"timeout_s": "60"},
        {"timeout_s": -1},
        {"timeout_s": 3601},
        {"timeout_s": 10**400},
        {"timeout_s": None},
    ],
)
def test_fields_of_other_types_are_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, change: dict[str, Any]
) -> None:
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    sentence(post(ask, path, **change), 400)
    assert not core.asked


@pytest.mark.parametrize("name", [*NO_NAMES, 7, None, True, ["n"], {"n": 1}])
@pytest.mark.parametrize("path", [SNAPSHOTS, RESTORES])
def test_invalid_names_are_refused(monkeypatch: pytest.MonkeyPatch, path: str, name: Any) -> None:
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    assert "name of a snapshot" in sentence(post(ask, path, name=name), 400)
    assert not core.asked


@pytest.mark.parametrize("name", ["x", "0", "A-b_c.d", "x" * 100, "a..b", "zip"])
def test_valid_names_are_accepted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    assert post(ask, SNAPSHOTS, name=name).status_code == 200
    assert core.asked[1]["name"] == name


@pytest.mark.parametrize(
    ("path", "change"),
    [
        *((path, {"job": job}) for path in (SNAPSHOTS, FORKS) for job in NO_IDS),
        (SNAPSHOTS, {"job": "x" * 513}),
        (SNAPSHOTS, {"job": "\ud800"}),
        (SNAPSHOTS, {"wait_turn": 0}),
        (SNAPSHOTS, {"stop": "no"}),
        (RESTORES, {"job": 7}),
        (RESTORES, {"job": ""}),
        (RESTORES, {"job": "(inferred) 1"}),
        (RESTORES, {"stop": True}),
        (FORKS, {"as": []}),
        (FORKS, {"as": "k"}),
        (FORKS, {"as": {"k": 1}}),
        (FORKS, {"as": [7]}),
        (FORKS, {"as": ["k", "k"]}),
        (FORKS, {"as": ["(inferred) 1"]}),
        (FORKS, {"as": [str(number) for number in range(65)]}),
    ],
)
def test_invalid_ids_and_flags_are_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, change: dict[str, Any]
) -> None:
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    content = json.dumps({**BODIES[path], **change})
    sentence(ask(path, "POST", content=content, headers=JSON), 400)
    assert not core.asked


def test_the_maximum_number_of_forks_and_inferred_jobs_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = WorkingCore(["(inferred) 1"])
    _, ask = serve(monkeypatch, core)
    names = [str(number) for number in range(64)]
    assert post(ask, FORKS, job="(inferred) 1", **{"as": names}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"n"',
        b"{",
        b"{}",
        b'{"name": "n", "name": "n"}',
        b'{"name": "n", "timeout_s": NaN}',
        b'{"name": "n", "timeout_s": Infinity}',
        b'{"name": "n", "timeout_s": 1e999}',
        b'{"name": "n", "timeout_s": ' + b"9" * 6000 + b"}",
        b'{"name": "n\xff"}',
        b'\xef\xbb\xbf{"name": "n"}',
        '{"name": "n"}'.encode("utf-16"),
        b'{"name": "n"} {}',
        b"[" * 60_000,
        b'{"name":' * 8_000,
    ],
)
def test_invalid_bodies_are_refused(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    sentence(ask(RESTORES, "POST", content=content, headers=JSON), 400)
    assert not core.asked


def test_only_the_start_of_an_oversized_body_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = WorkingCore([])
    app, ask = serve(monkeypatch, core)
    whole = b'{"name": "n"}'.ljust(MAX_BODY_BYTES)
    assert ask(RESTORES, "POST", content=whole, headers=JSON).status_code == 200
    core.asked.clear()
    assert "64 KiB" in sentence(ask(RESTORES, "POST", content=whole + b" ", headers=JSON), 413)

    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b" " * 1024

    async def story(client: httpx.AsyncClient) -> None:
        sentence(await client.post(RESTORES, content=endless(), headers=JSON), 413)

    asyncio.run(with_client(app, story))
    assert read == 65
    assert not core.asked


@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_content_types_that_web_pages_can_send_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, "s3cret")
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    headers = {"Authorization": "Bearer s3cret"} | ({} if kind is None else {"Content-Type": kind})
    for path, body in BODIES.items():
        answer = ask(path, "POST", content=json.dumps(body), headers=headers)
        assert "application/json" in sentence(answer, 415)
    assert not core.asked
    for good in ("application/json", "Application/JSON; charset=utf-8"):
        headers["Content-Type"] = good
        answer = ask(RESTORES, "POST", content=b'{"name": "n"}', headers=headers)
        assert answer.status_code == 200
