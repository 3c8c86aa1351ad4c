"""The segment store fulfils its contract with any codec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, Codec, EncodedPage, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.storage.disk.files import FileLayer
from tiered_kv.storage.store.locks import StoreError
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import FaultyFiles
from tiered_kv.testing.segment_store import (
    SegmentBench,
    SegmentStoreConformance,
    ToyCodec,
    store_options,
)
from tiered_kv.testing.segments import SegmentFile


class TestStoreWithRawCodec(SegmentStoreConformance):
    def make_codec(self, page_format: PageFormat) -> Codec:
        return RawCodec(page_format)

    def codec_from(self, codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
        return RawCodec(page_format)


class TestStoreWithTrainedCodec(SegmentStoreConformance):
    def make_codec(self, page_format: PageFormat) -> Codec:
        return ToyCodec(page_format)

    def codec_from(self, codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
        return ToyCodec(page_format, table)

    def tables(self, bench: SegmentBench) -> list[bytes]:
        return [
            SegmentFile(path).header.table for path in sorted(bench.options.folder.glob("*.seg"))
        ]

    def test_a_large_first_put_trains_the_codec_immediately(self, bench: SegmentBench) -> None:
        bench.put(*range(20))
        assert all(table == bytes([21]) * 5000 for table in self.tables(bench))
        bench.check()

    def test_small_puts_are_stored_untrained_until_there_are_enough_pages(
        self, bench: SegmentBench
    ) -> None:
        for name in range(15):
            bench.put(name)
        assert self.tables(bench) == [b""]
        bench.put(15)
        assert self.tables(bench) == [b"", bytes([17]) * 5000]
        bench.check()
        bench.reopen()
        bench.check()

    def test_the_table_of_an_earlier_process_is_used_again(self, bench: SegmentBench) -> None:
        bench.put(*range(30))
        before = set(self.tables(bench))
        bench.reopen()
        bench.put(*range(30, 50))
        assert set(self.tables(bench)) == before
        bench.check()

    def test_the_kept_pages_do_not_change_with_their_slots(self, bench: SegmentBench) -> None:
        seen = []

        class Curious(ToyCodec):
            def trained(self, pages: list[Bytes]) -> Codec:
                seen.extend(pages)
                return super().trained(pages)

        bench.store.close()
        bench.store = SegmentStore(bench.options, Curious(PAGE_FORMAT), self.codec_from)
        page = page_bytes(page_key(1))
        bench.store.put([(page_key(1), page)])
        page[:] = 0
        bench.put(*range(2, 20))
        assert np.array_equal(seen[0], page_bytes(page_key(1)))


class StubbornCodec(ToyCodec):
    """Refuses to encode one page, and refuses training."""

    def encode(self, page: Bytes) -> EncodedPage:
        if page[0] == 13:
            raise RuntimeError("unlucky")
        return super().encode(page)

    def trained(self, pages: list[Bytes]) -> Codec:
        raise RuntimeError("no")


def open_store(options: StoreOptions, files: FileLayer | None = None) -> SegmentStore:
    return SegmentStore(options, RawCodec(options.page_format), lambda i, t, f: RawCodec(f), files)


def test_a_failing_codec_costs_only_the_page_it_fails_on(tmp_path: Path) -> None:
    options = store_options(tmp_path)
    store = SegmentStore(options, StubbornCodec(PAGE_FORMAT), lambda i, t, f: ToyCodec(f, t))
    pages = [(page_key(i), page_bytes(page_key(i))) for i in range(20)]
    for _, page in pages:
        page[0] = 1
    pages[4][1][0] = 13
    assert store.put(pages) == {4}
    assert len(store) == 19
    store.close()


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    files.refuse_direct()
    bench = SegmentBench.of(TestStoreWithRawCodec(), store_options(tmp_path), files)
    assert bench.store.direct is False
    assert caplog.text.count("O_DIRECT") == 1
    bench.put(*range(40))
    bench.check()
    bench.reopen()
    bench.check()
    bench.store.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity_bytes": 100_000}, "raise TIERED_KV_SSD_GIB"),
        ({"fingerprint": b"short"}, "16 bytes"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        open_store(store_options(tmp_path, **changes))


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(StoreError, match="another TIERED_KV_SSD_PATH"):
        open_store(store_options(tmp_path / "root"))


def test_segments_grow_with_the_capacity_up_to_a_limit(tmp_path: Path) -> None:
    small, large = (store_options(tmp_path, capacity_bytes=n << 30) for n in (1, 100))
    assert small.segment_bytes == 64 << 20
    assert large.segment_bytes == 512 << 20
    assert store_options(tmp_path, capacity_bytes=1 << 30, ranks=4).segment_bytes == 16 << 20
    big_pages = PageFormat(PAGE_FORMAT.element, 64 << 20, 16)
    assert store_options(tmp_path, page_format=big_pages).segment_bytes > 8 * (64 << 20)


def test_more_segments_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.storage.store.catalogue.OPEN_FILES", 2)
    bench = SegmentBench.of(TestStoreWithRawCodec(), store_options(tmp_path))
    bench.put(*range(200))
    bench.check()
    bench.reopen()
    bench.check()
    descriptors = Path("/proc/self/fd").iterdir()
    held = {path for fd in descriptors if (path := fd.resolve()).suffix == ".seg"}
    assert len(held) <= 2 < len(list(bench.options.folder.glob("*.seg")))
    bench.store.close()
