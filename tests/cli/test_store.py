"""``tiered-kv store`` reports the contents of stores and exports pages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tests.cli.store_disk import OTHER, Disk, flip, run, run_json
from tiered_kv.keys import PageKey
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import FINGERPRINT, page_key

# -- ls, stat -------------------------------------------------------------------------


def test_ls_and_stat_agree_with_the_store(disk: Disk) -> None:
    store = disk.open("centred")
    disk.put(store, *range(30))
    disk.put(store, *range(5), version=1)
    expected = {
        "pages": len(store),
        "stored_bytes": store.stored_bytes,
        "raw_bytes": store.raw_bytes,
        "codecs": ["centred"],
    }
    store_ratio = pytest.approx(store.raw_bytes / store.stored_bytes)
    store.close()

    (found,) = run_json("ls", disk.root)["stores"]
    total = run_json("stat", disk.root)

    assert found | expected == found
    assert total | expected == total
    assert found["fingerprint"] == FINGERPRINT.hex()
    assert (found["replica"], found["rank"], found["ranks"]) == (0, 0, 1)
    assert found["ratio"] == total["ratio"] == store_ratio
    on_disk = sum(path.stat().st_size for path in store.options.folder.glob("*.seg"))
    assert found["bytes_on_disk"] == total["bytes_on_disk"] == on_disk
    assert (found["locked"], found["holder"], total["locked"]) == (False, None, 0)
    assert 0 <= found["newest_page_s"] <= found["oldest_page_s"] < 60
    assert total["dead_bytes"] == 5 * disk.inventory.segments[0].loaded.entries[0].nbytes
    assert total["fingerprints"] == [FINGERPRINT.hex()]


@pytest.mark.parametrize(("error", "code"), [(FileNotFoundError, 0), (OSError, 1)])
def test_ls_skips_a_deleted_segment_and_names_an_unreadable_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, error: type[OSError], code: int
) -> None:
    """A segment that is deleted while the command reads the store is skipped, because a running
    server may do that. An unreadable segment is reported, and the exit code is 1."""
    disk.fill(40)
    (segment,) = disk.root.rglob("*.seg")
    stat = Path.stat

    def failing(path: Path, **options: Any) -> os.stat_result:
        if path == segment:
            raise error(5, "Input/output error", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", failing)
    found = run_json("ls", disk.root, code=code)
    assert len(found["stores"]) == 1
    assert found["skipped"] == ({str(segment): "Input/output error"} if code else {})


def test_ls_names_the_process_that_has_a_store_open(disk: Disk, live: SegmentStore) -> None:
    disk.fill(10, fingerprint=OTHER)
    first, last = sorted(
        run_json("ls", disk.root)["stores"], key=lambda store: bool(store["locked"])
    )
    assert (first["locked"], last["locked"]) == (False, True)
    assert last["holder"]["pid"] == os.getpid()
    assert last["pages"] == 20
    text = run("ls", disk.root)
    assert f"process {os.getpid()} on " in text
    assert f"{FINGERPRINT.hex()[:8]}/0-0" in text
    assert "2, 1 of them open" in run("stat", disk.root)


def test_a_store_can_be_named_by_its_own_folder(disk: Disk) -> None:
    folder = disk.fill(10, rank=1, ranks=2)
    disk.fill(20, rank=0, ranks=2)
    for path, pages in ((folder, 10), (folder.parent, 30), (disk.root, 30)):
        assert run_json("stat", path)["pages"] == pages
        assert run_json("verify", path)["pages"] == pages
    assert "1 of 2" in run("ls", folder)


# -- export ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd", "centred"])
def test_export_gives_back_what_was_put(disk: Disk, tmp_path: Path, codec: str) -> None:
    store = disk.open(codec)
    disk.put(store, *range(20))
    disk.put(store, 3, version=1)
    store.close()
    out = tmp_path / "out"

    assert run_json("export", disk.root, "--all", out, "--stored")["pages"] == 20

    pages = json.loads((out / "manifest.json").read_text())["pages"]
    assert {page["key"] for page in pages} == {key.hex() for key in disk.pages}
    for page in pages:
        content = disk.pages[PageKey(bytes.fromhex(page["key"]))]
        assert (out / page["file"]).read_bytes() == content
        assert page["codec"] == codec
        plane = (out / page["plane_file"]).read_bytes() if "plane_file" in page else b""
        frame = (out / page["frame_file"]).read_bytes() if "frame_file" in page else b""
        assert (len(plane), len(frame)) == (page["plane_bytes"], page["frame_bytes"])
        if codec == "raw":
            assert (plane, frame) == (content, b"")
            continue
        unpacked = zstandard.ZstdDecompressor().decompress(frame)
        if codec == "zstd":
            assert unpacked == content
        else:
            assert len(unpacked) == len(content) // 2
            assert (out / page["table_file"]).read_bytes() == store.codec.table


def test_an_empty_folder_can_be_exported_to(disk: Disk, tmp_path: Path) -> None:
    disk.fill(10)
    (tmp_path / "out").mkdir()
    assert run_json("export", disk.root, "--all", tmp_path / "out")["pages"] == 10


def test_one_page_is_exported_from_every_store_that_has_it(disk: Disk, tmp_path: Path) -> None:
    disk.fill(10, rank=0, ranks=2)
    disk.fill(10, rank=1, ranks=2)
    key = page_key(4)
    out = tmp_path / "new" / "out"
    assert "2" in run("export", disk.root, key.hex(), out)
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        f"{FINGERPRINT.hex()}/0-0/{key.hex()}.page",
        f"{FINGERPRINT.hex()}/0-1/{key.hex()}.page",
        "manifest.json",
    ]


def test_a_damaged_page_is_not_exported_and_the_others_are(disk: Disk, tmp_path: Path) -> None:
    disk.fill(10)
    place = disk.inventory.pages[page_key(4)]
    flip(place.segment.path, place.entry.offset + 5000)
    result = run_json("export", disk.root, "--all", tmp_path / "out", code=1)
    assert result["pages"] == 9
    (reason,) = result["failed"].values()
    assert page_key(4).hex() in reason


def test_an_export_to_a_full_disk_reports_what_it_has_written(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.fill(10)
    write, left = Path.write_bytes, iter(range(3))

    def filling(path: Path, page: memoryview) -> int:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        return write(path, page)

    monkeypatch.setattr(Path, "write_bytes", filling)
    assert "No space left" in run("export", disk.root, "--all", tmp_path / "out", code=2)
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["pages"]) == 3


# -- errors ----------------------------------------------------------------------------


def test_bad_input_gets_one_sentence(disk: Disk, tmp_path: Path) -> None:
    disk.fill(10)
    folder = tmp_path / "folder"
    folder.mkdir()
    file = tmp_path / "file"
    file.touch()
    key = page_key(77).hex()
    for command in ("ls", "stat", "verify"):
        assert "does not exist" in run(command, tmp_path / "nowhere", code=2)
        assert "is not a folder" in run(command, file, code=2)
        assert "contains no store" in run(command, folder, code=2)
        run(command, folder, "--json", code=2)
    assert "contains no store" in run("gc", folder, "--all", code=2)
    assert "select stores" in run("gc", disk.root, code=2)
    assert "select stores" in run("gc", disk.root, "--all", "--older-than", 3, code=2)
    assert "is not a fingerprint" in run("gc", disk.root, "--fingerprint", "xyz", code=2)
    assert "is not a page key" in run("export", disk.root, "xyz", tmp_path / "out", code=2)
    assert "16 to 255 bytes" in run("export", disk.root, "abcd", tmp_path / "out", code=2)
    assert "no store has" in run("export", disk.root, key, tmp_path / "out", code=2)
    assert "expected KEY and OUT" in run("export", disk.root, key, code=2)
    assert "not an empty folder" in run("export", disk.root, "--all", tmp_path, code=2)
    assert not (tmp_path / "out").exists()
    assert run_json("stat", disk.root)["pages"] == 10


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_unreadable_folder_is_not_taken_for_an_empty_one(disk: Disk, depth: int) -> None:
    folder = [disk.fill(10).parents[1], *disk.fill(10).parents[:1], disk.fill(10)][depth]
    folder.chmod(0)
    try:
        if folder == disk.root:
            assert "Permission denied" in run("ls", disk.root, code=2)
        else:
            skipped = run_json("ls", disk.root, code=1)["skipped"]
            assert skipped == {str(folder): "Permission denied"}
    finally:
        folder.chmod(0o700)


def test_page_ages_are_sorted(disk: Disk) -> None:
    """``tiered-kv store stat`` reports the page ages from the newest to the oldest, and all are
    below a minute."""
    disk.fill(20)
    found = run_json("stat", disk.root)["page_age_s"]
    assert list(found) == ["newest", "p10", "p50", "p90", "oldest"]
    assert list(found.values()) == sorted(found.values())
    assert np.all(np.array(list(found.values())) < 60)
