"""Engines in turn, of which each finds what those before it left: in one folder, or in a place that
they share and that must be asked. Whatever happened to either, outputs are right, and no engine
sees KV of a generation that a reset ended."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.random_scripts import BATCH, play_each
from tests.runtime.pages import troubled_place
from tests.runtime.test_random_scripts import SomeGoToSsd
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore, FasterRestore
from tiered_kv.remote import breaker
from tiered_kv.testing.checked_kv import CELL, Cells, expected, text
from tiered_kv.testing.engine.model import LAYERS, PagedModel, Work
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.memory_file.memory_format import MAGIC

MODULE = troubled_place.__name__
Trouble = Callable[[SecondRig], None]


class Weights(PagedModel):
    """The model, with weights that a reset changes: KV of others is wrong.

    Attributes:
        generation: tells them apart; those on disk are the first.
    """

    generation = 0

    def _read(self, work: Work, tokens: int) -> Cells:
        return super()._read(work, tokens) - np.uint8(self.generation)

    def _write(self, work: Work, cells: Cells) -> None:
        super()._write(work, cells + np.uint8(self.generation))


@contextmanager
def life(rng: random.Random, **extra: object) -> Iterator[SecondRig]:
    """An engine of some size."""
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
        rig.policy = SomeGoToSsd(rng)
        modes = [FasterRestore(), *map(AlwaysRestore, RestoreMode)]
        rig.pages.restores.policy = rng.choice(modes)
        yield rig


def live(
    rig: SecondRig, rng: random.Random, contexts: list[list[int]], name: str, trouble: Trouble
) -> None:
    """Send requests of jobs that earlier engines served as well, and go through trouble."""
    faulty = rig.inject(FaultyTransfer)
    model: Any = rig.engine.model
    for number in range(rng.randrange(5, 25)):
        for _ in range(rng.randrange(8)):
            rig.step()
        if rng.random() < 0.3:
            rig.wait_for_worker()
        rig.now += rng.choice([0, 0.1, 3, 20])
        what, job = rng.random(), rng.randrange(len(contexts))
        if what < 0.65:
            context = contexts[job][
                : rng.randrange(len(contexts[job]) // 2, len(contexts[job]) + 1)
            ]
            params = {"job_id": f"job{job}", "is_last_step": rng.random() < 0.1}
            tokens = rng.randrange(1, 9)
            rig.add(f"{name}-{number}", context, tokens, params=rng.choice([params, None]))
            if len(contexts[job]) < 200:
                contexts[job] = contexts[job] + expected(contexts[job], 3) + text(20, number)
        elif what < 0.7 and rig.requests:
            rig.abort(rng.choice(list(rig.requests)))
        elif what < 0.75:
            faulty.fail_next(rng.choice(list(Direction)), {rng.randrange(3)})
        elif what < 0.78:
            rig.reset_cache()
            model.generation = rng.randrange(1, 256)
        else:
            trouble(rig)


def check(rig: SecondRig) -> None:
    """Run to the end: all answers are right, and nothing is left behind."""
    rig.run()
    for name, request in rig.requests.items():
        answer = expected(rig.prompts[name], request.max_tokens)
        if rig.finished[name].name != "CANCELLED":
            assert rig.outputs[name] == answer, name
    rig.now += 5 * 3600  # no gap is waited for that long
    for number in range(2):
        rig.wait_for_worker()
        rig.ask(f"last{number}", text(1, seed=1))
    rig.half.release_all()
    rig.wait_for_worker()
    rig.check_clean()


def some_contexts(rng: random.Random) -> list[list[int]]:
    return [text(rng.randrange(20, 160), seed=rng.randrange(10**6)) for _ in range(4)]


# -- a tier that must be asked -------------------------------------------------------------


def play_asked(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    place, contexts = troubled_place.renew(), some_contexts(rng)
    place.retry_s = rng.choice([None, None, 0.001])
    for number in range(rng.randrange(2, 5)):
        tier = rng.choice(["OwnTier", "SharedTier"])
        with life(rng, tiers=f"{MODULE}:{tier}") as rig:
            live(rig, rng, contexts, f"{number}", lambda _: place.befall(rng))
            place.recover()
            check(rig)


@pytest.mark.scripts(75, nightly=10_000)
def test_engines_over_an_asked_tier_end_well(
    tmp_path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "PATIENCE_S", 0.005)
    hits = 0

    def play(folder: Path, seed: int) -> None:
        nonlocal hits
        play_asked(folder, seed)
        hits += troubled_place.PLACE.hits

    play_each(tmp_path, seeds, play)
    assert hits or len(seeds) < BATCH, "the scripts reach what they are about"


# -- one folder ------------------------------------------------------------------------------


def damage(folder: Path, rng: random.Random) -> None:
    """Change bytes of files, cut them short, or delete them. The first bytes of a memory file stay:
    a file without them is somebody else's, so that an engine refuses to start, and says so."""
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
    """Copy what a killed engine would leave; files that go meanwhile are gone."""
    with suppress(shutil.Error):
        shutil.copytree(folder, to)


def play_folder(folder: Path, seed: int, found: Callable[[SecondRig], None]) -> None:
    rng, contexts = random.Random(seed), some_contexts(random.Random(-seed))
    home = folder / "0"
    home.mkdir(parents=True)
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
            live(rig, rng, contexts, f"{number}", lambda _: None)
            how = rng.random()
            if how < 0.4:  # killed: nothing more of it reaches its files
                copy(home, following)
                check(rig)
            elif how < 0.7:
                check(rig)
            found(rig)  # else it is closed in the middle of its work
        if following.exists():
            shutil.rmtree(home)
            home = following
        if rng.random() < 0.4:
            damage(home, rng)


@pytest.mark.scripts(50, nightly=10_000)
def test_engines_in_turn_on_one_folder_end_well(tmp_path: Path, seeds: range) -> None:
    reused = 0

    def found(rig: SecondRig) -> None:
        nonlocal reused
        reused += rig.count("prompt_tokens_cpu") + rig.count("prompt_tokens_ssd")

    play_each(tmp_path, seeds, lambda folder, seed: play_folder(folder, seed, found))
    assert reused or len(seeds) < BATCH, "the scripts reach what they are about"
