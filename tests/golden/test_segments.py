"""A store written by commit 913b4b9: a sealed segment for each of two codecs, and a segment that a
killed process left open.

``tests/storage/store/test_written_before.py`` reads stores of an earlier commit, with every codec.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.golden.conftest import Copy
from tests.golden.written import FINGERPRINT, FORMAT, changed, changes, keys_of, pages_of
from tiered_kv.codecs.registry import CODECS, from_table, parse
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.storage.segment.format import FormatError
from tiered_kv.storage.segment.headers import (
    pack_footer,
    pack_record_header,
    pack_segment_header,
    parse_footer,
    parse_record_header,
    parse_trailer,
)
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.segments import SegmentFile

RAW, CENTRED, OPEN = 1, 2, 3
"""Segment numbers."""
FIXED_BYTES, DIGEST_BYTES = 88, 16
"""Sizes of the segment header's fields before the codec table, and of the digest after the
table."""


def options(root: Path) -> StoreOptions:
    return StoreOptions(root, FINGERPRINT, 0, 0, 1, FORMAT, 4 << 20, 2)


def segment(root: Path, number: int) -> Path:
    return options(root).folder / f"{number:08}.seg"


def expected_keys() -> list[PageKey]:
    """Return the keys in the order in which their pages were written. Two pages were written
    twice."""
    first, second = keys_of(0, 4, 1), keys_of(100, 17, 2)
    third = keys_of(200, 2) + keys_of(300, 1, 1)
    return [*first[2:], first[0], *second, first[1], *third]


def read(root: Path) -> dict[PageKey, bytes]:
    """Return every page that the next engine finds, oldest first."""
    store = SegmentStore(options(root), parse("raw")(FORMAT), from_table)
    try:
        keys = store.keys()
        out = np.zeros((len(keys), FORMAT.page_bytes), np.uint8)
        failed = store.get(list(zip(keys, out, strict=True)))
        return {key: out[at].tobytes() for at, key in enumerate(keys) if at not in failed}
    finally:
        store.close()


def test_the_next_engine_finds_every_page(copy: Copy) -> None:
    root = copy("store")
    for _ in range(2):
        found = read(root)
        assert found == pages_of(expected_keys())
        assert list(found) == expected_keys()


def test_segments_name_their_codecs(written: Path) -> None:
    found = [SegmentFile(segment(written / "store", number)) for number in (RAW, CENTRED, OPEN)]
    ids = [CODECS[name].cls.codec_id for name in ("raw", "centred", "centred")]
    assert [one.header.codec_id for one in found] == ids
    assert [one.sealed for one in found] == [True, True, False]
    assert [bool(one.header.table) for one in found] == [False, True, True]
    for one in found:
        header = one.header
        assert (header.fingerprint, header.page_format) == (FINGERPRINT, FORMAT)
        assert (header.rank, header.ranks, header.replica) == (0, 1, 0)


def test_headers_and_footers_are_written_in_the_same_format(written: Path) -> None:
    for number in (RAW, CENTRED, OPEN):
        path = segment(written / "store", number)
        content, found = path.read_bytes(), SegmentFile(path)
        header = found.header
        assert pack_segment_header(header) == content[: header.header_bytes]
        for entry in found.entries:
            stored = content[entry.offset :][:BLOCK]
            record = parse_record_header(header, stored)
            packed = pack_record_header(header, record)
            assert packed == stored[: len(packed)]
        if found.sealed:
            end = parse_trailer(header, len(content), content[-BLOCK:])
            assert parse_footer(header, content[end:]) == found.entries
            assert pack_footer(header, end, found.entries) == content[end:]


def parts(root: Path, number: int) -> dict[str, range]:
    """Return offsets to change, for each part of a segment."""
    found = SegmentFile(segment(root, number))
    used = FIXED_BYTES + len(found.header.table) + DIGEST_BYTES
    live = found.entries[2]
    begin = live.offset
    header = 96 + len(live.key)
    return {
        "segment header": range(0, used, 5),
        "record header": range(begin, begin + header, 5),
        "page": range(begin + 192, begin + 192 + live.plane_bytes + live.frame_bytes - 64, 199),
    }


@pytest.mark.parametrize("part", ["segment header", "record header", "page"])
@pytest.mark.parametrize("number", [RAW, CENTRED, OPEN])
def test_a_changed_byte_costs_pages_and_never_gives_a_wrong_one(
    number: int, part: str, written: Path, tmp_path: Path
) -> None:
    whole = pages_of(expected_keys())
    content = segment(written / "store", number).read_bytes()
    for at, bad in changes(content, parts(written / "store", number)[part]):
        root = shutil.copytree(written / "store", tmp_path / str(at))
        segment(root, number).write_bytes(bad)
        found = read(root)
        assert found.items() <= whole.items(), f"the change at {at} gave a wrong page"
        assert found != whole, f"the change at {at} went unnoticed"
        shutil.rmtree(root)


@pytest.mark.parametrize("number", [RAW, CENTRED])
def test_a_changed_footer_is_refused_and_its_records_are_read_one_by_one(
    number: int, written: Path, copy: Copy
) -> None:
    path = segment(copy("store"), number)
    content, found = path.read_bytes(), SegmentFile(path)
    header = found.header
    end = parse_trailer(header, len(content), content[-BLOCK:])
    entries = sum(32 + len(entry.key) for entry in found.entries)
    trailer = len(content) - 64
    for at in (*range(end, end + entries, 7), *range(trailer, len(content))):
        bad = changed(content, at)
        with pytest.raises(FormatError):
            parse_footer(header, bad[parse_trailer(header, len(bad), bad[-BLOCK:]) :])
    path.write_bytes(changed(content, end))
    assert not SegmentFile(path).sealed
    assert read(path.parents[2]) == pages_of(expected_keys())
