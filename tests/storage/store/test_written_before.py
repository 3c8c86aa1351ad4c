"""Stores of an earlier version are read unchanged: same keys, same pages.

``written_by_380c62f/make`` describes how they were created.
"""

from __future__ import annotations

import json
import tarfile
from hashlib import shake_128
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, Codec, ElementType, PageFormat
from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.keys import PageKey
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.segments import SegmentFile

ARCHIVE = Path(__file__).parent / "written_by_380c62f" / "stores.tar.xz"
CODECS = ("raw", "zstd", "zstd:3", "centred")


def page(key: PageKey, page_format: PageFormat) -> Bytes:
    """Return the page of a key, as it was written."""
    bits = np.frombuffer(shake_128(key).digest(page_format.page_bytes), np.uint8).copy()
    bits[1::2] = bits[1::2] & 0x80 | 0x3C | bits[1::2] & 0x03
    return bits


class Found:
    """A store of the earlier version, unpacked from the archive."""

    def __init__(self, codec: str, root: Path) -> None:
        with tarfile.open(ARCHIVE) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # exists since 3.11.4
            archive.extractall(root)
        said: dict[str, Any] = json.loads((root / "manifest.json").read_text())
        (store,) = (one for one in said["stores"] if one["codec"] == codec)
        self.format = PageFormat(ElementType(said["element"]), said["page_bytes"], said["tokens"])
        self.keys = [PageKey(bytes.fromhex(key)) for key in store["keys"]]
        self.options = StoreOptions(
            root, bytes.fromhex(store["fingerprint"]), 0, 0, 1, self.format, 4 << 20, 2
        )

    def open(self, codec: Codec) -> SegmentStore:
        return SegmentStore(self.options, codec, from_table)

    def check(self, store: SegmentStore) -> None:
        """Assert that the store has the original pages in the original order."""
        assert store.keys() == self.keys
        out = np.zeros((len(self.keys), self.format.page_bytes), np.uint8)
        assert store.get(list(zip(self.keys, out, strict=True))) == frozenset()
        for key, read in zip(self.keys, out, strict=True):
            assert np.array_equal(read, page(key, self.format))
        assert store.stats.segments_bad == store.stats.pages_bad == 0


@pytest.mark.parametrize("codec", CODECS)
def test_every_page_is_found_unchanged(codec: str, tmp_path: Path) -> None:
    found = Found(codec, tmp_path / "root")
    segments = [SegmentFile(path) for path in sorted(found.options.folder.glob("*.seg"))]
    assert [segment.sealed for segment in segments] == [True, True, False]
    store = found.open(parse(codec)(found.format))
    found.check(store)
    store.close()


@pytest.mark.parametrize("codec", CODECS)
def test_new_pages_may_use_another_codec(codec: str, tmp_path: Path) -> None:
    found = Found(codec, tmp_path / "root")
    store = found.open(parse("raw" if codec == "centred" else "centred")(found.format))
    new = PageKey(found.options.fingerprint + b"new")
    assert store.put([(new, page(new, found.format))]) == frozenset()
    found.keys.append(new)
    found.check(store)
    store.close()
    store = found.open(parse(codec)(found.format))
    found.check(store)
    store.close()


def test_a_trained_table_is_used_again(tmp_path: Path) -> None:
    found = Found("centred", tmp_path / "root")
    store = found.open(parse("centred")(found.format))
    assert store.codec.table
    assert not store.codec.wants_training
    store.close()
