"""Hints by HTTP: which are refused, and how the results of several engines are merged."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.vllm.routes.engines import FakeCore
from tests.vllm.routes.test_endpoints import ODD, Ask, serve
from tiered_kv.connectors.vllm.routes import hint_routes
from tiered_kv.policies.jobs.kv_hints import MAX_ID_BYTES, MAX_MESSAGE_CHARS

HINTS = "/tiered_kv/hints"
ACTIONS = [{"action_id": "a", "action_type": "release", "payload": {"job_id": "j"}}]


def result(outcome: str, reason: str = "", name: str = "a") -> dict[str, Any]:
    return {"action_id": name, "intent": "release", "outcome": outcome, "reason": reason}


def engine(*results: dict[str, Any], at: int = 0) -> dict[str, Any]:
    return {"engine": at, "results": list(results)}


def post(ask: Ask, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(
        HINTS, "POST", content=content, headers={"content-type": "application/json", **headers}
    )


class JobCore(FakeCore):
    """A fake engine core client whose engines have jobs and answer each hint with ``outcome``.

    Args:
        jobs: engine and number of each job. Every job ID refers to all of these jobs.
    """

    def __init__(self, *jobs: tuple[int, int], outcome: str = "accepted") -> None:
        super().__init__()
        self.jobs, self.outcome = jobs, outcome

    async def call_utility_all_async(self, method: str, question: dict[str, Any]) -> list[str]:
        self.asked.append(question)
        if question["ask"] == "job":
            rows = [{"engine": engine, "number": number} for engine, number in self.jobs]
            return [json.dumps({"jobs": rows})]
        return [json.dumps(engine(result(self.outcome)))]


def test_a_message_reaches_the_engines_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeCore(engine(result("accepted")))
    _, ask = serve(monkeypatch, core)
    body = {"protocol_version": "0.1", "message_id": "m 🎉", "actions": ACTIONS, "later": 2**70}
    assert post(ask, body).json() == {"message_id": "m 🎉", "results": [result("accepted")]}
    (question,) = core.asked
    assert json.loads(question.pop("message")) == body
    assert question == {"ask": "hints", "salt": None}
    assert post(ask, {"actions": ACTIONS, "cache_salt": "s"}).json()["message_id"] is None
    assert core.asked[-1]["salt"] == "s"
    long = post(ask, {"actions": ACTIONS, "message_id": "\ud800" * 9999}).json()["message_id"]
    assert len(long) <= MAX_ID_BYTES


def test_the_best_outcome_of_all_engines_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    first = engine(result("missing"), result("rejected"), result("deferred"), result("missing"))
    other = engine(
        result("clipped"), result("missing"), result("accepted"), result("missing"), at=1
    )
    _, ask = serve(monkeypatch, FakeCore(first, other))
    results = post(ask, {"actions": ACTIONS * 4}).json()["results"]
    assert [one["outcome"] for one in results] == ["clipped", "rejected", "accepted", "missing"]


@pytest.mark.parametrize(
    ("body", "status", "hint"),
    [
        (b"", 400, "JSON object"),
        (b"[]", 400, "JSON object"),
        (b'{"actions": [NaN]}', 400, "JSON object"),
        (b"[" * 100_000, 400, "JSON object"),
        (b'{"actions": [], "actions": []}', 400, "repeats a field"),
        ({}, 400, "action_type"),
        ({"actions": {"action_type": "release"}}, 400, "action_type"),
        ({"actions": [], "cache_salt": 7}, 400, "cache_salt"),
        ({"actions": [], "cache_salt": "\ud800"}, 400, "cache_salt"),
        (b" " * (MAX_MESSAGE_CHARS + 1), 413, "KiB"),
    ],
)
def test_an_unreadable_body_is_refused_with_the_reason(
    body: Any, status: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FakeCore(engine())
    _, ask = serve(monkeypatch, core)
    answer = post(ask, body)
    assert answer.status_code == status
    assert hint in answer.json()["error"]["message"]
    assert not core.asked


def test_hints_follow_the_rules_of_the_other_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    core = JobCore((0, 1))
    _, ask = serve(monkeypatch, core)
    plain = ask(HINTS, "POST", content=json.dumps({"actions": []}))
    assert plain.status_code == 415, "as a web page may send it"
    assert post(ask, {"actions": []}, origin="http://evil").status_code == 403
    assert ask(f"{HINTS}?x=1", "POST", json={"actions": []}).status_code == 400
    assert ask("/tiered_kv/jobs/j", "DELETE", headers={"origin": "http://evil"}).status_code == 403
    monkeypatch.setenv("TIERED_KV_ADMIN_TOKEN", "s3cret")
    _, ask = serve(monkeypatch, core)
    assert post(ask, {"actions": []}).status_code == 401
    assert ask("/tiered_kv/jobs/j", "DELETE").status_code == 401
    assert not core.asked


# -- a job is released ----------------------------------------------------------------


def test_a_job_is_released_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    core = JobCore((1, 57))
    _, ask = serve(monkeypatch, core)
    answer = ask("/tiered_kv/jobs/" + "".join(f"%{byte:02x}" for byte in ODD.encode()), "DELETE")
    assert answer.json() == {"results": [result("accepted")]}
    assert core.asked[0] == {"ask": "job", "id": ODD}
    (action,) = json.loads(core.asked[1]["message"])
    assert (action["action_type"], action["payload"]) == ("release", {"number": "1.57"})
    assert core.asked[1]["salt"] is None


def test_an_id_of_several_jobs_needs_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    core = JobCore((0, 3), (0, 57), (1, 57))
    _, ask = serve(monkeypatch, core)
    answer = ask("/tiered_kv/jobs/j", "DELETE")
    assert (answer.status_code, answer.json()["error"]["message"]) == (409, hint_routes.SEVERAL)
    for given, number in (("3", "0.3"), ("57", "0.57"), ("0.57", "0.57"), ("1.57", "1.57")):
        assert ask(f"/tiered_kv/jobs/j?number={given}", "DELETE").status_code == 200
        assert json.loads(core.asked[-1]["message"])[0]["payload"] == {"number": number}
    assert ask("/tiered_kv/jobs/j?number=4", "DELETE").status_code == 404
    for wrong in ("", "x", "-1", "1.2.3", "9" * 5000, "%00"):
        assert ask(f"/tiered_kv/jobs/j?number={wrong}", "DELETE").status_code == 400
    assert ask("/tiered_kv/jobs/j?nummer=4", "DELETE").status_code == 400


def test_a_job_that_does_not_exist_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ask = serve(monkeypatch, JobCore())
    assert ask("/tiered_kv/jobs/j", "DELETE").status_code == 404
    assert ask(f"/tiered_kv/jobs/{'x' * 600}", "DELETE").status_code == 404
    _, ask = serve(monkeypatch, JobCore((0, 1), outcome="missing"))
    assert ask("/tiered_kv/jobs/j", "DELETE").status_code == 404, "it has ended meanwhile"
    _, ask = serve(monkeypatch, JobCore((0, 1), outcome="rejected"))
    assert ask("/tiered_kv/jobs/j", "DELETE").json()["results"][0]["outcome"] == "rejected"
