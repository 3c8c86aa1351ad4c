"""Random clients, faults and resets while CPU memory keeps pages compressed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.random_scripts import (
    AnyDecision,
    Script,
    SomeTools,
    choose_restores,
    play_each,
    some_contexts,
    some_options,
)
from tests.runtime.cold import PAGE, WAITS, Held, cold_settings, flip_a_byte, inject_cold
from tests.runtime.cold import held as held
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.groups.kinds import MODELS
from tiered_kv.testing import shrinking
from tiered_kv.testing.checked_kv import expected
from tiered_kv.testing.policies import Always
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig

pytestmark = pytest.mark.usefixtures("small_bundles")
KINDS: Sequence[tuple[GroupSpec, ...]] = [
    *[()] * 4,
    *(groups for name, groups in MODELS.items() if name != "state"),  # states are not compressed
]
CALM = {"turn": 90, "abort": 5, "reset": 1}
FAULTS = {"fail_copy": 4, "fail_store": 4}


class Clients(Script):
    """Clients of an engine whose copies of compressed pages can fail too."""

    steps = (0, 1, 3, 8)

    def __init__(self, rig: Rig, *args: Any) -> None:
        super().__init__(rig, *args)
        self.copies = self.faulty, inject_cold(rig)

    def fail_copy(self) -> None:
        self.faulty = self.rng.choice(self.copies)
        super().fail_copy()

    def reset(self) -> bool:
        return self.rig.reset_cache(running=False)


def befall(rig: Rig, held: Held, rng: random.Random) -> None:
    """Inject a random fault that affects compressed pages."""
    match rng.randrange(6):
        case 0:
            held.let_go()
            flip_a_byte(rig, rng)
        case 1:
            held.failing[rng.choice(["encode", "decode"])] = rng.randrange(1, 4)
        case 2:
            rng.choice([held.encodes, held.decodes]).clear()
        case 3:
            held.let_go()
        case 4:
            held.while_it_waits(rig.worker_half.release_vram)
            rig.worker_half.take_vram()
        case _ if rng.random() < 0.3:
            rig.reset_cache(running=False)


@contextmanager
def troubled(rig: Rig, held: Held, rng: random.Random, chance: float) -> Iterator[None]:
    """Inject faults before some of the engine's steps, until the block ends."""
    right, wait = rig.step, rig.wait_for_worker

    def step() -> Any:
        if rng.random() < chance:
            befall(rig, held, rng)
        return right()

    def wait_for_worker() -> None:
        held.let_go()
        wait()

    rig.step, rig.wait_for_worker = step, wait_for_worker  # type: ignore[method-assign]
    try:
        yield
    finally:
        rig.step, rig.wait_for_worker = right, wait  # type: ignore[method-assign]
        held.let_go()
        held.failing.update(encode=0, decode=0)


@pytest.mark.scripts(150, nightly=10_000)
def test_random_scripts_end_well(tmp_path: Path, held: Held, seeds: range) -> None:
    play_each(tmp_path, seeds, lambda folder, seed: play_script(folder, held, seed))


def play_script(folder: Path, held: Held, seed: int) -> Mapping[str, int]:
    """Play one script. In some cases, a second engine then answers the same prompts, and may find
    the pages that the first one left on SSD."""
    rng = random.Random(seed)
    groups = KINDS[seed % len(KINDS)]
    page = max((group.block_size for group in groups), default=16) * PAGE // 16
    ssd_gib = rng.choice([None, 1, 0.004])
    on_disk = {} if ssd_gib is None else {"ssd_path": str(folder / "ssd"), "ssd_gib": ssd_gib}
    options = some_options(
        rng,
        groups,
        tools=SomeTools(rng) if rng.random() < 0.3 else None,
        extra={
            "pin_fraction": rng.choice([0, 0.5]),
            "admission": rng.choice(["auto", "off", "off"]),
            "admission_max_wait_s": 300,
            "io_threads": 2,
            **cold_settings(rng.choice([32, 48, 80]) * max(1, len(groups)), page, **on_disk),
        },
    )
    with Rig(folder / "model", options) as rig:
        rig.policy = rng.choice([Always(WAITS), Always(WAITS), Always(WAITS), AnyDecision(rng)])
        choose_restores(rig, rng)
        chance = rng.choice([0, 0.003, 0.03, 0.1, 0.3])
        script = Clients(rig, rng, {**CALM, **FAULTS} if chance else CALM, some_contexts(rng, 10))
        with troubled(rig, held, rng, chance):
            script.play(rng.randrange(20, 60))
            rig.run()
        script.finish()
        assert not rig.index.cold.being_compressed
        if not chance:
            assert rig.count("restore_failures") == rig.count("compression_failures") == 0
        pages = {"pages_compressed": rig.count("pages_compressed")}
    assert rig.worker_half.compressor is None
    if on_disk and rng.random() < 0.5:
        with Rig(folder / "model", options) as rig:
            for name in rng.sample(sorted(script.sent), min(len(script.sent), 8)):
                prompt = script.sent[name].prompt
                assert rig.ask(name, prompt) == expected(prompt, 4), name
            rig.half.release_all()
            rig.settle()
            rig.check_clean()
    shrinking.forget_pages()
    return pages
