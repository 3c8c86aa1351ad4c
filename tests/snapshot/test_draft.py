"""Drafts: a snapshot is complete or does not exist, and shares pages with other snapshots."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.snapshot.made_snapshots import (
    ONE,
    PLAIN,
    check_whole,
    drafts,
    key_of,
    make,
    outline,
    page_files,
    page_of,
    written,
)
from tiered_kv.snapshot.draft import SnapshotDraft
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.rank_writer import PageWriter
from tiered_kv.snapshot.reader import find_snapshot, open_snapshot

ROOT = Path(__file__).resolve().parents[2]

# -- complete snapshots -------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_snapshot_of_all_ranks_is_what_they_wrote(tmp_path: Path, ranks: int) -> None:
    made = make(tmp_path, "one", outline(ranks=ranks))
    with open_snapshot(find_snapshot(tmp_path, "one")) as snapshot:
        assert snapshot.manifest == made
        check_whole(snapshot)
        sizes = [path.stat().st_size for path in page_files(tmp_path, "one")]
        assert made.stored_bytes == sum(sizes)
        whole = (tmp_path / "one" / "manifest.json").stat().st_size + sum(sizes)
        assert snapshot.nbytes == whole
    assert made.shared_bytes == 0
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"manifest.json", "pages"}
    assert not drafts(tmp_path)


def test_a_snapshot_without_kv_has_no_pages(tmp_path: Path) -> None:
    made = make(tmp_path, "one", replace(outline(), kv_tokens=0))
    assert made.pages == ()
    with open_snapshot(tmp_path / "one") as snapshot:
        check_whole(snapshot)


def test_only_the_owner_can_read_a_snapshot(tmp_path: Path) -> None:
    make(tmp_path / "root", "one", ONE)
    for path in (tmp_path / "root").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_pages_are_written_on_many_threads(tmp_path: Path) -> None:
    manifest = outline(PLAIN, ranks=1, tokens=64 * 16 + 1)
    with SnapshotDraft.begin(tmp_path, "one") as draft:
        writer = PageWriter(draft.folder, 0)
        page_format = PLAIN[0].page_format

        def add(block: int) -> None:  # four blocks each have the same bytes
            page = page_of(PLAIN[0], block % 16, 0)
            writer.add(0, block, key_of(0, block), page_format, page)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(add, range(64)))
        writer.finish()
        made = draft.seal(manifest)
    assert len(made.pages) == 64
    assert len(page_files(tmp_path, "one")) == 16
    with open_snapshot(tmp_path / "one") as snapshot, ThreadPoolExecutor(8) as threads:

        def right(page: Any) -> bool:
            out = np.empty(page_format.page_bytes, np.uint8)
            snapshot.read_page(page, out)
            return np.array_equal(out, page_of(PLAIN[0], page.block % 16, 0))

        assert all(threads.map(right, made.pages))


RANK = """
import sys
from pathlib import Path
from tests.snapshot.made_snapshots import PLAIN, outline, written
written(Path(sys.argv[1]), outline(PLAIN, ranks=2), int(sys.argv[2])).finish()
"""


def test_each_rank_writes_in_a_process_of_its_own(tmp_path: Path) -> None:
    with SnapshotDraft.begin(tmp_path, "one") as draft:
        command = [sys.executable, "-c", RANK, str(draft.folder)]
        ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(2)]
        assert [rank.wait() for rank in ranks] == [0, 0]
        draft.seal(outline(PLAIN, ranks=2))
    with open_snapshot(tmp_path / "one") as snapshot:
        check_whole(snapshot)


def test_ranks_that_hold_the_same_bytes_write_them_once(tmp_path: Path) -> None:
    manifest = outline(PLAIN, ranks=4)
    with SnapshotDraft.begin(tmp_path, "one") as draft:
        for rank in range(4):
            writer = PageWriter(draft.folder, rank)
            for block in range(3):
                page = page_of(PLAIN[0], block, 0)
                writer.add(0, block, key_of(0, block), PLAIN[0].page_format, page)
            writer.finish()
        made = draft.seal(manifest)
    assert len(made.pages) == 12
    assert len(page_files(tmp_path, "one")) == 3
    assert made.shared_bytes == 0
    with open_snapshot(tmp_path / "one") as snapshot:
        snapshot.verify()


def test_files_are_durable_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "zero")
    synced, lock = set[int](), threading.Lock()
    fsync, rename, missing = os.fsync, os.rename, list[str]()

    def noted(fd: int) -> None:
        fsync(fd)
        with lock:
            synced.add(os.fstat(fd).st_ino)

    def renamed(old: Any, new: Any) -> None:
        if Path(new) == tmp_path / "one":
            paths = [Path(old), *Path(old).rglob("*")]
            missing.extend(path.name for path in paths if path.stat().st_ino not in synced)
            synced.clear()
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    make(tmp_path, "one")
    assert missing == ["lock"]
    assert tmp_path.stat().st_ino in synced, "the name is not durable"


# -- drafts -------------------------------------------------------------------------------


def test_a_draft_is_not_a_snapshot(tmp_path: Path) -> None:
    with SnapshotDraft.begin(tmp_path, "one") as draft:
        written(draft.folder).finish()
        assert draft.folder.parent == tmp_path
        with pytest.raises(SnapshotError):
            open_snapshot(draft.folder)
        with pytest.raises(SnapshotError, match="no snapshot one"):
            find_snapshot(tmp_path, "one")
    assert not drafts(tmp_path)


def test_a_draft_is_abandoned_once_and_never_after_it_is_sealed(tmp_path: Path) -> None:
    draft = SnapshotDraft.begin(tmp_path, "one")
    written(draft.folder).finish()
    draft.seal(ONE)
    for _ in range(2):
        draft.abandon()
    assert (tmp_path / "one" / "manifest.json").exists()
    other = SnapshotDraft.begin(tmp_path, "two")
    for _ in range(2):
        other.abandon()
    assert not drafts(tmp_path)


def test_a_dead_draft_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    living = SnapshotDraft.begin(tmp_path, "one")
    dead = tmp_path / f".making-{'0' * 16}"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "pages").mkdir()
    (dead / "pages" / ("ab" * 32)).write_text("torn")
    new = tmp_path / f".making-{'1' * 16}"  # its maker was killed before it had a lock
    new.mkdir()
    file = tmp_path / f".making-{'2' * 16}"
    file.touch()
    other = tmp_path / ".making-notes"
    other.mkdir()
    SnapshotDraft.begin(tmp_path, "two").abandon()
    assert sorted(drafts(tmp_path)) == sorted([living.folder, other])
    written(living.folder).finish()
    living.seal(ONE)


def test_a_lock_left_in_a_snapshot_by_a_killed_maker_is_removed(tmp_path: Path) -> None:
    make(tmp_path, "one", ONE)
    (tmp_path / "one" / "lock").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").touch()
    with open_snapshot(tmp_path / "one") as snapshot:
        check_whole(snapshot)
    SnapshotDraft.begin(tmp_path, "two").abandon()
    assert not (tmp_path / "one" / "lock").exists()
    assert (tmp_path / "other" / "lock").exists(), "a folder of somebody else"


def test_writers_whose_draft_was_swept_get_an_error(tmp_path: Path) -> None:
    draft = SnapshotDraft.begin(tmp_path, "one")
    writer = written(draft.folder)
    draft.abandon()
    with pytest.raises(SnapshotError):
        writer.add(0, 9, b"key", PLAIN[0].page_format, page_of(PLAIN[0], 9, 0))
    with pytest.raises(SnapshotError):
        writer.finish()
    with pytest.raises(SnapshotError):
        draft.seal(ONE)


def test_two_drafts_of_one_name_give_one_snapshot(tmp_path: Path) -> None:
    drafts_of = [SnapshotDraft.begin(tmp_path, "one") for _ in range(2)]
    for seed, draft in enumerate(drafts_of):
        written(draft.folder, seed=seed).finish()
    drafts_of[0].seal(ONE)
    with drafts_of[1], pytest.raises(SnapshotError, match="already"):
        drafts_of[1].seal(ONE)
    assert not drafts(tmp_path)
    with open_snapshot(tmp_path / "one") as snapshot:
        check_whole(snapshot)
