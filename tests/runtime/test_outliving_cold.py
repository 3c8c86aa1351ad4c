"""Compressed CPU memory that outlives its engine: returning jobs find their pages."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runtime.cold import WAITS, cold_settings
from tests.runtime.cold import small_bundles as small_bundles
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.policies import Always
from tiered_kv.transfer.memory_file.validation import Validation

pytestmark = pytest.mark.usefixtures("small_bundles")

BLOCK = 128
PAGE = LAYERS * BLOCK * CELL
SLOTS, JOBS, PAGES = 48, 10, 4
CONTEXT = PAGES * BLOCK
"""Tokens of a job that fill whole pages. These pages fill one bundle."""


@contextmanager
def rig(folder: Path) -> Iterator[SecondRig]:
    extra = {"cpu_path": str(folder), "admission": "off", **cold_settings(SLOTS, PAGE)}
    options = RigOptions(blocks=30, block_size=BLOCK, max_model_len=1024, extra=extra)
    with SecondRig(options) as made:
        made.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
        made.policy = Always(WAITS)
        yield made


def prompt(job: int) -> list[int]:
    return text(CONTEXT + 20, seed=job)


def at_rest(made: SecondRig) -> None:
    """Wait until all pages are hashed, no page is being compressed, and the notebook has written
    all its entries."""
    made.settle()
    assert made.worker_half.lasting.wait_idle(30.0)
    made.worker_half.compressor.drain()
    assert made.half.deps.notebook.drain(30.0)


def test_the_next_engine_finds_compressed_contexts(tmp_path: Path) -> None:
    with rig(tmp_path / "memory") as first:
        for job in range(JOBS):
            first.now += 1.0
            first.ask(f"job{job}", prompt(job), params={"job_id": f"job{job}"})
            at_rest(first)
        cold, pages = first.index.cold.compressed, len(first.index)
        assert cold >= 3 * PAGES
        assert first.index.evictions == 0
        shutil.copytree(tmp_path / "memory", tmp_path / "killed")
    with rig(tmp_path / "killed") as second:
        assert (second.index.cold.compressed, len(second.index)) == (cold, pages)
        second.check_clean()
        for job in range(JOBS):
            before = second.count("prompt_tokens_cpu")
            answer = second.ask(f"again{job}", prompt(job), params={"job_id": f"job{job}"})
            assert answer == expected(prompt(job), 4)
            assert second.count("prompt_tokens_cpu") - before >= CONTEXT
            second.settle()
        assert second.count("pages_decompressed") >= cold
        assert second.count("restore_failures") == 0
        second.check_clean()


def test_pages_that_are_compressed_before_they_are_hashed_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under pressure, a page may be compressed in the same step in which the worker learns that it
    is complete, and is then never hashed uncompressed. The next engine finds its compressed
    bytes."""
    monkeypatch.setattr(Validation, "landed", lambda *_: None)
    with rig(tmp_path / "memory") as first:
        for job in range(JOBS):
            first.now += 1.0
            first.ask(f"job{job}", prompt(job), params={"job_id": f"job{job}"})
            at_rest(first)
        cold = first.index.cold.compressed
        assert cold >= 3 * PAGES
        shutil.copytree(tmp_path / "memory", tmp_path / "killed")
    with rig(tmp_path / "killed") as second:
        assert (second.index.cold.compressed, len(second.index)) == (cold, cold)
        second.check_clean()


def test_compressed_contexts_are_found_by_several_engines_in_sequence(tmp_path: Path) -> None:
    """Each engine is killed at a random moment, while pages are being saved and compressed. The
    next engine continues with its memory file, restores compressed pages from it, and gives the
    right answers."""
    chance, folder, restored = random.Random(3), tmp_path / "0", 0
    for life in range(4):
        with rig(folder) as one:
            asked = dict[str, int]()
            for number in range(20):
                job = chance.randrange(JOBS + 4)
                asked[str(number)] = job
                one.now += 1.0
                one.add(str(number), prompt(job), params={"job_id": f"{job}"})
                for _ in range(chance.randrange(4, 30)):
                    one.step()
                if chance.random() < 0.5:
                    one.wait_for_worker()
            to = tmp_path / str(life + 1)
            shutil.copytree(folder, to)
            folder = to
            one.run()
            for name, job in asked.items():
                assert one.outputs[name] == expected(prompt(job), 4)
            restored += bool(life) and one.count("pages_decompressed")
            one.settle()
            one.check_clean()
    assert restored
