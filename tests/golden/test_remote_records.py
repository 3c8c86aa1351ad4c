"""Values that commit 913b4b9 wrote to a remote store: pages of two codecs, and one codec's
table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.golden.written import FINGERPRINT, FORMAT, changed, keys_of, pages_of
from tiered_kv.codecs.registry import CODECS, from_table, parse
from tiered_kv.keys import PageKey
from tiered_kv.remote.base import Got, Outcome, Parts, RemoteKey
from tiered_kv.remote.page_record import NO_TABLE, open_record, pack_record, table_name
from tiered_kv.storage import remote_pages
from tiered_kv.storage.base import StoreSite
from tiered_kv.storage.remote_pages import PAGE_PREFIX, TABLE_PREFIX, RemotePages

RANK = 3
SITE = StoreSite(FINGERPRINT, RANK, 4, 0, True, FORMAT, 1)
RAW = keys_of(0, 1)[0]
CODED = keys_of(200, 1, 1)
KEYS = [RAW, *CODED]
DIGEST_BYTES = 16

Values = dict[bytes, bytes]


class ReadOnly:
    """A read-only remote store that contains ``values``."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def check(self, deadline: float) -> None:
        """Does nothing, because the store is always reachable."""

    def exists(self, keys: Sequence[RemoteKey], deadline: float) -> list[Outcome]:
        return [Outcome.HIT if key.name in self._values else Outcome.MISS for key in keys]

    def get(self, keys: Sequence[RemoteKey], buffer: memoryview, deadline: float) -> Iterator[Got]:
        for at, key in enumerate(keys):
            value = self._values.get(key.name)
            if value is None:
                yield Got(at, Outcome.MISS)
            else:
                buffer[: len(value)] = value
                yield Got(at, Outcome.HIT, len(value))

    def put(self, values: Sequence[tuple[RemoteKey, Parts]], deadline: float) -> list[Outcome]:
        return [Outcome.REFUSED] * len(values)

    def delete(self, keys: Sequence[RemoteKey], deadline: float) -> bool:
        return False

    def close(self) -> None:
        """Does nothing, because nothing is open."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a slow machine more time per call."""
    monkeypatch.setattr(remote_pages, "CALL_S", 60.0)


@pytest.fixture
def values(written: Path) -> Values:
    return {bytes.fromhex(path.name): path.read_bytes() for path in (written / "remote").iterdir()}


def read(values: Values) -> dict[PageKey, bytes]:
    """Return every page that another engine finds."""
    pages = RemotePages(lambda: ReadOnly(values), SITE, parse("raw")(FORMAT), from_table, 1e9)
    out = np.zeros((len(KEYS), FORMAT.page_bytes), np.uint8)
    failed = pages.get(list(zip(KEYS, out, strict=True)))
    pages.close()
    return {key: out[at].tobytes() for at, key in enumerate(KEYS) if at not in failed}


def with_rank(key: PageKey) -> bytes:
    return key + RANK.to_bytes(2, "big")


def name_of(key: PageKey) -> bytes:
    return PAGE_PREFIX + with_rank(key)


def name_of_table(values: Values) -> bytes:
    (name,) = (name for name in values if name.startswith(TABLE_PREFIX))
    return name


def test_another_engine_finds_every_page(values: Values) -> None:
    assert read(values) == pages_of(KEYS)


def test_values_have_the_same_names_and_format(values: Values) -> None:
    table = values[name_of_table(values)][DIGEST_BYTES:]
    for key in KEYS:
        value = values[name_of(key)]
        record = open_record(memoryview(value), with_rank(key), FORMAT)
        codec = CODECS["raw" if key == RAW else "centred"].cls
        assert record.codec_id == codec.codec_id
        assert record.table == (NO_TABLE if key == RAW else table_name(codec.codec_id, table))
        assert b"".join(pack_record(with_rank(key), FORMAT, record)) == value
    coded = table_name(CODECS["centred"].cls.codec_id, table)
    assert values.keys() == {*map(name_of, KEYS), TABLE_PREFIX + FINGERPRINT + coded}


@pytest.mark.parametrize("key", KEYS, ids=["raw", "centred", "partial block"])
def test_a_changed_byte_of_a_page_costs_that_page(key: PageKey, values: Values) -> None:
    whole, value = pages_of(KEYS), values[name_of(key)]
    del whole[key]
    for at in (*range(150), *range(150, len(value), 19)):
        assert read({**values, name_of(key): changed(value, at)}) == whole, f"changed at {at}"


def test_a_changed_byte_of_a_table_costs_the_pages_that_need_it(values: Values) -> None:
    name = name_of_table(values)
    for at in range(len(values[name])):
        found = read({**values, name: changed(values[name], at)})
        assert found == pages_of([RAW]), f"changed at {at}"
