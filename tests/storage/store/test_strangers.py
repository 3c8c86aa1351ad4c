"""Foreign files under a root folder are not read, followed, counted or deleted."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.raw import RawCodec
from tiered_kv.storage.disk.files import FileLayer, RealFiles
from tiered_kv.storage.store.locks import StoreError
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.segment_store import store_options

LEAST = store_options(Path(), capacity_bytes=0).segment_bytes
OTHER = bytes(16)
Opener = Callable[..., SegmentStore]


@pytest.fixture
def open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Return a function that opens a store of six segments under ``root``."""
    monkeypatch.setattr("tiered_kv.storage.store.capacity.FRESH_S", -1.0)
    opened: list[SegmentStore] = []

    def open_store(files: FileLayer | None = None, **changes: object) -> SegmentStore:
        options = options_of(tmp_path, **changes)
        codec = RawCodec(options.page_format)
        opened.append(SegmentStore(options, codec, lambda i, t, f: RawCodec(f), files))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def options_of(folder: Path, **changes: object) -> StoreOptions:
    changes = {"capacity_bytes": 6 * LEAST, **changes}
    return replace(store_options(folder / "root"), **changes)  # type: ignore[arg-type]


def put(store: SegmentStore, *names: int) -> int:
    """Put pages, and return how many were stored."""
    keys = [page_key(name) for name in names]
    return len(keys) - len(store.put([(key, page_bytes(key)) for key in keys]))


def found_in(store: SegmentStore) -> set[int]:
    """Return the names of the pages found. Asserts that all of them have the correct bytes."""
    keys = store.keys()
    wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in keys]
    assert store.get(wanted) == frozenset()
    assert all(np.array_equal(out, page_bytes(key)) for key, out in wanted)
    return {int.from_bytes(key[16:], "big") for key in keys}


def fill(store: SegmentStore, puts: int) -> int:
    """Put pages, freeing space as needed. Returns the number of stored pages."""
    stored = 0
    for first in range(0, 8 * puts, 8):
        stored += put(store, *range(first, first + 8))
        while (proposal := store.proposal()) is not None:
            store.reclaim(proposal.segment, ())
    return stored


def dead_store(open_store: Opener, root: Path, fingerprint: bytes = OTHER) -> Path:
    """Create a closed store that fills most of its capacity, and return its folder."""
    store = open_store(root=root, fingerprint=fingerprint)
    for name in range(0, 64, 8):
        put(store, *range(name, name + 8))
    store.close()
    assert len(list(store.options.folder.glob("*.seg"))) >= 3
    return store.options.folder


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- freeing space -----------------------------------------------------------------------


def test_freeing_space_deletes_only_segments_of_stores(open_store: Opener, tmp_path: Path) -> None:
    root = tmp_path / "root"
    dead = dead_store(open_store, root)
    strangers = {
        root / "backups" / "2024" / "lock": b"",
        root / "backups" / "2024" / "00000001.seg": b"x" * 4 * LEAST,
        root / ("ab" * 16) / "notes" / "lock": b"",
        root / ("ab" * 16) / "notes" / "00000001.seg": b"x" * LEAST,
        dead / "00000000.seg": b"a film, not a segment" * 5000,
        dead / "film.seg": b"another" * 20_000,
        dead / "notes.txt": b"mine",
    }
    for path, content in strangers.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (dead / "00000099.seg").mkdir()
    os.utime(dead / "lock", (1e9, 1e9))

    store = open_store()
    assert fill(store, 40) == 40 * 8

    assert {path: path.read_bytes() for path in strangers} == strangers
    assert (dead / "00000099.seg").is_dir()
    assert not (dead / "00000001.seg").exists()


@pytest.mark.parametrize("linked", ["fingerprint", "place", "segment"])
def test_freeing_space_follows_no_link(open_store: Opener, tmp_path: Path, linked: str) -> None:
    """A link under the root points to a store elsewhere. Freeing space deletes segments under the
    root, but neither the link nor any file elsewhere."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    outside = dead_store(open_store, elsewhere)
    mine = dead_store(open_store, root, fingerprint=bytes(15) + b"\1")
    before = everything(elsewhere)
    if linked == "fingerprint":
        (root / outside.parent.name).symlink_to(outside.parent)
    elif linked == "place":
        (root / outside.parent.name).mkdir()
        (root / outside.parent.name / "0-0").symlink_to(outside)
    else:
        (mine / "00000000.seg").symlink_to(next(outside.glob("*.seg")))
    links = [path for path in root.rglob("*") if path.is_symlink()]

    store = open_store()
    assert fill(store, 40) == 40 * 8

    assert everything(elsewhere) == before
    assert all(path.is_symlink() for path in links)
    assert not (mine / "00000001.seg").exists()


def test_an_undeletable_file_takes_space_and_blocks_nothing(
    open_store: Opener, tmp_path: Path
) -> None:
    dead = dead_store(open_store, tmp_path / "root")
    for path in dead.glob("*.seg"):
        path.write_bytes(b"no segment" * (LEAST // 10))
    store = open_store()
    assert fill(store, 30) > 15 * 8
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.seg")) <= 6 * LEAST


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Simulate a folder with mode 000, because root may access such a folder."""

    def refusing(name: str) -> None:
        asked = getattr(os, name)

        def ask(path: object = ".", *arguments: object, **options: object) -> object:
            if not isinstance(path, int):
                named = Path(os.fsdecode(path))  # type: ignore[arg-type]
                lists = named == folder and name in ("scandir", "listdir")
                if lists or named.parent == folder:
                    raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return asked(path, *arguments, **options)

        monkeypatch.setattr(os, name, ask)

    for name in ("stat", "lstat", "scandir", "listdir", "open"):
        refusing(name)


