"""Jobs out of generators and out of recordings in the formats of others."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.common.left_out import LeftOut
from tiered_kv.bench.live.live_jobs import LiveJobs, Unit, copies, fitting, load_jobs
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn


def load(source: str | Path, count: int = 5) -> LiveJobs:
    return load_jobs(str(source), count=count, seed=0)


def fit(jobs: LiveJobs, **limits: Any) -> LiveJobs:
    return fitting(jobs, **{"tokens_per_unit": 1.0, "most_tokens": None, "turns": None, **limits})


def lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def request(t: float, tokens: int, out: int, hashes: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": out, "hash_ids": list(hashes), **more}


TRACE = {
    "id": "trace",
    "block_size": 64,
    "requests": [
        request(0.0, 200, 10, [1, 2, 3], type="s", api_time=1.0),
        request(1.5, 200, 10, [1, 2, 3], api_time=2.0),
        {
            "t": 4.0,
            "type": "subagent",
            "agent_id": "helper",
            "duration_ms": 3_000,
            "requests": [request(4.0, 100, 5, [7], api_time=1.0)],
        },
        request(9.5, 300, 20, [1, 2, 3, 4], api_time=1.0),
        request(12.0, 100, 20, [1, 9], think_time=0.25),
    ],
}


def test_the_generated_workload_of_continuum_has_eight_turns_and_its_tools() -> None:
    jobs = load("original").jobs
    assert [len(job.turns) for job in jobs] == [8] * 5
    assert {turn.tool for job in jobs for turn in job.turns[:-1]} == {"cat notes.txt", "pytest -q"}


@pytest.mark.parametrize("form", ["folder", "file", "lines", "indented"])
def test_traces_of_kv_cache_tester_keep_gaps_shared_tokens_and_sub_agents(
    form: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(TRACE, indent=1 if form == "indented" else None))
    if form == "lines":
        other = {**TRACE, "id": "other"}
        path.write_text(f"{json.dumps(TRACE)}\n{json.dumps(other)}\n")
    found = load(tmp_path if form == "folder" else path)
    job = found.jobs[0]
    assert [(turn.prompt, turn.output) for turn in job.turns] == [(200, 10), (300, 20), (100, 20)]
    assert [turn.shared for turn in job.turns] == [0, 210, 64], "the last was compacted"
    # 9.5 - 1.5 - 2 s lie between; the sub-agent takes three of them.
    assert [turn.gap_s for turn in job.turns] == [3.0, 0.25, 0.0]
    (agent,) = job.turns[0].agents
    assert [(turn.prompt, turn.output) for turn in agent.turns] == [(100, 5)]
    assert len(found.jobs) == (2 if form == "lines" else 1)


def test_a_request_that_was_recorded_twice_is_played_once(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(TRACE))
    assert sum(turn.prompt == 200 for turn in load(tmp_path).jobs[0].turns) == 1


def test_mooncakes_requests_are_joined_to_jobs_by_their_prompts_blocks(tmp_path: Path) -> None:
    def row(ms: int, tokens: int, out: int, hashes: Sequence[int]) -> dict[str, Any]:
        said = {"timestamp": ms, "input_length": tokens, "output_length": out}
        return {**said, "hash_ids": list(hashes)}

    path = lines(
        tmp_path / "mooncake.jsonl",
        [
            row(0, 1_100, 60, [1, 2, 3]),
            row(1_000, 1_030, 50, [1, 5, 6]),  # begins as the first does, and is another job
            row(4_000, 1_700, 60, [1, 2, 7, 8]),  # goes on from the first
            row(5_000, 1_110, 60, [1, 2, 9]),  # has its blocks, but no room for its answer
        ],
    )
    jobs = load(path).jobs
    assert [[turn.prompt for turn in job.turns] for job in jobs] == [
        [1_100, 1_700],
        [1_030],
        [1_110],
    ]
    first = jobs[0]
    assert first.turns[1].shared == 1_160, "the prompt and the answer before"
    assert first.turns[0].gap_s == pytest.approx(4.0 - 60 / 60)
    assert {job.prefix for job in jobs} == {"1"}
    assert [job.prefix_tokens for job in jobs] == [1_024, 512, 1_024]


def test_texts_of_agents_are_kept_and_a_prompt_that_does_not_go_on_is_sent_whole(
    tmp_path: Path,
) -> None:
    def row(us: int, prompt: str, answer: str) -> dict[str, Any]:
        return {"session_id": "s", "timestamp": us, "input": prompt, "output": answer}

    rows = [
        row(0, "system task", "look"),
        row(5_000_000, "system task look result", "done"),
        row(6_000_000, "another agent", "yes"),
    ]
    packed = tmp_path / "texts.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    found = load(packed)
    assert found.unit is Unit.CHARACTERS
    assert found.texts["s"] == ("system task", " look result", "another agent")
    (job,) = found.jobs
    assert [turn.shared for turn in job.turns] == [0, len("system tasklook"), 0]
    assert job.turns[0].gap_s == pytest.approx(5 - len("look") / 4 / 60)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "no recording that is known"), ("nothing", "cannot be read"), ("", "cannot be read")],
)
def test_another_file_is_refused_with_what_would_be_read(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        load(path)


def test_an_unknown_workload_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="swe-agent, chat"):
        load("nobody")


def job(*turns: SimTurn, name: str = "job") -> LiveJobs:
    return LiveJobs("made", (SimJob(name, 0.0, turns),))


def test_a_job_ends_before_the_turn_that_the_server_could_not_take() -> None:
    long = job(SimTurn(0, 100, 10, 1.0), SimTurn(110, 50, 10, 1.0), SimTurn(170, 500, 10, 0.0))
    found = fit(long, most_tokens=200)
    assert [turn.prompt for turn in found.jobs[0].turns] == [100, 160]
    assert found.jobs[0].turns[-1].gap_s == 0.0, "nothing follows"
    assert found.left_out["cut"] == LeftOut(1, 1)


def test_turns_that_are_not_wanted_are_left_out_of_sub_agents_too() -> None:
    agent = SimJob("agent", 0.0, (SimTurn(0, 5, 5, 1.0), SimTurn(10, 5, 5, 0.0)))
    found = fit(job(SimTurn(0, 10, 10, 1.0, agents=(agent,)), SimTurn(20, 10, 10, 1.0)), turns=1)
    assert found.jobs[0].turns == (SimTurn(0, 10, 10, 0.0),), "no agent begins behind the end"
    two = fit(job(SimTurn(0, 10, 10, 1.0, agents=(agent,)), SimTurn(20, 10, 10, 1.0)), turns=2)
    assert len(two.jobs[0].turns[0].agents[0].turns) == 2


def test_sizes_are_scaled_and_stay_a_conversation() -> None:
    found = fit(job(SimTurn(0, 100, 10, 1.0), SimTurn(110, 50, 10, 1.0)), tokens_per_unit=0.5)
    first, second = found.jobs[0].turns
    assert (first.prompt, first.output) == (50, 5)
    assert (second.shared, second.prompt, second.output) == (55, 80, 5)
    assert second.gap_s == 0.0


def test_no_job_that_fits_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="--scale below 1"):
        fit(job(SimTurn(0, 100, 10, 0.0)), most_tokens=50)


def test_jobs_come_again_under_names_of_their_own() -> None:
    two = (SimJob("a", 0.0, ()), SimJob("b", 0.0, ()))
    assert [one.name for one in islice(copies(two), 5)] == [
        "a",
        "b",
        "a-copy1",
        "b-copy1",
        "a-copy2",
    ]
