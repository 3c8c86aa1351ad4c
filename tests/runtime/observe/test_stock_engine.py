"""An engine that is observed serves as the same engine without connector: step by step the same
requests, tokens and blocks, and nothing is made for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.groups.kinds import FULL, STATE, WINDOW
from tests.runtime.observe.idle_connector import with_idle_connector
from tiered_kv.policies import registry
from tiered_kv.testing.checked_kv import CELL, VOCABULARY, expected, text
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions as SecondOptions
from tiered_kv.testing.engine.rig import SecondRig
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.vllm.rig import Rig, RigOptions

HOSTILE: Sequence[object] = (
    None,
    {"job_id": ["a", "list"], "is_last_step": "perhaps"},
    {"job_id": "j" * 600, "expected_tool_s": -1e300},
    {"job_id": 7, "tool_name": 3, "expected_tool_s": float("nan")},
    {"job_id": "\ud800", "tool_command": "x" * 10_000},
    {"job_id": "", "is_last_step": 2**60},
)
"""Hints that make no sense, or hardly any."""

Twin = tuple[EngineRig, EngineRig]


def look(rig: EngineRig, scheduled: Any) -> object:
    """All that an engine decides of its blocks and its requests."""
    if isinstance(rig, SecondRig):
        pool, engine = rig.engine.pool, rig.engine
        tables = {name: [block.block_id for block in table] for name, table in pool.tables.items()}
        waiting = [request.request_id for request in engine.waiting]
        return scheduled, list(pool._free), tables, rig.running(), waiting  # noqa: SLF001
    assert isinstance(rig, Rig)
    free = [block.block_id for block in rig.pool.free_block_queue.get_all_free_blocks()]
    tables = {name: rig.table(name) for name in rig.tables}
    hashes = [block.block_hash for block in rig.pool.blocks]
    waiting = [request.request_id for request in rig.scheduler.waiting]
    return scheduled.num_scheduled_tokens, free, tables, hashes, rig.running(), waiting


def step(twins: Twin) -> None:
    """Make a step of both, and compare."""
    seen = [look(rig, rig.step()) for rig in twins]
    assert seen[0] == seen[1], f"step {twins[0].steps}"


def play(twins: Twin, rng: random.Random, resets: Callable[[EngineRig], object]) -> None:
    """Run one script on both."""
    contexts = [text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for _ in range(4)]
    for i in range(rng.randrange(15, 40)):
        for _ in range(rng.randrange(0, 6)):
            step(twins)
        passes, what, job = rng.choice([0.01, 0.1, 0.5, 3]), rng.random(), rng.randrange(4)
        cut, tokens = rng.randrange(1, len(contexts[job]) + 1), rng.randrange(1, 40)
        stops = rng.choice([(), tuple(range(0, VOCABULARY, 12))])
        named = {"job_id": f"job{job}", "is_last_step": rng.random() < 0.2}
        params = rng.choice([named, named, named, *HOSTILE])
        known = list(twins[0].prompts)
        gone = rng.choice(known) if known else None
        for rig in twins:
            rig.now += passes
            if what < 0.75:
                prompt = contexts[job][:cut]
                rig.add(f"r{i}", prompt, max_tokens=tokens, params=params, stop_ids=stops)
            elif what < 0.9 and gone is not None and gone not in rig.finished:
                rig.abort(gone)
            elif what >= 0.9:
                resets(rig)
        if what < 0.75:
            longer = contexts[job] + expected(contexts[job], 3) + text(20, seed=1000 + i)
            contexts[job] = longer[:190]
    for _ in range(2000):
        if set(twins[0].prompts) <= set(twins[0].finished):
            break
        step(twins)
        for rig in twins:
            rig.now += 0.05
    assert twins[0].outputs == twins[1].outputs
    assert list(twins[0].finished) == list(twins[1].finished)


def settings(rng: random.Random, page_bytes: int, folder: Path) -> dict[str, Any]:
    slots = rng.choice([0, 30, 300])
    ssd = {"ssd_path": str(folder / "ssd"), "ssd_gib": rng.choice([1, 0.004])}
    return {
        "mode": "observe",
        "cpu_gib": slots * page_bytes / 2**30,
        "pin_fraction": rng.choice([0, 0.5, 1]),
        "admission": rng.choice(["auto", "off"]),
        **(rng.choice([{}, ssd]) if slots else {}),
    }


def check_nothing_was_made(twins: Twin, folder: Path) -> None:
    """No memory, no file, no thread of a tier, no reference on a block, no order to a worker."""
    stock, rig = twins
    worker = rig.worker_half
    assert worker.pool is None
    assert worker.backend is None
    assert worker.compressor is None
    assert not worker.stores
    assert not (folder / "ssd").exists()
    assert rig.free_blocks == stock.free_blocks
    assert rig.count("hook_errors") == 0
    rig.index.check_integrity()


def choose_policy(rig: EngineRig, rng: random.Random) -> None:
    if rng.random() < 0.7:
        rig.policy = registry.policy(rng.choice(sorted(registry.POLICIES)))


@pytest.mark.parametrize("seed", range(30))
def test_the_second_engine_serves_as_by_itself(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    size: dict[str, Any] = {
        "blocks": rng.choice([20, 30, 60]),
        "max_batched_tokens": rng.choice([64, 256]),
    }
    extra = settings(rng, 16 * CELL * LAYERS, tmp_path)
    with (
        SecondRig(SecondOptions(**size, extra=None)) as stock,
        SecondRig(SecondOptions(**size, extra=extra)) as observed,
    ):
        choose_policy(observed, rng)
        play((stock, observed), rng, lambda rig: rig.reset_cache())
        check_nothing_was_made((stock, observed), tmp_path)


GROUPS = ((), (), (FULL, WINDOW), (FULL, STATE))


@pytest.mark.parametrize("seed", range(24))
def test_vllm_schedules_as_without_connector(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice(GROUPS)
    size: dict[str, Any] = {
        "blocks": rng.choice([24, 40, 60]) * max(1, len(groups)),
        "max_model_len": 256,
        "max_batched_tokens": rng.choice([64, 256]),
        "max_num_seqs": rng.choice([2, 8]),
        "ahead": rng.random() < 0.5,
        "groups": groups,
        "retention": rng.choice([0, None]) if groups else 0,
    }
    by_any = bool(groups) or size["ahead"]  # then vLLM frees blocks later for any connector
    company = with_idle_connector if by_any else lambda _: None
    extra = settings(rng, 16 * CELL, tmp_path)
    with (
        Rig(tmp_path / "stock", RigOptions(**size, extra=None, configure=company)) as stock,
        Rig(
            tmp_path / "observed",
            RigOptions(**size, extra=extra, in_job_order=rng.random() < 0.5),
        ) as observed,
    ):
        choose_policy(observed, rng)
        again = rng.random() < 0.5

        def reset(rig: EngineRig) -> None:
            assert isinstance(rig, Rig)
            with suppress(RuntimeError):  # vLLM: steps are under way
                rig.scheduler.reset_prefix_cache(reset_running_requests=again)

        play((stock, observed), rng, reset)
        check_nothing_was_made((stock, observed), tmp_path)
