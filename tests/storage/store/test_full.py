"""If the disk is full before a store reaches its capacity, the store only holds fewer pages."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import FileLayer, RealFiles
from tiered_kv.storage.io_thread import IoThread
from tiered_kv.storage.store.locks import StoreBusyError, StoreError
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import FaultyFiles, SmallDisk, UnsafeFiles
from tiered_kv.testing.segment_store import store_options

LEAST = store_options(Path(), capacity_bytes=0).segment_bytes
CAPACITY = 16 * LEAST


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.storage.store.capacity.FRESH_S", -1.0)


LIVES: list[Life] = []


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    yield
    while LIVES:
        LIVES.pop().store.close()


@dataclass
class Life:
    """A store and the pages that it must have, with methods that put pages and reclaim proposed
    segments."""

    options: StoreOptions
    files: FileLayer
    stored: dict[PageKey, Bytes] = field(default_factory=dict)
    next_name: int = 0
    store: SegmentStore = field(init=False)

    def __post_init__(self) -> None:
        self.open()
        LIVES.append(self)

    def open(self) -> None:
        self.store = SegmentStore(
            self.options, RawCodec(PAGE_FORMAT), lambda i, t, f: RawCodec(f), self.files
        )

    def put(self, count: int = 8) -> int:
        """Put new pages, and return how many were stored."""
        keys = [page_key(self.next_name + i) for i in range(count)]
        self.next_name += count
        pages = [(key, page_bytes(key)) for key in keys]
        failed = self.store.put(pages)
        self.stored.update(page for i, page in enumerate(pages) if i not in failed)
        return count - len(failed)

    def make_room(self, survivors: int = 2) -> int:
        """Reclaim segments while any is proposed, and return the number of lost survivors."""
        lost = 0
        while (proposal := self.store.proposal()) is not None:
            kept = proposal.keys[:survivors]
            for key in self.store.reclaim(proposal.segment, kept):
                del self.stored[key]
                lost += key in kept
        return lost

    def go_on(self, puts: int, survivors: int = 2) -> tuple[int, int]:
        """Put pages and reclaim segments. Returns the numbers of stored pages and of lost
        survivors."""
        stored = lost = 0
        for _ in range(puts):
            stored += self.put()
            lost += self.make_room(survivors)
        return stored, lost

    def check(self) -> None:
        """Assert that every stored page exists and has the correct bytes."""
        assert set(self.store.keys()) == set(self.stored)
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in self.stored]
        assert self.store.get(wanted) == frozenset()
        for key, out in wanted:
            assert np.array_equal(out, self.stored[key]), "a wrong page"

    def check_restart(self) -> None:
        self.store.close()
        self.open()
        missing = self.stored.keys() - set(self.store.keys())
        assert not missing, "durable pages are lost"
        found = self.store.keys()  # dropped pages may exist again
        self.stored = {key: page_bytes(key) for key in found}
        self.check()


def small_life(root: Path, segments: float, *, tells: bool = True, **changes: object) -> Life:
    options = store_options(root, **{"capacity_bytes": CAPACITY, **changes})
    return Life(options, SmallDisk(root, int(segments * LEAST), tells=tells, inner=UnsafeFiles()))


def used(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.seg"))


@pytest.mark.parametrize("segments", [5.5, 8, 12])
def test_a_disk_smaller_than_the_capacity_is_a_smaller_capacity(
    tmp_path: Path, segments: float, caplog: pytest.LogCaptureFixture
) -> None:
    """On a disk smaller than the capacity, all new pages are stored, all survivors of reclaims are
    kept, and no warning is logged."""
    life = small_life(tmp_path, segments)
    stored, lost = life.go_on(80)
    assert (stored, lost) == (80 * 8, 0)
    assert life.store.stats.write_errors == 0
    assert used(tmp_path) > (segments / 2 - 1) * LEAST
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    life.check()
    life.check_restart()


@pytest.mark.parametrize("segments", [2.2, 5.5, 8])
def test_an_unreported_quota_is_a_smaller_capacity(
    tmp_path: Path, segments: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A quota that the disk does not report is detected by failed writes. More than half of the
    pages are stored, and one warning is logged."""
    life = small_life(tmp_path, segments, tells=False)
    stored, _ = life.go_on(80)
    assert stored > 80 * 8 * 0.5
    assert life.store.stats.write_errors > 3
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    life.check()
    life.check_restart()


