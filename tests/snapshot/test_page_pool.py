"""Snapshots in one root folder. They share the files of identical pages, and each snapshot stays
complete if the others are removed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.snapshot.made_snapshots import (
    ONE,
    PLAIN,
    check_whole,
    drafts,
    make,
    outline,
    page_files,
    pool_files,
)
from tiered_kv.snapshot.draft import SnapshotDraft
from tiered_kv.snapshot.reader import open_snapshot


def test_two_snapshots_share_the_files_of_pages_that_both_have(tmp_path: Path) -> None:
    first = make(tmp_path, "first", outline(tokens=33))
    second = make(tmp_path, "second", outline(tokens=65))
    shared = {page.sha256 for page in first.pages} & {page.sha256 for page in second.pages}
    assert len(shared) == 6  # two full blocks and a state of each of two ranks
    for digest in shared:
        files = [tmp_path / name / "pages" / digest for name in ("first", "second")]
        assert files[0].samefile(files[1])
        assert files[0].stat().st_nlink == 3
    sizes = {path.name: path.stat().st_size for path in page_files(tmp_path, "second")}
    assert second.shared_bytes == sum(sizes[digest] for digest in shared)
    assert second.stored_bytes == sum(sizes.values())
    assert first.shared_bytes == 0
    taken = {path.stat().st_ino: path.stat().st_size for path in tmp_path.glob("*/pages/*")}
    assert sum(taken.values()) == first.stored_bytes + second.stored_bytes - second.shared_bytes


def test_removing_a_snapshot_does_not_affect_another(tmp_path: Path) -> None:
    make(tmp_path, "first")
    kept = page_files(tmp_path, "first")
    make(tmp_path, "second", outline(tokens=100))
    shutil.rmtree(tmp_path / "second")
    with open_snapshot(tmp_path / "first") as snapshot:
        check_whole(snapshot)
    assert len(pool_files(tmp_path)) > len(kept)
    SnapshotDraft.begin(tmp_path, "third").abandon()
    assert {path.name for path in pool_files(tmp_path)} == {path.name for path in kept}


def test_pages_of_no_snapshot_are_removed(tmp_path: Path) -> None:
    make(tmp_path, "first", ONE)
    shutil.rmtree(tmp_path / "first")
    assert len(pool_files(tmp_path)) == 3
    make(tmp_path, "second", ONE, seed=1)
    assert {path.name for path in pool_files(tmp_path)} == {
        path.name for path in page_files(tmp_path, "second")
    }


def test_only_pages_are_removed(tmp_path: Path) -> None:
    make(tmp_path, "first", ONE)
    (tmp_path / ".pages" / "notes").write_text("mine")
    (tmp_path / ".pages" / "00").mkdir(exist_ok=True)
    (tmp_path / ".pages" / "00" / "notes").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ("ab" * 32)).write_text("mine")
    (tmp_path / ".pages" / "zz").symlink_to(elsewhere)
    SnapshotDraft.begin(tmp_path, "second").abandon()
    assert (tmp_path / ".pages" / "notes").exists()
    assert (tmp_path / ".pages" / "00" / "notes").exists()
    assert (elsewhere / ("ab" * 32)).exists()


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def exchange(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"another")


def symlink(path: Path) -> None:
    aside = path.with_suffix(".aside")
    path.rename(aside)
    path.symlink_to(aside)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [damage, cut, empty, exchange, symlink, folder])
def test_a_damaged_page_is_written_again(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    make(tmp_path, "first", ONE)
    harmed = next(iter(pool_files(tmp_path)))
    harm(harmed)
    made = make(tmp_path, "second", ONE)
    with open_snapshot(tmp_path / "second") as snapshot:
        check_whole(snapshot)
    file = tmp_path / "second" / "pages" / harmed.name
    assert made.shared_bytes == made.stored_bytes - file.stat().st_size
    if harm is not folder:
        assert harmed.samefile(file), "the pool has the good one now"
        assert make(tmp_path, "third", ONE).shared_bytes == made.stored_bytes


@pytest.mark.parametrize("number", [errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
def test_a_page_that_cannot_be_linked_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    make(tmp_path, "first", ONE)
    before = {path: path.stat().st_ino for path in pool_files(tmp_path)}
    link = os.link

    def refused(source: Any, target: Any, **rest: Any) -> None:
        if Path(source) in before:
            raise OSError(number, os.strerror(number))
        link(source, target, **rest)

    monkeypatch.setattr(os, "link", refused)
    made = make(tmp_path, "second", ONE)
    assert made.shared_bytes == 0
    for name in ("first", "second"):
        with open_snapshot(tmp_path / name) as snapshot:
            check_whole(snapshot)
    renewed = all(path.stat().st_ino != inode for path, inode in before.items())
    assert renewed == (number == errno.EMLINK), "a page with room for more names takes its place"


def test_a_root_without_links_holds_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    for name in ("first", "second"):
        make(tmp_path, name, ONE)
        with open_snapshot(tmp_path / name) as snapshot:
            check_whole(snapshot)


def test_many_concurrent_makers_in_one_root_all_succeed(tmp_path: Path) -> None:
    def story(maker: int) -> None:
        for turn in range(8):
            name = f"m{maker}-{turn}"
            make(tmp_path, name, ONE, seed=turn % 3)
            with open_snapshot(tmp_path / name) as snapshot:
                check_whole(snapshot, seed=turn % 3)
            if turn % 2:
                shutil.rmtree(tmp_path / name)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(story, range(4)))
    for maker in range(4):
        for turn in range(0, 8, 2):
            with open_snapshot(tmp_path / f"m{maker}-{turn}") as snapshot:
                check_whole(snapshot, seed=turn % 3)
    assert not drafts(tmp_path)
    digests = {path.name for path in tmp_path.glob("*/pages/*")}
    assert all(path.name == sha(path) for path in pool_files(tmp_path) if path.name in digests)


def sha(path: Path) -> str:
    """Return the digest of the page that is stored uncompressed at the end of a file."""
    return sha256(path.read_bytes()[-PLAIN[0].page_format.page_bytes :]).hexdigest()
