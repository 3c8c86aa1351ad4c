"""A restore of uncompressed and compressed pages is reported as one copy, and runs on the
compressor's threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.codecs.registry import parse
from tiered_kv.connectors.runtime.worker.compressor import Compressor
from tiered_kv.keys import PageKey
from tiered_kv.orders import LoadOrder, OrderId, OrderReport, PackOrder, RestoreMode
from tiered_kv.page_group import Placement, page_layout
from tiered_kv.pages.cold_pages import cold_place
from tiered_kv.storage.bundles import Bundles
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.transfer.base import CopyResult, Direction
from tiered_kv.transfer.cpu import CpuTransfer
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

PAGE, PAGES, STAGING = 1024, 12, 4
ALL = range(PAGES)


def key(name: int) -> PageKey:
    return PageKey(b"%20d" % name)


class Rank:
    """A rank's VRAM and CPU memory. Page ``n`` is initially in slot ``n``, and is restored to block
    ``n``."""

    def __init__(self) -> None:
        self.pool = CpuPool(AnonymousMemory((PAGES + STAGING) * PAGE), PAGE)
        self.pages = (
            np.arange(PAGES, dtype=np.uint8)[:, None] + np.arange(PAGE, dtype=np.uint8) // 4
        )
        self.pool.slots[:PAGES] = self.pages
        self.vram = np.full(PAGES * PAGE, 0xEE, np.uint8)
        layout = page_layout([Placement(1, PAGES * PAGE, PAGE, 0)], PAGES)
        self.copies = FaultyTransfer(CpuTransfer([layout], self.vram, self.pool))
        codec = parse("zstd")(PageFormat(ElementType.OPAQUE, PAGE, 16))
        groups = {0: Bundles(self.pool.slots, codec)}
        staging = range(PAGES, PAGES + STAGING)
        self.reports = list[tuple[OrderId, OrderReport]]()
        self.compressor = Compressor(
            groups, self.pool.slots, staging, lambda: self.copies, 2, self.reports.append
        )
        self.places = list(ALL)

    def pack(self, names: Sequence[int]) -> None:
        """Compress pages into one bundle, which becomes their place."""
        order = PackOrder(OrderId(1), 0, tuple(names), tuple(map(key, names)))
        self.compressor.pack(order)
        self.compressor.drain()
        (_, report) = self.reports.pop()
        assert not report.failed
        assert report.slots < len(names)
        self.pool.slots[list(names[report.slots :])] = 0xAA  # as if other pages used the free slots
        for name in names:
            self.places[name] = cold_place(names[0])

    def load(self, names: Sequence[int]) -> CopyResult:
        """Restore pages. Asserts that every page that did not fail is in its block."""
        self.vram[:] = 0xEE
        places = tuple(self.places[name] for name in names)
        cold = tuple(key(name) for name in names if self.places[name] < 0)
        blocks = tuple(names)
        order = LoadOrder(OrderId(7), 0, "request", blocks, places, RestoreMode.ASYNC, cold=cold)
        self.compressor.load(order)
        self.compressor.drain()
        (result,) = self.compressor.poll()
        for i, name in enumerate(names):
            if i not in result.failed:
                assert (self.vram.reshape(PAGES, PAGE)[name] == self.pages[name]).all()
        assert result.job_id == 7
        assert result.nbytes == (len(names) - len(result.failed)) * PAGE
        return result

    def close(self) -> None:
        self.compressor.close()
        self.pool.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_resident_and_compressed_pages_of_a_restore_arrive_together(rank: Rank) -> None:
    rank.pack([3, 4, 5, 6, 7, 8, 9])
    assert not rank.load(ALL).failed
    assert not rank.load([9, 0, 8, 1, 5]).failed
    assert not rank.load([6, 3]).failed, "of compressed pages alone"


def test_a_damaged_page_fails_alone(rank: Rank) -> None:
    rank.pack([3, 4, 5, 6])
    rank.pack([7, 8, 9])
    rank.pool.slots[7] ^= 0xFF
    assert rank.load([0, 7, 3, 8, 11, 9, 4]).failed == {1, 3, 5}


@pytest.mark.parametrize("part", range(3))
def test_pages_of_a_copy_that_failed_fail_alone(rank: Rank, part: int) -> None:
    """The uncompressed pages are copied first, then the compressed ones, two at a time. If one of
    these copies fails for one page, only that page fails."""
    rank.pack([3, 4, 5, 6])
    for _ in range(part):
        rank.copies.fail_next(Direction.LOAD, ())
    rank.copies.fail_next(Direction.LOAD, {1})
    assert rank.load([3, 0, 4, 1, 5, 2, 6]).failed == [{3}, {2}, {6}][part]


def test_without_vram_a_restore_fails(rank: Rank) -> None:
    rank.pack([3, 4, 5])
    rank.compressor.release_vram()
    assert rank.load([0, 3, 1]).failed == {0, 1, 2}


def test_an_interrupted_restore_fails_as_a_whole(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.pack([3, 4, 5])
    with monkeypatch.context() as patch:
        patch.setattr(Bundles, "read", lambda *_: 1 / 0)
        assert rank.load([0, 3, 1]).failed == {0, 1, 2}
    assert not rank.load([0, 3, 1]).failed


def test_the_engine_is_waited_for_before_its_blocks_are_written(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = list[bool]()

    class Fence(nullcontext[None]):
        def __enter__(self) -> None:
            entered.append(bool((rank.vram == 0xEE).all()))

    monkeypatch.setattr(rank.copies, "fence", Fence, raising=False)
    rank.pack([3, 4, 5])
    rank.load([0, 3])
    assert entered == [True]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_damaged_no_wrong_page_arrives(data: st.DataObject) -> None:
    rank = Rank()
    try:
        names = data.draw(st.permutations(ALL))
        cut = data.draw(st.integers(3, PAGES - 3))
        damaged = set[int]()
        for bundle in (names[:cut], names[cut:]):
            if data.draw(st.booleans()):
                rank.pack(bundle)
                if data.draw(st.booleans()):
                    rank.pool.slots[bundle[0]] ^= 0xFF
                    damaged.update(bundle)
        wanted = data.draw(st.lists(st.sampled_from(ALL), min_size=1, unique=True))
        failed = {wanted[i] for i in rank.load(wanted).failed}
        assert failed <= damaged
    finally:
        rank.close()
