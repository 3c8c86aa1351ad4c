"""KV hints in requests and queries are passed to the engine's executor, and its results are
returned to the clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from tiered_kv.connectors.runtime.views.questions import answer
from tiered_kv.connectors.vllm.requests.vllm_request import hints_of
from tiered_kv.policies.base import job_scope
from tiered_kv.policies.jobs.kv_hints import HintResult, Intent, KvHint, Outcome, Target
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.engine.rig import RigOptions, SecondRig


@dataclass
class Recorder:
    """An executor that accepts and records every hint but does nothing."""

    calls: list[tuple[str | None, tuple[KvHint, ...]]] = field(default_factory=list)

    def carry_out(
        self, scope: str | None, hints: Sequence[KvHint], request_id: str | None = None
    ) -> list[HintResult]:
        self.calls.append((scope, tuple(hints)))
        return [HintResult(one.action_id, one.intent, Outcome.ACCEPTED, "Done.") for one in hints]


@pytest.fixture
def rig() -> Iterator[SecondRig]:
    with SecondRig(RigOptions(extra={"cpu_gib": 0.001, "admission": "off"})) as rig:
        yield rig


def reports(rig: SecondRig, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the reports that clients receive with their answers."""
    found, ended = list[Any](), rig.half.on_finished
    assert rig.halves is not None
    monkeypatch.setattr(rig.halves, "ended", lambda one: found.append(ended(one.request_id)))
    return found


def test_an_answer_has_the_results_of_the_hints_in_its_request(
    rig: SecondRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = reports(rig, monkeypatch)
    pin = {"action_id": "p", "action_type": "kv.pin", "action_version": "9"}
    wrong = {"action_id": "w", "action_type": "kv.share"}
    rig.ask("1", text(50, seed=1), params={"job_id": "j", "kv_hints": [wrong, pin]})
    share, pinned = told[0]["tiered_kv"]["hints"]
    assert (share["action_id"], share["outcome"]) == ("w", "rejected")
    assert pinned["reason"].startswith("This version of pin is unknown: version 1.0 is assumed.")
    assert (pinned["action_id"], pinned["outcome"]) == ("p", "accepted"), "the turn has ended"
    assert pinned["pages"] == 3
    json.dumps(told)


def test_an_answer_without_hints_is_as_before(
    rig: SecondRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = reports(rig, monkeypatch)
    rig.ask("1", text(50, seed=1))
    rig.ask("2", text(50, seed=2), params={"job_id": "j"})
    assert told[0] is None
    assert "hints" not in told[1]["tiered_kv"]


def test_a_query_has_a_result_for_each_action_in_order(
    rig: SecondRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(rig.half.kv_hints, "carry_out", recorder.carry_out)
    actions = [
        {"action_id": "a", "action_type": "release", "payload": {"job_id": "j"}},
        {"action_id": "b", "action_type": "share"},
        {"action_id": "c", "action_type": "demote", "payload": {"number": 4}},
        {"action_id": "d", "action_type": "demote", "payload": {"number": "1.4"}},
    ]
    query = {"ask": "hints", "message": json.dumps({"actions": actions}), "salt": None}
    said = answer(rig.half, query)
    results = [(one["action_id"], one["outcome"]) for one in said["results"]]
    assert said["engine"] == 0
    assert results == [("a", "accepted"), ("b", "rejected"), ("c", "accepted"), ("d", "missing")]
    wanted = [("a", Intent.RELEASE, Target(job="j")), ("c", Intent.DEMOTE, Target(number=4))]
    assert recorder.calls == [(None, tuple(KvHint(*one) for one in wanted))]
    answer(rig.half, {**query, "salt": "s" * 2000})
    assert recorder.calls[1][0] == job_scope("s" * 2000), "as for the requests of that salt"
    assert answer(rig.half, {**query, "message": "{"})["results"][0]["outcome"] == "rejected"


def test_vllms_own_field_of_a_request_is_read() -> None:
    """The KV hints in vLLM's own field of a request are read. Only callers of ``AsyncLLM`` and
    ``LLM`` can set that field; HTTP clients cannot."""
    action = KvHintAction("a", "kv.retain", "1.0", {"ttl_seconds": 60})
    request = Request(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        kv_hints=KvHintsEnvelope("0.1", "m", [action]),
    )
    wanted = KvHint("a", Intent.RETAIN, Target(own=True), 60.0)
    assert hints_of(request).kv_hints == (wanted,)
    request.kv_hints = None
    assert not hints_of(request).kv_hints
