"""A shared folder as a remote store: writers add values, readers find them, and failures are
misses."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.conftest import keys
from tiered_kv.remote.base import Outcome, RemoteStore
from tiered_kv.remote.breaker import Breaker
from tiered_kv.storage.shared_root import own_folder, root_store
from tiered_kv.storage.shared_root.own_folder import INDEX_NAME
from tiered_kv.storage.shared_root.root_store import SharedRoot
from tiered_kv.testing.conformance.remote import (
    HIT,
    MISS,
    RemoteConformance,
    put_all,
    read_all,
    some_keys,
    soon,
)

MOST_BYTES = 1 << 30
NUMBER = bytes(range(16))
Open = Callable[..., SharedRoot]


class TestSharedRoot(RemoteConformance):
    """The conformance suite of remote stores, with the store of one process in its own folder."""

    def make_store(self, root: Path) -> RemoteStore:
        root.mkdir()
        return SharedRoot(root, MOST_BYTES)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shared folder in which every lookup refreshes the indexes."""
    monkeypatch.setattr(root_store, "REFRESH_S", 0.0)
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def open_store(root: Path) -> Iterator[Open]:
    stores: list[SharedRoot] = []

    def make(most_bytes: int = MOST_BYTES) -> SharedRoot:
        store = SharedRoot(root, most_bytes)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def pack_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.pack"))


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> list[int]:
    """Make a system call fail with this error number until the returned list is emptied."""
    real, failures = getattr(os, name), [number]

    def call(*args: Any) -> Any:
        if failures:
            raise OSError(failures[-1], os.strerror(failures[-1]))
        return real(*args)

    monkeypatch.setattr(os, name, call)
    return failures


# -- several processes --------------------------------------------------------------


def test_others_find_written_values_without_waiting_for_a_lock(open_store: Open) -> None:
    ours, theirs = open_store(), open_store()
    mine, other = some_keys(20), some_keys(20, "other")
    put_all(ours, mine, [b"ours"] * 20)
    put_all(theirs, other, [b"theirs"] * 20)
    for store in (ours, theirs):
        assert store.exists([*mine, *other], soon()) == [HIT] * 40
        assert read_all(store, [mine[3], other[5]]) == {0: b"ours", 1: b"theirs"}


def test_a_value_is_read_without_an_earlier_lookup(open_store: Open) -> None:
    ours, theirs = open_store(), open_store()
    assert theirs.exists(keys("page"), soon()) == [MISS]
    put_all(ours, keys("page"), [b"value"])
    assert read_all(theirs, keys("page")) == {0: b"value"}


def test_each_process_of_a_host_has_a_folder_and_leaves_it_to_the_next(
    root: Path, open_store: Open
) -> None:
    stores = [open_store() for _ in range(3)]
    for at, store in enumerate(stores):
        put_all(store, keys(f"page {at}"), [b"value"])
    folders = set(root.iterdir())
    assert len(folders) == 3
    stores[1].close()
    again = open_store()
    assert again.exists(keys("page 1"), soon()) == [HIT]
    put_all(again, keys("page 3"), [b"value"])
    assert set(root.iterdir()) == folders
    assert stores[0].exists(keys("page 1", "page 3"), soon()) == [HIT, HIT]


def test_a_process_that_wrote_nothing_leaves_nothing(root: Path, open_store: Open) -> None:
    store = open_store()
    store.check(soon())
    store.close()
    assert not list(root.iterdir())


def test_deleting_other_writers_values_only_forgets_them(open_store: Open) -> None:
    ours, theirs = open_store(), open_store()
    put_all(theirs, keys("page"), [b"value"])
    assert ours.exists(keys("page"), soon()) == [HIT]
    assert ours.delete(keys("page"), soon())
    assert ours.exists(keys("page"), soon()) == [MISS]
    assert theirs.exists(keys("page"), soon()) == [HIT]


def test_a_reader_follows_a_rewritten_index(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_folder, "MOST_STALE", 10)
    ours, theirs = open_store(), open_store()
    for at in range(60):
        put_all(ours, keys("changing", f"page {at}"), [b"%d" % at] * 2)
        assert theirs.exists(keys("changing"), soon()) == [HIT]
        assert read_all(theirs, keys("changing")) == {0: b"%d" % at}
        ours.delete(keys(f"page {at - 1}"), soon())
    assert theirs.exists(keys("page 57", "page 58", "page 59"), soon()) == [MISS, MISS, HIT]


