"""Random clients of vLLM's scheduler with several KV groups, without the connector."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.random_scripts import LONGEST, Script, some_options
from tests.testing.vllm.models import MODELS
from tiered_kv.page_group import KvKind
from tiered_kv.testing.vllm.rig import Rig, RigOptions


def random_options(rng: random.Random, models: Iterable[str] = MODELS) -> RigOptions:
    """Return the options of an engine with one of the models, and space for one to three of the
    longest requests."""
    name = rng.choice(sorted(models))
    groups = MODELS[name]
    one = sum(LONGEST // group.block_size + 2 for group in groups)
    match_unit = 4 if name == "full-state" and rng.random() < 0.5 else None
    sparse = {group.kind for group in groups} & {KvKind.WINDOW, KvKind.STATE}
    options: dict[str, Any] = {
        "extra": None,
        "in_job_order": False,
        "blocks": rng.choice([one, one * 3 // 2, 3 * one]),
        "policy": rng.choice(["fcfs", "priority"]),
        "retention": rng.choice([0, None, 64]) if sparse else 0,
        "match_unit": match_unit,
    }
    if match_unit:  # see test_hits_within_a_block_that_is_being_computed
        options["max_num_seqs"] = 1
    return some_options(rng, groups, **options)


class VllmAlone(Script):
    passes = (0,)

    def fields(self, job: str) -> dict[str, Any]:
        return {"priority": self.rng.randrange(3)}


def play_script(
    folder: Path,
    seed: int,
    models: Iterable[str] = MODELS,
    prepare: Callable[[Rig, random.Random], object] = lambda rig, rng: None,
) -> None:
    """Play one script on an engine, after ``prepare`` has been called with it."""
    rng = random.Random(seed)
    with Rig(folder / "model", random_options(rng, models)) as rig:
        prepare(rig, rng)
        script = VllmAlone(rig, rng, {"turn": 80, "abort": 13, "reset": 7})
        script.play(rng.randrange(10, 40))
        script.finish()
