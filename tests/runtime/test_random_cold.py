"""Random clients, faults and resets while CPU memory keeps pages compressed: outputs stay right,
nothing hangs, and every block and slot is accounted for at the end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.random_scripts import BATCH, play_each
from tests.runtime.cold import PAGE, Held, Waits, cold_settings, flip_a_byte, inject_cold, settle
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.groups.kinds import MODELS
from tests.runtime.test_random_scripts import LONGEST, SomeGoToSsd, SomeTools, break_once
from tiered_kv.codecs.base import Bytes, CodecError, EncodedPage
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore, FasterRestore
from tiered_kv.testing import shrinking
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.shrinking import Shrinking
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig, RigOptions
from tiered_kv.transfer.base import Direction

pytestmark = pytest.mark.usefixtures("small_bundles")
KINDS: Sequence[tuple[GroupSpec, ...]] = [
    *[()] * 4,
    *(groups for name, groups in MODELS.items() if name != "state"),  # those are not compressed
]


class Trouble(Held):
    """Trouble with compressed pages, by lot.

    Attributes:
        failing: calls of the codec that are to fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failing = {"encode": 0, "decode": 0}

    def end(self) -> None:
        """Have all go well again."""
        self.let_go()
        self.failing.update(encode=0, decode=0)

    def befall(self, rig: Rig, rng: random.Random) -> None:
        """Trouble between two steps."""
        match rng.randrange(6):
            case 0:
                self.let_go()
                flip_a_byte(rig, rng)
            case 1:
                self.failing[rng.choice(["encode", "decode"])] = rng.randrange(1, 4)
            case 2:
                rng.choice([self.encodes, self.decodes]).clear()
            case 3:
                self.let_go()
            case 4:
                self.while_it_waits(rig.worker_half.release_vram)
                rig.worker_half.take_vram()
            case _ if rng.random() < 0.3:
                rig.scheduler.reset_prefix_cache()

    def strike(self, name: str) -> bool:
        """True if this call of the codec is to fail."""
        strikes = self.failing[name] > 0
        self.failing[name] -= strikes
        return strikes


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trouble]:
    """A codec that is slow and fails as is asked."""
    made, encode, decode = Trouble(), Shrinking.encode, Shrinking.decode

    def encoded(self: Shrinking, page: Bytes) -> EncodedPage:
        assert made.encodes.wait(300)
        if made.strike("encode"):
            raise MemoryError("injected")
        return encode(self, page)

    def decoded(self: Shrinking, page: EncodedPage, out: Bytes) -> None:
        assert made.decodes.wait(300)
        if made.strike("decode"):
            out[:] = 255
            raise CodecError("injected")
        decode(self, page, out)

    monkeypatch.setattr(Shrinking, "encode", encoded)
    monkeypatch.setattr(Shrinking, "decode", decoded)
    yield made
    made.let_go()
    shrinking.forget_pages()


@pytest.mark.scripts(150, nightly=10_000)
def test_random_scripts_end_well(tmp_path: Path, trouble: Trouble, seeds: range) -> None:
    pages = 0

    def play(folder: Path, seed: int) -> None:
        nonlocal pages
        pages += play_script(folder, trouble, seed)
        shrinking.forget_pages()

    play_each(tmp_path, seeds, play)
    assert pages > 0 or len(seeds) < BATCH, "nothing was compressed"


def play_script(folder: Path, trouble: Trouble, seed: int) -> int:
    """Play one script, and have a second engine find what it left on SSD."""
    rng = random.Random(seed)
    groups = KINDS[seed % len(KINDS)]
    options = some_options(folder, rng, groups)
    with Rig(folder / "model", options) as rig:
        rig.policy = rng.choice([Waits(), Waits(), Waits(), SomeGoToSsd(rng)])
        rig.pages.restores.policy = rng.choice(
            [FasterRestore(), *(AlwaysRestore(mode) for mode in RestoreMode)]
        )
        chance = rng.choice([0, 0.003, 0.03, 0.1, 0.3])
        with troubled(rig, trouble, rng, chance):
            asked = play(rig, rng, calm=not chance)
        rig.now += 5 * 3600  # no gap is waited for that long
        rig.half.release_all()
        settle(rig)
        rig.check_clean()
        assert not rig.index.cold.being_compressed
        if not chance:
            assert rig.count("restore_failures") == rig.count("compression_failures") == 0
        pages: int = rig.count("pages_compressed")
    assert rig.worker_half.compressor is None
    if "ssd_path" in (options.extra or {}) and rng.random() < 0.5:
        with Rig(folder / "model", options) as rig:
            for name in rng.sample(sorted(asked), min(len(asked), 8)):
                prompt, _ = asked[name]
                assert rig.ask(name, prompt) == expected(prompt, 4), name
            settle(rig)
            rig.half.release_all()
            rig.check_clean()
    return pages


