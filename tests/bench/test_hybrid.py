"""The hybrid benchmark: agents on models with several KV groups, with their jobs, pools and
servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from tiered_kv.bench.agents.jobs import make_jobs
from tiered_kv.bench.hybrid import (
    DENSE,
    MIDDLE,
    MIDDLE_SHAPES,
    QUICK,
    QUICK_SHAPES,
    Pools,
    Shape,
    chosen,
    make_servers,
    mistaken,
    pools_for,
)
from tiered_kv.bench.models.catalogue import VOCABULARY
from tiered_kv.bench.replay.names import BOUND, REACH, STOCK, TIERED


def test_servers_differ_only_in_what_is_compared() -> None:
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
    assert servers[BOUND].kv_blocks == servers[REACH].kv_blocks == 900
    assert '{"reach_blocks": 30}' in servers[REACH].extra_args
    assert {servers[name].kv_blocks for name in (STOCK, DENSE, TIERED)} == {30}
    assert servers[DENSE].extra_args[len(stock.extra_args) :] == (
        "--prefix-cache-retention-interval",
        "None",
    )
    assert servers[TIERED].kv_transfer_config is not None
    assert alone[TIERED].extra_args == stock.extra_args != servers[TIERED].extra_args


def test_a_model_is_chosen_by_name_or_by_the_machine() -> None:
    def names(only: Sequence[str], *, bf16: bool) -> list[str]:
        return [shape.model.name for shape in chosen(QUICK_SHAPES, only, bf16=bf16)]

    assert names(["granite4"], bf16=True) == ["granite4"]
    assert names([], bf16=False) == ["gemma3", "granite4"]
    assert names([], bf16=True) == ["gemma3", "qwen3_next"]
    with pytest.raises(typer.BadParameter, match="is not one of"):
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


def test_a_mistaken_job_differs_only_in_its_position() -> None:
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
