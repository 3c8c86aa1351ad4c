"""Snapshot routes over ASGI: the engine that has the job acts, and waiting clients receive the
result."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm.routes.engines import FakeCore, WorkingCore
from tests.vllm.routes.snapshot_asks import (
    BODIES,
    FORKS,
    RESTORES,
    SNAPSHOTS,
    post,
    sentence,
    with_client,
)
from tests.vllm.routes.test_endpoints import ODD, serve
from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.connectors.vllm.routes import snapshot_routes
from tiered_kv.connectors.vllm.routes.access import Refusal
from tiered_kv.connectors.vllm.routes.core_method import FAILED, METHOD, NO_CONNECTOR
from tiered_kv.connectors.vllm.routes.snapshot_routes import (
    CROWD,
    FOLDER,
    SEVERAL,
    Ask,
    Patience,
    SnapshotRoutes,
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_routes, "FIRST_PAUSE_S", 0.0)


def test_the_engine_that_has_the_job_makes_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    core = WorkingCore(["other"], ["j"])
    core.looks = 3
    _, ask = serve(monkeypatch, core)
    answer = post(ask, SNAPSHOTS, wait_turn=True)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json() == {"engine": 1, "tokens": 7}
    known, begin, *looks = core.asked
    assert known == {"ask": "job", "id": "j"}
    assert begin == {
        "ask": "snapshot",
        "job": "j",
        "name": "n",
        "wait_turn": True,
        "stop": False,
        "exact": False,
    }
    assert looks == [{"ask": "operation", "engine": 1, "id": 10}] * 4


def test_a_job_is_forked_and_restored_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    core = WorkingCore([ODD])
    core.result = {"jobs": ["a", ODD], "cache_salt": None}
    _, ask = serve(monkeypatch, core)
    answer = post(ask, FORKS, job=ODD, exact=True, **{"as": ["a", ODD + "2"]})
    assert answer.json() == {"engine": 0, "jobs": ["a", ODD], "cache_salt": None}
    assert core.asked[1] == {"ask": "fork", "job": ODD, "as": ["a", ODD + "2"], "exact": True}
    core.asked.clear()
    assert post(ask, RESTORES, job=ODD).status_code == 200
    assert core.asked[0] == {"ask": "restore", "name": "n", "job": ODD, "salt": None}
    core.asked.clear()
    assert post(ask, RESTORES, job=None, timeout_s=3600).status_code == 200
    assert core.asked[0] == {"ask": "restore", "name": "n", "job": None, "salt": None}


def test_a_job_that_no_engine_has_is_answered_with_404(monkeypatch: pytest.MonkeyPatch) -> None:
    core = WorkingCore(["a"], [])
    _, ask = serve(monkeypatch, core)
    for path in (SNAPSHOTS, FORKS):
        assert "no job with this id" in sentence(post(ask, path), 404)
    assert not core.begun


@pytest.mark.parametrize("jobs", [[["j"], ["j"]], [["j", "j"]]])
def test_of_several_jobs_with_one_id_none_is_changed(
    monkeypatch: pytest.MonkeyPatch, jobs: list[list[str]]
) -> None:
    core = WorkingCore(*jobs)
    _, ask = serve(monkeypatch, core)
    for path in (SNAPSHOTS, FORKS):
        assert sentence(post(ask, path), 409) == SEVERAL
    assert not core.begun


def test_a_job_that_moves_to_a_second_engine_meanwhile_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Core(WorkingCore):
        def _begin(self, engine: int, ask: str, question: dict[str, Any]) -> dict[str, Any]:
            self.jobs = (["j"], ["j"])
            return super()._begin(engine, ask, question)

    _, ask = serve(monkeypatch, Core(["j"], []))
    assert sentence(post(ask, FORKS), 409) == SEVERAL


def test_refusals_and_failures_are_reported_in_the_engines_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    for path in BODIES:
        core.fails, core.refuses = {0: "The disk is full."}, {}
        assert sentence(post(ask, path), 409) == "The disk is full."
        for status in (409, 501):
            core.refuses = {0: ("Set a folder first.", status)}
            assert sentence(post(ask, path), status) == "Set a folder first."


def test_an_engine_without_the_job_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    core = WorkingCore(["j"], [])
    core.refuses = {1: ("It has no folder.", 501)}
    _, ask = serve(monkeypatch, core)
    for path in (SNAPSHOTS, FORKS):
        assert post(ask, path).json() == {"engine": 0, "tokens": 7}


async def restored(ask: Ask) -> list[dict[str, Any]]:
    patience = Patience.of(60.0, stays)
    return await SnapshotRoutes(ask, {}).results({"ask": "restore"}, patience, of_all=True)


def test_an_operation_is_polled_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, sleep = list[float](), asyncio.sleep
    core = WorkingCore(["j"])
    core.looks = 60

    async def slept(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.undo()  # restore the real pauses
    monkeypatch.setattr(asyncio, "sleep", slept)

    async def ask(question: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in await core.call_utility_all_async(METHOD, question)]

    async def story() -> None:
        await restored(ask)

    asyncio.run(story())
    waited = [one for one in pauses if one]
    assert len(waited) == 60
    assert 0.001 < waited[0] < 0.01
    assert all(a <= b < 1.5 * a for a, b in itertools.pairwise(waited))
    assert 0.05 < waited[-1] == waited[-9] < 0.5


def test_an_older_engine_or_one_without_connector_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error, status in ((FAILED, 500), (NO_CONNECTOR, 501)):
        _, ask = serve(monkeypatch, FakeCore({"error": error}))
        for path in BODIES:
            sentence(post(ask, path), status)
    _, ask = serve(monkeypatch, None)
    sentence(post(ask, RESTORES), 501)


def test_a_restore_goes_to_all_engines_and_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    core = WorkingCore([], [], [])
    core.looks = 2
    _, ask = serve(monkeypatch, core)
    assert post(ask, RESTORES).json() == {
        "engine": 0,
        "tokens": 7,
        "others": [{"engine": 1, "tokens": 7}, {"engine": 2, "tokens": 7}],
    }
    assert len(core.done) == 3

    core.fails = {0: "The page is damaged."}
    assert sentence(post(ask, RESTORES), 409) == "The page is damaged."
    assert len(core.done) == 6, "the others came to their end"
    core.fails, core.refuses = {}, {2: ("It has another model.", 409)}
    assert sentence(post(ask, RESTORES), 409) == "It has another model."
    assert len(core.done) == 8


def test_a_snapshot_needs_only_the_engine_that_has_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = WorkingCore([], ["j"], [])
    core.refuses = {0: ("Set a folder first.", 409), 2: ("It has another model.", 501)}
    _, ask = serve(monkeypatch, core)
    for path in (SNAPSHOTS, FORKS):
        answer = post(ask, path)
        assert answer.status_code == 200
        assert answer.json() == {"engine": 1, "tokens": 7}
    assert sentence(post(ask, RESTORES), 409) == "Set a folder first.", "which needs all of them"


def test_an_operation_continues_after_its_client_stops_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = WorkingCore(["j"])
    core.looks = 10**9
    _, ask = serve(monkeypatch, core)
    for path in BODIES:
        said = sentence(post(ask, path, timeout_s=0), 504)
        assert "not finished within 0 s, and continues on the server (writing pages)" in said
    assert {one["ask"] for one in core.asked} == {"job", "snapshot", "fork", "restore", "operation"}


def test_other_requests_are_answered_while_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    core = WorkingCore(["j"])
    core.looks = 10**9
    app, _ = serve(monkeypatch, core)

    async def story(client: httpx.AsyncClient) -> None:
        waits = asyncio.create_task(client.post(SNAPSHOTS, json=BODIES[SNAPSHOTS]))
        while not core.begun:
            await asyncio.sleep(0)
        for _ in range(3):
            status = await client.get("/tiered_kv/status")
            assert status.json()["engines"] == [{"engine": 0}]
        assert not waits.done()
        core.looks = 0
        assert (await waits).json() == {"engine": 0, "tokens": 7}

    asyncio.run(with_client(app, story))
    assert core.at_once == 1


def test_excess_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core = WorkingCore(["j"])
    core.looks = 10**9
    app, _ = serve(monkeypatch, core)

    async def story(client: httpx.AsyncClient) -> None:
        body = BODIES[RESTORES]
        waiting = [asyncio.create_task(client.post(RESTORES, json=body)) for _ in range(16)]
        while len(core.begun) < 16:
            await asyncio.sleep(0)
        assert sentence(await client.post(RESTORES, json=body), 429) == CROWD
        core.looks = 0
        assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}
        assert (await client.post(RESTORES, json=body)).status_code == 200, "nobody waits any more"

    asyncio.run(with_client(app, story))


def test_a_client_that_goes_away_leaves_the_operation_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = WorkingCore(["j"])
    core.looks = 10**9
    app, _ = serve(monkeypatch, core)
    sent: list[Any] = []

    async def story() -> None:
        arrived = asyncio.Queue[dict[str, Any]]()
        body = json.dumps(BODIES[SNAPSHOTS]).encode()
        arrived.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: Any) -> None:
            sent.append(message)

        served = asyncio.create_task(app(scope(SNAPSHOTS), arrived.get, send))
        while {"ask": "operation", "engine": 0, "id": 0} not in core.asked:
            await asyncio.sleep(0)
        arrived.put_nowait({"type": "http.disconnect"})
        await served

    asyncio.run(story())
    assert core.begun == [(0, 0)]
    assert {one["ask"] for one in core.asked} == {"job", "snapshot", "operation"}


def test_a_busy_engine_is_asked_again() -> None:
    core = WorkingCore([])
    busy = [Refusal(504, "Busy."), Refusal(429, "Busy.")]

    async def ask(question: dict[str, Any]) -> list[dict[str, Any]]:
        if question["ask"] == "operation" and busy:
            raise busy.pop()
        return [json.loads(text) for text in await core.call_utility_all_async(METHOD, question)]

    async def story() -> list[dict[str, Any]]:
        return await restored(ask)

    assert asyncio.run(story()) == [{"engine": 0, "tokens": 7}]
    assert not busy


def test_a_missing_engine_ends_the_wait() -> None:
    async def ask(question: dict[str, Any]) -> list[dict[str, Any]]:
        if question["ask"] == "restore":
            return [{"engine": 0, "operation": 0}, {"engine": 1, "operation": 0}]
        return [{"engine": 0, "state": "done" if question["engine"] == 0 else None, "result": {}}]

    async def story() -> None:
        await restored(ask)

    with pytest.raises(Refusal, match="no longer exists") as caught:
        asyncio.run(story())
    assert caught.value.status == 409


def test_access_is_as_for_the_other_routes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    for headers in ({"Origin": "http://127.0.0.1"}, {"Host": "evil.example.com"}, {"Via": "1.1 p"}):
        for path, body in BODIES.items():
            assert ask(path, "POST", json=body, headers=headers).status_code == 403
        assert ask(SNAPSHOTS, headers=headers).status_code == 403
    _, ask = serve(monkeypatch, core, host="0.0.0.0")
    assert [post(ask, path).status_code for path in BODIES] == [403] * 3
    assert ask(SNAPSHOTS).status_code == 403
    monkeypatch.setenv(ADMIN_TOKEN, "s3cret")
    _, ask = serve(monkeypatch, core, host="0.0.0.0")
    assert [post(ask, path).status_code for path in BODIES] == [401] * 3
    assert ask(SNAPSHOTS).status_code == 401
    assert not core.asked
    right = {"Authorization": "Bearer s3cret"}
    assert ask(SNAPSHOTS, "POST", json=BODIES[SNAPSHOTS], headers=right).status_code == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "HEAD", "NONSENSE"])
def test_other_methods_and_queries_are_refused(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    for path, body in BODIES.items():
        assert ask(path, method, json=body).status_code == 405
        assert ask(f"{path}?x=1", "POST", json=body).status_code == 400
    assert ask(RESTORES).status_code == ask(FORKS).status_code == 405
    assert ask(f"{SNAPSHOTS}?x=1").status_code == 400
    assert not core.asked


def test_the_snapshots_of_the_folder_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    _, ask = serve(monkeypatch, None)
    assert FOLDER in sentence(ask(SNAPSHOTS), 501)
    root = tmp_path / "root"
    monkeypatch.setenv(FOLDER, str(root))
    assert ask(SNAPSHOTS).json() == {"folder": str(root), "snapshots": []}, "it is still to be made"
    for name in ("b", "a", ".making-0123456789abcdef", "ü", "x" * 101):
        (root / name).mkdir(parents=True)
        (root / name / "manifest.json").touch()
    (root / ".pages").mkdir()
    (root / "no manifest").mkdir()
    (root / "empty").mkdir()
    for name in ("a.zip", "z.zip", ".zip", "-.zip", "notes.txt"):
        (root / name).touch()
    (root / "elsewhere").symlink_to(root / "a")
    (root / "linked.zip").symlink_to(root / "z.zip")
    assert ask(SNAPSHOTS).json() == {"folder": str(root), "snapshots": ["a", "b", "z"]}
    monkeypatch.setenv(FOLDER, str(root / "notes.txt"))
    assert "cannot be read" in sentence(ask(SNAPSHOTS), 500)


def scope(path: str) -> dict[str, Any]:
    """Return the ASGI scope of a POST request to a path."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


async def stays() -> bool:
    return False
