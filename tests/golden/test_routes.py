"""The fields of every route's answers, from an engine with running, waiting and snapshotted
jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm

from tests.golden.answers import shape
from tests.golden.conftest import NAMES, Compare
from tests.vllm.routes.test_endpoints import Ask, serve
from tiered_kv.connectors.runtime.views.questions import answer
from tiered_kv.connectors.vllm.routes import endpoints
from tiered_kv.connectors.vllm.routes.core_method import METHOD
from tiered_kv.policies.base import Costs, Decision, GapClass, Tier, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.status import JobForked, JobPage, JobRestored, ServerStatus, SnapshotMade
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.engine.rig import RigOptions, SecondRig

SNAPSHOTS, RESTORES, FORKS = "/tiered_kv/snapshots", "/tiered_kv/restores", "/tiered_kv/forks"

HINTED = "/tiered_kv/hints"
RETAIN = {"action_id": "r", "action_type": "kv.retain", "payload": {"ttl": "5m"}}
PREFETCH = {"action_type": "prefetch", "payload": {"job_id": "waits"}}
HINTS = {
    "job_id": "waits",
    "tool_name": "bash",
    "tool_command": "pytest -x",
    "expected_tool_s": 30.0,
}


class RigCore:
    """vLLM's client of an engine. Each poll of an operation runs one engine step."""

    def __init__(self, rig: SecondRig) -> None:
        self._rig = rig

    async def call_utility_all_async(self, method: str, question: dict[str, Any]) -> list[str]:
        assert method == METHOD
        if question["ask"] == "operation":
            self._rig.half.snapshots.drain()
            self._rig.wait_for_worker()
            self._rig.step()
        return [json.dumps(answer(self._rig.half, question))]


class Scripted(StatelessPolicy):
    """Pins one job's KV in VRAM, and keeps other jobs' KV in CPU memory."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        forecast = Forecast(np.linspace(0.0, 0.995, len(GRID)))
        if turn.job is not None and turn.job.name == "pinned":
            return Decision(Tier.PIN, 60.0, GapClass.FAST, forecast)
        return Decision(Tier.CPU, 0.0, None, forecast, back_s=30.0)


@contextmanager
def engine(tmp_path: Path, **extra: Any) -> Iterator[SecondRig]:
    tmp_path.mkdir(exist_ok=True)
    paths = {"ssd_path": str(tmp_path / "ssd"), "snapshot_path": str(tmp_path / "snapshots")}
    settings = {"cpu_gib": 0.001, "ssd_gib": 0.02, "codec": "raw", "admission": "off", **paths}
    with SecondRig(RigOptions(extra={**settings, **extra})) as rig:
        rig.policy = Scripted()
        yield rig


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the shapes of all routes' answers."""
    monkeypatch.setenv("TIERED_KV_SNAPSHOT_PATH", str(tmp_path / "snapshots"))
    found = dict[str, Any]()
    with engine(tmp_path) as rig:
        _, ask = serve(monkeypatch, RigCore(rig))
        reports = list[object]()
        ended = rig.half.on_finished
        monkeypatch.setattr(
            rig.halves, "ended", lambda request: reports.append(ended(request.request_id))
        )
        rig.ask("1", text(300, seed=1), params={"job_id": "pinned"})
        rig.ask("2", text(50, seed=2), params=HINTS)
        rig.ask("3", text(50, seed=3), params={"job_id": "over", "is_last_step": True})
        rig.ask("5", text(300, seed=5), params={"job_id": "hinted", "kv_hints": [RETAIN, RETAIN]})
        rig.add("4", text(300, seed=4), 80, params={"job_id": "runs"})
        for _ in range(3):
            rig.step()
        status = answered(ask, "/tiered_kv/status")
        pages = [answered(ask, f"/tiered_kv/jobs{query}") for query in ("", "?limit=1")]
        jobs = [answered(ask, f"/tiered_kv/jobs/{name}") for name in ("pinned", "waits", "runs")]
        taken = answered(ask, SNAPSHOTS, {"job": "pinned", "name": "night"})
        exact = answered(ask, SNAPSHOTS, {"job": "runs", "name": "exact", "exact": True})
        listed = answered(ask, SNAPSHOTS)
        restored = answered(ask, RESTORES, {"name": "night", "job": "back"})
        again = answered(ask, RESTORES, {"name": "exact", "job": "again", "exact": True})
        forked = answered(ask, FORKS, {"job": "pinned", "as": ["a", "b"]})
        fork = answered(ask, "/tiered_kv/jobs/a")
        assert SnapshotMade.from_json(taken).job == "pinned"
        assert JobRestored.from_json(restored).job == "back"
        assert JobForked.from_json(forked).jobs == ("a", "b")
        hinted = answered(ask, HINTED, {"message_id": "m", "actions": [PREFETCH, {}]})
        released = ask("/tiered_kv/jobs/a", "DELETE").json()
        refused = answered(ask, "/tiered_kv/jobs/nobody", status=404)
        rig.run()
    with engine(tmp_path / "observed", mode="observe", snapshot_path="") as rig:
        _, ask = serve(monkeypatch, RigCore(rig))
        rig.ask("1", text(300, seed=1), params={"job_id": "pinned"})
        (observed,) = answered(ask, "/tiered_kv/status")["engines"]
    managed = status["engines"][0]
    for engine_status in (managed, observed):
        engine_status["transfers"] = "by kind: see words.json"
    assert managed.keys() <= observed.keys()
    more = {name: one for name, one in observed.items() if name not in managed}
    found["GET status"] = shape(status)
    found["GET status, more of an engine that observes"] = shape(more)
    found["GET jobs"] = shape(*pages)
    found["GET jobs/JOB"] = shape(*jobs, fork)
    found["POST snapshots"] = shape(taken, exact)
    found["GET snapshots"] = shape(listed)
    found["POST restores"] = shape(restored, again)
    found["POST forks"] = shape(forked)
    found["POST hints"] = shape(hinted)
    found["DELETE jobs/JOB"] = shape(released)
    found["refusal"] = shape(refused)
    found["kv_transfer_params of a completion"] = shape(*reports)
    return found