def test_an_inaccessible_folder_does_not_lift_the_limit(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    beside = store.options.folder.with_name("0-1")
    beside.mkdir()
    forbid(monkeypatch, beside)
    refused = 0
    for first in range(0, 400, 8):
        refused += 8 - put(store, *range(first, first + 8))
    folder = store.options.folder
    used = sum((folder / name).stat().st_size for name in RealFiles().names(folder))
    assert refused > 0
    assert store.proposal() is not None
    assert used <= store.options.capacity_bytes


# -- locks ------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", ["lock", "capacity.lock"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "socket"])
def test_a_lock_that_is_not_a_regular_file_is_refused_in_one_sentence(
    open_store: Opener, tmp_path: Path, kind: str, lock: str
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("what must stay")
    folder = options_of(tmp_path).folder
    folder.mkdir(parents=True)
    path = folder / "lock" if lock == "lock" else tmp_path / "root" / lock
    make_odd(path, kind, precious)
    with pytest.raises(StoreError, match=f"{path} is not a regular file: remove it"):
        open_store()
    assert precious.read_text() == "what must stay"
    assert not (tmp_path / "nowhere").exists()
    path.rmdir() if kind == "folder" else path.unlink()
    assert put(open_store(), 1) == 1


def make_odd(path: Path, kind: str, precious: Path) -> None:
    if kind == "link":
        path.symlink_to(precious)
    elif kind == "dangling":
        path.symlink_to(precious.with_name("nowhere"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "itself":
        path.symlink_to(path.name)
    else:
        here = Path.cwd()
        # A socket's path may have about a hundred bytes.
        with socket.socket(socket.AF_UNIX) as bound:
            os.chdir(path.parent)
            try:
                bound.bind(path.name)
            finally:
                os.chdir(here)


def test_a_lock_with_a_second_hard_link_does_not_change_that_file(
    open_store: Opener, tmp_path: Path
) -> None:
    """A store's lock has a second hard link, as in a backup or as a trap. The store opens and locks
    its folder, and the other file does not change."""
    store = open_store()
    put(store, 1)
    store.close()
    kept = tmp_path / "kept"
    kept.write_text("what must stay")
    lock = store.options.folder / "lock"
    lock.unlink()
    lock.hardlink_to(kept)
    store = open_store()
    assert found_in(store) == {1}
    assert put(store, 2) == 1
    assert kept.read_text() == "what must stay"
    assert json.loads(lock.read_text())["pid"] == os.getpid()
    with pytest.raises(StoreError, match="in use by process"):
        open_store()


# -- files named like segments -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "socket", "itself"])
def test_only_regular_files_are_segments(open_store: Opener, tmp_path: Path, kind: str) -> None:
    """A path that is named like a segment is not a regular file. The store opens with all its
    pages, stores new pages, and does not change the path or what it links to."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"what must stay")
    store = open_store()
    put(store, 1, 2, 3)
    store.close()
    odd = store.options.folder / "00000002.seg"
    make_odd(odd, kind, precious)
    store = open_store()
    assert found_in(store) == {1, 2, 3}
    assert store.stats.segments_bad == 0
    assert put(store, 4, 5) == 2
    store.close()
    store = open_store()
    assert found_in(store) == {1, 2, 3, 4, 5}
    store.clear()
    assert odd.lstat()
    assert precious.read_bytes() == b"what must stay"


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_a_store_whose_lock_is_not_a_regular_file_blocks_no_other(
    open_store: Opener, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "root" / ("ff" * 16) / "0-0"
    folder.mkdir(parents=True)
    make_odd(folder / "lock", kind, tmp_path / "precious")
    store = open_store()
    assert fill(store, 20) == 20 * 8


@pytest.mark.parametrize("number", [99_999_999, 99_999_998, 90_000_001])
@pytest.mark.parametrize("kind", ["junk", "pipe"])
def test_a_number_at_the_end_of_the_range_hides_no_later_segment(
    open_store: Opener, tmp_path: Path, number: int, kind: str
) -> None:
    store = open_store()
    put(store, *range(10))
    store.close()
    odd = store.options.folder / f"{number}.seg"
    if kind == "junk":
        odd.write_bytes(b"junk" * 5000)
    else:
        os.mkfifo(odd)
    for first in (10, 20, 30):
        store = open_store()
        assert found_in(store) == set(range(first))
        assert put(store, *range(first, first + 10)) == 10
        store.close()
    assert found_in(open_store()) == set(range(40))


def test_a_store_without_segment_numbers_left_is_cleared(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store whose segment numbers are nearly used up is cleared when it is opened, and numbers
    its segments from 1 again."""
    monkeypatch.setattr("tiered_kv.storage.store.segment_lifecycle.NEARLY_LAST_NUMBER", 3)
    monkeypatch.setattr("tiered_kv.storage.store.recovery.NEARLY_LAST_NUMBER", 3)
    store = open_store()
    for first in (0, 20, 40):
        put(store, *range(first, first + 20))
    store.close()
    assert (store.options.folder / "00000004.seg").exists()
    store = open_store()
    assert found_in(store) == set()
    assert put(store, *range(20)) == 20
    store.close()
    assert sorted(path.name for path in store.options.folder.glob("*.seg"))[0] == "00000001.seg"
    assert found_in(open_store()) == set(range(20))


def test_no_segment_is_created_after_the_last_number(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.storage.store.segment_lifecycle.LAST_NUMBER", 1)
    store = open_store()
    assert put(store, *range(20)) < 20
    assert [path.name for path in store.options.folder.glob("*.seg")] == ["00000001.seg"]
    assert store.stats.write_errors > 0