def test_without_time_left_the_next_poll_continues(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = [open_store() for _ in range(4)]
    for at, store in enumerate(writers):
        put_all(store, keys(f"page {at}"), [b"value"])
    reader, wanted = open_store(), keys(*(f"page {at}" for at in range(4)))
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    seen = []
    for _ in range(4):
        now = next(clock)
        seen.append(reader.exists(wanted, now + 5).count(HIT))
    assert seen == sorted(seen)
    assert seen[0] < seen[-1] == 4


# -- space --------------------------------------------------------------------------


def test_the_oldest_values_are_deleted_when_a_folder_is_full(root: Path, open_store: Open) -> None:
    ours, theirs = open_store(most_bytes=800_000), open_store()
    wanted = some_keys(60)
    for at, key in enumerate(wanted):
        put_all(ours, [key], [bytes([at]) * 40_000])
        assert sum(path.stat().st_size for path in pack_files(root)) <= 800_000
    found = theirs.exists(wanted, soon())
    assert found == sorted(found, key=lambda one: one is HIT), "the oldest"
    assert 10 <= found.count(HIT) <= 20
    assert read_all(theirs, wanted[-10:]) == {at: bytes([50 + at]) * 40_000 for at in range(10)}
    assert ours.put([(keys("big")[0], [bytes(800_001)])], soon()) == [Outcome.REFUSED]


def test_a_tenth_of_the_file_system_stays_free_and_dead_writers_values_go_first(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_folder, "LOOK_FOR_GONE_S", 0.0)
    # Locks are not visible on other hosts.
    monkeypatch.setattr(own_folder, "is_locked", lambda _: False)
    gone, idle, ours = open_store(), open_store(), open_store()
    for at, store in enumerate((gone, idle, ours)):
        put_all(store, keys(f"page {at}"), [bytes(100_000)])
    (root / "notes.txt").write_text("of somebody else")
    folders = sorted(path for path in root.iterdir() if (path / "lock").exists())
    theirs = root / "folder of somebody else"
    theirs.mkdir()
    for name in ("lock", INDEX_NAME, "00000001.pack"):
        (theirs / name).write_bytes(b"of theirs")
    long_ago = time.time() - 2 * own_folder.GONE_S
    for folder in (folders[0], theirs):
        os.utime(folder / "lock", (long_ago, long_ago))

    def statvfs(path: Path) -> os.statvfs_result:
        used = sum(file.stat().st_size for file in pack_files(root))
        free = 1000 - used // 1000
        return os.statvfs_result((1000, 1000, 1000, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    more = some_keys(20)
    for key in more[:5]:
        put_all(ours, [key], [bytes(140_000)])
    assert not folders[0].exists()
    assert folders[1].exists()
    assert (root / "notes.txt").exists()
    assert len(list(theirs.iterdir())) == 3
    assert ours.exists([*keys("page 0", "page 1", "page 2"), *more[:5]], soon()) == [
        MISS,
        HIT,
        HIT,
        *[HIT] * 5,
    ]
    put_all(ours, more[5:7], [bytes(140_000)] * 2)
    assert statvfs(root).f_bavail >= 100
    put_all(gone, keys("page 0"), [b"back again"])
    assert read_all(ours, keys("page 0")) == {0: b"back again"}


def test_on_a_full_disk_earlier_values_are_still_found(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    ours, theirs = open_store(), open_store()
    put_all(ours, keys("before"), [b"value"])
    failures = failing(monkeypatch, "pwrite", errno.ENOSPC)
    assert ours.put([(keys("page")[0], [b"value"])], soon()) == [Outcome.REFUSED]
    failures.clear()
    put_all(ours, keys("after"), [b"value"])
    assert theirs.exists(keys("before", "page", "after"), soon()) == [HIT, MISS, HIT]


# -- failures -----------------------------------------------------------------------


def test_a_torn_index_hides_no_later_entries(root: Path, open_store: Open) -> None:
    ours, theirs = open_store(), open_store()
    put_all(ours, keys("first"), [b"value"])
    (index,) = root.glob(f"*/{INDEX_NAME}")
    whole = index.read_bytes()
    index.write_bytes(whole + b"half an entry")
    assert theirs.exists(keys("first"), soon()) == [HIT]
    put_all(ours, keys("second"), [b"value"])
    assert theirs.exists(keys("first", "second"), soon()) == [HIT, HIT]
    ours.close()
    index.write_bytes(whole[:-1])
    again = open_store()
    assert again.exists(keys("first"), soon()) == [MISS]
    put_all(again, keys("third"), [b"value"])
    assert theirs.exists(keys("third"), soon()) == [HIT]


def test_an_index_that_could_not_be_written_is_rewritten(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    ours, theirs = open_store(), open_store()
    put_all(ours, keys("first"), [b"value"])
    real, torn = os.pwrite, [True]

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if torn and Path(f"/proc/self/fd/{fd}").readlink().name == INDEX_NAME:
            torn.clear()
            real(fd, data[: len(data) // 2], offset)
            raise OSError(errno.EIO, "injected")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert ours.put([(keys("second")[0], [b"value"])], soon()) == [Outcome.DOWN]
    assert theirs.exists(keys("first", "second"), soon()) == [HIT, MISS]
    put_all(ours, keys("third"), [b"value"])
    assert theirs.exists(keys("first", "third"), soon()) == [HIT, HIT]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_pack_deleted_meanwhile_is_a_miss(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ours, theirs, wanted = open_store(), open_store(), some_keys(4)
    put_all(ours, wanted, [b"value"] * 4)
    assert theirs.exists(wanted, soon()) == [HIT] * 4
    if number == errno.ENOENT:
        (pack,) = pack_files(root)
        pack.unlink()
    else:
        failing(monkeypatch, "preadv", number)
    assert read_all(theirs, wanted) == dict.fromkeys(range(4), MISS)
    assert theirs.exists(wanted, soon()) == [MISS] * 4


def test_a_value_that_is_cut_short_is_a_miss(root: Path, open_store: Open) -> None:
    ours, theirs = open_store(), open_store()
    put_all(ours, keys("one", "two"), [b"a" * 1000] * 2)
    (pack,) = pack_files(root)
    os.truncate(pack, 1500)
    assert read_all(theirs, keys("one", "two")) == {0: b"a" * 1000, 1: MISS}


def test_packs_that_a_power_cut_shortened_are_left_out(root: Path, open_store: Open) -> None:
    ours = open_store()
    put_all(ours, keys("one", "two"), [b"a" * 1000] * 2)
    ours.close()
    (pack,) = pack_files(root)
    os.truncate(pack, 1500)
    again = open_store()
    put_all(again, keys("three"), [b"value"])
    assert again.exists(keys("two", "three"), soon()) == [MISS, HIT]


def test_a_failing_disk_is_paused_and_then_used_again(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = open_store(), open_store()
    put_all(ours, keys("page"), [b"value"])
    assert theirs.exists(keys("page"), soon()) == [HIT]
    failures = failing(monkeypatch, "preadv", errno.EIO)
    assert read_all(theirs, keys("page")) == {0: Outcome.DOWN}
    failures.clear()
    assert theirs.exists(keys("page"), soon()) == [Outcome.DOWN], "it is left alone for a while"
    until = time.monotonic() + 60.0
    while read_all(theirs, keys("page")) != {0: b"value"}:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_missing_root_is_down_and_not_created(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    root.rmdir()
    store, down = open_store(), Outcome.DOWN
    assert store.exists(keys("page"), soon()) == [down]
    assert store.put([(keys("page")[0], [b"x"])], soon()) == [down]
    assert read_all(store, keys("page")) == {0: down}
    assert not store.delete(keys("page"), soon())
    with pytest.raises(FileNotFoundError):
        store.check(soon())
    assert not root.exists()
    root.mkdir()
    put_all(store, keys("page"), [b"value"])
    assert read_all(store, keys("page")) == {0: b"value"}


def test_a_process_that_lost_its_folder_starts_another(root: Path, open_store: Open) -> None:
    store, other = open_store(), open_store()
    put_all(store, keys("page"), [b"value"])
    (folder,) = (path for path in root.iterdir() if (path / INDEX_NAME).exists())
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    put_all(store, keys("more"), [b"value"])
    assert other.exists(keys("page", "more"), soon()) == [MISS, HIT]


def test_foreign_folders_are_ignored(root: Path, open_store: Open) -> None:
    (root / "file").write_bytes(b"x")
    (root / "empty").mkdir()
    for name, content in (("newer", b"tkvindx\0" + b"\2" * 24), ("strange", b"#!/bin/sh")):
        (root / name).mkdir()
        (root / name / INDEX_NAME).write_bytes(content)
    (root / "link").symlink_to(root / "newer")
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / INDEX_NAME)
    ours, theirs = open_store(), open_store()
    put_all(ours, keys("page"), [b"value"])
    assert theirs.exists(keys("page"), soon()) == [HIT]