def answered(ask: Ask, path: str, body: dict[str, Any] | None = None, status: int = 200) -> Any:
    """Call a route and return its answer. With a body, the call is a POST."""
    found = ask(path, "POST", json=body) if body else ask(path)
    assert found.status_code == status, found.text
    return found.json()


def test_every_answer_has_the_published_fields(asked: dict[str, Any], compare: Compare) -> None:
    compare("routes", asked)


def test_status_and_jobs_are_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compare: Compare
) -> None:
    """The answers are compared as text, including the order of fields and the format of numbers.
    Three kinds of values are left out: counters and gauges, which other tests compare; the number
    of steps, which depends on how fast copies are; and costs, which depend on measured speeds."""
    monkeypatch.setattr(endpoints, "__version__", "0.1.0")
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    found = dict[str, str]()
    with engine(tmp_path) as rig:
        _, ask = serve(monkeypatch, RigCore(rig))
        rig.ask("1", text(300, seed=1), params={"job_id": "pinned"})
        rig.now += 5
        rig.ask("2", text(50, seed=2), params=HINTS)
        rig.now += 2
        rig.ask("3", text(50, seed=3), params={"job_id": "over", "is_last_step": True})
        rig.add("4", text(300, seed=4), 80, params={"job_id": "runs"})
        for _ in range(3):
            rig.step()
            rig.wait_for_worker()
        rig.now += 1.5
        for path in ("status", "jobs", "jobs?limit=1", "jobs/pinned", "jobs/waits", "jobs/runs"):
            found[f"GET {path}"] = ask(f"/tiered_kv/{path}").text
        rig.run()
    with engine(tmp_path / "observed", mode="observe", snapshot_path="") as rig:
        _, ask = serve(monkeypatch, RigCore(rig))
        rig.ask("1", text(300, seed=1), params={"job_id": "pinned"})
        found["GET status of an engine that observes"] = ask("/tiered_kv/status").text
    whole, first = (json.loads(found[f"GET jobs{query}"]) for query in ("", "?limit=1"))
    assert [JobPage.from_json(one).to_json() for one in (whole, first)] == [whole, first]
    status = json.loads(found["GET status"])
    assert ServerStatus.from_json(status).to_json() == status, "no field is lost on its way"
    costs = '"benefit_s"|"restore_s"|"recompute_s"|"cpu_s"|"tiers_s"'
    varies = re.compile(rf'("counters"|"gauges"|"steps"|{costs}): (\{{[^}}]*\}}|[\d.]+)')
    compare("texts", {path: varies.sub(r"\1: 0", one) for path, one in found.items()})


@pytest.mark.parametrize("path", [SNAPSHOTS, RESTORES, FORKS])
def test_every_body_may_have_the_published_fields(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body with all published fields, or with the required ones only, is accepted. A body with an
    unknown field, or without a required field, is refused."""
    fields = json.loads((NAMES / "bodies.json").read_text())[path]
    with engine(tmp_path) as rig:
        _, ask = serve(monkeypatch, RigCore(rig))
        whole = {**fields["required"], **fields["optional"]}
        assert ask(path, "POST", json=whole).status_code in (404, 409), "such a body can be read"
        assert ask(path, "POST", json=fields["required"]).status_code in (404, 409)
        for name in fields["required"]:
            less = {one: value for one, value in whole.items() if one != name}
            assert ask(path, "POST", json=less).status_code == 400, f"{name} is required"
        assert ask(path, "POST", json={**whole, "colour": 1}).status_code == 400
