"""Shared folders that are full, old, or written by somebody odd."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.remote.conftest import keys
from tiered_kv.remote.base import Outcome
from tiered_kv.storage.shared_root import own_folder, root_store
from tiered_kv.storage.shared_root.index_entries import Entry, Kind, Place, head_of, pack_entries
from tiered_kv.storage.shared_root.root_store import SharedRoot
from tiered_kv.testing.conformance.remote import soon

MOST = 1 << 24
TWO_DAYS_S = 2 * 86400.0


@pytest.fixture(autouse=True)
def _always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_store, "REFRESH_S", 0.0)


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "no locks"])
@pytest.mark.parametrize("looks", [True, False], ids=["looks", "reads alone"])
def test_the_folder_of_an_engine_that_only_reads_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool, looks: bool
) -> None:
    """Its lock tells this host, and its sign of life all others. The first rank looks pages up,
    and the others read them alone."""
    reader, (one, other) = SharedRoot(tmp_path, MOST), keys("one", "other")
    assert reader.put([(one, [b"x" * 1000])], soon()) == [Outcome.STORED]
    lock = next(tmp_path.glob("*/lock"))
    os.utime(lock, (time.time() - TWO_DAYS_S,) * 2)  # the last write was two days ago
    if not locked:
        monkeypatch.setattr(own_folder, "_nobody_has", lambda _: True)
        monkeypatch.setattr(own_folder, "SIGN_OF_LIFE_S", 0.0)
    if looks:
        assert reader.exists([one], soon()) == [Outcome.HIT]
    else:
        (got,) = reader.get([one], memoryview(bytearray(1000)), soon())
        assert got.outcome is Outcome.HIT
    writer = SharedRoot(tmp_path, MOST)
    monkeypatch.setattr(own_folder, "KEPT_FREE", 1.0)  # room is short
    writer.put([(other, [b"y" * 1000])], soon())
    assert lock.exists()
    writer.close()
    reader.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_an_engine_that_cannot_write_reads_what_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    others, (there, new) = SharedRoot(tmp_path, MOST), keys("there", "new")
    assert others.put([(there, [b"x" * 1000])], soon()) == [Outcome.STORED]

    def failing(fd: int, parts: Sequence[bytes], offset: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(own_folder, "_write", failing)
    mine = SharedRoot(tmp_path, MOST)
    assert mine.put([(new, [b"z" * 10])], soon()) == [Outcome.REFUSED]
    assert mine.exists([there], soon()) == [Outcome.HIT]
    mine.close()
    others.close()


def test_an_entry_of_an_impossible_place_counts_as_none(tmp_path: Path) -> None:
    folder, number, (key,) = tmp_path / "other.0", bytes(16), keys("one")
    folder.mkdir()
    entry = Entry(Kind.VALUE, key.name, Place(1, 1 << 63, 10))
    (folder / "index").write_bytes(head_of(number) + pack_entries([entry], number))
    (folder / "00000001.pack").write_bytes(bytes(100))
    store = SharedRoot(tmp_path, MOST)
    (got,) = store.get([key], memoryview(bytearray(100)), soon())
    store.close()
    assert got.outcome is Outcome.MISS
