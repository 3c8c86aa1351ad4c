"""Writes that the disk finishes in a different order than they were started."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes
from tiered_kv.storage.disk.aligned import BufferPool
from tiered_kv.storage.disk.files import Buffers
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import UnsafeFiles
from tiered_kv.testing.segment_store import ToyCodec, store_options


@dataclass
class SecondSegmentFirst(UnsafeFiles):
    """Delays writes of records to the first file until a record of another file is written."""

    first: int | None = None
    second_is_written: threading.Event = field(default_factory=threading.Event)

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        if offset == 0:
            return super().pwrite(fd, buffers, offset)  # the header of a segment
        if self.first is None:
            self.first = fd
        if fd == self.first:
            assert self.second_is_written.wait(300), "all fits into one segment"
        try:
            return super().pwrite(fd, buffers, offset)
        finally:
            if fd != self.first:
                self.second_is_written.set()


@pytest.mark.parametrize("attempt", range(5))
def test_pages_side_by_side_in_two_segments_share_their_buffer_until_both_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    give = BufferPool.give

    def spoil_and_give(pool: BufferPool, buffer: Bytes) -> None:
        buffer[:] = attempt
        give(pool, buffer)

    monkeypatch.setattr(BufferPool, "give", spoil_and_give)
    codec = ToyCodec(PAGE_FORMAT, b"learnt")
    store = SegmentStore(
        store_options(tmp_path), codec, lambda i, table, f: ToyCodec(f, table), SecondSegmentFirst()
    )
    pages = [(key, page_bytes(key)) for key in map(page_key, range(40))]
    assert not store.put(pages)
    wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key, _ in pages]
    assert not store.get(wanted)
    assert all(np.array_equal(out, page) for (_, out), (_, page) in zip(wanted, pages, strict=True))
    store.close()
