"""``tiered-kv store``: what it says is what is there, and it takes nothing it must not."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from typer.testing import CliRunner

from tiered_kv.cli import app
from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.codecs.choice import codec_from, make_codec, synthetic_page
from tiered_kv.keys import PageKey
from tiered_kv.storage import export
from tiered_kv.storage.segment_format import TRAILER_BYTES, record_header_bytes
from tiered_kv.storage.segment_store import SegmentStore
from tiered_kv.storage.survey import Survey, find_stores, survey
from tiered_kv.testing.store import FINGERPRINT, page_key, store_options

PAGE_FORMAT = PageFormat(ElementType.BF16, 16384, 16)
OTHER = bytes(15) + b"\1"


def run(*arguments: object, code: int = 0) -> str:
    """What a command prints on standard output."""
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    if code != 2:
        return result.stdout
    assert result.stdout == ""
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The one object that a command prints."""
    found = json.loads(run(*arguments, "--json", code=code))
    assert isinstance(found, dict)
    return found


class Disk:
    """A root with stores in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pages: dict[PageKey, bytes] = {}

    def open(self, codec: str = "raw", **changes: object) -> SegmentStore:
        options = store_options(
            self.root, page_format=PAGE_FORMAT, capacity_bytes=64 << 20, **changes
        )
        return SegmentStore(options, make_codec(codec, PAGE_FORMAT), codec_from)

    def put(self, store: SegmentStore, *names: int, version: int = 0) -> list[PageKey]:
        keys = [page_key(name, store.options.fingerprint) for name in names]
        pages = [
            (key, synthetic_page(PAGE_FORMAT, seed=name + 1000 * version))
            for key, name in zip(keys, names, strict=True)
        ]
        assert not store.put(pages)
        self.pages.update((key, page.tobytes()) for key, page in pages)
        return keys

    def fill(self, count: int = 40, codec: str = "raw", **changes: object) -> Path:
        """A closed store of so many pages, put in groups of ten; its folder."""
        store = self.open(codec, **changes)
        for first in range(0, count, 10):
            self.put(store, *range(first, first + 10))
        store.close()
        return store.options.folder

    @property
    def survey(self) -> Survey:
        (info,) = find_stores(self.root).stores
        return survey(info)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "root")


@pytest.fixture
def live(disk: Disk) -> Iterator[SegmentStore]:
    """A store that is open, with twenty pages."""
    store = disk.open()
    disk.put(store, *range(20))
    yield store
    store.close()


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


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
    assert total["dead_bytes"] == 5 * disk.survey.segments[0].loaded.entries[0].nbytes
    assert total["fingerprints"] == [FINGERPRINT.hex()]


@pytest.mark.parametrize(("error", "code"), [(FileNotFoundError, 0), (OSError, 1)])
def test_ls_passes_over_a_segment_that_is_gone_and_names_one_that_cannot_be_read(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, error: type[OSError], code: int
) -> None:
    """A server may delete one while the others are looked at."""
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


# -- verify ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd", "centred"])
def test_a_healthy_store_verifies(disk: Disk, codec: str) -> None:
    disk.fill(40, codec)
    found = run_json("verify", disk.root)
    assert (found["good"], found["pages"]) == (True, 40)
    assert found["bad_pages"] == found["bad_segments"] == []
    assert "all good" in run("verify", disk.root)


def test_a_store_in_use_verifies_and_goes_on(disk: Disk, live: SegmentStore) -> None:
    assert run_json("verify", disk.root)["pages"] == 20
    disk.put(live, *range(20, 30))
    assert run_json("verify", disk.root)["pages"] == 30


def test_what_a_killed_process_was_writing_is_not_damage(disk: Disk, live: SegmentStore) -> None:
    """Its segment ends in half a group: the second of three records never came."""
    (path,) = live.options.folder.glob("*.seg")
    disk.put(live, 100, 101, 102)
    entry = disk.survey.pages[page_key(101)].entry
    with path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(bytes(entry.nbytes))
    found = run_json("verify", disk.root)
    assert (found["good"], found["pages"]) == (True, 22)


PLACES: dict[str, Callable[[int, int, int], int]] = {
    "the magic of the record": lambda start, payload, end: start,
    "the header of the record": lambda start, payload, end: start + 20,
    "the key": lambda start, payload, end: start + 100,
    "the padding of the header": lambda start, payload, end: payload - 1,
    "the first byte of the page": lambda start, payload, end: payload,
    "the middle of the page": lambda start, payload, end: (payload + end) // 2,
    "the last byte of the page": lambda start, payload, end: end - 1,
    "the padding behind the page": lambda start, payload, end: end,
}


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("codec", ["raw", "centred"])
def test_a_flipped_byte_is_found_and_its_page_named(disk: Disk, codec: str, what: str) -> None:
    if codec == "raw" and what == "the padding behind the page":
        pytest.skip("a raw page has whole blocks, and no padding")
    disk.fill(40, codec)
    victim = page_key(17)
    found = disk.survey.pages[victim]
    payload = found.entry.offset + record_header_bytes(len(victim), found.entry.stored_bytes)
    end = payload + found.entry.stored_bytes
    path = found.segment.path
    flip(path, PLACES[what](found.entry.offset, payload, end))

    result = run_json("verify", disk.root, code=1)

    (bad,) = result["bad_pages"]
    assert not result["good"]
    assert bad.pop("reason")
    assert bad == {
        "store": str(path.parent),
        "segment": path.name,
        "offset": found.entry.offset,
        "key": victim.hex(),
    }
    text = run("verify", disk.root, code=1)
    assert f"bad page {victim.hex()} in {path} at {found.entry.offset}: " in text


@pytest.mark.parametrize(
    ("offset", "pages"), [(0, 0), (30, 0), (100, 0), (4000, 40), (-1, 40), (-TRAILER_BYTES, 40)]
)
def test_a_flipped_byte_in_the_frame_of_a_segment_is_found(
    disk: Disk, offset: int, pages: int
) -> None:
    """Without the header nothing can be read, without the footer everything."""
    disk.fill(40)
    (segment,) = disk.survey.segments
    flip(segment.path, offset)
    result = run_json("verify", disk.root, code=1)
    (bad,) = result["bad_segments"]
    assert bad["segment"] == segment.path.name
    assert result["pages"] == pages
    assert f"bad segment {segment.path}: " in run("verify", disk.root, code=1)


def test_a_lost_record_of_an_unsealed_segment_is_found(disk: Disk, live: SegmentStore) -> None:
    place = disk.survey.pages[page_key(3)]
    disk.put(live, *range(20, 30))
    flip(place.segment.path, place.entry.offset + 20)
    (bad,) = run_json("verify", disk.root, code=1)["bad_pages"]
    assert (bad["offset"], bad["key"]) == (place.entry.offset, None)


@pytest.mark.parametrize(("lost", "found"), [(19, True), (20, False)])
def test_only_what_was_written_last_may_be_missing(
    disk: Disk, live: SegmentStore, lost: int, found: bool
) -> None:
    """The last page before the last group was durable; the first of the group perhaps never."""
    disk.put(live, *range(20, 30))
    place = disk.survey.pages[page_key(lost)]
    flip(place.segment.path, place.entry.offset + 20)
    result = run_json("verify", disk.root, code=1 if found else 0)
    assert [bad["offset"] for bad in result["bad_pages"]] == [place.entry.offset] * found


def test_an_unsealed_segment_that_lost_a_byte_of_nothing_is_found(
    disk: Disk, live: SegmentStore
) -> None:
    (path,) = live.options.folder.glob("*.seg")
    os.truncate(path, path.stat().st_size - 1)
    (bad,) = run_json("verify", disk.root, code=1)["bad_segments"]
    assert "cut off" in bad["reason"]


def test_a_segment_with_room_for_its_footer_and_no_more_is_not_cut_off(disk: Disk) -> None:
    disk.fill(10)
    (segment,) = disk.survey.segments
    with segment.path.open("r+b") as file:
        file.seek(segment.records_end)
        file.write(bytes(segment.loaded.size - segment.records_end))
    result = run_json("verify", disk.root)
    assert (result["good"], result["pages"]) == (True, 10)


def test_pages_are_told_in_the_order_they_were_written(disk: Disk) -> None:
    store = disk.open()
    disk.put(store, *range(10))
    disk.put(store, 3, version=1)
    store.close()
    order = [page_key(name) for name in (0, 1, 2, 4, 5, 6, 7, 8, 9, 3)]
    assert list(disk.survey.pages) == order


def test_a_segment_of_another_store_is_bad(disk: Disk) -> None:
    folder = disk.fill(10)
    (folder / "00000001.seg").rename(folder / "00000007.seg")
    (bad,) = run_json("verify", disk.root, code=1)["bad_segments"]
    assert bad["reason"] == "it belongs to another store"
    assert run_json("stat", disk.root)["unreadable_segments"] == 1


@pytest.mark.parametrize("lost", [1, 4096, 20000, 100_000, 300_000])
def test_a_segment_that_lost_its_end_is_found(disk: Disk, lost: int) -> None:
    disk.fill(40)
    (segment,) = disk.survey.segments
    os.truncate(segment.path, segment.loaded.size - lost)
    result = run_json("verify", disk.root, code=1)
    (bad,) = result["bad_segments"]
    assert bad["reason"]


def test_a_segment_without_a_page_yet_is_not_bad(disk: Disk, live: SegmentStore) -> None:
    """What a process leaves that dies before it writes the header, or has not come to it."""
    for number, size in ((2, 0), (3, 1 << 20)):
        path = live.options.folder / f"{number:08}.seg"
        path.touch()
        os.truncate(path, size)
    assert run_json("verify", disk.root)["pages"] == 20
    assert run_json("stat", disk.root)["unreadable_segments"] == 0


def test_a_store_that_is_written_all_the_time_verifies(disk: Disk) -> None:
    """Segments are begun, sealed and deleted between two looks, and in the middle of one."""
    store = disk.open()
    done = threading.Event()

    def write() -> None:
        for first in range(300, 100_000, 10):
            if done.is_set():
                return
            disk.put(store, *range(first, first + 10))
            store.drop([page_key(name) for name in range(first - 300, first - 290)])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(8):
            run("verify", disk.root)
            assert run_json("stat", disk.root)["unreadable_segments"] == 0
    finally:
        done.set()
        writer.join()
        store.close()


def test_looking_changes_nothing(disk: Disk, tmp_path: Path) -> None:
    disk.fill(20)

    def everything() -> dict[Path, tuple[int, bytes]]:
        files = [path for path in disk.root.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = everything()
    for command in ("ls", "stat", "verify"):
        run(command, disk.root)
    run("gc", disk.root, "--all", "--dry-run")
    run("export", disk.root, "--all", tmp_path / "out")
    assert everything() == before


# -- gc -------------------------------------------------------------------------------


def test_gc_refuses_a_store_in_use_and_removes_another(disk: Disk, live: SegmentStore) -> None:
    dead = disk.fill(10, fingerprint=OTHER)
    size = sum(path.stat().st_size for path in dead.glob("*.seg"))

    result = run_json("gc", disk.root, "--all", code=1)

    assert result["removed"] == [str(dead)]
    assert result["bytes_freed"] == size
    (reason,) = result["refused"].values()
    assert f"in use by process {os.getpid()}" in reason
    assert not dead.parent.exists()
    disk.put(live, 50)
    assert run_json("verify", disk.root)["pages"] == 21


def test_gc_removes_what_is_selected_and_no_more(disk: Disk) -> None:
    old = disk.fill(10)
    new = disk.fill(10, fingerprint=OTHER)
    month_ago = time.time() - 30 * 86400
    os.utime(old / "lock", (month_ago, month_ago))

    assert run_json("gc", disk.root, "--older-than", 31)["removed"] == []
    nothing = run_json("gc", disk.root, "--older-than", 29, "--fingerprint", OTHER.hex()[:8])
    assert nothing["removed"] == []
    dry = run_json("gc", disk.root, "--older-than", 29, "--dry-run")
    assert (dry["removed"], old.exists()) == ([str(old)], True)
    assert str(old) in run("gc", disk.root, "--older-than", 29)
    assert not old.exists()
    assert run_json("gc", disk.root, "--fingerprint", OTHER.hex().upper())["removed"] == [str(new)]
    assert run_json("ls", disk.root)["stores"] == []
    assert run_json("gc", disk.root, "--all")["removed"] == []


@pytest.mark.parametrize("last_use", [-5.0, 0.0, 3600.0])
def test_a_store_used_under_a_clock_that_was_not_set_is_of_no_age(
    disk: Disk, last_use: float
) -> None:
    """Perhaps it was used a minute ago."""
    folder = disk.fill(10)
    os.utime(folder / "lock", (last_use, last_use))
    assert run_json("gc", disk.root, "--older-than", 1)["removed"] == []
    assert len(run_json("ls", disk.root)["stores"]) == 1
    assert run_json("gc", disk.root, "--all")["removed"] == [str(folder)]


def test_gc_keeps_a_folder_with_something_of_somebody_else_in_it(disk: Disk) -> None:
    folder = disk.fill(10)
    (folder / "notes.txt").write_text("mine")
    assert "notes.txt" in run("gc", disk.root, "--all", code=1)
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "notes.txt"]
    disk.fill(10)


def test_gc_clears_away_what_dead_processes_left(disk: Disk) -> None:
    folder = disk.fill(10)
    probe, fresh = disk.root / ".probe-123", disk.root / ".probe-124"
    empty = disk.root / ("ab" * 16) / "0-0"
    empty.mkdir(parents=True)
    other = disk.root / "something else"
    other.mkdir()
    for path in (probe, fresh):
        path.write_bytes(bytes(10))
    for path in (probe, empty, empty.parent, other):
        os.utime(path, (1e9, 1e9))

    result = run_json("gc", disk.root, "--older-than", 1)

    assert result["leftovers"] == [str(probe), str(empty), str(empty.parent)]
    assert {path.name for path in disk.root.iterdir()} == {
        "capacity.lock",
        fresh.name,
        other.name,
        folder.parent.name,
    }


def test_gc_names_what_it_could_not_clear_away(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.fill(10)
    empty = disk.root / ("ab" * 16) / "0-0"
    empty.mkdir(parents=True)
    for path in (empty, empty.parent):
        os.utime(path, (1e9, 1e9))

    def refusing(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rmdir", refusing)
    result = run_json("gc", disk.root, "--older-than", 1, code=1)
    assert result["leftovers"] == []
    assert "Permission denied" in result["refused"][str(empty)]


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
    place = disk.survey.pages[page_key(4)]
    flip(place.segment.path, place.entry.offset + 5000)
    result = run_json("export", disk.root, "--all", tmp_path / "out", code=1)
    assert result["pages"] == 9
    (reason,) = result["failed"].values()
    assert page_key(4).hex() in reason


def test_an_export_onto_a_full_disk_says_what_it_has_written(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.fill(10)
    write, left = export._write, iter(range(3))

    def filling(*arguments: Any) -> dict[str, object]:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(export, "_write", filling)
    assert "No space left" in run("export", disk.root, "--all", tmp_path / "out", code=2)
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["pages"]) == 3


# -- what cannot be done --------------------------------------------------------------


def test_bad_input_gets_one_sentence(disk: Disk, tmp_path: Path) -> None:
    disk.fill(10)
    folder = tmp_path / "folder"
    folder.mkdir()
    file = tmp_path / "file"
    file.touch()
    key = page_key(77).hex()
    for command in ("ls", "stat", "verify"):
        assert "there is no" in run(command, tmp_path / "nowhere", code=2)
        assert "is no folder" in run(command, file, code=2)
        assert "holds no store" in run(command, folder, code=2)
        run(command, folder, "--json", code=2)
    assert "holds no store" in run("gc", folder, "--all", code=2)
    assert "say which" in run("gc", disk.root, code=2)
    assert "say which" in run("gc", disk.root, "--all", "--older-than", 3, code=2)
    assert "is no fingerprint" in run("gc", disk.root, "--fingerprint", "xyz", code=2)
    assert "is no key" in run("export", disk.root, "xyz", tmp_path / "out", code=2)
    assert "16 to 255 bytes" in run("export", disk.root, "abcd", tmp_path / "out", code=2)
    assert "no store has" in run("export", disk.root, key, tmp_path / "out", code=2)
    assert "give a page's key" in run("export", disk.root, key, code=2)
    assert "not an empty folder" in run("export", disk.root, "--all", tmp_path, code=2)
    assert not (tmp_path / "out").exists()
    assert run_json("stat", disk.root)["pages"] == 10


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_that_may_not_be_read_is_no_empty_one(disk: Disk, depth: int) -> None:
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


def test_ages_are_of_the_pages_not_of_the_files(disk: Disk) -> None:
    """A quantile of the ages lies between the youngest and the oldest page."""
    disk.fill(20)
    found = run_json("stat", disk.root)["page_age_s"]
    assert list(found) == ["newest", "p10", "p50", "p90", "oldest"]
    assert list(found.values()) == sorted(found.values())
    assert np.all(np.array(list(found.values())) < 60)
