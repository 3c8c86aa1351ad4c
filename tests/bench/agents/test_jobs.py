from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.agents.jobs import Job, Turn, arrivals, mini_swe_jobs, synthetic_jobs
from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.recorded_rows import RecordingError
from tiered_kv.bench.agents.sessions import read_recording, recording

BEGIN = 1


class Letters:
    """A tokenizer with one token per character, and a start-of-text token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [BEGIN] * add_special_tokens + [ord(char) for char in text]


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def row(session: str, at_s: float, prompt: str, answer: str) -> dict[str, Any]:
    return {
        "session_id": session,
        "timestamp": int(at_s * 1e6),
        "input": prompt,
        "output": answer,
    }


FIX = [
    row("fix", 10.0, "Fix it.", "ls"),
    row("fix", 12.0, "Fix it. a.py", "cat a.py" * 20),
    row("fix", 13.0, "Fix it. a.py x=1", "done"),
]
ADD = [
    row("add", 11.0, "Add it.", "vi"),
    row("add", 15.0, "Add it.vi ok", "make"),
    row("add", 16.0, "Add it.vi okmake ok", "done"),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace file with two sessions of three turns each. The prompts of one session lack the
    answers, as in mini-swe-agent's recordings."""
    path = tmp_path / "sessions.jsonl.gz"
    rows = [row for pair in zip(FIX, ADD, strict=True) for row in pair]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def made(trace: Path, count: int = 2, turns: int = 3, seed: int = 0) -> dict[str, Job]:
    jobs = mini_swe_jobs(trace, Letters(), count=count, turns=turns, seed=seed).jobs
    assert len({job.name for job in jobs}) == len(jobs) == count
    return {job.name: job for job in jobs}


def test_answers_stand_in_the_prompts_whether_or_not_the_record_has_them(trace: Path) -> None:
    jobs = made(trace)
    begin = [BEGIN, *ids("Fix it.")]
    assert jobs["fix"].prompt(0) == begin
    assert jobs["fix"].prompt(1) == [*begin, *ids("ls a.py")]
    assert jobs["fix"].prompt(2) == [*begin, *ids("ls a.py" + "cat a.py" * 20 + " x=1")]
    assert jobs["add"].prompt(2) == [BEGIN, *ids("Add it.vi okmake ok")]


def test_a_gap_is_what_the_answer_leaves_of_the_time_between_requests(trace: Path) -> None:
    fix = made(trace)["fix"]
    assert fix.turns[0].gap_s == pytest.approx(2.0 - 2 / 60)
    assert fix.turns[1].gap_s == 0.05, "160 tokens would have taken longer than the whole second"
    assert fix.turns[2].gap_s == 0, "nothing follows"


def test_copies_of_a_session_share_nothing_but_their_turns(trace: Path) -> None:
    jobs = list(made(trace, count=6).values())
    originals, copies = jobs[:2], jobs[2:]
    assert {job.salt for job in originals} == {""}
    assert len({job.salt for job in copies} - {""}) == len(copies)
    assert all(copies[at].turns == originals[at % 2].turns for at in range(4))


def test_the_seed_determines_the_order_of_sessions(trace: Path) -> None:
    orders = {tuple(made(trace, seed=seed)) for seed in range(20)}
    assert orders == {("fix", "add"), ("add", "fix")}
    assert made(trace, seed=7) == made(trace, seed=7)


@pytest.mark.parametrize("broken", ["Another chat.", "Fix"])
def test_a_session_whose_prompts_do_not_continue_is_left_out(tmp_path: Path, broken: str) -> None:
    rows = [*ADD, *FIX[:2], row("fix", 13.0, broken, "done")]
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert set(made(path, count=1)) == {"add"}
    assert set(made(path, turns=2)) == {"add", "fix"}, "its first two turns do go on"


