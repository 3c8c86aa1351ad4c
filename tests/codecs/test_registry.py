"""Codecs, including those of other packages, are found by name and by what a segment records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codecs.shuffled import Shuffled
from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import Codec, CodecError, ElementType, PageFormat, Section
from tiered_kv.codecs.centred import CentredCodec
from tiered_kv.codecs.out_of_tree import OUT_OF_TREE_ID, split_table
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import CODECS, UnknownCodecError, codec_name, from_table, parse
from tiered_kv.codecs.sections import SectionsCodec
from tiered_kv.codecs.zstd import ZstdCodec
from tiered_kv.errors import ConfigError
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.codec import CodecConformance
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.segment_store import SegmentStoreConformance, store_options
from tiered_kv.testing.segments import SegmentFile

PAGE = PageFormat(ElementType.BF16, 1_000_000, 16)
MIXED = PageFormat.of((Section(ElementType.BF16, 4096), Section(ElementType.FP32, 8192)), 0)
SHUFFLED = "tests.codecs.shuffled:Shuffled"


class TestRaw(CodecConformance):
    codec_class = RawCodec


class TestZstd(CodecConformance):
    codec_class = ZstdCodec


class TestCentred(CodecConformance):
    codec_class = CentredCodec


class TestShuffled(CodecConformance):
    codec_class = Shuffled


# -- names ------------------------------------------------------------------------


def test_codecs_by_name() -> None:
    assert [parse(name)(PAGE).name for name in CODECS] == list(CODECS)
    assert [parse(name)(PAGE).codec_id for name in CODECS] == [0, 1, 2]
    third = parse("zstd:3")(PAGE)
    assert (third.name, third.codec_id) == ("zstd:3", 1)
    assert parse("zstd:1")(PAGE) == parse("zstd")(PAGE)


def test_names_mean_the_same_for_pages_of_several_types() -> None:
    assert [parse(name)(MIXED).name for name in CODECS] == list(CODECS)
    assert [parse(name)(MIXED).codec_id for name in CODECS] == [0, 1, 3]
    assert parse("raw")(MIXED).stores_in_place
    assert parse("zstd:3")(MIXED) == ZstdCodec(MIXED, 3)
    assert parse("centred")(MIXED) == SectionsCodec(MIXED)
    with pytest.raises(ValueError, match="opaque"):
        CentredCodec(MIXED)
    assert parse(SHUFFLED)(MIXED).page_format == MIXED


@pytest.mark.parametrize(
    "name", ["", "Raw", "lz4", "zstd:", "zstd:x", "zstd:-1", "zstd:\u00b2", "centred:3", "raw:1"]
)
def test_an_unknown_codec_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"set raw, zstd, zstd:LEVEL \(1 to 22\), centred, or"):
        parse(name)


@pytest.mark.parametrize("level", ["0", "23", "999999999999"])
def test_a_level_that_zstd_does_not_have(level: str) -> None:
    with pytest.raises(ConfigError, match="zstd:1 to zstd:22"):
        parse(f"zstd:{level}")


def test_a_class_that_is_not_a_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="lacks decode, encode, trained"):
        parse("pathlib:Path")


# -- segments ---------------------------------------------------------------------


def test_segments_name_their_codec_by_number_and_table() -> None:
    trained = CentredCodec(PAGE).trained([synthetic_page(PAGE)])
    for codec in (*(parse(name)(PAGE) for name in CODECS), trained):
        assert from_table(codec.codec_id, codec.table, PAGE) == codec
        assert codec_name(codec.codec_id, codec.table) == codec.name
    for codec in (parse(name)(MIXED) for name in CODECS):
        assert from_table(codec.codec_id, codec.table, MIXED) == codec
        assert codec_name(codec.codec_id, codec.table) == codec.name

    with pytest.raises(CodecError, match="codec 4 is unknown"):
        from_table(4, b"", PAGE)
    with pytest.raises(CodecError, match="codec 1 has no table"):
        from_table(1, trained.table, PAGE)
    with pytest.raises(CodecError, match="not a table of centres"):
        from_table(2, b"nonsense", PAGE)
    with pytest.raises(CodecError, match="opaque"):
        from_table(2, b"", PageFormat(ElementType.OPAQUE, PAGE.page_bytes, 16))


def test_a_codec_out_of_tree_is_named_in_its_table() -> None:
    codec = parse(SHUFFLED)(PAGE)
    assert (codec.codec_id, codec.name) == (OUT_OF_TREE_ID, SHUFFLED)
    trained = codec.trained([synthetic_page(PAGE)])
    assert trained.table[:-1] == codec.table
    assert from_table(trained.codec_id, trained.table, PAGE, trusted=SHUFFLED) == trained
    assert codec_name(trained.codec_id, trained.table) == SHUFFLED


def test_a_file_cannot_make_the_reader_import_a_module() -> None:
    table = parse(SHUFFLED)(PAGE).table
    for trusted in ("", "centred", "tests.codecs.shuffled:Another"):
        with pytest.raises(UnknownCodecError, match=f"only with TIERED_KV_CODEC={SHUFFLED}"):
            from_table(OUT_OF_TREE_ID, table, PAGE, trusted)
    gone = table.replace(b"shuffled", b"vanished")
    with pytest.raises(UnknownCodecError, match="cannot be imported"):
        from_table(OUT_OF_TREE_ID, gone, PAGE, SHUFFLED.replace("shuffled", "vanished"))


@pytest.mark.parametrize("table", [b"", b"\x01", b"\0\0", b"\x09\0short", b"\x01\0\xff"])
def test_a_table_without_a_name_is_refused(table: bytes) -> None:
    with pytest.raises(CodecError):
        split_table(table)
    assert codec_name(OUT_OF_TREE_ID, table) == f"codec {OUT_OF_TREE_ID}"


# -- a store with an out-of-tree codec -----------------------------------------------


class TestStoreWithCodecOutOfTree(SegmentStoreConformance):
    def make_codec(self, page_format: PageFormat) -> Codec:
        return parse(SHUFFLED)(page_format)

    def codec_from(self, codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
        return from_table(codec_id, table, page_format, trusted=SHUFFLED)


def test_pages_of_a_missing_codec_are_absent_until_it_is_installed(tmp_path: Path) -> None:
    suite, options = TestStoreWithCodecOutOfTree(), store_options(tmp_path / "root")
    keys = [page_key(name) for name in range(20)]
    store = suite.open_store(options)
    assert not store.put([(key, page_bytes(key)) for key in keys])
    learnt = store.codec.table
    store.close()
    (path,) = options.folder.glob("*.seg")
    assert SegmentFile(path).header.codec_id == OUT_OF_TREE_ID

    store = SegmentStore(options, RawCodec(PAGE_FORMAT), from_table)
    assert store.keys() == []
    assert store.stats.segments_bad == 1
    assert store.exists(keys, 1.0) == frozenset(range(20))
    assert not store.put([(page_key(99), page_bytes(page_key(99)))])
    store.close()

    store = suite.open_store(options)
    assert store.keys() == [*keys, page_key(99)]
    assert store.codec.table == learnt
    out = [(key, page_bytes(page_key(1000))) for key in [*keys, page_key(99)]]
    assert store.get(out) == frozenset()
    assert all((page == page_bytes(key)).all() for key, page in out)
    store.close()
