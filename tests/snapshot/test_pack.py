"""Snapshots in zip files, from this or another program, are opened only if they are complete."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.snapshot.made_snapshots import ONE, check_whole, drafts, make, open_files, outline
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.pack import pack, unpack
from tiered_kv.snapshot.reader import find_snapshot, open_snapshot

Members = list[tuple[zipfile.ZipInfo, bytes]]


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """Create a snapshot, and return its folder."""
    make(tmp_path / "root", "one", ONE)
    return tmp_path / "root" / "one"


def members_of(folder: Path) -> Members:
    """Return the members of a snapshot's zip file."""
    paths = [folder / "manifest.json", *sorted((folder / "pages").iterdir())]
    return [(zipfile.ZipInfo(str(path.relative_to(folder))), path.read_bytes()) for path in paths]


def write_zip(path: Path, members: Members, **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for info, data in members:
            archive.writestr(info, data)
    return path


def refusal(path: Path) -> str:
    before = open_files()
    with pytest.raises(SnapshotError) as caught, open_snapshot(path) as snapshot:
        snapshot.verify()
    assert open_files() == before, "a file stays open"
    return str(caught.value)


# -- valid zip files ----------------------------------------------------------------------


def test_a_snapshot_is_the_same_after_a_zip_file(tmp_path: Path) -> None:
    made = make(tmp_path, "one", outline(tokens=70))
    pack(tmp_path / "one", tmp_path / "two.zip")
    unpack(tmp_path / "two.zip", tmp_path / "three")
    for path in (find_snapshot(tmp_path, "two"), tmp_path / "three"):
        with open_snapshot(path) as snapshot:
            assert snapshot.manifest == made
            check_whole(snapshot)
    for path in (tmp_path / "one").rglob("*"):
        if path.is_file():
            other = tmp_path / "three" / path.relative_to(tmp_path / "one")
            assert other.read_bytes() == path.read_bytes()
    assert not drafts(tmp_path)
    for path in (tmp_path / "three").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "two.zip").stat().st_mode & 0o077 == 0


def test_any_program_can_read_the_zip_file(one: Path, tmp_path: Path) -> None:
    pack(one, tmp_path / "one.zip")
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        archive.extractall(tmp_path / "by-hand")
    with open_snapshot(tmp_path / "by-hand") as snapshot:
        check_whole(snapshot)


