"""External queries: each is answered, or rejected as malformed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.views import questions
from tiered_kv.connectors.runtime.views.questions import answer
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    rig = make_rig()
    for at in range(4):
        rig.ask(f"t{at}", text(20, seed=at), params={"job_id": f"job {at}"})
    return rig


def ids(said: dict[str, Any]) -> list[str]:
    return [job["id"] for job in said["jobs"]]


def test_each_question_has_its_answer(rig: Rig) -> None:
    assert answer(rig.half, {"ask": "status"})["jobs"]["known"] == 4
    said = answer(rig.half, {"ask": "jobs", "limit": 3, "after": [0, 1]})
    assert ids(said) == ["job 1", "job 2", "job 3"]
    assert said["known"] == 4
    assert ids(answer(rig.half, {"ask": "job", "id": "job 2"})) == ["job 2"]
    assert ids(answer(rig.half, {"ask": "job", "id": "job 7"})) == []


def test_a_list_continues_from_engine_to_engine(rig: Rig) -> None:
    """A list of jobs continues from the first engine to the second. This engine is the first, so it
    returns no jobs once the list has reached the second."""
    assert len(answer(rig.half, {"ask": "jobs", "limit": 9, "after": [0, 0]})["jobs"]) == 4
    assert answer(rig.half, {"ask": "jobs", "limit": 9, "after": [1, 0]})["jobs"] == []


def test_an_answer_is_bounded_whatever_is_asked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MOST_JOBS", 2)
    asked = {"ask": "jobs", "limit": 10**9, "after": [0, 0]}
    assert len(answer(rig.half, asked)["jobs"]) == 2
    assert answer(rig.half, {**asked, "limit": -1})["jobs"] == []


@pytest.mark.parametrize(
    "nonsense", [{}, {"ask": "everything"}, {"ask": "job"}, {"ask": "jobs", "limit": 3}]
)
def test_a_malformed_query_is_refused(rig: Rig, nonsense: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        answer(rig.half, nonsense)
