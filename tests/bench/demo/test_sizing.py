from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.demo.agents import JobPlan, make_jobs
from tiered_kv.bench.demo.sizing import (
    FEWEST_JOBS,
    MEMORY_SHARE,
    MOST_JOBS,
    context_tokens,
    kv_bytes,
    plan_for,
    predict_s,
    size_for,
)
from tiered_kv.bench.demo.speed import Speed, SpeedError, fastest, measure_speed

PLENTY = 64 << 30


def speed(prefill: float, decode: float, context: int = 8192) -> Speed:
    return Speed(
        prefill_tokens_s=prefill,
        decode_tokens_s=decode,
        max_context_tokens=context,
        kv_token_bytes=46_080,
    )


def test_the_pool_is_too_small_for_all_jobs_but_not_for_one(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("value = compute(1, 2)\n" * 500)
    plan = JobPlan()
    jobs = make_jobs(plan, [source])
    contexts = [job.estimate_tokens(plan.max_tokens) for job in jobs]
    sizing = size_for(jobs, plan.max_tokens, 32)
    assert max(contexts) * 1.15 <= sizing.max_model_len < sizing.pool_tokens < sum(contexts) / 2
    assert sizing.contexts_tokens == sum(contexts)

    alone = size_for(jobs[:1], plan.max_tokens, 32)
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
    assert context_tokens(plan) < 0.9 * 8192
    assert plan == smallest or predict_s(plan, here) <= seconds
    assert plan == smallest or kv_bytes(plan, here) <= MEMORY_SHARE * free
    assert plan.result_chars[0] > 0


def test_a_faster_machine_gets_more_to_do_and_takes_as_long() -> None:
    plans = [plan_for(speed(100 * 2**n, 20 * 2**n), 210.0, PLENTY, JobPlan()) for n in range(2, 7)]
    contexts = [plan.jobs * context_tokens(plan) for plan in plans]
    assert contexts == sorted(set(contexts))
    for n, plan in enumerate(plans, start=2):
        assert 150 < predict_s(plan, speed(100 * 2**n, 20 * 2**n)) <= 210


def test_the_smallest_jobs_still_put_the_pool_under_pressure(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("value = compute(1, 2)\n" * 500)
    plan = plan_for(speed(20, 2), 210.0, PLENTY, JobPlan())
    jobs = make_jobs(plan, [source])
    sizing = size_for(jobs, plan.max_tokens, 32)
    assert sizing.pool_tokens < sizing.contexts_tokens / 2


def test_a_slow_moment_does_not_make_the_machine_look_slow() -> None:
    """The first round loads kernels, and a neighbour slows the next ones down."""
    slow = [0.05, 0.05, 0.0]
    (took,) = fastest([lambda: time.sleep(slow.pop(0))], 0.05)
    assert took < 0.05


def test_a_model_that_does_not_run_is_an_error_that_shows_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ValueError: $3 is no model" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(SpeedError, match=r"(?s)did not run /none:.*ValueError: /none is no model"):
        measure_speed("/none", "float32")