def test_one_snapshot_gives_one_zip_file(one: Path, tmp_path: Path) -> None:
    pack(one, tmp_path / "a.zip")
    pack(one, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_zip_file_of_another_program_is_read(one: Path, tmp_path: Path) -> None:
    """A zip file that has timestamps in extra fields and an entry for the page folder, as from
    another program, is read completely."""
    extra = struct.pack("<HHBI", 0x5455, 5, 1, 1700000000)
    members = members_of(one)
    for info, _ in members:
        info.extra = extra
    folder = zipfile.ZipInfo("pages/")
    folder.external_attr = (stat.S_IFDIR | 0o755) << 16 | 0x10
    members.insert(1, (folder, b""))
    with open_snapshot(write_zip(tmp_path / "x.zip", members)) as snapshot:
        check_whole(snapshot)


@pytest.mark.parametrize("limit", ["ZIP64_LIMIT", "ZIP_FILECOUNT_LIMIT"])
def test_a_zip_file_with_long_numbers_is_read(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(zipfile, limit, 1)
    pack(one, tmp_path / "x.zip")
    assert b"PK\6\6" in (tmp_path / "x.zip").read_bytes()
    with open_snapshot(tmp_path / "x.zip") as snapshot:
        check_whole(snapshot)


def test_nothing_is_overwritten(one: Path, tmp_path: Path) -> None:
    pack(one, tmp_path / "x.zip")
    for taken in (tmp_path / "x.zip", one):
        with pytest.raises(SnapshotError, match="already"):
            pack(one, taken)
        with pytest.raises(SnapshotError, match="already"):
            unpack(tmp_path / "x.zip", taken)
    with open_snapshot(one) as snapshot, open_snapshot(tmp_path / "x.zip") as packed:
        check_whole(snapshot)
        check_whole(packed)


def test_files_that_are_not_snapshots_are_neither_packed_nor_unpacked(
    one: Path, tmp_path: Path
) -> None:
    pack(one, tmp_path / "x.zip")
    data = (tmp_path / "x.zip").read_bytes()
    (tmp_path / "x.zip").write_bytes(data[:-1])
    next((one / "pages").iterdir()).unlink()
    with pytest.raises(SnapshotError):
        pack(one, tmp_path / "y.zip")
    with pytest.raises(SnapshotError):
        unpack(tmp_path / "x.zip", tmp_path / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "x.zip"]


def test_a_disk_that_is_full_leaves_nothing(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    pack(one, tmp_path / "x.zip")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SnapshotError, match="No space left"):
        pack(one, tmp_path / "y.zip")
    with pytest.raises(SnapshotError, match="No space left"):
        unpack(tmp_path / "x.zip", tmp_path / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "x.zip"]


def test_drafts_of_killed_makers_are_removed(one: Path, tmp_path: Path) -> None:
    (tmp_path / f".making-{'0' * 16}").write_bytes(b"half a zip file")
    (tmp_path / f".making-{'1' * 16}").mkdir()
    pack(one, tmp_path / "x.zip")
    assert not drafts(tmp_path)
    (tmp_path / f".making-{'0' * 16}").write_bytes(b"half a zip file")
    unpack(tmp_path / "x.zip", tmp_path / "y")
    assert not drafts(tmp_path)


# -- refused zip files --------------------------------------------------------------------


def renamed(number: int, name: str) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        members[number][0].filename = name

    return change


def added(name: str, data: bytes = b"x") -> Callable[[Members], None]:
    return lambda members: members.append((zipfile.ZipInfo(name), data))


def compressed(members: Members) -> None:
    members[1][0].compress_type = zipfile.ZIP_DEFLATED


def of_kind(kind: int) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        members[1][0].external_attr = (kind | 0o777) << 16

    return change


DIGEST = "ab" * 32
WRONG: dict[str, tuple[Callable[[Members], object], str]] = {
    "no manifest": (lambda m: m.pop(0), "no manifest"),
    "no page": (lambda m: m.pop(), "missing"),
    "nothing": (lambda m: m.clear(), "no manifest"),
    "a compressed member": (compressed, "compressed"),
    "a link": (of_kind(stat.S_IFLNK), "not a regular file"),
    "a device": (of_kind(stat.S_IFBLK), "not a regular file"),
    "a folder": (of_kind(stat.S_IFDIR), "not a regular file"),
    "an absolute path": (renamed(1, f"/pages/{DIGEST}"), "not a file name"),
    "a path upwards": (renamed(1, f"../pages/{DIGEST}"), "not a file name"),
    "a path through": (renamed(1, f"pages/../pages/{DIGEST}"), "not a file name"),
    "a path with a dot": (renamed(1, f"./pages/{DIGEST}"), "not a file name"),
    "two slashes": (renamed(1, f"pages//{DIGEST}"), "not a file name"),
    "a backslash": (renamed(1, f"pages\\{DIGEST}"), "not a file name"),
    "a manifest in capitals": (renamed(0, "MANIFEST.JSON"), "not a file name"),
    "a folder in capitals": (renamed(1, f"Pages/{DIGEST}"), "not a file name"),
    "a page in capitals": (renamed(1, f"pages/{DIGEST.upper()}"), "not a file name"),
    "a page below": (renamed(1, f"pages/ab/{DIGEST}"), "not a file name"),
    "a page of a short name": (renamed(1, "pages/abcd"), "not a file name"),
    "a page with an end of line": (renamed(1, f"pages/{DIGEST}\n"), "not a file name"),
    "something else": (added("notes.txt"), "not a file name"),
    "a folder with something in it": (added("pages/", b"x"), "conflicting sizes"),
    "another folder": (added("more/", b""), "not a file name"),
    "a page that nobody knows": (added(f"pages/{DIGEST}"), "not in the manifest"),
    "a member twice": (lambda m: m.append(m[1]), "duplicate"),
    "a manifest twice": (lambda m: m.append(m[0]), "duplicate"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_invalid_zip_file_is_refused(one: Path, tmp_path: Path, what: str) -> None:
    members = members_of(one)
    WRONG[what][0](members)
    assert WRONG[what][1] in refusal(write_zip(tmp_path / "x.zip", members))


def packed(one: Path, tmp_path: Path) -> bytearray:
    pack(one, tmp_path / "good.zip")
    return bytearray((tmp_path / "good.zip").read_bytes())


def entry_at(data: bytearray, number: int = 1) -> int:
    """Return the offset of a member's entry in the central directory."""
    at = struct.unpack_from("<I", data, len(data) - 6)[0]
    for _ in range(number):
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        at += 46 + name + extra + comment
    return int(at)


def put(data: bytearray, at: int, shape: str, value: int) -> bytearray:
    struct.pack_into(shape, data, at, value)
    return data


def member_at(data: bytearray, number: int = 1) -> int:
    """Return the offset of a member's local header."""
    return int(struct.unpack_from("<I", data, entry_at(data, number) + 42)[0])


def encrypt(data: bytearray) -> None:
    put(data, entry_at(data) + 8, "<H", 1)
    put(data, member_at(data) + 6, "<H", 1)


def overlap(data: bytearray) -> None:
    """Set the offset of one page to the offset of another page."""
    put(data, entry_at(data, 2) + 42, "<I", member_at(data, 1))


EDITS: dict[str, Callable[[bytearray], object]] = {
    "encrypted": encrypt,
    "written in one go": lambda d: put(d, entry_at(d) + 8, "<H", 8),
    "overlapping": overlap,
    "a comment at the end": lambda d: put(d, len(d) - 2, "<H", 1).extend(b"x"),
    "something behind": lambda d: d.extend(b"x"),
    "something before": lambda d: d.__setitem__(slice(0, 0), b"#!"),
    "another name at the member": lambda d: put(d, member_at(d) + 30, "<B", ord("q")),
    "another size at the member": lambda d: put(d, member_at(d) + 22, "<I", 5),
    "another method at the member": lambda d: put(d, member_at(d) + 8, "<H", 8),
    "another method in the directory": lambda d: put(d, entry_at(d) + 10, "<H", 8),
    "a huge size": lambda d: [
        put(d, at, "<I", 0xFFFFFFFE) for at in (entry_at(d) + 20, entry_at(d) + 24)
    ],
    "a long size that is missing": lambda d: put(d, entry_at(d) + 24, "<I", 0xFFFFFFFF),
    "a size that is too large": lambda d: put(d, entry_at(d) + 24, "<I", 1 << 30),
    "an offset behind the end": lambda d: put(d, entry_at(d) + 42, "<I", 0x7FFFFFFF),
    "another disk": lambda d: put(d, entry_at(d) + 34, "<H", 1),
    "a comment of a member": lambda d: put(d, entry_at(d) + 32, "<H", 3),
    "too many members": lambda d: [put(d, len(d) - at, "<H", 60000) for at in (12, 14)],
    "unlike counts": lambda d: put(d, len(d) - 14, "<H", 1),
    "a directory elsewhere": lambda d: put(d, len(d) - 6, "<I", 40),
    "a directory of another size": lambda d: put(d, len(d) - 10, "<I", 46),
    "a member that the directory hides": lambda d: (
        [put(d, len(d) - at, "<H", 3) for at in (12, 14)],
        put(d, len(d) - 10, "<I", entry_at(d, 3) - entry_at(d, 0)),
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_zip_file_with_an_edit_is_refused(one: Path, tmp_path: Path, what: str) -> None:
    data = packed(one, tmp_path)
    EDITS[what](data)
    (tmp_path / "x.zip").write_bytes(data)
    assert refusal(tmp_path / "x.zip")


def test_a_zip_file_that_is_cut_anywhere_is_refused(one: Path, tmp_path: Path) -> None:
    data = packed(one, tmp_path)
    for end in range(0, len(data), 37):
        (tmp_path / "x.zip").write_bytes(data[:end])
        refusal(tmp_path / "x.zip")


def test_a_manifest_above_the_size_limit_is_refused(one: Path, tmp_path: Path) -> None:
    members = members_of(one)
    members[0] = (members[0][0], b" " * ((64 << 20) + 1))
    assert "too large" in refusal(write_zip(tmp_path / "x.zip", members))


def test_a_snapshot_can_be_packed_where_it_is_found_by_name(one: Path) -> None:
    root = one.parent
    pack(one, root / "one-packed.zip")
    shutil.rmtree(one)
    with open_snapshot(find_snapshot(root, "one-packed")) as snapshot:
        check_whole(snapshot)
