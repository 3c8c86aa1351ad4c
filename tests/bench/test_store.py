"""Measurements of the store benchmark, and the sparse store that it builds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tiered_kv.bench.store import (
    BLOCKS,
    Device,
    Slots,
    Store,
    build_sparse,
    contest,
    open_store,
    options_of,
)
from tiered_kv.storage import io_thread


def test_the_device_is_measured_at_its_best_setting_and_outliers_are_ignored() -> None:
    turns = list[str]()

    def passes(name: str, usual_s: float, first_s: float) -> Callable[[], float]:
        def run() -> float:
            turns.append(name)
            return usual_s if turns.count(name) > 1 else first_s

        return run

    settings = {(1, 4096): passes("slow", 1.0, 0.001), (4, 4096): passes("fast", 0.45, 9.0)}
    found = contest(passes("store", 0.5, 20.0), settings, 1, lambda _: None)

    assert found.best == (4, 4096)
    assert found.fraction == pytest.approx(0.9)
    assert (found.store_s, found.device_s) == pytest.approx((4 * 0.5, 4 * 0.45))
    assert turns.count("store") == turns.count("slow") == turns.count("fast")
    assert turns[:6] == ["store", "slow", "fast", "slow", "fast", "store"]


def test_store_and_device_move_the_same_bytes_through_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_thread, "GROUP_BYTES", 8 << 20)
    slots = Slots(1 << 20)
    with closing(Store(tmp_path / "store", slots, 2)) as store:
        if not store.direct:
            pytest.skip("no O_DIRECT here")
        assert store.write() > 0
        assert store.read() > 0
        with closing(Device(tmp_path / "device", 2, slots, 2)) as device:
            for setting in ((1, BLOCKS[0]), (2, BLOCKS[-1])):
                assert device.write(setting) > 0
                slots.fill(0)
                expected = slots.bytes.copy()
                slots.bytes[:] = 0
                assert device.read(setting) > 0
                assert (slots.bytes == expected).all(), "the files have pages from 0 on"


def test_a_sparse_store_opens_with_all_its_pages(tmp_path: Path) -> None:
    options = replace(options_of(tmp_path, 64 << 10), capacity_bytes=1 << 30)
    build_sparse(options, 3000)
    paths = list(options.folder.glob("*.seg"))
    assert len(paths) > 3
    assert all(path.stat().st_size <= options.segment_bytes for path in paths)
    assert sum(path.stat().st_blocks * 512 for path in paths) < 2 << 20
    with closing(open_store(options)) as store:
        assert len(store) == 3000
        assert store.stats.segments_bad == 0
