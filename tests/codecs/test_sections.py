"""Pages with several element types. Each type is encoded by a suitable codec, and pages are decoded
exactly."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.codecs.autotune import choose, synthetic_page
from tiered_kv.codecs.base import CodecError, ElementType, EncodedPage, PageFormat, Section
from tiered_kv.codecs.centred import CentredCodec
from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.codecs.section_table import HEADER, SECTION, SectionTable
from tiered_kv.codecs.sections import PART_BYTES, SectionsCodec, divide, part_format
from tiered_kv.codecs.zstd import ZstdCodec
from tiered_kv.testing.conformance.codec import CodecConformance

BF16, FP16, FP32, FP8, OPAQUE = (
    ElementType.BF16,
    ElementType.FP16,
    ElementType.FP32,
    ElementType.FP8_E4M3,
    ElementType.OPAQUE,
)


def mixed(*sections: tuple[ElementType, int], tokens: int = 16) -> PageFormat:
    return PageFormat.of([Section(*one) for one in sections], tokens)


STATE = mixed((BF16, 1280), (FP32, 6912), (BF16, 1280), (FP32, 6912), tokens=0)
FORMATS = {
    "bf16 and fp32": mixed((BF16, 1280), (FP32, 8192)),
    "a state of two layers": STATE,
    "fp32 alone": mixed((FP32, 6400)),
    "opaque and bf16": mixed((OPAQUE, 77), (BF16, 6400)),
    "tiny": mixed((FP32, 4), (BF16, 2), (FP8, 1), (OPAQUE, 1)),
    "odd": mixed((FP32, 641), (BF16, 333), (FP32, 5), (FP16, 7)),
    "shifted": mixed((FP8, 3), (FP32, 4000), (OPAQUE, 1), (BF16, 4000), (FP32, 96)),
    "all": mixed(*((element, 1600) for element in ElementType)),
}


class _Sections(CodecConformance):
    codec_class = SectionsCodec


def _suite(page_format: PageFormat) -> type[_Sections]:
    return type("Suite", (_Sections,), {"formats": (page_format,)})


class TestSections(_Sections):
    """The codec conformance suite with its default page formats."""


TestBf16AndFp32 = _suite(FORMATS["bf16 and fp32"])
TestState = _suite(STATE)
TestFp32Alone = _suite(FORMATS["fp32 alone"])
TestOpaqueAndBf16 = _suite(FORMATS["opaque and bf16"])
TestTiny = _suite(FORMATS["tiny"])
TestOdd = _suite(FORMATS["odd"])
TestShifted = _suite(FORMATS["shifted"])
TestAll = _suite(FORMATS["all"])


# -- formats ----------------------------------------------------------------------


def test_neighbours_of_one_type_are_one_section() -> None:
    joined = mixed((BF16, 2), (OPAQUE, 0), (BF16, 4), (FP32, 8))
    assert joined.sections == (Section(BF16, 6), Section(FP32, 8))
    assert (joined.element, joined.page_bytes, joined.mixed) == (OPAQUE, 14, True)
    assert mixed((BF16, 2), (BF16, 4)) == PageFormat(BF16, 6, 16)
    assert PageFormat(BF16, 6, 16).sections == (Section(BF16, 6),)
    assert not PageFormat(OPAQUE, 6, 16).mixed
    assert joined.outline == PageFormat(OPAQUE, 14, 16) != joined
    assert PageFormat(FP32, 8, 1).outline == PageFormat(FP32, 8, 1)


@pytest.mark.parametrize(
    ("element", "nbytes"), [(OPAQUE, 13), (OPAQUE, 15), (BF16, 14), (FP32, 14)]
)
def test_sections_that_do_not_form_a_page_are_refused(element: ElementType, nbytes: int) -> None:
    sections = (Section(BF16, 6), Section(FP32, 8))
    assert PageFormat(OPAQUE, 14, 16, sections).sections == sections
    with pytest.raises(ValueError, match="but the page has"):
        PageFormat(element, nbytes, 16, sections)


def test_a_section_has_no_negative_size() -> None:
    with pytest.raises(ValueError, match="negative"):
        mixed((BF16, -2), (FP32, 8))


# -- pages ------------------------------------------------------------------------

SECTIONS = st.lists(
    st.tuples(
        st.sampled_from(ElementType),
        st.one_of(st.integers(1, 9), st.sampled_from([64, 640, 1920]), st.integers(1, 3000)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SECTIONS, st.integers(0, 40), st.integers(0, 3), st.booleans(), st.integers(0, 2**32 - 1))
def test_any_page_of_any_sections_comes_back(
    sections: list[tuple[ElementType, int]], tokens: int, training: int, noise: bool, seed: int
) -> None:
    page_format = mixed(*sections, tokens=tokens)
    page = synthetic_page(page_format, seed)
    if noise:
        page = np.random.default_rng(seed).integers(0, 256, page.size, dtype=np.uint8)
    codec = SectionsCodec(page_format)
    writer = codec.trained([synthetic_page(page_format, i) for i in range(training)])
    reader = from_table(writer.codec_id, writer.table, page_format.outline)
    assert reader == writer
    out = np.full_like(page, 0xA5)
    reader.decode(writer.encode(page), out)
    assert np.array_equal(out, page)


def test_each_type_has_the_codec_that_suits_it() -> None:
    codec = SectionsCodec(FORMATS["odd"])
    assert [part_format(codec.page_format, part) for part in codec.parts] == [
        PageFormat(FP32, 646, 16),
        PageFormat(BF16, 333, 16),
        PageFormat(FP16, 7, 16),
    ]
    assert [type(one) for one in codec.codecs] == [ZstdCodec] * 3, "no whole elements"
    assert [type(one) for one in SectionsCodec(STATE).codecs] == [CentredCodec] * 2
    opaque, bf16 = SectionsCodec(FORMATS["opaque and bf16"]).codecs
    assert (type(opaque), type(bf16)) == (ZstdCodec, CentredCodec)


def test_short_sections_of_one_type_are_a_page_of_that_type() -> None:
    """The short sections of each type are encoded together, so that a type costs one frame and one
    table, regardless of the number of layers."""
    page = synthetic_page(STATE)
    stored = SectionsCodec(STATE).encode(page)
    conv = np.concatenate([page[:1280], page[8192:9472]])
    states = np.concatenate([page[1280:8192], page[9472:]])
    parts = [
        CentredCodec(PageFormat(element, part.nbytes, 0)).encode(part)
        for element, part in ((BF16, conv), (FP32, states))
    ]
    planes = np.concatenate([part.plane for part in parts])
    frames = np.concatenate([part.frame for part in parts])
    assert np.array_equal(stored.plane, planes)
    assert np.array_equal(stored.frame[16:], frames)


def test_long_sections_are_parts_of_their_own() -> None:
    """Sections of one type are encoded together until they have ``PART_BYTES``, so that long
    sections need not be copied together. Such pages are decoded exactly."""
    long, short = (FP32, PART_BYTES), (BF16, PART_BYTES // 2)
    assert list(divide(mixed(short, long, short, long, short))) == [(1,), (0, 2), (3,), (4,)]
    assert list(divide(mixed((FP32, PART_BYTES - 1), (BF16, 1), long))) == [(0, 2), (1,)]
    page_format = mixed(short, long, short, long, short)
    assert len(SectionsCodec(page_format).codecs) == 4
    page = synthetic_page(page_format)
    codec = SectionsCodec(page_format).trained([page])
    reader = from_table(codec.codec_id, codec.table, page_format.outline)
    assert reader == codec
    out = np.empty_like(page)
    reader.decode(codec.encode(page), out)
    assert np.array_equal(out, page)


def test_a_state_learns_nothing_and_kv_does() -> None:
    assert not SectionsCodec(STATE).wants_training
    kv = SectionsCodec(mixed((BF16, 6400), (OPAQUE, 160)))
    assert kv.wants_training
    trained = kv.trained([synthetic_page(kv.page_format, i) for i in range(3)])
    assert not trained.wants_training
    assert trained.table != kv.table
    assert kv.trained([]) is kv


def test_a_page_of_another_size_is_refused_by_every_method() -> None:
    codec = SectionsCodec(FORMATS["bf16 and fp32"])
    page = synthetic_page(codec.page_format)
    stored = codec.encode(page)
    for call in (
        lambda: codec.encode(page[:-1]),
        lambda: codec.decode(stored, page[:-1]),
        lambda: codec.trained([page[:-1]]),
    ):
        with pytest.raises(ValueError, match="9471 bytes instead of 9472"):
            call()


def test_pages_of_several_types_are_measured_with_every_codec() -> None:
    """On a disk with 1 MB/s, only the size of pages matters. The measurement chooses the sections
    codec for pages of several types, and centred for fp32 states."""
    page_format = mixed((BF16, 64 * 1024), (FP32, 64 * 1024))
    choice = choose(page_format, disk_read_mbs=1, disk_write_mbs=1, cores=1)
    assert choice.codec == SectionsCodec(page_format) == parse("centred")(page_format)
    assert choice.reason.startswith("codec centred: ")
    states = PageFormat(FP32, 64 * 1024, 0)
    choice = choose(states, disk_read_mbs=1, disk_write_mbs=1, cores=1)
    assert choice.codec == CentredCodec(states)


def test_a_synthetic_page_has_numbers_of_each_type_in_its_place() -> None:
    page = synthetic_page(mixed((BF16, 8000), (FP32, 16000)))
    halves = page[:8000].view(np.uint16).astype(np.uint32) << 16
    for numbers in (halves.view(np.float32), page[8000:].view(np.float32)):
        assert numbers.size == 4000
        assert abs(float(numbers.mean())) < 0.1
        assert float(numbers.std()) == pytest.approx(1, abs=0.05)


# -- stored bytes -------------------------------------------------------------------


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("what", range(2))
@pytest.mark.parametrize("by", [1, 1 << 31, (1 << 32) - 1])
def test_sizes_of_parts_that_do_not_add_up_are_refused(part: int, what: int, by: int) -> None:
    codec = SectionsCodec(STATE)
    stored = codec.encode(synthetic_page(STATE))
    sizes = stored.frame.copy()
    told = sizes[:16].view("<u4")
    told[2 * part + what : 2 * part + what + 1] += np.uint32(by)
    out = np.empty(STATE.page_bytes, np.uint8)
    with pytest.raises(CodecError, match="its sections need"):
        codec.decode(EncodedPage(stored.plane, sizes), out)
    other = 2 * (1 - part) + what
    told[other : other + 1] -= np.uint32(by)
    with pytest.raises(CodecError):
        codec.decode(EncodedPage(stored.plane, sizes), out)


def test_every_cut_of_a_page_is_refused() -> None:
    codec = SectionsCodec(STATE)
    stored = codec.encode(synthetic_page(STATE))
    out = np.empty(STATE.page_bytes, np.uint8)
    for length in range(0, stored.frame.nbytes, 7):
        with pytest.raises(CodecError):
            codec.decode(EncodedPage(stored.plane, stored.frame[:length]), out)
    for length in range(0, stored.plane.nbytes, 1001):
        with pytest.raises(CodecError):
            codec.decode(EncodedPage(stored.plane[:length], stored.frame), out)


# -- tables -----------------------------------------------------------------------

KV = mixed((BF16, 640), (OPAQUE, 17), (BF16, 1280))
TABLE = SectionsCodec(KV).trained([synthetic_page(KV, i) for i in range(2)]).table


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def test_every_bit_and_every_cut_of_a_table_is_noticed() -> None:
    assert SectionsCodec.from_table(KV, TABLE).table == TABLE
    for at in range(len(TABLE)):
        damaged = bytearray(TABLE)
        damaged[at] ^= 1 << at % 8
        for table in (bytes(damaged), TABLE[:at]):
            with pytest.raises(CodecError, match="table"):
                SectionsCodec.from_table(KV, table)


def replaced(at: int, *new: int) -> Callable[[bytes], bytes]:
    return lambda body: body[:at] + bytes(new) + body[at + len(new) :]


ROW, PARTS = HEADER.size, HEADER.size + 3 * SECTION.size
WRONG: dict[str, Callable[[bytes], bytes]] = {
    "another version": replaced(4, 2),
    "reserved bytes": replaced(5, 1),
    "fewer parts": replaced(6, 1),
    "more parts": replaced(6, 3),
    "no parts": replaced(6, 0),
    "more parts than there is room for": replaced(6, 255, 255),
    "other tokens": replaced(8, 8),
    "pages of another size": replaced(12, 0x92),
    "fewer sections": replaced(20, 2),
    "no sections": replaced(20, 0),
    "more sections than there is room for": replaced(20, 0xFF, 0xFF, 0xFF, 0xFF),
    "a section of another type": replaced(ROW, 2),
    "a section of no type": replaced(ROW, 6),
    "a section of the type of its neighbour": replaced(ROW, 0),
    "a section in a part of another type": replaced(ROW + 1, 1),
    "a section in a part that is not there": replaced(ROW + 1, 2),
    "a part without a section": replaced(ROW + SECTION.size + 1, 0),
    "a longer section": replaced(ROW + 3, 0x81),
    "a section of 2**63 bytes": replaced(ROW + 10, 0x80),
    "an empty section": replaced(ROW + SECTION.size + 3, 0),
    "another codec": replaced(PARTS, 1),
    "a codec that is not for parts": replaced(PARTS, 3),
    "an unknown codec": replaced(PARTS, 0x34, 0x12),
    "a longer table": replaced(PARTS + 2, 255, 255),
    "a table for a codec without one": replaced(PARTS + 6 + 2, 1),
    "not a table of centres": replaced(PARTS + 12, 0),
    "something behind it": lambda body: body + b"\0",
    "nothing": lambda body: b"",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_table_with_a_good_checksum_is_refused(what: str) -> None:
    body = TABLE[:-4]
    changed = WRONG[what](body)
    assert changed != body
    for page_format in (KV, KV.outline):
        with pytest.raises(CodecError):
            SectionsCodec.from_table(page_format, sealed(changed))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_table_with_a_good_checksum_is_refused_or_works(data: st.DataObject) -> None:
    body = bytearray(TABLE[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(4, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec = SectionsCodec.from_table(KV.outline, sealed(bytes(body)))
    except CodecError:
        return
    page = synthetic_page(codec.page_format, 5)
    out = np.zeros_like(page)
    codec.decode(codec.encode(page), out)
    assert np.array_equal(out, page)


def test_a_table_of_other_sections_is_refused() -> None:
    for other in (
        mixed((BF16, 1280), (OPAQUE, 17), (BF16, 640)),
        mixed((BF16, 640), (FP8, 17), (BF16, 1280)),
        mixed((BF16, 640), (OPAQUE, 17), (BF16, 1280), tokens=8),
        PageFormat(OPAQUE, KV.page_bytes, 8),
        PageFormat(OPAQUE, KV.page_bytes + 1, 16),
        PageFormat(FP8, KV.page_bytes, 16),
    ):
        with pytest.raises(CodecError, match="does not belong to pages"):
            SectionsCodec.from_table(other, TABLE)


def test_a_table_is_read_as_it_was_packed() -> None:
    table = SectionTable.read(TABLE)
    assert table.page_format == KV
    assert [part.sections for part in table.parts] == [(0, 2), (1,)]
    assert table.pack() == TABLE