def play(rig: Rig, rng: random.Random, *, calm: bool) -> dict[str, tuple[list[int], int]]:
    """Run turns of several jobs, each of which goes on from what it asked before; gives prompts and
    lengths of answers. Calm: without faults of copies and stores."""
    copies = [rig.inject(FaultyTransfer), inject_cold(rig)]
    contexts = [text(rng.randrange(40, 130), seed=rng.randrange(10**6)) for _ in range(10)]
    asked: dict[str, tuple[list[int], int]] = {}
    for i in range(rng.randrange(20, 60)):
        for _ in range(rng.choice([0, 1, 3, 8])):
            rig.step()
        rig.now += rng.choice([0, 0.1, 0.5, 3])
        what = rng.random()
        if what < 0.9:
            job, tokens, name = rng.randrange(len(contexts)), rng.randrange(1, 20), f"r{i}"
            prompt = contexts[job]
            params = {"job_id": f"job{job}", "is_last_step": rng.random() < 0.05}
            rig.add(name, prompt, max_tokens=tokens, params=params)
            asked[name] = prompt, tokens
            longer = [*prompt, *expected(prompt, tokens), *text(rng.randrange(1, 30), seed=i)]
            contexts[job] = longer if len(longer) <= LONGEST - 20 else longer[: len(longer) // 2]
        elif what < 0.95 and (running := [name for name in asked if name not in rig.finished]):
            rig.abort(rng.choice(running), late=rng.random() < 0.5)
        elif what < 0.99 and not calm:
            rng.choice(copies).fail_next(rng.choice(list(Direction)), {rng.randrange(3)})
            if stores := rig.worker_half.stores:
                break_once(stores[rng.choice(sorted(stores))].io.store, rng)
        elif what >= 0.99:
            rig.scheduler.reset_prefix_cache()
    rig.run()
    for name, (prompt, tokens) in asked.items():
        if rig.finished[name] != "abort":
            assert rig.outputs[name] == expected(prompt, tokens), name
    return asked


@contextmanager
def troubled(rig: Rig, trouble: Trouble, rng: random.Random, chance: float) -> Iterator[None]:
    """Have trouble befall an engine before some of its steps."""
    right, wait = rig.step, rig.wait_for_worker

    def step() -> Any:
        if rng.random() < chance:
            trouble.befall(rig, rng)
        return right()

    def wait_for_worker() -> None:
        trouble.let_go()
        wait()

    rig.step, rig.wait_for_worker = step, wait_for_worker  # type: ignore[method-assign]
    try:
        yield
    finally:
        rig.step, rig.wait_for_worker = right, wait  # type: ignore[method-assign]
        trouble.end()


def some_options(folder: Path, rng: random.Random, groups: tuple[GroupSpec, ...]) -> RigOptions:
    """An engine that has fewer slots than its clients have pages."""
    page = max((group.block_size for group in groups), default=16) * PAGE // 16
    on_disk: dict[str, Any] = {"ssd_path": str(folder / "ssd")}
    ssd = rng.choice([{}, {**on_disk, "ssd_gib": 1}, {**on_disk, "ssd_gib": 0.004}])
    longest = sum(LONGEST // group.block_size + 2 for group in groups) + 1
    options = RigOptions(
        blocks=max(longest, rng.choice([20, 30, 60]) * max(1, len(groups))),
        max_model_len=LONGEST,
        max_batched_tokens=rng.choice([64, 256]),
        max_num_seqs=rng.choice([2, 8]),
        in_job_order=rng.random() < 0.5,
        ahead=rng.random() < 0.5,
        tools=SomeTools(rng) if rng.random() < 0.3 else None,
        extra={
            "pin_fraction": rng.choice([0, 0.5]),
            "admission": rng.choice(["auto", "off", "off"]),
            "admission_max_wait_s": 300,
            "io_threads": 2,
            **cold_settings(rng.choice([32, 48, 80]) * max(1, len(groups)), page, **ssd),
        },
    )
    return (
        replace(options, groups=groups, retention=rng.choice([0, 0, None])) if groups else options
    )