@pytest.mark.parametrize("tells", [True, False])
def test_a_disk_that_others_fill_accepts_pages_while_it_has_space(
    tmp_path: Path, tells: bool
) -> None:
    life = small_life(tmp_path, 16, tells=tells)
    life.go_on(40)
    disk = life.files
    assert isinstance(disk, SmallDisk)
    before = used(tmp_path)
    disk.nbytes = before // 2  # other programs have used the rest
    life.go_on(20)
    assert used(tmp_path) <= before // 2
    stored, _ = life.go_on(20)
    assert stored > 20 * 8 * 0.5
    life.check()

    disk.nbytes = 100 * CAPACITY  # the other programs have deleted their files
    stored, _ = life.go_on(60)
    assert stored >= 59 * 8
    assert used(tmp_path) > 11 * LEAST, "all of its share but what is kept free"
    life.check()
    life.check_restart()


@pytest.mark.parametrize("tells", [True, False])
def test_on_a_full_disk_unused_stores_are_deleted_first(tmp_path: Path, tells: bool) -> None:
    """The pages of an earlier model fill the disk. The store of the new model deletes some of their
    segments, and stores all its pages."""
    old = small_life(tmp_path, 6, tells=tells, fingerprint=bytes(16))
    while old.put() == 8:
        pass
    old.store.close()
    segments = len(list(old.options.folder.glob("*.seg")))
    assert segments >= 4
    new = small_life(tmp_path, 6, tells=tells)
    stored, _ = new.go_on(8)
    assert stored == 8 * 8
    assert len(list(old.options.folder.glob("*.seg"))) < segments
    new.check()


def test_on_a_full_disk_the_largest_store_yields_space_to_a_new_one(tmp_path: Path) -> None:
    old = small_life(tmp_path, 8, rank=0, ranks=2)
    old.go_on(60)
    new = small_life(tmp_path, 8, rank=1, ranks=2)
    for _ in range(20):
        old.go_on(2)
        new.go_on(2)
    shares = [used(life.options.folder) for life in (old, new)]
    assert min(shares) >= LEAST
    assert new.go_on(10)[0] == old.go_on(10)[0] == 80
    for life in (old, new):
        life.check()


