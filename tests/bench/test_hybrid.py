"""Agents on models of several KV groups: their jobs and pools, and the figures of a row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from tiered_kv.bench.agents.jobs import make_jobs
from tiered_kv.bench.agents.results import JobDone, Kept, Run, TurnDone
from tiered_kv.bench.hybrid import (
    MIDDLE,
    MIDDLE_SHAPES,
    OURS,
    QUICK,
    QUICK_SHAPES,
    STOCK,
    Pools,
    Shape,
    chosen,
    make_row,
    make_servers,
    mistaken,
    pools_for,
    read_counts,
)
from tiered_kv.bench.models.catalogue import VOCABULARY

METRICS = """
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 20.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 3.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 2.0
# TYPE vllm:tiered_kv_faults counter
vllm:tiered_kv_faults_total{engine="0",kind="hook"} 7.0
vllm:tiered_kv_faults_total{engine="0",kind="watchdog"} 1.0
"""


def a_run(
    server: str,
    seconds: Sequence[float],
    *,
    number: int = 0,
    logprobs: Sequence[float] = (-1.0,) * 8,
    **counts: int,
) -> Kept:
    turn = TurnDone(1, 0.0, 0.5, 1.0, 100, 0, 8, {}, tuple(range(8)), tuple(logprobs))
    jobs = tuple(JobDone(f"j{at}", 0.0, s, (turn,)) for at, s in enumerate(seconds))
    counted = Counter({"prompt": 100, "computed": 10, "restored": 5, **counts})
    return Kept(Run(server, "pressure", number, 0, 1.0, jobs, counts=counted), "[]", 0.0)


def test_counters_are_read_by_source() -> None:
    found = read_counts(METRICS)
    assert found == Counter(prompt=123, computed=100, restored=3, preempted=2, stuck=1)
    assert (found - Counter(prompt=3, stuck=1))["stuck"] == 0
    with pytest.raises(RuntimeError, match="by_source"):
        read_counts("up 1\n")


def test_ratios_are_of_means_and_have_the_range_of_the_rounds() -> None:
    played = [
        a_run(STOCK, [10, 30], number=0, preempted=2),
        a_run(OURS, [5, 15], number=0),
        a_run(STOCK, [20, 20], number=1, preempted=1),
        a_run(OURS, [20, 20], number=1, stuck=1),
        a_run("unlimited", [10, 10], number=0),
    ]
    row = make_row("m", "1 full", played)
    assert row["ours_over_stock"] == pytest.approx(math.sqrt(0.5))
    assert row["ours_over_stock_range"] == [0.5, 1.0]
    assert row["ours_over_unlimited"] == 1.0  # of the round that both had
    assert row["ours_over_dense"] is None
    assert row["servers"][STOCK]["mean_job_s"] == 20
    assert row["servers"][OURS]["mean_job_s_range"] == [10, 20]
    assert row["servers"][OURS]["prompt_tokens_computed"] == 10
    assert row["notes"] == [
        "stock: 3 requests were preempted",
        "ours: 1 times it stood still for half a minute",
    ]


def test_answers_are_equal_if_ours_differ_no_more_than_stocks_do() -> None:
    stock, dense = a_run(STOCK, [1]), a_run("stock_dense", [1])
    near, far = a_run(OURS, [1], logprobs=[-1.01] * 8), a_run(OURS, [1], logprobs=[-2.0] * 8)
    assert make_row("m", "", [stock, dense, near])["answers_equal"] is True
    assert make_row("m", "", [stock, dense, far])["answers_equal"] is False
    assert make_row("m", "", [stock, near])["answers_equal"] is None  # nothing to measure by
    assert make_row("m", "", [])["answers_equal"] is None


def test_servers_differ_in_what_is_compared_only() -> None:
    pools = Pools(1024, 30, 900)
    both = [
        {
            kind.name: kind.options
            for kind in make_servers(Path("m"), "float32", QUICK_SHAPES[0], pools, alone=alone)
        }
        for alone in (False, True)
    ]
    servers, alone = both
    stock = servers[STOCK]
    assert servers["unlimited"].kv_blocks == servers["reach"].kv_blocks == 900
    assert '{"reach_blocks": 30}' in servers["reach"].extra_args
    assert {servers[name].kv_blocks for name in (STOCK, "stock_dense", OURS)} == {30}
    assert servers["stock_dense"].extra_args[len(stock.extra_args) :] == (
        "--prefix-cache-retention-interval",
        "None",
    )
    assert servers[OURS].kv_transfer_config is not None
    assert alone[OURS].extra_args == stock.extra_args != servers[OURS].extra_args


def test_a_model_is_chosen_by_name_or_by_the_machine() -> None:
    def names(only: Sequence[str], *, bf16: bool) -> list[str]:
        return [shape.model.name for shape in chosen(QUICK_SHAPES, only, bf16=bf16)]

    assert names(["granite4"], bf16=True) == ["granite4"]
    assert names([], bf16=False) == ["gemma3", "granite4"]
    assert names([], bf16=True) == ["gemma3", "qwen3_next"]
    with pytest.raises(typer.BadParameter, match="is none of"):
        names(["gpt-2"], bf16=False)


def test_jobs_share_the_system_prompt_and_each_turn_but_the_last_has_a_gap() -> None:
    jobs = make_jobs(MIDDLE, 3, VOCABULARY)
    assert jobs == make_jobs(MIDDLE, 3, VOCABULARY) != make_jobs(MIDDLE, 2, VOCABULARY)
    first, second = (job.turns[0].added for job in jobs[:2])
    assert first[: MIDDLE.system] == second[: MIDDLE.system]
    assert first[MIDDLE.system :][:8] != second[MIDDLE.system :][:8]
    for job in jobs:
        *before, last = job.turns
        assert all(0 < turn.gap_s <= MIDDLE.gap_limit_s for turn in before)
        assert last.gap_s == 0
        assert {len(turn.answer) for turn in job.turns} == {MIDDLE.answer}
        assert max(max(turn.added) for turn in job.turns) < VOCABULARY


def test_a_mistaken_job_differs_in_its_place_only() -> None:
    job = make_jobs(QUICK, 0, VOCABULARY)[0]
    right, wrong = job.turns[0].added, mistaken(job, 100, 32).turns[0].added
    differing = [at for at, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
    assert differing == list(range(100, 132))
    assert max(wrong) < VOCABULARY


@pytest.mark.parametrize("shape", [*MIDDLE_SHAPES, *QUICK_SHAPES], ids=lambda one: one.model.name)
def test_the_pool_is_too_small_for_the_jobs_and_holds_any_request(shape: Shape) -> None:
    load = MIDDLE if shape in MIDDLE_SHAPES else QUICK
    tokens = [job.context for job in make_jobs(load, 0, VOCABULARY)]
    pools = pools_for(shape, tokens, load.turns)
    waiting = sum(map(shape.context_blocks, tokens))
    assert shape.request_blocks(pools.longest) < pools.pressed < 0.6 * waiting
    assert pools.unlimited > 2 * waiting
    assert pools.longest > max(tokens)


def test_blocks_of_a_context_by_group() -> None:
    gemma, qwen, _ = MIDDLE_SHAPES
    assert gemma.context_blocks(1024) == 8 + 5 * 3
    assert qwen.context_blocks(1025) == 9 + 3 * 2
