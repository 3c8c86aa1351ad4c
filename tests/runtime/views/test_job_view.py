"""A job as an operator sees it: from its first turn to its last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.admission.admitting import begin, holding_rig
from tests.runtime.between_turns.waiting import CONTEXT, FAST, JOB, LONG, reader, waiting_rig
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.between_turns.open_gaps import LONGEST_S
from tiered_kv.connectors.runtime.views.job_view import MOST_TURNS, JobView
from tiered_kv.policies.base import NO_TOOL
from tiered_kv.status import JobStatus
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return waiting_rig(make_rig, tmp_path)


def view(rig: Rig, name: str = "j") -> dict[str, Any]:
    """Return the only job of this name. Asserts that it is valid JSON, and that the job list has
    the same values."""
    now = JobView(rig.half)
    (found,) = now.named(name, 10)
    told: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    (listed,) = now.page(told["number"] - 1, 1)
    row = json.loads(json.dumps(listed.to_json(), allow_nan=False))
    assert JobStatus.from_json(row) == JobStatus.from_json(told) == listed
    assert told.keys() > row.keys()
    short = {**told, "forecast": row["forecast"]}
    assert {name: short[name] for name in row} == row, "the list says the same, and less"
    return told


def after_s(said: dict[str, Any], moment: str) -> float:
    """Return the seconds from the start of the gap to a time in the job's KV status, rounded to
    0.01."""
    return round(float(said["kv"][moment] - said["gap"]["since"]), 2)


def test_a_subagent_reports_its_session_and_its_parent(rig: Rig) -> None:
    ids = {"session": "S", "agent": "a2", "parent_agent": "a1"}
    rig.ask("t1", CONTEXT, params={"client": ids})
    said = view(rig, "S/agent:a2")
    assert (said["session"], said["agent"], said["parent"]) == ("S", "a2", "S/agent:a1")
    rig.ask("t2", CONTEXT, params={"client": {"session": "S"}})
    said = view(rig, "S")
    assert said["session"] is said["agent"] is said["parent"] is None


def test_a_running_job_reports_the_state_of_its_turn(rig: Rig) -> None:
    rig.add("t1", CONTEXT, max_tokens=8, params=JOB)
    said = view(rig)
    assert (said["state"], said["turn"]) == ("queued", 1)
    assert said["kv"]["where"] == "nowhere"
    for _ in range(4):
        rig.step()
    said = view(rig)
    assert said["state"] == "running"
    assert said["kv"] == {"where": "vram", "pinned_blocks": 0, "until": None, "back_at": None}
    assert said["gap"] is said["decision"] is said["forecast"] is None
    (turn,) = said["turns"]
    assert turn["request_id"] == "t1"
    assert said["since"] == turn["arrived"]
    assert turn["prompt_tokens"] == 320
    assert said["context_tokens"] == 320 + turn["output_tokens"] > 320
    assert turn["vram_tokens"] == turn["cpu_tokens"] == 0


def test_a_waiting_job_reports_where_its_kv_is_and_until_when(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    said = view(rig)
    assert said["state"] == "waiting"
    assert said["gap"]["tool_unread"]
    assert said["kv"]["where"] == "vram"
    assert said["kv"]["pinned_blocks"] == 20
    assert after_s(said, "until") == 2.0
    assert said["since"] == said["gap"]["since"]

    reader(rig).says("t1", FAST)
    rig.step()
    said = view(rig)
    assert said["decision"] == {"tier": "pin", "ttl_s": 30.0, "class": "fast"}
    assert after_s(said, "until") == 30.0
    assert said["gap"]["tool"] == ["fast"]
    assert said["context_tokens"] == 324
    forecast = said["forecast"]
    assert forecast["q10_s"] == 10
    assert forecast["q50_s"] == 50
    assert forecast["q90_s"] == 90

    rig.now += 31
    rig.step()
    said = view(rig)
    assert said["kv"]["where"] == "cpu", "its copy, since the pin has ended"
    assert said["kv"]["until"] is None


def test_a_job_that_is_away_for_long_waits_in_a_lower_tier(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", LONG)
    rig.step()
    said = view(rig)
    assert said["kv"]["where"] == "store"
    assert after_s(said, "back_at") == 60.0
    assert said["decision"]["class"] == "slow"


def test_the_last_decision_is_known_while_the_next_turn_runs(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", FAST)
    rig.step()
    rig.add("t2", CONTEXT + text(40, seed=2), params=JOB)
    said = view(rig)
    assert (said["state"], said["turn"]) == ("queued", 2)
    assert said["kv"]["where"] == "vram"
    assert said["kv"]["until"] is None, "it is held until the turn has it"
    assert said["decision"] == {"tier": "pin", "ttl_s": 30.0, "class": "fast"}
    assert said["gap"] is said["forecast"] is None
    rig.step()
    said = view(rig)
    assert said["state"] == "running"
    assert said["kv"]["pinned_blocks"] == 0
    assert said["turns"][0]["vram_tokens"] == 320


def test_a_turn_that_waits_for_copies_reports_it(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", NO_TOOL)
    rig.step()
    rig.add("t2", CONTEXT + text(40, seed=2), params=JOB)
    assert view(rig)["kv"]["where"] == "cpu"


def test_a_job_that_is_silent_for_long_is_not_waited_for(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += LONGEST_S + 1
    rig.half.gaps.manager.poll()
    said = view(rig)
    assert said["state"] == "silent"
    assert said["since"] is None
    assert said["kv"]["where"] == "nowhere"
    assert said["gap"] is None


def test_a_finished_job_is_not_found(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.ask("t2", CONTEXT, params={**JOB, "is_last_step": True})
    assert JobView(rig.half).named("j", 10) == []
    assert JobView(rig.half).page(0, 10) == []


def test_a_held_back_job_reports_its_state(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=False)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    states = [job.state.value for job in JobView(rig.half).page(0, 10)]
    assert states == ["running", "running", "running", "held"]
    rig.run()


def test_jobs_with_the_same_name_are_distinguished_by_their_salts(rig: Rig) -> None:
    """Jobs with the same name have different numbers. The view says whether a job has a salt, but
    never shows the salt, which is a client's secret."""
    for salt in ("secret-a", "secret-b", None):
        rig.ask(f"t {salt}", CONTEXT, params=JOB, salt=salt)
    found = JobView(rig.half).named("j", 10)
    assert [(job["salted"], job["number"]) for job in found] == [(False, 3), (True, 1), (True, 2)]
    assert "secret" not in json.dumps(found)
    assert len(JobView(rig.half).named("j", 2)) == 2


def test_jobs_are_listed_page_by_page_while_they_change(rig: Rig) -> None:
    for at in range(5):
        rig.ask(f"t{at}", text(20, seed=at), params={"job_id": f"job {at}"})
    first = JobView(rig.half).page(0, 2)
    assert [job.id for job in first] == ["job 0", "job 1"]
    rig.ask("again", text(30, seed=0), params={"job_id": "job 0"})
    rig.ask("over", text(30, seed=2), params={"job_id": "job 2", "is_last_step": True})
    rig.ask("new", text(30, seed=9), params={"job_id": "job 9"})
    rest = JobView(rig.half).page(first[-1].number, 10)
    assert [job.id for job in rest] == ["job 3", "job 4", "job 9"], "none twice, none left out"


def test_some_turns_of_a_job_with_many_concurrent_turns_are_shown(make_rig: MakeRig) -> None:
    rig = make_rig()
    for at in range(MOST_TURNS + 5):
        rig.add(f"t{at}", text(20, seed=at), params=JOB)
    said = view(rig)
    assert said["live_turns"] == MOST_TURNS + 5
    assert [turn["number"] for turn in said["turns"]] == list(range(1, MOST_TURNS + 1))
    rig.run()
