"""An engine in observe mode behaves like the same engine without a connector: each step has the
same requests, tokens and blocks, and no CPU memory is allocated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.random_scripts import Script, play_each, some_options, some_size, some_tiers
from tests.runtime.groups.kinds import FULL, STATE, WINDOW
from tests.runtime.observe.idle_connector import with_idle_connector
from tiered_kv.policies import registry
from tiered_kv.testing.checked_kv import CELL
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions as SecondOptions
from tiered_kv.testing.engine.rig import SecondRig
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.vllm.rig import Rig

HOSTILE: Sequence[object] = (
    None,
    {"job_id": ["a", "list"], "is_last_step": "perhaps"},
    {"job_id": "j" * 600, "expected_tool_s": -1e300},
    {"job_id": 7, "tool_name": 3, "expected_tool_s": float("nan")},
    {"job_id": "\ud800", "tool_command": "x" * 10_000},
    {"job_id": "", "is_last_step": 2**60},
)
"""Hints that are invalid or implausible."""


def look(rig: EngineRig, scheduled: Any) -> object:
    """Return everything that an engine has decided about its blocks and requests."""
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


class Twins:
    """An engine without a connector and one in observe mode, driven as one rig. They are compared
    after every step."""

    half = None

    def __init__(self, stock: EngineRig, observed: EngineRig) -> None:
        self.rigs = stock, observed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rigs[0], name)

    @property
    def now(self) -> float:
        return self.rigs[0].now

    @now.setter
    def now(self, now: float) -> None:
        for rig in self.rigs:
            rig.now = now

    def add(self, *args: Any, **fields: Any) -> None:
        for rig in self.rigs:
            rig.add(*args, **fields)

    def abort(self, request_id: str, *, late: bool) -> None:
        for rig in self.rigs:
            rig.abort(request_id, late=late)

    def reset_cache(self, *, running: bool) -> None:
        for rig in self.rigs:
            with suppress(RuntimeError):  # vLLM raises this while steps are in flight
                rig.reset_cache(running=running)

    def step(self) -> None:
        seen = [look(rig, rig.step()) for rig in self.rigs]
        assert seen[0] == seen[1], f"step {self.steps}"

    def run(self) -> None:
        while self.prompts.keys() > self.finished.keys():
            self.step()
            self.now += 0.05
            assert self.steps < 2000, "still busy"

    def check_clean(self) -> None:
        """Assert that the engines gave the same answers, and that the observed one has no CPU
        memory, no store and no block reference."""
        stock, rig = self.rigs
        assert stock.outputs == rig.outputs
        assert list(stock.finished) == list(rig.finished)
        worker = rig.worker_half
        assert worker.pool is worker.backend is worker.compressor is None
        assert not worker.stores
        assert rig.free_blocks == stock.free_blocks
        assert rig.count("hook_errors") == 0
        rig.index.check_integrity()


class Clients(Script):
    passes = (0.01, 0.1, 0.5, 3)

    def fields(self, job: str) -> dict[str, Any]:
        hints = {"job_id": job, "is_last_step": self.rng.random() < 0.2}
        return {"params": self.rng.choice([hints, hints, hints, *HOSTILE])}


def compare(stock: EngineRig, observed: EngineRig, rng: random.Random, folder: Path) -> None:
    """Run one random script on both engines."""
    if rng.random() < 0.7:
        observed.policy = registry.policy(rng.choice(sorted(registry.POLICIES)))
    acts = {"turn": 75, "abort": 15, "reset": 10}
    script = Clients(cast("Any", Twins(stock, observed)), rng, acts)
    script.play(rng.randrange(15, 40))
    script.finish()
    assert not (folder / "ssd").exists()


def settings(rng: random.Random, page_bytes: int, folder: Path) -> dict[str, Any]:
    return {
        "mode": "observe",
        **some_tiers(rng, folder, page_bytes, [0, 30, 300]),
        "pin_fraction": rng.choice([0, 0.5, 1]),
        "admission": rng.choice(["auto", "off"]),
    }


@pytest.mark.scripts(25, nightly=2_000)
def test_the_second_engine_behaves_as_without_connector(tmp_path: Path, seeds: range) -> None:
    def play(folder: Path, seed: int) -> None:
        rng = random.Random(seed)
        size, extra = some_size(rng), settings(rng, 16 * CELL * LAYERS, folder)
        with (
            SecondRig(SecondOptions(**size, extra=None)) as stock,
            SecondRig(SecondOptions(**size, extra=extra)) as observed,
        ):
            compare(stock, observed, rng, folder)

    play_each(tmp_path, seeds, play)


GROUPS = ((), (), (FULL, WINDOW), (FULL, STATE))


@pytest.mark.scripts(25, nightly=2_000)
def test_vllm_schedules_as_without_connector(tmp_path: Path, seeds: range) -> None:
    def play(folder: Path, seed: int) -> None:
        rng = random.Random(seed)
        options = some_options(rng, rng.choice(GROUPS), extra=settings(rng, 16 * CELL, folder))
        # With several groups or async scheduling, vLLM frees blocks later if there is any
        # connector.
        by_any = bool(options.groups) or options.ahead
        company = with_idle_connector if by_any else options.configure
        stock = replace(options, extra=None, in_job_order=False, configure=company)
        with Rig(folder / "stock", stock) as alone, Rig(folder / "observed", options) as observed:
            compare(alone, observed, rng, folder)

    play_each(tmp_path, seeds, play)
