"""Random clients while weights change: requests that start after a reset or an update use no
earlier KV in any tier, also after restarts."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.random_scripts import Script, play_each, some_options
from tiered_kv.connectors.vllm.weights import watch
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import CELL, Cells
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.testing.vllm.runner import CheckingRunner

OLD = 255
UPDATES: Sequence[str | Callable[..., object]] = (
    "update_weights",
    "reload_weights",
    "load_from_trainer",
    lambda worker: None,
)


class Generations(CheckingRunner):
    """A model whose KV identifies the weights that computed it. Only requests whose blocks were all
    allocated after the last change of weights are checked."""

    def __init__(self, rig: Rig) -> None:
        pages = rig.groups[0].page_bytes
        super().__init__(rig.groups, rig.memory.numpy().view(np.uint8).reshape(-1, pages))
        self._blocks_of = rig.tables
        self._old: dict[str, Sequence[Any]] = {}
        self.generation = 0

    def begin(self) -> None:
        """Change the weights."""
        self.generation += 1
        self._old = {name: blocks for name, blocks in self._blocks_of.items() if blocks}

    def model_kv(self, request_id: str, cells: Cells) -> Cells:
        weights = self.generation if self.is_checked(request_id) else OLD
        return cells ^ np.uint8(weights)

    def is_checked(self, request_id: str) -> bool:
        old = self._old.get(request_id)
        return old is None or self._blocks_of.get(request_id) is not old


class Workers:
    """Workers whose weights change with every call in ``UPDATES``.

    Args:
        versions: numbers of the next weights. The weights on disk have number 0.
    """

    def __init__(self, rig: Rig, versions: Iterator[int]) -> None:
        self.runner = rig.runner = Generations(rig)
        self._versions = versions
        watch(self, rig.connector)

    def collective_rpc(
        self, method: object, timeout: object = None, args: object = (), kwargs: object = None
    ) -> None:
        """Call a method on the workers, with the signature of vLLM's executor."""
        if method in UPDATES:
            self.runner.begin()
            self.runner.generation = next(self._versions)


class Updates(Script):
    """Clients of an engine whose trainer updates the weights through calls to the workers, and
    sometimes resets the cache."""

    workers: Workers

    def fields(self, job: str) -> dict[str, Any]:
        return {**super().fields(job), "salt": self.rng.choice([None, "policy-1", "policy-2"])}

    def update(self) -> None:
        if self.rng.random() < 0.3:
            self.rig.run()
        for _ in range(self.rng.choice([1, 1, 3])):  # as a start, an update and a finish call
            self.workers.collective_rpc(self.rng.choice(UPDATES))
            if self.rng.random() < 0.3:
                self.rig.step()
        if self.rng.random() < 0.3:
            self.rig.reset_cache(running=False)


class Resets(Script):
    """Clients whose weights change at every reset, whether vLLM carries it out or refuses it."""

    weights: Generations
    refused = 0

    def change(self) -> None:
        if self.rng.random() < 0.3:
            self.rig.run()
        self.refused += not self.reset()
        self.weights.begin()


def play_resets(folder: Path, seed: int) -> Mapping[str, int]:
    rng = random.Random(seed)
    ssd = {"ssd_path": str(folder / "ssd"), "codec": "raw"} if seed % 20 == 0 else {}
    cpu_gib = rng.choice([12, 300]) * 16 * CELL / 2**30
    options = some_options(rng, extra={"cpu_gib": cpu_gib, "admission": "off", **ssd})
    with Rig(folder / "model", options) as rig:
        rig.pages.restores.policy = AlwaysRestore(rng.choice(list(RestoreMode)))
        script = Resets(rig, rng, {"turn": 65, "abort": 7, "fail_copy": 6, "change": 14})
        script.weights = rig.runner = Generations(rig)
        script.play(rng.randrange(20, 50))
        script.finish()
    return {"refused": script.refused}


@pytest.mark.scripts(50, nightly=4_000)
def test_no_request_after_a_reset_uses_earlier_kv(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_resets)


def play_updates(folder: Path, seed: int) -> None:
    """Play engines one after another on the same folders. Each starts with the weights on disk, and
    every update brings other weights, whose KV can be distinguished."""
    rng, versions = random.Random(seed), itertools.cycle(range(1, 255))
    memory, place = folder / "memory", rng.choice(["ssd", "memory", "none"])
    acts = {"turn": 65, "abort": 7, "fail_copy": 5, "wait": 5, "update": 18}
    contexts = None
    for life in range(rng.choice([1, 2, 2, 3])):
        kept: dict[str, dict[str, Any]] = {
            "ssd": {"ssd_path": str(folder / "ssd"), "ssd_gib": 1},
            "memory": {"cpu_path": str(memory), "cpu_keep": True},
            "none": {},
        }
        extra: dict[str, Any] = {
            "cpu_gib": rng.choice([12, 300]) * 16 * CELL / 2**30,
            "admission": "off",
            "codec": "raw",
            **kept[place],
        }
        with Rig(folder / "model", some_options(rng, extra=extra)) as rig:
            rig.pages.restores.policy = AlwaysRestore(rng.choice(list(RestoreMode)))
            script = Updates(rig, rng, acts, contexts)
            script.workers, contexts = Workers(rig, versions), script.contexts
            script.play(rng.randrange(15, 35))
            if place == "memory" and rng.random() < 0.5:  # the files that a killed engine leaves
                memory = folder / f"memory of {life}"
                shutil.copytree(kept[place]["cpu_path"], memory)
            script.finish()


@pytest.mark.scripts(50, nightly=10_000)
def test_random_scripts_with_weights_that_change(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_updates)
