"""``tiered-kv store`` skips an unusual file, names it, and continues with the others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.store_disk import OTHER, PAGE_FORMAT, Disk, run, run_json
from tiered_kv.codecs.base import PageFormat
from tiered_kv.storage.segment.format import SegmentHeader
from tiered_kv.storage.segment.headers import pack_segment_header
from tiered_kv.testing.conformance.store import FINGERPRINT, page_key

ODD = bytes(15) + b"\2"


def no_lock(root: Path) -> Path:
    """Create a store whose lock file is a pipe."""
    lock = root / ODD.hex() / "0-0" / "lock"
    lock.parent.mkdir(parents=True)
    os.mkfifo(lock)
    return lock


def linked_fingerprint(root: Path) -> Path:
    elsewhere = Disk(root.with_name("elsewhere")).fill(10, fingerprint=ODD)
    link = root / ODD.hex()
    link.symlink_to(elsewhere.parent)
    return link


def linked_store(root: Path) -> Path:
    elsewhere = Disk(root.with_name("elsewhere")).fill(10, fingerprint=ODD)
    link = root / ODD.hex() / "0-0"
    link.parent.mkdir()
    link.symlink_to(elsewhere)
    return link


def odd_segment(root: Path) -> Path:
    path = root / FINGERPRINT.hex() / "0-0" / "00000077.seg"
    os.mkfifo(path)
    return path


ODDITIES: list[Callable[[Path], Path]] = [no_lock, linked_fingerprint, linked_store, odd_segment]


@pytest.mark.parametrize("make_odd", ODDITIES)
def test_an_unusual_file_is_named_and_the_rest_is_examined(
    disk: Disk, tmp_path: Path, make_odd: Callable[[Path], Path]
) -> None:
    disk.fill(10)
    disk.fill(20, fingerprint=OTHER)
    odd = make_odd(disk.root)

    listed = run_json("ls", disk.root, code=1)
    assert [store["pages"] for store in listed["stores"]] == [10, 20]
    assert list(listed["skipped"]) == [str(odd)]
    assert run_json("stat", disk.root, code=1)["pages"] == 30
    verified = run_json("verify", disk.root, code=1)
    assert (verified["pages"], verified["good"]) == (30, False)
    assert verified["bad_pages"] == verified["bad_segments"] == []
    assert run_json("export", disk.root, "--all", tmp_path / "out", code=1)["pages"] == 30
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["pages"]) == 30


@pytest.mark.parametrize("make_odd", ODDITIES[:3])
def test_gc_deletes_the_others_and_follows_no_link(
    disk: Disk, tmp_path: Path, make_odd: Callable[[Path], Path]
) -> None:
    disk.fill(10)
    disk.fill(20, fingerprint=OTHER)
    odd = make_odd(disk.root)
    elsewhere = tmp_path / "elsewhere"
    before = {path: path.stat().st_size for path in elsewhere.rglob("*")}
    empty = elsewhere / ODD.hex() / "7-7"  # looks as if a dead process had left it
    if elsewhere.exists():
        empty.mkdir()
        os.utime(empty, (1e9, 1e9))

    found = run_json("gc", disk.root, "--all", code=1)

    assert len(found["removed"]) == 2
    assert list(found["skipped"]) == [str(odd)]
    assert {path: path.stat().st_size for path in before} == before
    assert empty.exists() is elsewhere.exists()
    assert odd.lstat()


def test_gc_keeps_and_reports_a_store_with_a_pipe(disk: Disk) -> None:
    folder = disk.fill(10)
    odd = odd_segment(disk.root)
    found = run_json("gc", disk.root, "--all", code=1)
    assert "contains 00000077.seg, which is not part of a store" in found["refused"][str(folder)]
    assert sorted(path.name for path in folder.iterdir()) == [odd.name, "lock"]


def test_a_probe_or_folder_that_is_a_link_is_not_left_over(disk: Disk, tmp_path: Path) -> None:
    disk.fill(10)
    kept = tmp_path / "kept"
    kept.mkdir()
    os.utime(kept, (1e9, 1e9))
    for name in (".probe-1", "ab" * 16):
        (disk.root / name).symlink_to(kept)
    found = run_json("gc", disk.root, "--older-than", 1, code=1)
    assert found["leftovers"] == []
    assert (disk.root / ".probe-1").is_symlink()


@pytest.mark.parametrize("name", ["2024-11", "ab" * 16, "notes.txt"])
def test_a_foreign_file_is_left_alone(disk: Disk, tmp_path: Path, name: str) -> None:
    disk.fill(10)
    (disk.root / name).write_text("notes")
    assert len(run_json("ls", disk.root)["stores"]) == 1
    assert run_json("verify", disk.root)["pages"] == 10
    assert run_json("export", disk.root, "--all", tmp_path / "out")["pages"] == 10
    assert len(run_json("gc", disk.root, "--all")["removed"]) == 1
    assert (disk.root / name).read_text() == "notes"


def test_a_folder_that_may_not_be_read_is_named(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = disk.fill(10), disk.fill(20, fingerprint=OTHER)
    scandir = os.scandir

    def refusing(path: Path) -> Any:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = run_json("ls", disk.root, code=1)
    assert [store["path"] for store in found["stores"]] == [str(other)]
    assert found["skipped"] == {str(folder): "Permission denied"}
    assert run_json("gc", disk.root, "--all", code=1)["removed"] == [str(other)]
    assert folder.exists()


@pytest.mark.parametrize("lock", ["[" * 200_000, "[1]", "\0" * 100, '{"pid": 1}', ""])
def test_a_lock_without_holder_information_is_harmless(disk: Disk, lock: str) -> None:
    folder = disk.fill(10)
    (folder / "lock").write_text(lock)
    (store,) = run_json("ls", disk.root)["stores"]
    assert (store["pages"], store["locked"]) == (10, False)
    disk.open().close()


def test_a_segment_that_claims_impossible_pages_spoils_no_other(disk: Disk, tmp_path: Path) -> None:
    folder = disk.fill(10)
    header = SegmentHeader(FINGERPRINT, 5, 50, 0, PAGE_FORMAT, 0, 0, 1, 0, b"")
    huge = PageFormat(PAGE_FORMAT.element, 1 << 62, 16)
    forged = pack_segment_header(replace(header, page_format=huge))
    (folder / "00000050.seg").write_bytes(forged + bytes(100_000))
    verified = run_json("verify", disk.root, code=1)
    assert verified["pages"] == 10
    assert verified["bad_segments"][0]["segment"] == "00000050.seg"
    exported = run_json("export", disk.root, "--all", tmp_path / "out", code=1)
    assert exported["pages"] == 10
    assert list(exported["skipped"]) == [str(folder / "00000050.seg")]


@pytest.mark.parametrize("now", [-5.0, 2.0**63])
def test_pages_of_any_clock_have_an_age(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        disk.fill(10)
        run("ls", disk.root)
    disk.put(store := disk.open(), 100)
    store.close()
    page_age = run_json("stat", disk.root)["page_age_s"]
    assert list(page_age.values()) == sorted(page_age.values())
    assert page_age["newest"] >= 0
    assert page_key(100) in disk.inventory.pages
