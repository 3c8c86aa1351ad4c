"""The store benchmark's figures are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.micro.device import (
    DEVICE_BLOCKS,
    DEVICE_THREADS,
    FINALISTS,
    contest,
    finalists,
    judge,
)
from tiered_kv.bench.store import build_sparse
from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import from_table
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore


def test_the_device_is_its_best_setting_and_one_bad_round_decides_nothing() -> None:
    device = {(1, 4096): [100.0, 100.0, 900.0], (4, 4096): [200.0, 20.0, 200.0]}
    found = judge([180.0, 10.0, 180.0], device)
    assert (found.threads, found.block) == (4, 4096)
    assert found.fraction == pytest.approx(0.9)
    assert (found.store_mbs, found.device_mbs) == (180, 200)


def test_the_best_settings_come_into_the_final() -> None:
    ticks: list[str] = []
    best = finalists(lambda threads, block, nbytes: threads * 1e9 + block, ticks.append)
    assert len(best) == FINALISTS
    assert best[0] == (max(DEVICE_THREADS), max(DEVICE_BLOCKS))
    assert ticks


def test_everybody_has_as_many_turns() -> None:
    turns: list[str] = []

    def runner(name: str, speed: float) -> float:
        turns.append(name)
        return speed

    found = contest(
        lambda: runner("store", 80), {(1, 4096): lambda: runner("device", 100)}, lambda _: None
    )
    assert found.fraction == pytest.approx(0.8)
    assert turns.count("store") == turns.count("device")
    assert turns[:4] == ["store", "device", "device", "store"]


def test_a_sparse_store_opens_with_all_its_pages(tmp_path: Path) -> None:
    page_format = PageFormat(ElementType.OPAQUE, 64 << 10, 16)
    options = StoreOptions(tmp_path, bytes(16), 0, 0, 1, page_format, 1 << 30)
    build_sparse(options, 3000)
    paths = list(options.folder.glob("*.seg"))
    assert len(paths) > 3
    assert all(path.stat().st_size <= options.segment_bytes for path in paths)
    assert sum(path.stat().st_blocks * 512 for path in paths) < 2 << 20
    store = SegmentStore(options, RawCodec(page_format), from_table)
    try:
        assert len(store) == 3000
        assert store.stats.segments_bad == 0
    finally:
        store.close()
