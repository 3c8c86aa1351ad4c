"""Ranks compress their pages independently, to different sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.cold import SLOTS, cold_settings, come_back, fill_cpu
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.two_ranks import TwoRankRig, TwoRanks, facts_of_two
from tiered_kv.testing.engine import halves
from tiered_kv.testing.engine import rig as engine_rig
from tiered_kv.testing.engine.rig import RigOptions

pytestmark = pytest.mark.usefixtures("small_bundles")
PAGES_OF_BOTH = 2 * 2 * 128
JOBS = 10
CONTEXT = 163


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRankRig]:
    monkeypatch.setattr(halves, "read_facts", facts_of_two)
    monkeypatch.setattr(engine_rig, "Halves", TwoRanks)
    extra = {"admission": "off", **cold_settings(SLOTS, PAGES_OF_BOTH)}
    with TwoRankRig(RigOptions(extra=extra)) as made:
        yield made


def test_the_rank_with_the_larger_bundle_determines_what_is_free(rig: TwoRankRig) -> None:
    fill_cpu(rig, JOBS)
    filled = rig.ranks.filled.values()
    assert any(first < second for first, second in filled)
    assert any(first > second for first, second in filled)
    held = sum(map(max, filled))
    assert held == len(rig.index.cold.slots)
    assert sum(come_back(rig, job) for job in range(JOBS)) > 6 * CONTEXT
    assert rig.count("restore_failures") == 0
    rig.settle()
    rig.check_clean()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_page_damaged_on_one_rank_is_computed_on_both(rig: TwoRankRig, rank: int) -> None:
    fill_cpu(rig, JOBS)
    worker = [rig.ranks.worker, rig.ranks.second][rank]
    for slot in rig.index.cold.slots:
        worker.pool.slots[slot] ^= 0xFF
    for job in range(JOBS):
        come_back(rig, job)
    assert rig.count("restore_failures") > 0
    rig.settle()
    rig.check_clean()


@pytest.mark.parametrize("rank", [0, 1])
def test_pages_that_one_rank_cannot_encode_are_lost_on_both(rig: TwoRankRig, rank: int) -> None:
    fill_cpu(rig, 7)
    worker = [rig.ranks.worker, rig.ranks.second][rank]
    bundles: Any = worker.compressor.groups[0]
    bundles.pack = lambda *_: 1 // 0
    fill_cpu(rig, 3, tag="rival")
    assert rig.count("compression_failures") > 0
    assert rig.count("pages_compressed") == rig.index.cold.compressed == 0
    rig.check_clean()
    del bundles.pack
    for job in range(7):
        come_back(rig, job)
    rig.settle()
    rig.check_clean()


def test_pages_that_one_rank_cannot_compress_stay_uncompressed(rig: TwoRankRig) -> None:
    rig.ranks.introduce(lambda said: replace(said, compresses=()))
    fill_cpu(rig, JOBS)
    assert rig.index.evictions > 0
    assert rig.count("pages_compressed") == rig.index.cold.compressed == 0
    for job in range(JOBS):
        come_back(rig, job)
    rig.check_clean()


def test_slots_for_decoded_pages_are_reserved_for_any_measured_speed(rig: TwoRankRig) -> None:
    """A measured copy speed of 0 means that the speed is unknown. Slots for decoded pages are
    reserved even then."""
    staging = rig.ranks.worker.compressor.staging
    rig.ranks.introduce(lambda said: replace(said, slots=said.slots - 1), copy=0.0)
    assert rig.index.num_slots == rig.index.free_slots == SLOTS - staging - 1
