"""A job as an operator sees it: from its first turn to its last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.admission.admitting import begin, holding_rig
from tests.runtime.conftest import MakeRig
from tests.runtime.gaps.waiting import CONTEXT, FAST, JOB, LONG, reader, waiting_rig
from tiered_kv.connectors.runtime.gaps.open_gaps import LONGEST_S
from tiered_kv.connectors.runtime.views.job_view import MOST_TURNS, JobView
from tiered_kv.policies.base import NO_TOOL
from tiered_kv.status import JobDecision, JobDetail, JobKv, JobState, Quantiles, Where
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return waiting_rig(make_rig, tmp_path)


def view(rig: Rig, name: str = "j") -> JobDetail:
    """The one job of that name, which clients read as it was."""
    now = JobView(rig.half)
    (found,) = now.named(name, 10)
    assert now.page(found.row.number - 1, 1) == [found.row], "the list says the same, and less"
    said = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert JobDetail.from_json(said) == found
    return found


def after_s(job: JobDetail, moment: float | None) -> float:
    """Seconds from the start of the gap to a moment, to the hundredth."""
    assert moment is not None
    assert job.gap is not None
    assert job.gap.since is not None
    return round(moment - job.gap.since, 2)


def test_a_job_that_runs_says_what_its_turn_does(rig: Rig) -> None:
    rig.add("t1", CONTEXT, max_tokens=8, params=JOB)
    said = view(rig)
    assert (said.row.state, said.row.turn) == (JobState.QUEUED, 1)
    assert said.row.kv.where == Where.NOWHERE
    for _ in range(4):
        rig.step()
    said = view(rig)
    assert said.row.state == JobState.RUNNING
    assert said.row.kv == JobKv(Where.VRAM, pinned_blocks=0, until=None, back_at=None)
    assert [said.gap, said.row.decision, said.forecast] == [None] * 3
    (turn,) = said.turns
    assert turn.request_id == "t1"
    assert said.row.since == turn.arrived
    assert turn.prompt_tokens == 320
    assert said.row.context_tokens == 320 + turn.output_tokens > 320
    assert turn.vram_tokens == turn.cpu_tokens == 0


def test_a_job_that_waits_says_where_its_kv_is_and_until_when(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    said = view(rig)
    assert said.row.state == JobState.WAITING
    assert said.gap is not None
    assert said.gap.tool_unread
    assert said.row.kv.where == Where.VRAM
    assert said.row.kv.pinned_blocks == 20
    assert after_s(said, said.row.kv.until) == 2.0
    assert said.row.since == said.gap.since

    reader(rig).says("t1", FAST)
    rig.step()
    said = view(rig)
    assert said.row.decision == JobDecision("pin", 30.0, "fast")
    assert after_s(said, said.row.kv.until) == 30.0
    assert said.gap is not None
    assert said.gap.tool == ("fast",)
    assert said.row.context_tokens == 324
    forecast = said.forecast
    assert forecast is not None
    assert (forecast.q10_s, forecast.q50_s, forecast.q90_s) == (10, 50, 90)
    assert said.row.forecast == Quantiles(50, 90)

    rig.now += 31
    rig.step()
    said = view(rig)
    assert said.row.kv.where == Where.CPU, "its copy, since the pin has ended"
    assert said.row.kv.until is None


def test_a_job_that_is_away_for_long_waits_below_cpu_memory(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", LONG)
    rig.step()
    said = view(rig)
    assert said.row.kv.where == Where.STORE
    assert after_s(said, said.row.kv.back_at) == 60.0
    assert said.row.decision is not None
    assert said.row.decision.gap_class == "slow"


def test_the_last_decision_is_known_while_the_next_turn_runs(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", FAST)
    rig.step()
    rig.add("t2", CONTEXT + text(40, seed=2), params=JOB)
    said = view(rig)
    assert (said.row.state, said.row.turn) == (JobState.QUEUED, 2)
    assert said.row.kv.where == Where.VRAM
    assert said.row.kv.until is None, "it is held until the turn has it"
    assert said.row.decision == JobDecision("pin", 30.0, "fast")
    assert [said.gap, said.forecast] == [None, None]
    rig.step()
    said = view(rig)
    assert said.row.state == JobState.RUNNING
    assert said.row.kv.pinned_blocks == 0
    assert said.turns[0].vram_tokens == 320


def test_a_turn_that_waits_for_copies_says_so(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", NO_TOOL)
    rig.step()
    rig.add("t2", CONTEXT + text(40, seed=2), params=JOB)
    assert view(rig).row.kv.where == Where.CPU


def test_a_job_that_is_silent_for_long_is_not_waited_for(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += LONGEST_S + 1
    rig.half.gaps.manager.poll()
    said = view(rig)
    assert said.row.state == JobState.SILENT
    assert said.row.since is None
    assert said.row.kv.where == Where.NOWHERE
    assert said.gap is None


def test_a_job_that_is_over_is_not_there(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.ask("t2", CONTEXT, params={**JOB, "is_last_step": True})
    assert [*JobView(rig.half).named("j", 10), *JobView(rig.half).page(0, 10)] == []


def test_a_job_that_is_held_says_so(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=False)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    states = [job.state.value for job in JobView(rig.half).page(0, 10)]
    assert states == ["running", "running", "running", "held"]
    rig.run()


def test_jobs_of_one_name_under_other_salts_are_told_apart(rig: Rig) -> None:
    """The salts themselves are secrets of clients."""
    for salt in ("secret-a", "secret-b", None):
        rig.ask(f"t {salt}", CONTEXT, params=JOB, salt=salt)
    found = JobView(rig.half).named("j", 10)
    assert [(job.row.salted, job.row.number) for job in found] == [(False, 3), (True, 1), (True, 2)]
    assert "secret" not in str([job.to_json() for job in found])
    assert len(JobView(rig.half).named("j", 2)) == 2


def test_jobs_are_listed_page_by_page_while_they_come_and_go(rig: Rig) -> None:
    for at in range(5):
        rig.ask(f"t{at}", text(20, seed=at), params={"job_id": f"job {at}"})
    first = JobView(rig.half).page(0, 2)
    assert [job.id for job in first] == ["job 0", "job 1"]
    rig.ask("again", text(30, seed=0), params={"job_id": "job 0"})
    rig.ask("over", text(30, seed=2), params={"job_id": "job 2", "is_last_step": True})
    rig.ask("new", text(30, seed=9), params={"job_id": "job 9"})
    rest = JobView(rig.half).page(first[-1].number, 10)
    assert [job.id for job in rest] == ["job 3", "job 4", "job 9"], "none twice, none left out"


def test_of_a_job_with_many_turns_at_once_some_are_told(make_rig: MakeRig) -> None:
    rig = make_rig()
    for at in range(MOST_TURNS + 5):
        rig.add(f"t{at}", text(20, seed=at), params=JOB)
    said = view(rig)
    assert said.live_turns == MOST_TURNS + 5
    assert [turn.number for turn in said.turns] == list(range(1, MOST_TURNS + 1))
    rig.run()
