"""Space for contexts with several KV types: pins are released for all blocks that a request
needs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig

from .kinds import ANSWER, CHUNK, FULL, JOB, PROMPT, STATE, WINDOW, forget_vram

KEEPER = text(160, seed=8)
FREE = range(4, 14)
"""Numbers of free blocks, from fewer than a turn needs without releasing the pin to more than it
needs."""
GROUPS = pytest.mark.parametrize(
    "groups", [(FULL, STATE, STATE, STATE), (FULL, WINDOW, WINDOW)], ids=["states", "windows"]
)


def take_all_but(rig: Rig, free: int) -> list[Any]:
    """Allocate blocks until ``free`` are left. Returns the allocated blocks."""
    return list(rig.pool.get_new_blocks(rig.free_blocks - free))


@pytest.mark.parametrize("free", FREE)
@GROUPS
def test_pins_are_released_for_a_restored_turn_with_states(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], free: int
) -> None:
    """With few free blocks, the pin of another job is released for a restored turn. The turn may
    need more blocks than its context has, because a restored state remains next to the state that
    is computed from it."""
    rig = make_rig(groups=groups, blocks=120, extra={"cpu_gib": 0.01})
    answer = rig.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    forget_vram(rig)
    rig.ask("k1", KEEPER, params={"job_id": "keeper"})
    rig.run()
    assert len(rig.pins) == 1
    prompt = PROMPT + answer + text(30, seed=2)
    rig.add("t2", prompt, params=JOB)
    while not rig.turn("t2").loading:
        rig.step()
    taken = take_all_but(rig, free)
    rig.run(limit=60)
    assert rig.outputs["t2"] == expected(prompt, 4)
    rig.pool.free_blocks(taken)
    rig.pins.release_all()
    rig.check_clean()


@pytest.mark.parametrize("beside", FREE)
@GROUPS
def test_pins_are_released_for_a_turn_with_states_in_vram(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], beside: int
) -> None:
    rig = make_rig(groups=groups, blocks=120, extra={"cpu_gib": 0})
    rig.ask("t1", PROMPT, max_tokens=ANSWER)
    rig.ask("k1", KEEPER, params={"job_id": "keeper"})
    rig.run()
    assert len(rig.pins) == 1
    prompt = PROMPT + text(60, seed=2)
    full = len(prompt) // 16
    taken = take_all_but(rig, full + beside)
    rig.add("t2", prompt)
    rig.run(limit=60)
    assert rig.outputs["t2"] == expected(prompt, 4)
    rig.pool.free_blocks(taken)
    rig.pins.release_all()
    rig.check_clean()


@pytest.mark.parametrize("other", [WINDOW, CHUNK, STATE], ids=lambda group: group.kind.value)
def test_a_pin_does_not_block_a_long_prompt_forever(make_rig: MakeRig, other: GroupSpec) -> None:
    """A long prompt is computed although another job's pin occupies VRAM. vLLM allocates more
    blocks for it than a window or chunk finally keeps, because the tokens computed in one step need
    additional ones. The clock stands still, so that the pin does not expire."""
    rig = make_rig(groups=(FULL, other))
    rig.ask("pinned", text(200, seed=1), params=JOB)
    prompt = text(504, seed=9)
    assert rig.ask("long", prompt) == expected(prompt, 4)
    assert rig.count("watchdog_barks") == 0


SMALL_WINDOW = GroupSpec(KvKind.WINDOW, 16, 32)


@pytest.mark.parametrize("seed", range(60, 76))
def test_restored_turns_do_not_wait_for_each_others_blocks(make_rig: MakeRig, seed: int) -> None:
    """Six agents share a pool that has space for two contexts of a model with five window groups.
    All agents finish their turns."""
    rng = random.Random(seed)
    rig = make_rig(
        groups=(FULL, *[SMALL_WINDOW] * 5),
        blocks=64,
        max_model_len=320,
        max_num_seqs=8,
        max_batched_tokens=64,
        in_job_order=True,
        extra={"cpu_gib": 0.02},
    )
    contexts = [text(rng.randrange(60, 140), seed=100 * seed + agent) for agent in range(6)]
    turns, begins = [0] * 6, [rng.randrange(30) for _ in contexts]
    asked: list[str | None] = [None] * 6
    while min(turns) < 5:
        for agent, name in enumerate(asked):
            if name is None and turns[agent] < 5 and rig.steps >= begins[agent]:
                asked[agent] = name = f"{agent} {turns[agent]}"
                job = {"job_id": f"{agent}", "is_last_step": turns[agent] == 4}
                rig.add(name, contexts[agent], max_tokens=rng.randrange(4, 12), params=job)
            elif name in rig.finished:
                news = text(rng.randrange(4, 40), seed=1000 * seed + 10 * agent + turns[agent])
                contexts[agent] = [*contexts[agent], *rig.outputs[name], *news][:300]
                turns[agent] += 1
                asked[agent], begins[agent] = None, rig.steps + rng.randrange(30)
        rig.step()
        rig.now += 0.05
        if rng.random() < 0.3:
            rig.wait_for_worker()
        assert rig.steps < 3000, "they stand still"
    rig.run()
    rig.half.release_all()
    rig.check_clean()
