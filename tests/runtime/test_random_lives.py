"""Sequences of engines, each of which finds the pages of its predecessors in a folder, or in a
shared store that must be queried. Whatever happens to the folder or store, outputs are right, and
no engine finds KV from before a reset."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.random_scripts import AnyDecision, Script, choose_restores, play_each, some_contexts
from tests.runtime.pages import troubled_place
from tiered_kv.remote import breaker
from tiered_kv.testing.checked_kv import CELL, Cells
from tiered_kv.testing.engine.model import LAYERS, PagedModel, Work
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.transfer.memory_file.memory_format import MAGIC

MODULE = troubled_place.__name__
ACTS = {"turn": 65, "abort": 5, "fail_copy": 5, "reset": 3, "trouble": 22}


class Weights(PagedModel):
    """The model, with weights that change at a reset. KV of other weights is wrong.

    Attributes:
        generation: identifies the weights. 0 stands for the weights on disk.
    """

    generation = 0

    def _read(self, work: Work, tokens: int) -> Cells:
        return super()._read(work, tokens) - np.uint8(self.generation)

    def _write(self, work: Work, cells: Cells) -> None:
        super()._write(work, cells + np.uint8(self.generation))


@contextmanager
def life(rng: random.Random, **extra: object) -> Iterator[SecondRig]:
    """Create an engine of random size."""
    size = rng.choice([16, 16, 16, 8])
    options = RigOptions(
        blocks=rng.choice([40, 80]),
        block_size=size,
        max_batched_tokens=rng.choice([64, 256]),
        extra={
            "cpu_gib": (rng.choice([12, 30, 200]) * 16 * CELL * LAYERS + 1) / 2**30,
            "codec": rng.choice(["raw", "zstd"]),
            "admission": "off",
            **extra,
        },
    )
    with SecondRig(options) as rig:
        model = Weights(options.blocks, size, "cpu")
        model.cache, rig.engine.model = rig.engine.model.cache, model
        rig.policy = AnyDecision(rng)
        choose_restores(rig, rng)
        yield rig


class Life(Script):
    """Clients of one engine, and faults in the folder or store that it shares with others."""

    steps = range(8)
    passes = (0, 0.1, 3, 20)

    def step(self) -> None:
        self.rig.step()
        if self.rng.random() < 0.1:
            self.rig.wait_for_worker()

    def reset(self) -> bool:
        rig: Any = self.rig
        rig.engine.model.generation = self.rng.randrange(1, 256)
        return super().reset()

    def trouble(self) -> None:
        """Inject a fault into the shared folder or store. Does nothing unless a test replaces
        it."""

    def live(self) -> None:
        self.play(self.rng.randrange(5, 25))


# -- a tier that must be queried -----------------------------------------------------------


def play_asked(folder: Path, seed: int) -> Mapping[str, int]:
    rng = random.Random(seed)
    place, contexts = troubled_place.renew(), some_contexts(rng)
    place.retry_s = rng.choice([None, None, 0.001])
    for _ in range(rng.randrange(2, 5)):
        tier = rng.choice(["OwnTier", "SharedTier"])
        with life(rng, tiers=f"{MODULE}:{tier}") as rig:
            script = Life(rig, rng, ACTS, contexts)
            script.trouble = partial(place.befall, rng)  # type: ignore[method-assign]
            script.live()
            place.recover()
            script.finish()
    return {"hits": place.hits}


@pytest.mark.scripts(75, nightly=10_000)
def test_engines_over_an_asked_tier_end_well(
    tmp_path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "PATIENCE_S", 0.005)
    play_each(tmp_path, seeds, play_asked)


# -- one folder ------------------------------------------------------------------------------


def damage(folder: Path, rng: random.Random) -> None:
    """Change bytes of files, truncate them, or delete them. The magic of a memory file stays,
    because an engine refuses to start with a foreign file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in rng.sample(files, min(len(files), rng.choice([1, 1, 3]))):
        first = len(MAGIC) if path.suffix == ".slots" else 0
        size, how = path.stat().st_size - first, rng.random()
        if how < 0.1:
            path.unlink()
        elif how < 0.3 and size > 0:
            with path.open("r+b") as file:
                file.truncate(first + rng.randrange(size))
        elif size > 0:
            with path.open("r+b") as file:
                for _ in range(rng.choice([1, 20])):
                    near = rng.randrange(min(size, 4096))
                    at = first + rng.choice([rng.randrange(size), near])
                    file.seek(at)
                    old = file.read(1)
                    file.seek(at)
                    file.write(bytes([old[0] ^ 1 << rng.randrange(8)]))


def copy(folder: Path, to: Path) -> None:
    """Copy the files that a killed engine would leave. Files that disappear during the copy are
    skipped."""
    with suppress(shutil.Error):
        shutil.copytree(folder, to)


def play_folder(folder: Path, seed: int) -> Mapping[str, int]:
    rng, contexts = random.Random(seed), some_contexts(random.Random(-seed))
    found = Counter[str]()
    home = folder / "0"
    home.mkdir()
    memory = rng.random() < 0.4
    for number in range(rng.randrange(2, 6)):
        on_disk: dict[str, Any] = {"ssd_path": f"{home}/ssd", "ssd_gib": rng.choice([0.003, 0.01])}
        kept: dict[str, Any] = {"cpu_path": f"{home}/memory", "cpu_keep": rng.random() < 0.7}
        settings = {
            **(on_disk if not memory or rng.random() < 0.6 else {}),
            **(kept if memory else {}),
        }
        following = folder / f"{number + 1}"
        with life(rng, **settings) as rig:
            script = Life(rig, rng, ACTS, contexts)
            script.live()
            how = rng.random()
            if how < 0.4:  # as if the engine were killed: no later write reaches the copy
                copy(home, following)
            if how < 0.7:  # otherwise the engine is closed with work in progress
                script.finish()
            for tier in ("cpu", "ssd"):
                found[tier] += rig.count(f"prompt_tokens_{tier}")
        if following.exists():
            shutil.rmtree(home)
            home = following
        if rng.random() < 0.4:
            damage(home, rng)
    return found


@pytest.mark.scripts(50, nightly=10_000)
def test_engines_in_turn_on_one_folder_end_well(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_folder)