def test_a_disk_smaller_than_a_usual_segment_has_smaller_ones(tmp_path: Path) -> None:
    options = store_options(tmp_path, capacity_bytes=64 << 20)
    disk = SmallDisk(tmp_path, options.segment_bytes * 3 // 4, inner=UnsafeFiles())
    life = Life(options, disk)
    assert life.store.group_bytes < options.segment_bytes // 4
    stored, lost = life.go_on(60)
    assert (stored, lost) == (60 * 8, 0)
    life.check()


def test_a_disk_with_space_for_one_segment_fills_it(tmp_path: Path) -> None:
    """On a disk with space for one segment, the segment is proposed for deletion only once it
    accepts no more pages."""
    life = small_life(tmp_path, 1.5)
    assert life.put() == 8
    assert life.store.proposal() is None
    assert life.put() == 8
    while life.put(1):
        pass
    assert life.store.proposal() is not None
    life.check()


def test_groups_are_as_small_as_the_segments_that_they_go_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The I/O thread puts pages in groups that fit into one segment. The deletion of one segment
    would not make space for a larger group."""
    options = store_options(tmp_path, capacity_bytes=64 << 20)
    life = Life(options, SmallDisk(tmp_path, 12 * LEAST, inner=UnsafeFiles()))
    groups: list[int] = []
    put = life.store.put

    def noted(pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        groups.append(len(pages))
        return put(pages)

    monkeypatch.setattr(life.store, "put", noted)
    io = IoThread(life.store, np.zeros((300, PAGE_FORMAT.page_bytes), np.uint8))
    io.close([(page_key(slot), slot) for slot in range(300)], 60.0)
    assert max(groups) <= LEAST // PAGE_FORMAT.page_bytes < 300


class FullUntilDeleted(FaultyFiles):
    """A full disk: once an operation has found no space, all operations fail until a segment is
    deleted."""

    def __init__(self) -> None:
        super().__init__(UnsafeFiles())

    def unlink(self, path: Path) -> None:
        nbytes = path.stat().st_size if path.exists() else 0
        super().unlink(path)
        if path.suffix == ".seg" and nbytes:
            self.heal()


def short_life(folder: Path, operation: str = "", error: int = 0, after: int = 0) -> Life:
    """Run puts, reclaims, a drop and a restart, on a disk that is full from some call on."""
    files = FullUntilDeleted()
    life = Life(store_options(folder, capacity_bytes=6 * LEAST, io_threads=1), files)
    if operation:
        times = 1 if operation == "unlink" else float("inf")
        files.fail(operation, error, after=after, times=times)
    life.go_on(10)
    first = list(life.stored)[:5]
    life.store.drop(first)
    for key in first:
        del life.stored[key]
    life.check()
    life.check_restart()
    life.go_on(3)
    return life


WRITES = ["create", "preallocate", "pwrite", "fdatasync", "sync_folder", "truncate", "unlink"]


@pytest.mark.parametrize(
    ("operation", "error"),
    [*((one, errno.ENOSPC) for one in WRITES), ("preallocate", errno.EDQUOT)],
)
def test_a_disk_that_was_full_at_any_write_accepts_pages_again(
    tmp_path: Path, operation: str, error: int
) -> None:
    """The disk becomes full at each write operation in turn. Stored pages remain, a reclaim frees
    space, and the store then accepts all pages again."""
    well = short_life(tmp_path / "well")
    assert isinstance(well.files, FaultyFiles)
    calls = well.files.calls[operation]
    well.store.close()
    for after in range(calls):
        life = short_life(tmp_path / f"{after}", operation, error, after)
        life.check()
        if not life.stored:  # nothing was ever stored that could be deleted
            assert isinstance(life.files, FaultyFiles)
            life.files.heal()
        life.go_on(2)
        assert life.go_on(3)[0] == 24
        life.check()
        life.check_restart()
        life.store.close()
    assert calls > 0


def test_a_store_starts_on_a_full_disk_by_replacing_an_unused_store(
    tmp_path: Path,
) -> None:
    """The disk has no space even for the new store's folder. The store deletes the oldest segment
    of an unused store, and then stores all its pages."""
    old = small_life(tmp_path, 12, fingerprint=bytes(16))
    old.go_on(8)
    old.store.close()
    files = FullUntilDeleted()
    files.fail("make_folders", errno.ENOSPC, times=float("inf"))
    new = Life(store_options(tmp_path, capacity_bytes=CAPACITY), files)
    assert new.go_on(3) == (24, 0)
    new.check()
    assert not (old.options.folder / "00000001.seg").exists()
    assert (old.options.folder / "00000002.seg").exists()


def test_if_nothing_can_be_deleted_the_start_is_refused_with_one_sentence(tmp_path: Path) -> None:
    files = FullUntilDeleted()
    files.fail("make_folders", errno.ENOSPC, times=float("inf"))
    tmp_path.joinpath("root").mkdir()
    with pytest.raises(StoreError, match="No space left on device"):
        Life(store_options(tmp_path / "root", capacity_bytes=CAPACITY), files)


def test_a_store_opens_although_its_lock_cannot_name_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = small_life(tmp_path, 12)
    life.go_on(2)
    life.store.close()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        life.open()
    life.check()
    assert life.go_on(2) == (16, 0)
    with pytest.raises(StoreBusyError, match="in use by"):
        life.open()


@pytest.mark.parametrize("operation", ["pwrite", "fdatasync"])
def test_a_disk_without_the_reserved_space_counts_as_full(tmp_path: Path, operation: str) -> None:
    """Writes into reserved space fail, because the file system writes to other blocks. The store
    proposes a segment for deletion, and accepts pages again once the disk has space."""
    files = FaultyFiles(UnsafeFiles())
    life = Life(store_options(tmp_path, capacity_bytes=CAPACITY), files)
    assert life.go_on(5) == (40, 0)
    assert life.store.proposal() is None
    files.fail(operation, errno.ENOSPC, times=float("inf"))
    assert life.put() == 0
    proposal = life.store.proposal()
    assert proposal is not None
    files.heal()  # the space is free again
    assert life.go_on(3)[0] == 24
    assert life.store.proposal() is None
    life.check()


@pytest.mark.parametrize(
    ("blocks", "files", "free"),
    [
        ((100, 7), (10, 3), 7 * 4096),
        ((100, 0), (10, 3), 0),
        ((100, 7), (10, 0), 0),  # no inodes are left
        ((100, 7), (0, 0), 7 * 4096),  # the number of inodes is unlimited
        ((0, 0), (0, 0), sys.maxsize),  # the size is unknown
    ],
)
def test_free_space_of_a_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blocks: tuple[int, int],
    files: tuple[int, int],
    free: int,
) -> None:
    def statvfs(_: Path) -> SimpleNamespace:
        return SimpleNamespace(
            f_blocks=blocks[0],
            f_bavail=blocks[1],
            f_frsize=4096,
            f_files=files[0],
            f_favail=files[1],
        )

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert RealFiles().free(tmp_path) == free
