"""Pages that arrive encoded are stored unchanged if the store uses the same codec and table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import Bytes, Codec, CodedPage, EncodedPage
from tiered_kv.codecs.centred import CentredCodec
from tiered_kv.codecs.raw import NOTHING
from tiered_kv.keys import PageKey
from tiered_kv.storage.bundles import Bundles
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import (
    PAGE_FORMAT,
    ZSTD,
    StoreBench,
    coded_page,
    page_bytes,
    page_key,
)
from tiered_kv.testing.segment_store import ToyCodec, store_options

CALLS: list[str] = []


class Counting(ToyCodec):
    """A codec that records its calls."""

    def encode(self, page: Bytes) -> EncodedPage:
        CALLS.append("encode")
        return super().encode(page)

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        CALLS.append("decode")
        super().decode(encoded, out)

    def trained(self, pages: list[Bytes]) -> Codec:
        return Counting(self.page_format, bytes([1 + len(pages) % 255]) * 5000)


@pytest.fixture
def bench(tmp_path: Path) -> StoreBench[SegmentStore]:
    options = store_options(tmp_path)
    return StoreBench(
        lambda: SegmentStore(options, Counting(PAGE_FORMAT), lambda i, t, f: Counting(f, t))
    )


def own(bench: StoreBench[SegmentStore]) -> Codec:
    """Return the store's codec, once it is trained."""
    bench.put(*range(20))
    codec = bench.store.codec_of_new_pages
    assert codec is not None
    assert codec.table
    return codec


def test_an_untrained_store_has_no_codec_for_encoded_pages(bench: StoreBench[SegmentStore]) -> None:
    assert bench.store.codec_of_new_pages is None
    bench.put(1)
    assert bench.store.codec_of_new_pages is None
    codec = own(bench)
    bench.reopen()
    assert own(bench) == codec, "of the earlier process"
    bench.store.close()


def test_a_page_in_the_stores_encoding_is_not_encoded_again(
    bench: StoreBench[SegmentStore],
) -> None:
    codec = own(bench)
    pages = [(key, coded_page(key, codec)) for key in map(page_key, range(30, 60))]
    CALLS.clear()
    assert bench.store.put_coded(pages) == frozenset()
    assert CALLS == []
    bench.expected.update((key, page_bytes(key)) for key, _ in pages)
    bench.check()
    bench.reopen()
    bench.check()
    bench.store.close()


def test_a_codec_with_an_equal_table_is_the_same(bench: StoreBench[SegmentStore]) -> None:
    again = Counting(PAGE_FORMAT, own(bench).table)
    CALLS.clear()
    bench.put_coded(*range(30, 40), codecs=[again])
    assert CALLS.count("decode") == 0
    bench.check()
    bench.store.close()


def counted(store: SegmentStore) -> tuple[int, int]:
    """Return the numbers of pages that were stored as they arrived, and of pages that were encoded
    again."""
    events = store.counters()
    return events["ssd_pages_kept_compressed"], events["ssd_pages_recompressed"]


def test_unchanged_and_recompressed_pages_are_counted(
    bench: StoreBench[SegmentStore],
) -> None:
    codec, other = own(bench), Counting(PAGE_FORMAT, bytes([99]) * 5000)
    bench.put_coded(*range(30, 40), codecs=[codec])
    assert counted(bench.store) == (10, 0)
    CALLS.clear()
    bench.put_coded(*range(40, 52), codecs=[codec, other, None])
    assert (CALLS.count("encode") - 8, CALLS.count("decode")) == (8, 4), "the bench encodes eight"
    assert counted(bench.store) == (14, 4)
    torn = CodedPage(codec, EncodedPage(NOTHING, NOTHING))
    lost = CodedPage(other, torn.page)
    assert bench.store.put_coded([(PageKey(b"short"), torn), (page_key(60), lost)]) == {0, 1}
    assert counted(bench.store) == (14, 4), "what is not stored is neither"
    bench.check()
    bench.store.close()
    assert bench.store.put_coded([(page_key(61), coded_page(page_key(61), codec))]) == {0}
    assert counted(bench.store) == (14, 4)


