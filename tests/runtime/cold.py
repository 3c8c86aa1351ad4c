"""Engines whose CPU memory compresses pages, and helpers for their tests."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tiered_kv.codecs import autotune
from tiered_kv.codecs.base import Bytes, CodecError, EncodedPage
from tiered_kv.connectors.runtime.pages import cpu_compression
from tiered_kv.connectors.runtime.worker import cpu_memory
from tiered_kv.pages.base import PageState
from tiered_kv.pages.cold_pages import Bundle
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.testing import shrinking
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.policies import Always
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.shrinking import Shrinking

PAGE = 16 * CELL
SLOTS = 96
TURN = 160
"""Tokens of a turn's prompt, which fill ten pages."""
FILLS = 7
"""Number of jobs whose pages nearly fill the slots."""
WAITS = Decision(Tier.CPU, forecast=Forecast(np.linspace(0.0, 0.9, len(GRID))))
"""Decision to keep the KV in CPU memory for a job that is expected back."""


@pytest.fixture
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress pages in bundles of four, because the contexts of these tests are short. Shorten the
    measurements at startup."""
    monkeypatch.setattr(cpu_compression, "BUNDLE_BYTES", 4 * PAGE)
    monkeypatch.setattr(autotune, "MEASURE_S", 0.0)
    monkeypatch.setattr(cpu_memory, "measure_flops", lambda *_: 0.0)


def cold_settings(slots: int = SLOTS, page: int = PAGE, **more: Any) -> dict[str, Any]:
    """Return settings for ``slots`` slots of compressible pages in CPU memory."""
    return {"cpu_gib": (slots * page + 1) / (1 << 30), "codec": shrinking.NAME, **more}


class Held:
    """Controls a codec whose calls wait or fail when the test chooses.

    Attributes:
        encodes, decodes: calls wait while this event is not set.
        failing: number of the next encodes and decodes that fail.
    """

    def __init__(self) -> None:
        self.encodes, self.decodes = threading.Event(), threading.Event()
        self.failing = {"encode": 0, "decode": 0}
        self.let_go()

    def let_go(self) -> None:
        """Let all waiting and later calls continue."""
        self.encodes.set()
        self.decodes.set()

    def while_it_waits(self, wait: Callable[[], object]) -> None:
        """Call a function that waits for the codec, while another thread lets the codec's calls
        continue."""
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self.let_go)
            wait()

    def strike(self, call: str) -> bool:
        """Return True if this call of the codec must fail, and count down the failures that are
        left."""
        strikes = self.failing[call] > 0
        self.failing[call] -= strikes
        return strikes


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """A codec whose calls a test can block and fail."""
    made, encode, decode = Held(), Shrinking.encode, Shrinking.decode

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


def prompt(job: int, tag: str = "job") -> list[int]:
    """Return the first prompt of a job. Jobs of different tags have different prompts."""
    return text(TURN, seed=len(tag) * 10_000 + job)


def fill_cpu(rig: EngineRig, jobs: int, *, tag: str = "job") -> None:
    """Run the first turns of ``jobs`` jobs, one after another. Their KV then waits in CPU
    memory."""
    rig.policy = Always(WAITS)
    for job in range(jobs):
        rig.now += 1.0
        rig.ask(f"{tag}{job}-first", prompt(job, tag), params={"job_id": f"{tag}{job}"})
        rig.settle()


def start_packing(rig: EngineRig, held: Held) -> None:
    """Fill most of CPU memory, and run one more job until the first pages are being compressed. The
    codec's encodes are blocked."""
    fill_cpu(rig, FILLS)
    held.encodes.clear()
    rig.add("last", prompt(FILLS), params={"job_id": "last"})
    while "last" not in rig.finished or not rig.index.cold.being_compressed:
        rig.step()


def come_back(rig: EngineRig, job: int, tag: str = "job") -> int:
    """Run a job's second turn and check its answer. Returns the number of prompt tokens restored
    from CPU memory."""
    name, first = f"{tag}{job}-again-{rig.steps}", prompt(job, tag)
    before = rig.count("prompt_tokens_cpu")
    longer = [*first, *expected(first, 4), *text(20, seed=2000 + job)]
    assert rig.ask(name, longer, params={"job_id": f"{tag}{job}"}) == expected(longer, 4)
    return rig.count("prompt_tokens_cpu") - before


def inject_cold(rig: EngineRig) -> FaultyTransfer:
    """Inject faults into the copies of restores that include compressed pages."""
    compressor = rig.worker_half.compressor
    faulty = compressor.backend = FaultyTransfer(compressor.backend)
    return faulty


def compressed_bundles(rig: EngineRig) -> list[Bundle]:
    return [one for one in rig.index.cold.bundles if one.state is PageState.COMPRESSED]


def damage(rig: EngineRig, bundles: int | None = None) -> int:
    """Damage the compressed pages of the first ``bundles`` bundles in CPU memory, or of all
    bundles. Returns the number of damaged bundles."""
    rig.worker_half.compressor.drain()
    packed = compressed_bundles(rig)[:bundles]
    for bundle in packed:
        for slot in bundle.slots:
            rig.worker_half.pool.slots[slot] ^= 0xFF
    return len(packed)


def flip_a_byte(rig: EngineRig, rng: random.Random) -> bool:
    """Flip a random bit in a slot that contains compressed pages. Returns False if there is no such
    slot."""
    if rig.worker_half.compressor is None:
        return False
    # Wait for reads in progress, because their pages were verified before the damage.
    rig.worker_half.compressor.drain()
    slots = [slot for bundle in compressed_bundles(rig) for slot in bundle.slots]
    if not slots:
        return False
    slot = rig.worker_half.pool.slots[rng.choice(slots)]
    slot[rng.randrange(len(slot))] ^= 1 << rng.randrange(8)
    return True
