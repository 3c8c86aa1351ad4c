"""The routes of a real server: what they report about a job over time, and calls that must fail."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.e2e.asking import EVENT_S, ask, job, tick
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer
from tiered_kv.doctor.running_server import events
from tiered_kv.metrics import COUNTERS

pytestmark = pytest.mark.e2e

ODD = "a/b?c=1&d#e%2F\n\r\x00 ü 🎉 <script>"


def get(client: httpx.Client, path: str) -> dict[str, Any]:
    answer = client.get(f"/tiered_kv/{path}")
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def the_job(client: httpx.Client, name: str) -> dict[str, Any]:
    (found,) = get(client, f"jobs/{quote(name, safe='')}")["jobs"]
    return dict(found)


def status(client: httpx.Client) -> dict[str, Any]:
    (engine,) = get(client, "status")["engines"]
    return dict(engine)


def settled(client: httpx.Client, name: str) -> dict[str, Any]:
    """Return the job once its tool call has been read. An idle engine reads it only in its next
    step, so small requests are sent until then."""
    deadline = time.monotonic() + EVENT_S
    while (found := the_job(client, name))["gap"]["tool_unread"] and time.monotonic() < deadline:
        tick(client)
    return found


def test_a_job_is_followed_from_its_first_turn_to_its_last(client: httpx.Client) -> None:
    before = status(client)
    context = texts(client, 1, 400)[0][:300]
    answer = ask(client, context, **job(ODD))["choices"][0]
    waiting = settled(client, ODD)
    assert (waiting["id"], waiting["turn"], waiting["state"]) == (ODD, 1, "waiting")
    assert waiting["context_tokens"] == 304
    assert waiting["decision"]["tier"] in ("pin", "cpu")
    assert 0 <= waiting["forecast"]["q10_s"] <= waiting["forecast"]["q50_s"]
    assert waiting["gap"]["tool"] == ["(no tool)"]
    in_vram = waiting["kv"]["where"] == "vram"
    assert in_vram == (waiting["decision"]["tier"] == "pin")
    assert (waiting["kv"]["pinned_blocks"] == 9) == in_vram
    assert ODD in [one["id"] for one in get(client, "jobs?limit=1000")["jobs"]]

    context = context + answer["token_ids"] + list(range(700, 780))
    body = {"model": MODEL_NAME, "prompt": context, "max_tokens": 300, "ignore_eos": True}
    with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True, **job(ODD)}
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        with httpx.Client(base_url=client.base_url, timeout=EVENT_S) as beside:
            running = the_job(beside, ODD)
            busy = status(beside)
        rest = [line for line in lines if line]
    assert len(rest) > 100, "token by token"
    assert rest[-1] == "data: [DONE]"
    assert (running["state"], running["turn"]) == ("running", 2)
    assert running["kv"]["where"] == "vram"
    (turn,) = running["turns"]
    assert turn["prompt_tokens"] == len(context)
    assert turn["vram_tokens"] + turn["cpu_tokens"] >= 288, "what the turn before left"
    assert busy["queues"]["running"] == 1

    ask(client, context + list(range(900, 990)), **job(ODD, last=True))
    gone = client.get(f"/tiered_kv/jobs/{quote(ODD, safe='')}")
    assert gone.status_code == 404
    after = status(client)
    assert after["counters"]["turns"] >= before["counters"]["turns"] + 3
    assert after["counters"]["hook_errors"] == 0
    assert after["steps"] > before["steps"]


def test_the_status_equals_the_metrics(client: httpx.Client) -> None:
    ask(client, texts(client, 1, 200)[0][:150], **job("counted"))
    deadline = time.monotonic() + EVENT_S
    while True:  # an idle engine may have received reports of copies after its last metrics
        tick(client)
        said, shown = status(client), events(client.get("/metrics").text)
        told = said["counters"] | said["gauges"]
        if told == pytest.approx({name: shown[name] for name in told}):
            break
        assert time.monotonic() < deadline, told.items() ^ shown.items()
    assert said["counters"].keys() == COUNTERS.keys()
    assert said["counters"]["turns"] > 0
    assert said["gauges"]["cpu_slots"] > 0


def test_pages_of_the_job_list_contain_each_job_once(client: httpx.Client) -> None:
    names = [f"page {at}" for at in range(5)]
    for at, name in enumerate(names):
        ask(client, [300 + at] * 40, max_tokens=1, **job(name))
    seen, after = [], ""
    while True:
        page = get(client, f"jobs?limit=2{after}")
        seen += [one["id"] for one in page["jobs"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert [name for name in seen if name in names] == names
    assert len(seen) == len(set(seen)) == page["known"]


def test_an_idle_engine_answers_and_stays_idle(client: httpx.Client) -> None:
    """An idle engine answers a query without running a step."""
    deadline = time.monotonic() + EVENT_S
    while (steps := status(client)["steps"]) != status(client)["steps"]:
        assert time.monotonic() < deadline, "copies end"
    assert [status(client)["steps"] for _ in range(50)] == [steps] * 50


CALLERS = 8
"""Number of concurrent clients. Each may leave a connection that is not closed yet."""
HOSTILE = (
    ("GET", "tiered_kv/jobs?limit=0", 400),
    ("GET", f"tiered_kv/jobs?limit={'9' * 4000}", 400),
    ("GET", "tiered_kv/jobs?limit=%00", 400),
    ("GET", "tiered_kv/jobs?after=0", 400),
    ("GET", "tiered_kv/jobs?after=999999.999999999999999999", 200),  # an empty page
    ("GET", "tiered_kv/jobs?sort=cost", 400),
    ("GET", "tiered_kv/jobs/no-such-job", 404),
    ("GET", "tiered_kv/jobs/%0a%0d%1b%5b31mred", 404),
    ("GET", "tiered_kv/jobs/%ff%fe%00", 404),
    ("GET", f"tiered_kv/jobs/{'%F0%9F%8E%89' * 512}", 404),
    ("GET", f"tiered_kv/jobs/{'x' * 8000}", 404),
    ("GET", "tiered_kv/jobs/../../etc/passwd", 404),
    ("GET", "tiered_kv/nothing", 404),
    ("POST", "tiered_kv/status", 405),
    ("DELETE", "tiered_kv/jobs/no-such-job", 404),
    ("DELETE", "tiered_kv/jobs/j?number=1.2.3", 400),
    ("DELETE", "tiered_kv/jobs", 405),
    ("POST", "tiered_kv/hints", 415),
    ("GET", "tiered_kv/hints", 405),
    ("PUT", "tiered_kv/jobs", 405),
)
"""Hostile calls: method, path, and expected status."""


def send(port: int, method: str, path: str) -> int:
    """Send a call with the path unchanged, which httpx would normalise. Returns the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=EVENT_S)
    try:
        connection.request(method, f"/{path}")
        return connection.getresponse().status
    finally:
        connection.close()


