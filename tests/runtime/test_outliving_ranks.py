"""Two ranks, each with a memory file that outlives the engine. The next engine finds a page only if
both ranks have it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runtime.cold import WAITS, cold_settings
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.two_ranks import TwoRankRig, TwoRanks, facts_of_two
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.engine import halves
from tiered_kv.testing.engine import rig as engine_rig
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions
from tiered_kv.testing.policies import Always

BLOCK = 16


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "read_facts", facts_of_two)
    monkeypatch.setattr(engine_rig, "Halves", TwoRanks)


@contextmanager
def rig(folder: Path) -> Iterator[TwoRankRig]:
    extra = {"cpu_gib": 0.002, "cpu_path": str(folder), "codec": "raw"}
    with TwoRankRig(RigOptions(extra=extra)) as made:
        made.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
        yield made


def _keep_all(folder: Path) -> None:
    """Leave both files unchanged."""


def _lose_one(folder: Path) -> None:
    (folder / "0-1.slots").unlink()


def _damage_a_page_of_one(folder: Path) -> None:
    """Flip a bit of the last byte of the second rank's file that is not 0. That byte is in a
    slot."""
    path = folder / "0-1.slots"
    held = bytearray(path.read_bytes())
    at = len(held.rstrip(b"\0")) - 1
    held[at] ^= 1
    path.write_bytes(held)


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [(_keep_all, 299, 299), (_lose_one, 0, 0), (_damage_a_page_of_one, 0, 298)],
)
def test_pages_that_both_ranks_have_are_found(
    tmp_path: Path, change: Callable[[Path], None], least: int, most: int
) -> None:
    prompt = text(300, seed=1)
    with rig(tmp_path / "memory") as first:
        assert first.ask("a", prompt) == expected(prompt, 4)
        first.run()
        for worker in (first.ranks.worker, first.ranks.second):
            assert worker.lasting.wait_idle(30.0)
        assert first.half.deps.notebook.drain(30.0)
        killed = tmp_path / "killed"
        shutil.copytree(tmp_path / "memory", killed)
    change(killed)
    with rig(killed) as second:
        assert second.ask("b", prompt) == expected(prompt, 4)
        assert least <= second.count("prompt_tokens_cpu") <= most
        second.check_clean()


def test_compressed_pages_that_both_ranks_have_are_found(
    tmp_path: Path, small_bundles: None
) -> None:
    """The two ranks compress the same pages to bundles of different sizes. The next engine finds at
    least half of the compressed pages, and restores from them."""
    block, jobs = 128, 10
    extra = cold_settings(48, 2 * LAYERS * block * CELL)

    @contextmanager
    def cold_rig(folder: Path) -> Iterator[TwoRankRig]:
        options = RigOptions(
            blocks=30,
            block_size=block,
            max_model_len=1024,
            extra={"cpu_path": str(folder), "admission": "off", **extra},
        )
        with TwoRankRig(options) as made:
            made.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
            made.policy = Always(WAITS)
            yield made

    def ask(made: TwoRankRig, job: int) -> None:
        made.now += 1.0
        prompt = text(4 * block + 20, seed=job)
        name = f"{job} at {made.steps}"
        assert made.ask(name, prompt, params={"job_id": f"{job}"}) == expected(prompt, 4)
        made.settle()
        for worker in (made.ranks.worker, made.ranks.second):
            assert worker.lasting.wait_idle(30.0)
            worker.compressor.drain()

    with cold_rig(tmp_path / "memory") as first:
        for job in range(jobs):
            ask(first, job)
        cold = first.index.cold.compressed
        assert len({tuple(sizes) for sizes in first.ranks.filled.values()}) > 1
        shutil.copytree(tmp_path / "memory", tmp_path / "killed")
    with cold_rig(tmp_path / "killed") as second:
        assert cold // 2 <= second.index.cold.compressed <= cold
        second.check_clean()
        for job in range(jobs):
            ask(second, job)
        assert second.count("pages_decompressed") > 0
        assert second.count("restore_failures") == 0
        second.check_clean()
