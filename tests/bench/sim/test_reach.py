"""The reachable bound: vLLM's real scheduler on a pool that never evicts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig, make_rig
from tiered_kv.bench.sim.engine.driver import simulate
from tiered_kv.bench.sim.engine.machines import Tiers
from tiered_kv.bench.sim.servers.schedulers import REACH_BLOCKS, ReachScheduler
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.study.catalogue import TIGHT
from tiered_kv.bench.sim.workloads.generate import generate
from tiered_kv.testing.vllm.rig import Rig

__all__ = ["make_rig"]

SMALL = 24
"""Number of 16-token blocks that requests may occupy concurrently, including vLLM's null block."""
LARGE = 2_000


def reach_rig(make_rig: MakeRig, *, blocks: int = LARGE, small: int = SMALL, **given: Any) -> Rig:
    def configure(config: Any) -> None:
        config.scheduler_config.scheduler_cls = ReachScheduler
        config.additional_config = {REACH_BLOCKS: small}

    return make_rig(blocks=blocks, max_model_len=256, extra=None, configure=configure, **given)


def held(rig: Rig) -> int:
    """Return the number of blocks that requests occupy. A shared block counts once."""
    return len({one.block_id for table in rig.tables.values() for one in table} - {0})


def context(rig: Rig, request_id: str) -> list[int]:
    return [*rig.prompts[request_id], *rig.outputs[request_id]]


def play(rig: Rig, seed: int, count: int = 60) -> tuple[list[Any], int]:
    """Add random requests and run them all.

    Some requests continue the context of a finished one, and all start with the same 32 tokens.
    Returns what each step scheduled, and the highest number of blocks occupied at one time.
    """
    rng, steps, most, left = random.Random(seed), list[Any](), 0, count
    while left or rig.scheduler.has_requests():
        if left and rng.random() < 0.4:
            left -= 1
            before = [one for one in rig.finished if len(context(rig, one)) < 180]
            prompt = [7] * 32 + [rng.randrange(1000) for _ in range(rng.randrange(1, 120))]
            if before and rng.random() < 0.5:
                news = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
                prompt = [*context(rig, rng.choice(before)), *news]
            rig.add(f"r{left}", prompt, rng.randrange(1, 50))
        output = rig.step()
        most = max(most, held(rig))
        steps.append((output.num_scheduled_tokens, output.preempted_req_ids, rig.running()))
        assert len(steps) < 5_000, "requests never end"
    return steps, most


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_running_contexts_never_exceed_the_bound_and_all_end(
    make_rig: MakeRig, seed: int, ahead: bool
) -> None:
    rig = reach_rig(make_rig, ahead=ahead)
    _, most = play(rig, seed)
    assert SMALL // 2 < most < SMALL
    assert len(rig.finished) == 60
    assert sum(map(rig.preemptions, rig.finished)), "the bound was felt"
    assert rig.free_blocks == rig.free_at_start == SMALL - 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(2))
def test_a_bound_as_large_as_the_pool_is_stock(make_rig: MakeRig, seed: int, policy: str) -> None:
    stock = make_rig(blocks=SMALL, max_model_len=256, extra=None, policy=policy)
    reach = reach_rig(make_rig, blocks=SMALL, policy=policy)
    assert play(reach, seed) == play(stock, seed)
    assert reach.outputs == stock.outputs


def test_a_preempted_context_is_found_again_except_its_last_block(make_rig: MakeRig) -> None:
    """Three requests of 7 blocks each fit into 23 blocks until they grow and are preempted. A
    resumed request computes at most one block of 16 tokens again."""
    rig = reach_rig(make_rig)
    for number in range(3):
        rig.add(f"r{number}", [number] * 110, 100)
    tokens: dict[str, int] = {}
    again: dict[str, int] = {}
    while rig.scheduler.has_requests():
        output = rig.step()
        for name in output.preempted_req_ids or ():
            tokens[name] = rig.scheduler.requests[name].num_tokens
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        again |= {name: output.num_scheduled_tokens[name] for name in resumed}
    assert tokens
    assert again.keys() == tokens.keys()
    assert max(again.values()) <= 16 < min(tokens.values())


def test_a_context_evicted_from_a_small_pool_is_still_cached(make_rig: MakeRig) -> None:
    """A job's second turn arrives after other requests that together fill the small pool three
    times. It computes at most one block. On stock vLLM with the small pool, it computes all 169
    tokens."""

    def computed(rig: Rig) -> int:
        rig.add("first", range(160), 8)
        rig.run()
        for number in range(6):
            rig.add(f"other{number}", [900 + number] * 180, 4)
            rig.run()
        rig.add("second", [*context(rig, "first"), 5], 1)
        return int(rig.step().num_scheduled_tokens["second"])

    assert computed(reach_rig(make_rig)) <= 16
    assert computed(make_rig(blocks=SMALL, max_model_len=256, extra=None)) == 169


def test_a_shared_prefix_counts_once(make_rig: MakeRig) -> None:
    prompt = [3] * 240
    rig = reach_rig(make_rig)
    rig.add("a", prompt, 8)
    rig.step()
    rig.add("b", prompt, 8)
    rig.step()
    assert rig.running() == ["a", "b"], "two contexts of 16 blocks, of which they share 14"
    rig.run()


def test_the_cache_can_be_reset_and_usage_is_relative_to_the_small_pool(make_rig: MakeRig) -> None:
    rig = reach_rig(make_rig)
    rig.add("a", [3] * 184, 8)
    rig.step()
    assert rig.scheduler.get_kv_cache_usage() == pytest.approx(12 / (SMALL - 1))
    rig.run()
    assert rig.scheduler.get_kv_cache_usage() == 0.0
    assert rig.reset_cache()
    rig.add("b", [3] * 184, 1)
    assert rig.step().num_scheduled_tokens == {"b": 184}


@pytest.mark.parametrize("small", [None, "24", 1, LARGE + 1])
def test_an_impossible_bound_is_refused(make_rig: MakeRig, small: Any) -> None:
    with pytest.raises(ValueError, match=f'"reach_blocks" in .* must be 2 to {LARGE}'):
        reach_rig(make_rig, small=small)


# -- simulation ----------------------------------------------------------------------------


def means(names: Sequence[str], pool_tokens: int) -> dict[str, float]:
    place = replace(TIGHT.machine(), pool_tokens=pool_tokens)
    jobs = generate("original", 20, 0).at(4.0, 0)
    return {
        name: simulate(place, server(name), jobs, Tiers()).summary()["mean_s"] for name in names
    }


def test_the_bound_lies_between_stock_and_unlimited_vram() -> None:
    found = means(("fcfs", "reach", "job-reach", "infinite"), 16_000)
    assert found["infinite"] < 0.9 * found["job-reach"] < 0.9 * found["reach"]
    assert found["reach"] < 0.9 * found["fcfs"]


def test_if_everything_fits_the_bound_equals_unlimited_vram() -> None:
    found = means(("reach", "infinite"), 200_000)
    assert found["reach"] == found["infinite"]
