"""Codec tables that are evicted, damaged, or of an unknown codec."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.remote.open_pages import open_at
from tests.storage.test_remote_pages import smooth_page
from tiered_kv.codecs.base import Codec, PageFormat
from tiered_kv.codecs.registry import from_table
from tiered_kv.remote.base import RemoteKey
from tiered_kv.remote.page_record import table_name
from tiered_kv.storage import remote_pages
from tiered_kv.storage.remote_pages import TABLE_PREFIX, FromTable, RemotePages
from tiered_kv.storage.remote_tier import make_store
from tiered_kv.storage.shared_root import root_store
from tiered_kv.testing.conformance.remote import soon
from tiered_kv.testing.conformance.store import FINGERPRINT, PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.valkey import ValkeyServer

PAGES = 20


@pytest.fixture(autouse=True)
def _always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_store, "REFRESH_S", 0.0)


def open_pages(
    root: Path, codec: str = "raw", gib: float = 0.1, make: FromTable = from_table
) -> RemotePages:
    return open_at(f"file://{root}?gib={gib}", codec, make)


def put(pages: RemotePages, first: int) -> None:
    some = range(first, first + PAGES)
    assert not pages.put([(page_key(number), smooth_page(number)) for number in some])


def put_trained(pages: RemotePages) -> Codec:
    """Put pages, wait until their codec has been trained, and put them again. Returns the trained
    codec."""
    put(pages, 0)
    while (codec := pages.codec_of_new_pages) is None:
        time.sleep(0.01)
    put(pages, 0)
    assert codec.table
    return codec


def test_an_evicted_table_is_put_again(tmp_path: Path) -> None:
    """A full shared folder deletes its oldest values, among them the codec's table. The table is
    put again, and another engine can read the newest page."""
    ours, at = open_pages(tmp_path, "centred", gib=0.001), 100
    put_trained(ours)
    while ours.counters()["remote_bytes_written"] < 3 << 20:
        put(ours, at)
        at += PAGES
    ours.close()
    theirs, out = open_pages(tmp_path), np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
    newest = page_key(at - 1)
    assert not theirs.exists([newest], 20.0)
    assert not theirs.get([(newest, out)])
    theirs.close()


@pytest.mark.parametrize("state", ["missing", "damaged"])
def test_an_unusable_table_is_read_once_and_then_occasionally(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """A missing or damaged table is read once for many pages, and only once more after
    ``MISSING_S``. Each read allocates memory for the longest possible table."""
    ours, theirs = open_at(server.url, "centred"), open_at(server.url)
    changing = make_store(server.address)
    codec = put_trained(ours)
    name = TABLE_PREFIX + FINGERPRINT + table_name(codec.codec_id, codec.table)
    if state == "missing":
        assert changing.delete([RemoteKey(name, name)], soon())
    else:
        changing.put([(RemoteKey(name, name), [b"damaged" * 10])], soon())
    calls, now = list[bytes](), [time.monotonic()]
    get = theirs._store.get  # noqa: SLF001

    def counted(keys: Sequence[RemoteKey], *more: Any) -> Any:
        calls.extend(key.name for key in keys if key.name == name)
        return get(keys, *more)

    monkeypatch.setattr(theirs._store, "get", counted)  # noqa: SLF001
    wanted = [
        (page_key(number), np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for number in range(PAGES)
    ]
    monkeypatch.setattr(remote_pages, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("tiered_kv.storage.remote_pages.CALL_S", 60.0)
    for _ in range(3):
        assert theirs.get(wanted) == frozenset(range(PAGES))
    assert len(calls) == 1
    assert theirs.counters()["remote_pages_bad"] == (state == "damaged")
    now[0] += remote_pages.MISSING_S
    assert theirs.get(wanted) == frozenset(range(PAGES))
    assert len(calls) == 2
    ours.close()
    theirs.close()
    changing.close()


def test_a_table_that_was_damaged_is_counted_and_read_again(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_pages, "AGAIN_S", 0.0)
    monkeypatch.setattr(remote_pages, "MISSING_S", 0.0)
    ours, damaging = open_at(server.url, "centred"), make_store(server.address)
    codec = put_trained(ours)
    name = TABLE_PREFIX + FINGERPRINT + table_name(codec.codec_id, codec.table)
    damaging.put([(RemoteKey(name, name), [b"damaged" * 10])], soon())
    theirs, out = open_at(server.url), np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
    assert theirs.get([(page_key(1), out)]) == {0}
    assert theirs.counters()["remote_pages_bad"] == 1
    put(ours, 0)  # this also writes the table
    assert not theirs.get([(page_key(1), out)])
    for one in (ours, theirs, damaging):
        one.close()


def test_an_unknown_codec_does_not_affect_other_pages(tmp_path: Path) -> None:
    def make(codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
        if table:  # as a user's own codec may do with a table of a newer version
            raise KeyError("version 2")
        return from_table(codec_id, table, page_format)

    ours, raw = open_pages(tmp_path, "centred"), open_pages(tmp_path)
    theirs, good = open_pages(tmp_path, make=make), page_key(50)
    put_trained(ours)
    assert not raw.put([(good, page_bytes(good))])
    out = np.zeros((2, PAGE_FORMAT.page_bytes), np.uint8)
    assert theirs.get([(page_key(0), out[0]), (good, out[1])]) == {0}
    for one in (ours, raw, theirs):
        one.close()