def test_a_store_without_a_table_adopts_that_of_the_first_pages(
    bench: StoreBench[SegmentStore],
) -> None:
    """A store without a table adopts the first table of pages that arrive encoded, and still has it
    after a restart. CPU memory compresses pages before the first one is demoted, so one table
    serves both."""
    bench.put(1, 2)
    first = Counting(PAGE_FORMAT, bytes([7]) * 5000)
    codecs = [Counting(PAGE_FORMAT), ZSTD, None, first, first]
    bench.put_coded(*range(30, 40), codecs=codecs)
    assert bench.store.codec_of_new_pages == first
    assert counted(bench.store) == (4, 4)
    bench.put_coded(*range(40, 50), codecs=[Counting(PAGE_FORMAT, bytes([8]) * 5000)])
    assert bench.store.codec_of_new_pages == first
    assert counted(bench.store) == (4, 14)
    bench.put(*range(50, 80))
    bench.check()
    bench.reopen()
    assert bench.store.codec_of_new_pages == first
    bench.check()
    bench.store.close()


def test_a_table_for_pages_of_another_size_is_not_adopted(bench: StoreBench[SegmentStore]) -> None:
    half = replace(PAGE_FORMAT, page_bytes=PAGE_FORMAT.page_bytes // 2, sections=())
    alien = CodedPage(Counting(half, bytes([7]) * 5000), EncodedPage(NOTHING, NOTHING))
    assert bench.store.put_coded([(page_key(1), alien)]) == {0}
    assert bench.store.codec_of_new_pages is None
    bench.store.close()


def test_pages_of_another_table_are_encoded_again(bench: StoreBench[SegmentStore]) -> None:
    codec = own(bench)
    other = Counting(PAGE_FORMAT, bytes([99]) * 5000)
    assert other != codec
    pages = [(key, coded_page(key, other)) for key in map(page_key, range(30, 40))]
    CALLS.clear()
    assert bench.store.put_coded(pages) == frozenset()
    assert (CALLS.count("encode"), CALLS.count("decode")) == (10, 10)
    bench.expected.update((key, page_bytes(key)) for key, _ in pages)
    bench.check()
    bench.store.close()


def test_earlier_untrained_pages_are_read_next_to_trained_ones(
    bench: StoreBench[SegmentStore],
) -> None:
    bench.put_coded(*range(100, 140), codecs=[Counting(PAGE_FORMAT)])
    bench.check()
    codec = own(bench)
    bench.put_coded(*range(140, 150), codecs=[Counting(PAGE_FORMAT), codec])
    bench.check()
    bench.reopen()
    bench.check()
    bench.store.close()


@pytest.mark.parametrize("foreign", [False, True])
def test_invalid_pages_and_keys_are_refused(bench: StoreBench[SegmentStore], foreign: bool) -> None:
    codec = ZSTD if foreign else own(bench)
    refused = bench.store.stats.pages_refused
    coded = coded_page(page_key(1), codec)
    pages = [
        (page_key(31), coded_page(page_key(31), codec)),
        (PageKey(b"short"), coded),
        (PageKey(b"l" * 256), coded),
        (page_key(32), coded_page(page_key(32), codec)),
    ]
    if foreign:
        half = page_bytes(page_key(1))[: PAGE_FORMAT.page_bytes // 2]
        pages.append((page_key(33), CodedPage(None, EncodedPage(half, half))))
        pages.append((page_key(34), CodedPage(None, EncodedPage(half[:1], half))))
        pages.append((page_key(35), CodedPage(None, EncodedPage(half, half[:0]))))
    assert bench.store.put_coded(pages) == {1, 2, *range(4, len(pages))}
    assert bench.store.stats.pages_refused >= refused + 2
    for name in (31, 32):
        bench.expected[page_key(name)] = page_bytes(page_key(name))
    bench.check()
    bench.store.close()


def test_a_page_given_twice_is_written_once(bench: StoreBench[SegmentStore]) -> None:
    codec, key = own(bench), page_key(50)
    one = bench.store.stored_bytes
    bench.put_coded(51, codecs=[codec])
    one = bench.store.stored_bytes - one
    written = bench.store.stats.bytes_written
    pages = [(key, coded_page(key, codec, version)) for version in (1, 2)]
    pages.insert(1, (PageKey(b"short"), pages[0][1]))
    assert bench.store.put_coded(pages) == {1}
    assert bench.store.stats.bytes_written - written == one
    bench.expected[key] = page_bytes(key, 2)
    bench.check()
    bench.store.close()


def test_a_damaged_page_of_the_stores_own_codec_is_never_served(
    bench: StoreBench[SegmentStore],
) -> None:
    """Three of ten encoded pages are damaged. The store serves the seven others and none of the
    three, before and after a restart."""
    codec = own(bench)
    pages = [(key, coded_page(key, codec)) for key in map(page_key, range(40, 50))]
    for i, count in ((0, 1), (4, 9), (9, 0)):
        whole = pages[i][1].page
        bad = EncodedPage(np.repeat(whole.plane, count), np.repeat(whole.frame, count)[:-1])
        pages[i] = (pages[i][0], CodedPage(codec, bad))

    assert bench.store.put_coded(pages) <= {0, 4, 9}

    good = [key for i, (key, _) in enumerate(pages) if i not in (0, 4, 9)]
    bench.expected.update((key, page_bytes(key)) for key in good)
    for _ in range(2):
        assert set(bench.read([key for key, _ in pages])) == set(good)
        bench.check()
        bench.reopen()
    bench.store.close()


def test_pages_of_a_bundle_are_written_in_their_encoded_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a compressed bundle are stored in their encoded form. Pages of an incompressible
    bundle are encoded by the store. All pages are read back, before and after a restart."""
    options = store_options(tmp_path, page_format=PAGE_FORMAT)
    slots = np.stack([synthetic_page(PAGE_FORMAT, seed) for seed in range(40)])
    slots[32:] = np.random.default_rng(1).integers(0, 256, (8, PAGE_FORMAT.page_bytes))
    pages = {page_key(n): slots[n].copy() for n in range(40)}
    keys = list(pages)

    def open_store() -> SegmentStore:
        return SegmentStore(
            options, CentredCodec(PAGE_FORMAT), lambda i, t, f: CentredCodec.from_table(f, t)
        )

    store = open_store()
    bundles = Bundles(slots, CentredCodec(PAGE_FORMAT))
    bundles.encode_like(lambda: store.codec_of_new_pages)
    assert not store.put([(keys[n], slots[n]) for n in range(20)])
    assert store.codec_of_new_pages is not None
    assert bundles.pack(keys[20:32], range(20, 32), map) < 12
    assert bundles.pack(keys[32:], range(32, 40), map) == 8
    encoded = list[int]()
    encode = CentredCodec.encode

    def watched(self: CentredCodec, page: Bytes, plane: Bytes | None = None) -> EncodedPage:
        encoded.append(1)
        return encode(self, page, plane)

    monkeypatch.setattr(CentredCodec, "encode", watched)
    for first, some in ((20, keys[20:32]), (32, keys[32:])):
        found = [(key, bundles.copy(first, key)) for key in some]
        coded = [(key, one) for key, one in found if one is not None]
        assert len(coded) == len(some)
        assert store.put_coded(coded) == frozenset()
    assert len(encoded) == 8

    for _ in range(2):
        outs = np.zeros((40, PAGE_FORMAT.page_bytes), np.uint8)
        assert store.get(list(zip(keys, outs, strict=True))) == frozenset()
        assert all(np.array_equal(pages[key], out) for key, out in zip(keys, outs, strict=True))
        store.close()
        store = open_store()
    store.close()
