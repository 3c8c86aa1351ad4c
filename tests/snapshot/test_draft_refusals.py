"""Drafts: anything invalid is refused with one sentence, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.snapshot.made_snapshots import (
    BF16,
    GROUPS,
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
from tiered_kv.snapshot.manifest import Manifest, SnapshotError
from tiered_kv.snapshot.rank_writer import PageWriter
from tiered_kv.snapshot.reader import find_snapshot, open_snapshot


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "../a", "/a", "-a", "a b", "ä", "a\n", "a\0", "x" * 101,
     "a.zip", "a.ZIP"],
)  # fmt: skip
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SnapshotError, match="is not a valid snapshot name"):
        SnapshotDraft.begin(tmp_path, name)
    with pytest.raises(SnapshotError, match="is not a valid snapshot name"):
        find_snapshot(tmp_path, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a", "7", "A.b_c-d", "x" * 100, "a.zip.b"])
def test_a_good_name_is_accepted(tmp_path: Path, name: str) -> None:
    make(tmp_path, name, ONE)
    assert find_snapshot(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("taken", ["folder", "empty", "file", "zip", "dangling"])
def test_a_name_that_is_taken_is_refused_at_both_ends(tmp_path: Path, taken: str) -> None:
    def take() -> None:
        match taken:
            case "folder":
                make(tmp_path, "one", ONE)
            case "empty":
                (tmp_path / "one").mkdir()
            case "file":
                (tmp_path / "one").write_text("mine")
            case "zip":
                (tmp_path / "one.zip").write_text("mine")
            case _:
                (tmp_path / "one").symlink_to("nowhere")

    with SnapshotDraft.begin(tmp_path, "one") as draft:
        written(draft.folder).finish()
        take()
        with pytest.raises(SnapshotError, match="already"):
            draft.seal(ONE)
    assert not drafts(tmp_path)
    with pytest.raises(SnapshotError, match="already"):
        SnapshotDraft.begin(tmp_path, "one")
    if taken == "folder":
        with open_snapshot(tmp_path / "one") as snapshot:
            check_whole(snapshot)


def test_an_unwritable_root_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SnapshotError, match="must be a writable folder"):
            SnapshotDraft.begin(root, "one")


def seal_refusal(draft: SnapshotDraft, manifest: Manifest) -> str:
    with pytest.raises(SnapshotError) as caught:
        draft.seal(manifest)
    draft.abandon()
    return str(caught.value)


def test_an_unfinished_rank_delays_nothing(tmp_path: Path) -> None:
    manifest = outline(PLAIN, ranks=2)
    draft = SnapshotDraft.begin(tmp_path, "one")
    written(draft.folder, manifest, 0).finish()
    written(draft.folder, manifest, 1)
    assert "rank 1 has not finished" in seal_refusal(draft, manifest)


def test_a_rank_too_many_is_refused(tmp_path: Path) -> None:
    draft = SnapshotDraft.begin(tmp_path, "one")
    for rank in range(2):
        written(draft.folder, outline(PLAIN, ranks=2), rank).finish()
    assert "rank 1" in seal_refusal(draft, ONE)


@pytest.mark.parametrize(
    "change", ["a page less", "a page more", "another key", "a group too many", "a block too far"]
)
def test_parts_that_disagree_are_refused(tmp_path: Path, change: str) -> None:
    manifest = outline(PLAIN, ranks=2)
    draft = SnapshotDraft.begin(tmp_path, "one")
    written(draft.folder, manifest, 0).finish()
    writer = PageWriter(draft.folder, 1)
    blocks = {"a page less": [0, 1], "a page more": [0, 1, 2, 3]}.get(change, [0, 1, 2])
    for block in blocks:
        key = b"another" if change == "another key" else key_of(0, block)
        writer.add(0, block, key, PLAIN[0].page_format, page_of(PLAIN[0], block, 1))
    if change == "a group too many":
        writer.add(1, 0, b"key", PLAIN[0].page_format, page_of(PLAIN[0], 0, 1))
    if change == "a block too far":
        writer.add(0, 7, b"key", PLAIN[0].page_format, page_of(PLAIN[0], 0, 1))
    writer.finish()
    assert seal_refusal(draft, manifest)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("harm", ["part", "cut page", "no page", "other rank", "no JSON", "rows"])
def test_a_draft_that_was_tampered_with_is_refused(tmp_path: Path, harm: str) -> None:
    draft = SnapshotDraft.begin(tmp_path, "one")
    written(draft.folder).finish()
    part, page = draft.folder / "part-0.json", next((draft.folder / "pages").iterdir())
    match harm:
        case "part":
            part.write_text(part.read_text().replace('"rank":0', '"rank":9999'))
        case "other rank":
            part.write_text(part.read_text().replace('"rank":0', '"rank":1'))
        case "no JSON":
            part.write_text("{")
        case "rows":
            part.write_text('{"rank": 0, "pages": [5], "files": []}')
        case "cut page":
            page.write_bytes(page.read_bytes()[:-5])
        case _:
            page.unlink()
    assert seal_refusal(draft, ONE)
    assert not (tmp_path / "one").exists()


def test_leftovers_of_writers_do_not_get_into_the_snapshot(tmp_path: Path) -> None:
    with SnapshotDraft.begin(tmp_path, "one") as draft:
        written(draft.folder).finish()
        (draft.folder / "page-0-99").write_text("torn")
        (draft.folder / "pages" / ("ab" * 32)).write_text("of a rank that restarted")
        draft.seal(ONE)
    assert len(page_files(tmp_path, "one")) == 3
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"manifest.json", "pages"}


def test_a_writer_refuses_invalid_pages(tmp_path: Path) -> None:
    page = page_of(GROUPS[0], 0, 0)
    with SnapshotDraft.begin(tmp_path, "one") as draft:
        writer = PageWriter(draft.folder, 0)
        writer.add(0, 0, b"key", BF16, page)
        with pytest.raises(SnapshotError, match="twice"):
            writer.add(0, 0, b"key", BF16, page)
        with pytest.raises(SnapshotError, match="2048"):
            writer.add(0, 1, b"key", BF16, page[:-1])
        writer.finish()
        with pytest.raises(SnapshotError, match="finished"):
            writer.add(0, 1, b"key", BF16, page)
        with pytest.raises(SnapshotError, match="finished"):
            writer.finish()


def test_a_writer_that_lost_a_page_does_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with SnapshotDraft.begin(tmp_path, "one") as draft:
        writer = PageWriter(draft.folder, 0)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(SnapshotError, match="No space left on device"):
                writer.add(0, 0, b"key", BF16, page_of(GROUPS[0], 0, 0))
        writer.add(0, 1, b"key", BF16, page_of(GROUPS[0], 0, 0))  # the same bytes
        with pytest.raises(SnapshotError, match="could not write all"):
            writer.finish()


def test_partial_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, part: write(fd, part[:100]))
    make(tmp_path, "one")
    with open_snapshot(tmp_path / "one") as snapshot:
        check_whole(snapshot)