def test_a_file_without_long_enough_sessions_is_refused(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fewer than 4 consecutive answered turns: 2;"):
        made(trace, turns=4)
    with pytest.raises(RecordingError):
        made(tmp_path / "missing.jsonl")


def test_sessions_that_get_too_long_are_left_out_and_counted(trace: Path) -> None:
    longest = max(job.context for job in made(trace).values())
    found = mini_swe_jobs(trace, Letters(), count=3, turns=3, seed=0, longest=longest - 1)
    assert [job.name for job in found.jobs] == ["add", "add-copy1", "add-copy2"]
    assert found.left_out["too_long"] == LeftOut(sessions=1, turns=3)
    assert found.left_out["too_short"] == found.left_out["nulls"] == LeftOut()
    with pytest.raises(ValueError, match="with more than 10 tokens: 2;"):
        mini_swe_jobs(trace, Letters(), count=3, turns=3, seed=0, longest=10)


@pytest.mark.parametrize("field", ["input", "output"])
def test_a_session_ends_before_a_turn_with_a_null(tmp_path: Path, field: str) -> None:
    path = tmp_path / "sessions.jsonl"
    rows = [*FIX[:1], {**FIX[1], field: None}, FIX[2], *ADD]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = mini_swe_jobs(path, Letters(), count=1, turns=2, seed=0)
    assert [job.name for job in found.jobs] == ["add"]
    assert found.left_out["nulls"] == LeftOut(sessions=1, turns=2)
    assert found.left_out["too_short"] == LeftOut(sessions=1, turns=1), "what is left of it"


@pytest.mark.parametrize("field", ["timestamp", "session_id"])
def test_a_session_with_an_unplaceable_turn_is_left_out(tmp_path: Path, field: str) -> None:
    path = tmp_path / "sessions.jsonl"
    lost = [{**row, field: None} for row in FIX] if field == "session_id" else FIX[:2]
    rows = [*lost, {**FIX[2], field: None}, *ADD]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = mini_swe_jobs(path, Letters(), count=1, turns=3, seed=0)
    assert [job.name for job in found.jobs] == ["add"]
    assert found.left_out["nulls"].sessions == 1
    path.write_text(json.dumps({**FIX[0], field: None}))
    with pytest.raises(RecordingError, match=r"no session in .* is usable"):
        mini_swe_jobs(path, Letters(), count=1, turns=3, seed=0)


def test_sessions_are_read_in_the_order_of_their_turns_from_the_file_that_is_named(
    tmp_path: Path,
) -> None:
    for name, sessions in (("plain.jsonl", "aba"), ("packed.jsonl.gz", "cdc")):
        rows = [row(key, at, f"{at}", "") for key, at in zip(sessions, (3, 1, 2), strict=True)]
        data = "\n".join(map(json.dumps, rows)).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for name, first, second in (("plain", "b", "a"), ("packed", "d", "c")):
        found = read_recording(recording(tmp_path, name)).sessions
        assert [[turn.at for turn in one] for one in found] == [[1_000_000], [2_000_000, 3_000_000]]
        assert [one[0].session for one in found] == [first, second]
    odd = tmp_path / "odd.jsonl"
    for content in (b"", b"{}", b'{"session_id": "a"}', gzip.compress(b"{}", mtime=0)[:-9]):
        odd.write_bytes(content)
        with pytest.raises(RecordingError):
            read_recording(odd)
    with pytest.raises(RecordingError):
        read_recording(recording(tmp_path, "missing"))


@given(count=st.integers(1, 5), seed=st.integers(0, 99), vocabulary=st.integers(2, 50_000))
def test_synthetic_jobs_have_the_gaps_and_contexts_they_promise(
    count: int, seed: int, vocabulary: int
) -> None:
    jobs = synthetic_jobs(count=count, seed=seed, vocabulary=vocabulary)
    assert jobs == synthetic_jobs(count=count, seed=seed, vocabulary=vocabulary)
    assert len({job.name for job in jobs}) == count
    for job in jobs:
        *gaps, last = [turn.gap_s for turn in job.turns]
        *short, long = sorted(gaps)
        assert len(short) == 6
        assert all(0.05 <= gap <= 0.3 for gap in short)
        assert 2 <= long <= 5
        assert last == 0
        prompts = [len(job.prompt(at)) for at in range(len(job.turns))]
        assert all(shorter < longer for shorter, longer in pairwise(prompts))
        assert prompts[-1] + len(job.turns[-1].answer) == 2900
        assert all(token < vocabulary for token in job.prompt(len(job.turns) - 1))


@given(count=st.integers(0, 30), rate=st.floats(0.01, 100), seed=st.integers(0, 99))
def test_arrivals_start_immediately_and_continue(count: int, rate: float, seed: int) -> None:
    times = arrivals(count, rate, seed)
    assert times == arrivals(count, rate, seed)
    assert len(times) == count
    assert times[:1] in ([], [0.0])
    assert times == sorted(times)


def test_arrivals_are_poisson() -> None:
    between = [later - time for time, later in pairwise(arrivals(20_001, 4.0, 1))]
    mean = fmean(between)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert fmean((gap - mean) ** 2 for gap in between) == pytest.approx(mean**2, rel=0.1)


def test_a_prompt_contains_the_whole_conversation() -> None:
    job = Job("j", "", (Turn((1, 2), (3,), 0.1), Turn((4,), (5, 6), 0.2), Turn((), (7,), 0.0)))
    assert [job.prompt(at) for at in range(3)] == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
