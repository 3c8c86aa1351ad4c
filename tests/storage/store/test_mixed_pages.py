"""Stores of pages with several element types: pages are found again, and pages of another format
are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import Codec, ElementType, PageFormat, Section
from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.codecs.sections import SectionsCodec
from tiered_kv.keys import PageKey
from tiered_kv.storage.admin.export import export
from tiered_kv.storage.admin.inventory import find_stores, take_inventory
from tiered_kv.storage.admin.verify import verify_store
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import page_key
from tiered_kv.testing.segment_store import SegmentStoreConformance, store_options
from tiered_kv.testing.segments import SegmentFile

CONV, SSM = Section(ElementType.BF16, 1536), Section(ElementType.FP32, 8192)
STATES = PageFormat.of([CONV, SSM, CONV, SSM], 0)
KV = PageFormat.of([Section(ElementType.BF16, 8192), Section(ElementType.OPAQUE, 528)], 16)
KEYS = [page_key(name) for name in range(30)]


class TestStoreOfSections(SegmentStoreConformance):
    """The conformance suite of segment stores, with the codec for sections."""

    def make_codec(self, page_format: PageFormat) -> Codec:
        return SectionsCodec(page_format)

    def codec_from(self, codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
        return from_table(codec_id, table, page_format)


def options_of(root: Path, page_format: PageFormat) -> StoreOptions:
    return store_options(root, page_format=page_format, capacity_bytes=16 << 20)


def opened(options: StoreOptions, codec: str) -> SegmentStore:
    return SegmentStore(options, parse(codec)(options.page_format), from_table)


def fill(options: StoreOptions, codec: str) -> None:
    """Write a closed store with the pages of ``KEYS``, in at least two segments if the codec is
    trained."""
    store = opened(options, codec)
    for some in (KEYS[:10], KEYS[10:]):
        pages = [(key, synthetic_page(options.page_format, KEYS.index(key))) for key in some]
        assert not store.put(pages)
    store.close()


def assert_has(store: SegmentStore, keys: Sequence[PageKey], page_format: PageFormat) -> None:
    assert store.keys() == list(keys)
    out = np.zeros((len(keys), page_format.page_bytes), np.uint8)
    assert store.get(list(zip(keys, out, strict=True))) == frozenset()
    for key, page in zip(keys, out, strict=True):
        assert np.array_equal(page, synthetic_page(page_format, KEYS.index(key)))


@pytest.mark.parametrize("page_format", [STATES, KV], ids=["states", "kv"])
@pytest.mark.parametrize("codec", ["raw", "zstd", "zstd:3", "centred"])
def test_pages_are_found_by_the_next_process(
    page_format: PageFormat, codec: str, tmp_path: Path
) -> None:
    options = options_of(tmp_path, page_format)
    fill(options, codec)
    store = opened(options, codec)
    assert_has(store, KEYS, page_format)
    assert not store.codec.wants_training
    assert store.stats.segments_bad == 0
    store.close()
    for path in options.folder.glob("*.seg"):
        assert SegmentFile(path).header.page_format == page_format.outline


def test_a_trained_table_is_used_again(tmp_path: Path) -> None:
    options = options_of(tmp_path, KV)
    fill(options, "centred")
    store = opened(options, "centred")
    assert store.codec.table != parse("centred")(KV).table
    assert not store.codec.wants_training
    store.close()


@pytest.mark.parametrize("codec", ["raw", "zstd", "centred"])
def test_new_pages_may_use_another_codec(codec: str, tmp_path: Path) -> None:
    options = options_of(tmp_path, STATES)
    fill(options, codec)
    store = opened(options, "zstd" if codec == "centred" else "centred")
    assert not store.put([(KEYS[0], synthetic_page(STATES, 0))])
    store.close()
    store = opened(options, codec)
    assert_has(store, [*KEYS[1:], KEYS[0]], STATES)
    store.close()


OTHERS = {
    "other sections": PageFormat.of([CONV, SSM, SSM, CONV], 0),
    "other types": PageFormat.of([CONV, replace(SSM, element=ElementType.FP16)] * 2, 0),
    "of which nothing is known": STATES.outline,
    "one type": PageFormat(ElementType.BF16, STATES.page_bytes, 0),
    "tokens": PageFormat.of(STATES.sections, 16),
}


@pytest.mark.parametrize("what", OTHERS)
def test_pages_of_another_format_are_not_found(what: str, tmp_path: Path) -> None:
    """A store does not find pages that have another format and the same fingerprint. Normally the
    fingerprints differ as well."""
    fill(options_of(tmp_path, STATES), "centred")
    store = opened(options_of(tmp_path, OTHERS[what]), "zstd")
    assert store.keys() == []
    assert store.stats.segments_bad > 0
    store.close()


@pytest.mark.parametrize("page_format", [STATES, KV], ids=["states", "kv"])
@pytest.mark.parametrize("codec", ["raw", "zstd", "centred"])
def test_stores_are_managed_without_the_engine(
    page_format: PageFormat, codec: str, tmp_path: Path
) -> None:
    fill(options_of(tmp_path / "root", page_format), codec)
    (info,) = find_stores(tmp_path / "root").stores
    inventory = take_inventory(info)
    assert list(inventory.pages) == KEYS
    assert inventory.codecs == [codec]
    assert inventory.raw_bytes == len(KEYS) * page_format.page_bytes
    found = verify_store(info, lambda nbytes: None)
    assert (found.good, found.pages) == (True, len(KEYS))

    out = tmp_path / "out"
    exported = export([inventory], None, out, stored=True, advance=lambda pages: None)
    assert not exported.failed
    for i, page in enumerate(exported.pages):
        content = (out / str(page["file"])).read_bytes()
        assert content == synthetic_page(page_format, i).tobytes()
        assert page["element"] == "opaque"


def test_damage_is_found_without_the_engine(tmp_path: Path) -> None:
    options = options_of(tmp_path, STATES)
    fill(options, "centred")
    (path,) = sorted(options.folder.glob("*.seg"))
    entry = SegmentFile(path).entries[3]
    content = bytearray(path.read_bytes())
    content[entry.offset + entry.nbytes // 2] ^= 1
    path.write_bytes(content)
    (info,) = find_stores(tmp_path).stores
    (bad,) = verify_store(info, lambda nbytes: None).bad_pages
    assert bad.key == KEYS[3]
    store = opened(options, "centred")
    assert store.get([(KEYS[3], np.zeros(STATES.page_bytes, np.uint8))]) == {0}
    store.close()
