"""Jobs of random tokens, and the pools that they are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tiered_kv.bench.hybrid.agents import MIDDLE, QUICK, contexts, make_jobs, mistaken
from tiered_kv.bench.hybrid.shapes import BF16, Shape, pools_for, suited
from tiered_kv.bench.hybrid.shapes import MIDDLE as SHAPES
from tiered_kv.bench.hybrid.shapes import QUICK as TINY
from tiered_kv.bench.models.catalogue import VOCABULARY


def test_the_same_seed_makes_the_same_jobs() -> None:
    assert make_jobs(QUICK, 1) == make_jobs(QUICK, 1) != make_jobs(QUICK, 2)


def test_jobs_share_the_system_prompt_and_nothing_else() -> None:
    one, other = make_jobs(MIDDLE, 0)[:2]
    first, second = one.turns[0].added, other.turns[0].added
    assert first[: MIDDLE.system] == second[: MIDDLE.system]
    assert first[MIDDLE.system :][:8] != second[MIDDLE.system :][:8]
    assert one.salt == other.salt == ""


def test_every_turn_but_the_last_has_a_tool_behind_it() -> None:
    for job in make_jobs(MIDDLE, 3):
        *before, last = job.turns
        assert all(0 < turn.gap_s <= MIDDLE.gap_limit_s for turn in before)
        assert last.gap_s == 0
        assert {len(turn.answer) for turn in job.turns} == {MIDDLE.answer}
        assert max(max(turn.added) for turn in job.turns) < VOCABULARY


def test_a_mistaken_job_differs_in_its_place_only() -> None:
    job = make_jobs(QUICK, 0)[0]
    right, wrong = job.turns[0].added, mistaken(job, 100, 32).turns[0].added
    differing = [at for at, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
    assert differing == list(range(100, 132))
    assert max(wrong) < VOCABULARY


@pytest.mark.parametrize("shape", [*SHAPES, *TINY], ids=lambda shape: shape.name)
def test_the_pool_is_too_small_for_the_jobs_and_holds_any_request(shape: Shape) -> None:
    load = MIDDLE if shape in SHAPES else QUICK
    tokens = contexts(make_jobs(load, 0))
    pools = pools_for(shape, tokens, load)
    waiting = sum(shape.context_blocks(count) for count in tokens)
    assert shape.request_blocks(pools.longest) < pools.pressed < 0.6 * waiting
    assert pools.unlimited > 2 * waiting
    assert pools.longest > max(tokens)


def test_blocks_of_a_context_by_group() -> None:
    shape = replace(SHAPES[0], block=128, windows=5, window=256, states=0)
    assert shape.context_blocks(1024) == 8 + 5 * 3
    shape = replace(shape, windows=0, states=3)
    assert shape.context_blocks(1025) == 9 + 3 * 2


def test_each_machine_gets_one_model_with_windows_and_one_with_states() -> None:
    assert BF16 == "bfloat16"
    for bf16 in (True, False):
        windows, states = suited(SHAPES, bf16=bf16)
        assert windows.windows
        assert states.states
        assert states.needs_bf16 == bf16
