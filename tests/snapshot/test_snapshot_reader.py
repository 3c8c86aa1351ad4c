"""A snapshot folder of unknown origin is opened only if it is complete and consistent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.snapshot.made_snapshots import ONE, check_whole, make, open_files, outline
from tiered_kv.snapshot.manifest import SnapshotError, SnapshotPage, dump, load
from tiered_kv.snapshot.reader import find_snapshot, open_snapshot


def refusal(path: Path) -> str:
    """Return the message with which a snapshot is refused, when it is opened or read. Asserts that
    no file stays open."""
    before = open_files()
    with pytest.raises(SnapshotError) as caught, open_snapshot(path) as snapshot:
        snapshot.verify()
    assert open_files() == before, "a file stays open"
    return str(caught.value)


def some_page(folder: Path) -> Path:
    return min((folder / "pages").iterdir())


def swap(folder: Path) -> None:
    a, b = sorted((folder / "pages").iterdir())[:2]
    a_bytes, b_bytes = a.read_bytes(), b.read_bytes()
    for path in (a, b):
        path.unlink()
    a.write_bytes(b_bytes)
    b.write_bytes(a_bytes)


def cut(path: Path, nbytes: int = 1) -> None:
    data = path.read_bytes()
    path.unlink()  # other snapshots share the file, so it must not be changed
    path.write_bytes(data[:-nbytes])


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


def link_away(path: Path) -> None:
    aside = next(one for one in path.parents if one.name == "one").with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def capital(path: Path) -> None:
    path.rename(path.with_name(path.name.upper() + "X"))


def forget_a_page(folder: Path) -> None:
    """Remove a page from the manifest, but keep its file."""
    path = folder / "manifest.json"
    manifest = load(path.read_bytes())
    path.write_bytes(dump(replace(manifest, pages=manifest.pages[:-1])))


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "swapped pages": (swap, "damaged"),
    "a page that is cut": (lambda f: cut(some_page(f)), "bytes"),
    "a page that is cut to nothing": (lambda f: cut(some_page(f), 9999), "bytes"),
    "a page that is too long": (
        lambda f: some_page(f).open("ab").write(b"x" * 5000) and None,
        "bytes",
    ),
    "a bit of a page": (lambda f: flip(some_page(f)), "damaged"),
    "a page's magic": (lambda f: flip(some_page(f), 0), "magic"),
    "a missing page": (lambda f: some_page(f).unlink(), "missing"),
    "missing pages": (lambda f: shutil.rmtree(f / "pages"), "No such file"),
    "a missing manifest": (lambda f: (f / "manifest.json").unlink(), "No such file"),
    "a page that is a link": (lambda f: link_away(some_page(f)), "not a regular file"),
    "pages that are a link": (lambda f: link_away(f / "pages"), "symbolic link"),
    "a manifest that is a link": (lambda f: link_away(f / "manifest.json"), "symbolic link"),
    "a page that is a folder": (lambda f: as_folder(some_page(f)), "not a regular file"),
    "a page that is a pipe": (lambda f: as_pipe(some_page(f)), "not a regular file"),
    "a manifest that is a pipe": (lambda f: as_pipe(f / "manifest.json"), "not a regular file"),
    "a manifest that is a folder": (lambda f: as_folder(f / "manifest.json"), "not a regular file"),
    "a manifest in capitals": (
        lambda f: (f / "manifest.json").rename(f / "MANIFEST.JSON"),
        "No such file",
    ),
    "a page of another name": (lambda f: capital(some_page(f)), "missing"),
    "a manifest that is cut": (lambda f: cut(f / "manifest.json", 2), "unusable"),
    "an empty manifest": (lambda f: (f / "manifest.json").write_bytes(b""), "unusable"),
    "a bit of the manifest": (lambda f: flip(f / "manifest.json", 300), "unusable"),
    "a page less": (forget_a_page, "according to the manifest"),
}


@pytest.mark.parametrize("what", HARM)
def test_a_damaged_folder_is_refused(tmp_path: Path, what: str) -> None:
    make(tmp_path, "one", ONE)
    change, why = HARM[what]
    change(tmp_path / "one")
    assert why in refusal(tmp_path / "one")


def test_a_huge_manifest_is_refused_before_it_is_read(tmp_path: Path) -> None:
    make(tmp_path, "one", ONE)
    os.truncate(tmp_path / "one" / "manifest.json", 1 << 40)  # a sparse file
    assert "more than the maximum" in refusal(tmp_path / "one")


def test_files_next_to_the_snapshot_do_not_matter(tmp_path: Path) -> None:
    make(tmp_path, "one")
    (tmp_path / "one" / "notes").write_text("mine")
    (tmp_path / "one" / "pages" / ".DS_Store").write_text("of a file browser")
    with open_snapshot(tmp_path / "one") as snapshot:
        check_whole(snapshot)


@pytest.mark.parametrize("kind", ["link", "pipe", "nothing", "text", "empty"])
def test_a_path_that_is_not_a_snapshot_is_refused(tmp_path: Path, kind: str) -> None:
    make(tmp_path, "one", ONE)
    path = tmp_path / "x"
    match kind:
        case "link":
            path.symlink_to(tmp_path / "one")
        case "pipe":
            os.mkfifo(path)
        case "text":
            path.write_text("text\n" * 100)
        case "empty":
            path.write_text("")
        case _:
            pass
    assert refusal(path)
    if kind in ("link", "pipe", "nothing"):
        with pytest.raises(SnapshotError, match="no snapshot x"):
            find_snapshot(tmp_path, "x")


def test_a_snapshot_is_found_as_a_folder_or_a_zip_file(tmp_path: Path) -> None:
    make(tmp_path, "one", ONE)
    (tmp_path / "two.zip").write_text("")
    (tmp_path / "three.zip").symlink_to(tmp_path / "two.zip")
    assert find_snapshot(tmp_path, "one") == tmp_path / "one"
    assert find_snapshot(tmp_path, "two") == tmp_path / "two.zip"
    for name in ("three", "four", "manifest.json"):
        with pytest.raises(SnapshotError, match="no snapshot"):
            find_snapshot(tmp_path, name)


def test_pages_of_another_snapshot_are_refused(tmp_path: Path) -> None:
    made = make(tmp_path, "one", outline())
    out = np.empty(2048, np.uint8)
    with open_snapshot(tmp_path / "one") as snapshot:
        page = made.pages[0]
        for other in (
            SnapshotPage(0, 0, 0, "../manifest.json", ""),
            SnapshotPage(0, 0, 0, "ab" * 32, ""),
            replace(page, group=2),
            replace(page, group=-1),
            replace(page, sha256=made.pages[-1].sha256),
        ):
            with pytest.raises(SnapshotError):
                snapshot.read_page(other, out)
        snapshot.read_page(page, out)


def test_a_page_replaced_after_opening_is_detected(tmp_path: Path) -> None:
    made = make(tmp_path, "one", ONE)
    out = np.empty(ONE.groups[0].page_format.page_bytes, np.uint8)
    with open_snapshot(tmp_path / "one") as snapshot:
        for harm in (cut, flip, Path.unlink):
            shutil.copytree(tmp_path / "one", tmp_path / "kept")
            harm(tmp_path / "one" / "pages" / made.pages[0].sha256)
            with pytest.raises(SnapshotError):
                snapshot.read_page(made.pages[0], out)
            for path in (tmp_path / "kept" / "pages").iterdir():
                shutil.copy(path, tmp_path / "one" / "pages" / path.name)
            shutil.rmtree(tmp_path / "kept")
            snapshot.read_page(made.pages[0], out)


def test_a_snapshot_closes_its_files(tmp_path: Path) -> None:
    make(tmp_path, "one", ONE)
    before = open_files()
    snapshot = open_snapshot(tmp_path / "one")
    assert open_files() > before
    for _ in range(2):
        snapshot.close()
    assert open_files() == before
