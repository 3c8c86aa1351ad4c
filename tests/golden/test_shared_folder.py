"""A shared folder written by commit 913b4b9: packs of two codecs. Two packs were deleted as a
whole, and one page on its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.golden.conftest import Copy
from tests.golden.written import FINGERPRINT, FORMAT, changed, changes, keys_of, pages_of
from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.keys import PageKey
from tiered_kv.storage import remote_pages
from tiered_kv.storage.base import StoreSite
from tiered_kv.storage.remote_pages import PAGE_PREFIX, RemotePages
from tiered_kv.storage.shared_root.index_entries import (
    HEAD_BYTES,
    Entry,
    Kind,
    Place,
    head_of,
    number_in,
    pack_entries,
    parse_entries,
)
from tiered_kv.storage.shared_root.own_folder import FolderReader
from tiered_kv.storage.shared_root.root_store import SharedRoot

RANK = 3
SITE = StoreSite(FINGERPRINT, RANK, 4, 0, True, FORMAT, 1)
RAW = keys_of(0, 16, 1) + keys_of(50, 3)
CODED = keys_of(100, 16, 1) + keys_of(150, 3)
LOST = [*RAW[:8], CODED[17]]
"""Pages of the two deleted packs, and the page that was deleted on its own."""
KEPT = [key for key in RAW + CODED if key not in LOST]
WRITER = "machine.0"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a slow machine more time per call."""
    monkeypatch.setattr(remote_pages, "CALL_S", 60.0)


def read(root: Path) -> dict[PageKey, bytes]:
    """Return every page that another engine finds."""
    pages = RemotePages(
        lambda: SharedRoot(root, 1 << 20), SITE, parse("raw")(FORMAT), from_table, 1e9
    )
    keys = RAW + CODED
    out = np.zeros((len(keys), FORMAT.page_bytes), np.uint8)
    failed = pages.get(list(zip(keys, out, strict=True)))
    pages.close()
    return {key: out[at].tobytes() for at, key in enumerate(keys) if at not in failed}


def test_another_engine_finds_every_page(copy: Copy) -> None:
    assert read(copy("shared")) == pages_of(KEPT)


def entries_of(index: bytes) -> list[Entry]:
    number = number_in(index[:HEAD_BYTES])
    assert number is not None
    entries, nbytes = parse_entries(index[HEAD_BYTES:], number)
    assert HEAD_BYTES + nbytes == len(index), "an entry is not whole"
    return entries


def places_in(folder: Path) -> dict[bytes, Place]:
    reader = FolderReader(folder)
    reader.refresh()
    return reader.contents.places


def test_the_index_is_written_in_the_same_format(written: Path) -> None:
    index = (written / "shared" / WRITER / "index").read_bytes()
    entries, number = entries_of(index), index[HEAD_BYTES - 16 : HEAD_BYTES]
    assert head_of(number) + pack_entries(entries, number) == index
    news = [(entry.kind, entry.name) for entry in entries if entry.kind is not Kind.VALUE]
    deleted = PAGE_PREFIX + LOST[-1] + RANK.to_bytes(2, "big")
    gone = (Kind.PACK_GONE, b"")
    assert news == [gone, gone, (Kind.DELETED, deleted)]


def test_a_changed_byte_of_the_index_is_noticed(copy: Copy) -> None:
    folder = copy("shared") / WRITER
    index = (folder / "index").read_bytes()
    whole = places_in(folder)
    noted = {one.name: one.place for one in entries_of(index) if one.kind is Kind.VALUE}
    pages = {name for name in whole if name.startswith(PAGE_PREFIX)}
    assert pages == {PAGE_PREFIX + key + RANK.to_bytes(2, "big") for key in KEPT}
    for at, bad in changes(index, range(0, len(index), 3)):
        (folder / "index").write_bytes(bad)
        found = places_in(folder)
        assert found != whole, f"the change at {at} went unnoticed"
        assert found.items() <= noted.items(), f"the change at {at} gave a wrong place"


@pytest.mark.parametrize(
    ("pack", "offsets"),
    [
        ("00000003", range(0, 8728, 97)),
        ("00000009", [*range(3152, 3272, 7), *range(4848, 8000, 97)]),
    ],
    ids=["pages as they are", "a codec's table and coded pages"],
)
def test_a_changed_byte_of_a_pack_costs_pages_and_never_gives_a_wrong_one(
    pack: str, offsets: Sequence[int], copy: Copy
) -> None:
    root = copy("shared")
    path = root / WRITER / f"{pack}.pack"
    whole, content = pages_of(KEPT), path.read_bytes()
    for at in offsets:
        path.write_bytes(changed(content, at))
        found = read(root)
        assert found != whole, f"the change at {at} went unnoticed"
        assert found.items() <= whole.items(), f"the change at {at} gave a wrong page"
