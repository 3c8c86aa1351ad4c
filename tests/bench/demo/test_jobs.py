"""The sizes of the demo's jobs and KV pool, chosen for a machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.demo.jobs import (
    FEWEST_JOBS,
    MEMORY_SHARE,
    MOST_JOBS,
    JobPlan,
    final_tokens,
    in_other_order,
    make_jobs,
    plan_for,
    size_for,
    source_files,
)
from tiered_kv.bench.demo.speed import Speed, SpeedError, fastest, measure_speed

PLENTY = 64 << 30


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three source files of numbered lines."""
    paths = [tmp_path_factory.mktemp("source") / f"module_{i}.py" for i in range(3)]
    for path in paths:
        path.write_text("".join(f"{path.stem}_{line} = {line}\n" for line in range(200)))
    return paths


def speed(prefill: float, decode: float) -> Speed:
    return Speed(
        prefill_tokens_s=prefill,
        decode_tokens_s=decode,
        max_context_tokens=8192,
        kv_token_bytes=46_080,
    )


def test_a_seed_draws_jobs_that_keep_to_their_plan(files: list[Path]) -> None:
    plan = JobPlan(jobs=5, turns=4, seed=3, result_chars=(100, 400), gap_s=(0.2, 0.4))
    arrivals = make_jobs(plan, files)
    assert arrivals == make_jobs(plan, files) != make_jobs(JobPlan(seed=4), files)
    assert [job.name for _, job in arrivals] == [f"agent-{number}" for number in range(1, 6)]
    for at_s, job in arrivals:
        assert 0 <= at_s <= plan.start_s
        *before, last = job.turns
        assert all(0.2 <= turn.gap_s <= 0.4 for turn in before)
        assert (len(job.turns), last.gap_s) == (4, 0.0)
        first, *later = (len(turn.text) for turn in job.turns)
        assert all(chars <= 500 for chars in later)
        assert first <= plan.first_results * 500
    latest = max(at_s for at_s, _ in arrivals)
    assert [at_s for at_s, _ in in_other_order(arrivals)] == [latest - at_s for at_s, _ in arrivals]


def test_a_tool_result_is_whole_lines_of_the_file_it_names(files: list[Path]) -> None:
    texts = {path.name: path.read_text().splitlines() for path in files}
    for _, job in make_jobs(JobPlan(), files):
        results = [part for turn in job.turns for part in turn.text.split("\n\n")]
        assert len(results) == JobPlan().first_results + JobPlan().turns - 1
        for result in results:
            head, *body, question = result.splitlines()
            first = int(head.split("line=")[1].split(")")[0]) - 1
            assert body
            assert body == texts[head.split("'")[1]][first : first + len(body)]
            assert question.endswith("?")


def test_agents_read_this_project_and_the_standard_library() -> None:
    assert {"stage.py", "argparse.py", "zipfile.py"} <= {path.name for path in source_files()}


def test_the_pool_is_too_small_for_all_jobs_but_not_for_one(files: list[Path]) -> None:
    slow = plan_for(speed(20, 2), 210.0, PLENTY, JobPlan())
    for plan in (JobPlan(), slow):
        arrivals = make_jobs(plan, files)
        contexts = [final_tokens(job) for _, job in arrivals]
        sizing = size_for(arrivals, 32)
        assert max(contexts) * 1.15 <= sizing.max_model_len < sizing.pool_tokens
        assert sizing.pool_tokens < sizing.contexts_tokens / 2 == sum(contexts) / 2
    alone = size_for(make_jobs(JobPlan(jobs=1), files), 32)
    assert alone.pool_tokens > alone.max_model_len


@given(
    prefill=st.floats(60, 50_000),
    decode=st.floats(5, 5_000),
    seconds=st.floats(60, 600),
    free=st.integers(1 << 28, 1 << 36),
)
def test_a_plan_fits_the_time_and_the_memory_and_the_model(
    prefill: float, decode: float, seconds: float, free: int
) -> None:
    here = speed(prefill, decode)
    plan = plan_for(here, seconds, free, JobPlan())
    smallest = plan_for(here, 0.0, free, JobPlan())
    assert FEWEST_JOBS <= plan.jobs <= MOST_JOBS
    assert plan.context_tokens < 0.9 * 8192
    assert plan == smallest or plan.predict_s(here) <= seconds
    assert plan == smallest or plan.kv_bytes(here) <= MEMORY_SHARE * free
    assert plan.result_chars[0] > 0


def test_a_faster_machine_gets_more_work_for_the_same_time() -> None:
    speeds = [speed(100 * 2**n, 20 * 2**n) for n in range(2, 7)]
    plans = [plan_for(one, 210.0, PLENTY, JobPlan()) for one in speeds]
    contexts = [plan.jobs * plan.context_tokens for plan in plans]
    assert contexts == sorted(set(contexts))
    assert all(150 < p.predict_s(one) <= 210 for p, one in zip(plans, speeds, strict=True))


def test_a_slow_moment_does_not_make_the_machine_look_slow() -> None:
    """Two slow calls are followed by a fast one, and the time of the fast call is reported. The
    first call loads kernels, and other processes may slow down the second."""
    slow = [0.05, 0.05, 0.0]
    (took,) = fastest([lambda: time.sleep(slow.pop(0))], 0.05)
    assert took < 0.05


def test_a_model_that_does_not_run_is_an_error_with_the_end_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ValueError: $3 is no model" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(SpeedError, match=r"(?s)did not run /none:.*ValueError: /none is no model"):
        measure_speed("/none", "float32")
