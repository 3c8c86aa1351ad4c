"""Recorded jobs, converted for the simulator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.records import record, records
from tiered_kv.bench.sim.what_if.jobs import recorded_jobs, unmasked
from tiered_kv.bench.sim.what_if.recording import WhatIfError, fit_turns
from tiered_kv.bench.sim.workloads.workload import SimJob
from tiered_kv.policies.tools.calls import tool_call
from tiered_kv.policies.tools.tool_use import tool_use
from tiered_kv.trace.turn_record import GapStory, StoryEnd, TurnRecord, TurnTimes, TurnTokens

BLOCK = 16
RETURNED, OVER = GapStory(StoryEnd.RETURNED, 1.0), GapStory(StoryEnd.OVER)


def turn(number: int, at: float, prompt: int, **fields: Any) -> TurnRecord:
    """Return the record of a turn that takes two seconds and generates ten tokens."""
    vram, lost = fields.pop("vram", 0), fields.pop("lost", 0)
    given: dict[str, Any] = {
        "turn": number,
        "arrived": 1e9 + at,
        "times": TurnTimes(admitted_s=0.0, end_s=2.0),
        "tokens": TurnTokens(
            prompt=prompt, vram=vram, recomputed=prompt - vram, lost=lost, output=10
        ),
        "gap": RETURNED,
    }
    return record(**{**given, **fields})


def made(*turns: TurnRecord) -> tuple[SimJob, ...]:
    return recorded_jobs(turns, BLOCK, 100_000).workload.jobs


def test_a_job_comes_with_its_turns_gaps_and_what_its_prompts_keep() -> None:
    first = turn(1, 5.0, 100)
    second = turn(2, 10.0, 160, vram=96, lost=14)
    (job,) = made(turn(3, 12.5, 300, vram=64, gap=OVER), first, second)
    assert [(one.shared, one.added, one.output) for one in job.turns] == [
        (0, 100, 10),
        (110, 50, 10),
        (64, 236, 10),
    ]
    assert [one.gap_s for one in job.turns] == pytest.approx([3.0, 0.5, 0.0], abs=1e-6)
    assert job.arrives_s == 0.0
    assert job.says_last


def test_a_job_that_timed_out_does_not_reveal_its_last_turn() -> None:
    found = recorded_jobs([turn(1, 0.0, 100, gap=GapStory(StoryEnd.CLOSED, 9.0))], BLOCK, 1_000)
    assert not found.workload.jobs[0].says_last
    assert found.left["open"] == 1


def test_inconsistent_turns_are_split_into_jobs_and_counted() -> None:
    found = recorded_jobs(
        [
            turn(1, 0.0, 100),
            turn(2, 1.0, 50),  # overlaps with the first turn
            turn(3, 4.0, 120),
            turn(1, 20.0, 100),  # the name is reused by a new job
            turn(1, 1.0, 70, job=None),
            turn(1, 2.0, 9_999, job="large"),
            turn(1, 3.0, 100, job="none said", tokens=TurnTokens(prompt=100)),
            turn(7, 6.0, 100, job="begun"),
        ],
        BLOCK,
        5_000,
    )
    assert [(job.name, len(job.turns)) for job in found.jobs] == [
        ("j", 2),
        ("", 1),
        ("j", 1),
        ("begun", 1),
        ("j", 1),
    ]
    assert {name: found.left[name] for name in ("beside", "empty", "too_long", "begun")} == {
        "beside": 1,
        "empty": 1,
        "too_long": 1,
        "begun": 1,
    }
    assert [job.arrives_s for job in found.workload.jobs] == [0.0, 1.0, 1.0, 6.0, 20.0]


def test_first_prompts_that_were_found_are_shared_within_a_client() -> None:
    jobs = made(
        turn(1, 0.0, 500, job="came first"),
        turn(1, 3.0, 500, job="a", vram=240),
        turn(1, 6.0, 500, job="b", vram=200),
        turn(1, 9.0, 500, job="other", client="0123abcd"),
        turn(4, 9.5, 500, job="begun before", vram=490, client="0123abcd"),
    )
    assert [(one.prefix_tokens, one.prefix) for one in jobs] == [
        (192, "client "),
        (240, "client "),
        (192, "client "),
        (0, ""),
        (0, ""),
    ]


@pytest.mark.parametrize(
    "command",
    [
        "pytest -x tests/a.py",
        "cd /x && git status",
        "sed -i s/a/b/ f.py",
        "python -m pytest tests/t.py::test_x -n 4",
        "git clone https://example.org/a.git",
        "head -20 a.py",
        "sleep 30",
    ],
)
def test_a_recorded_command_is_of_the_same_kind_again(command: str) -> None:
    path = tool_use([tool_call("bash", {"command": command})]).path
    (job,) = made(turn(1, 0.0, 100, tool=path))
    again = tool_use([tool_call(job.turns[0].tool_name, {"command": job.turns[0].tool})]).path
    assert again == path


def test_tools_other_than_shells_are_recognized_by_name() -> None:
    (job,) = made(turn(1, 0.0, 100, tool=("edit", "edit insert")), turn(2, 5.0, 200, tool=()))
    assert [(one.tool_name, one.tool) for one in job.turns] == [("edit", ""), ("", "")]
    assert unmasked("cat <path> <n>") == "cat a/b.py 1"


@given(st.lists(records, max_size=12))
def test_any_records_are_jobs_or_left_out(turns: list[TurnRecord]) -> None:
    found = recorded_jobs(turns, BLOCK, 10_000)
    assert len(found.jobs) == len(found.workload.jobs)
    assert [job.name for job in found.workload.jobs] == sorted(
        {job.name for job in found.workload.jobs}
    )
    for job in found.workload.jobs:
        assert 0 <= job.prefix_tokens < job.turns[0].prompt
        assert job.longest <= 10_000
        for one in job.turns:
            assert one.shared >= 0
            assert one.added > 0
            assert one.gap_s >= 0


@given(st.lists(records, max_size=12))
def test_costs_of_any_records_are_costs_or_refused(turns: list[TurnRecord]) -> None:
    try:
        found = fit_turns(turns, 2_048, 1e-5)
    except WhatIfError:
        return
    cost = found.cost
    assert min(cost.step, cost.weights, cost.token, cost.pair, cost.kv, cost.seq) >= 0