def held_by(group: int) -> dict[int, tuple[int, int]]:
    """Return the number of threads and open descriptors of each process in a group."""
    folders = {pid: Path(f"/proc/{pid}") for pid in group_members(group)}
    return {
        pid: (len(list((one / "task").iterdir())), len(list((one / "fd").iterdir())))
        for pid, one in folders.items()
    }


def test_hostile_calls_are_refused_and_leave_nothing_behind(
    client: httpx.Client, server: VllmServer
) -> None:
    def call(at: int) -> tuple[int, int]:
        method, path, wanted = HOSTILE[at % len(HOSTILE)]
        return send(server.port, method, path), wanted

    def crowd(calls: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(CALLERS) as callers:
            for got, wanted in callers.map(call, range(calls)):
                assert got in (wanted, 429)

    crowd(len(HOSTILE))
    before = held_by(server.pid or 0)
    assert len(before) >= 2, "the server and its engine"
    crowd(20 * len(HOSTILE))
    after = held_by(server.pid or 0)
    assert after.keys() == before.keys(), "the same processes"
    for process, counts in after.items():
        more = [now - then for now, then in zip(counts, before[process], strict=True)]
        assert max(more) <= CALLERS, "threads, descriptors"
    assert status(client)["counters"]["hook_errors"] == 0
    assert ask(client, [5, 6, 7])["choices"]
    assert "\x1b[31mred" not in server.log_text()
    server.check()


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example.com"}, {"Host": "evil.example.com"}]
)
def test_calls_from_web_pages_are_refused(client: httpx.Client, headers: dict[str, str]) -> None:
    answer = client.get("/tiered_kv/jobs", headers=headers)
    assert answer.status_code == 403
    assert json.loads(answer.text).keys() == {"error"}
