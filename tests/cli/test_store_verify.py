"""``tiered-kv store verify`` finds all damage, and reports no intact page as damaged."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.store_disk import Disk, flip, run, run_json
from tiered_kv.storage.segment.format import TRAILER_BYTES, record_header_bytes
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import page_key


@pytest.mark.parametrize("codec", ["raw", "zstd", "centred"])
def test_a_healthy_store_verifies(disk: Disk, codec: str) -> None:
    disk.fill(40, codec)
    found = run_json("verify", disk.root)
    assert (found["good"], found["pages"]) == (True, 40)
    assert found["bad_pages"] == found["bad_segments"] == []
    assert "all good" in run("verify", disk.root)


def test_pages_of_a_codec_from_another_package_verify_if_the_codec_is_named(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = "tests.codecs.shuffled:Shuffled"
    disk.fill(40, codec)
    found = run_json("verify", disk.root, code=1)
    assert all(f"TIERED_KV_CODEC={codec}" in bad["reason"] for bad in found["bad_segments"])
    assert (found["good"], found["pages"]) == (False, 0)

    monkeypatch.setenv("TIERED_KV_CODEC", codec)
    found = run_json("verify", disk.root)
    assert (found["good"], found["pages"]) == (True, 40)


def test_a_store_in_use_can_be_verified(disk: Disk, live: SegmentStore) -> None:
    assert run_json("verify", disk.root)["pages"] == 20
    disk.put(live, *range(20, 30))
    assert run_json("verify", disk.root)["pages"] == 30


def test_what_a_killed_process_was_writing_is_not_damage(disk: Disk, live: SegmentStore) -> None:
    """A killed process wrote the first and third record of a group, but not the second. The store
    verifies, and has the 20 earlier pages and these two."""
    (path,) = live.options.folder.glob("*.seg")
    disk.put(live, 100, 101, 102)
    entry = disk.inventory.pages[page_key(101)].entry
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
    found = disk.inventory.pages[victim]
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
    """A flipped byte in the header block or the footer of a segment is reported. No page can be
    read if the header is damaged. All 40 can be read if its padding or the footer is damaged."""
    disk.fill(40)
    (segment,) = disk.inventory.segments
    flip(segment.path, offset)
    result = run_json("verify", disk.root, code=1)
    (bad,) = result["bad_segments"]
    assert bad["segment"] == segment.path.name
    assert result["pages"] == pages
    assert f"bad segment {segment.path}: " in run("verify", disk.root, code=1)


def test_a_lost_record_of_an_unsealed_segment_is_found(disk: Disk, live: SegmentStore) -> None:
    place = disk.inventory.pages[page_key(3)]
    disk.put(live, *range(20, 30))
    flip(place.segment.path, place.entry.offset + 20)
    (bad,) = run_json("verify", disk.root, code=1)["bad_pages"]
    assert (bad["offset"], bad["key"]) == (place.entry.offset, None)


@pytest.mark.parametrize(("lost", "found"), [(19, True), (20, False)])
def test_only_what_was_written_last_may_be_missing(
    disk: Disk, live: SegmentStore, lost: int, found: bool
) -> None:
    """Page 19 was durable before the last group was written, so its damage is reported. Page 20
    belongs to the last group and may never have been durable, so its damage is not reported."""
    disk.put(live, *range(20, 30))
    place = disk.inventory.pages[page_key(lost)]
    flip(place.segment.path, place.entry.offset + 20)
    result = run_json("verify", disk.root, code=1 if found else 0)
    assert [bad["offset"] for bad in result["bad_pages"]] == [place.entry.offset] * found


def test_an_unsealed_segment_that_lost_an_unwritten_byte_is_found(
    disk: Disk, live: SegmentStore
) -> None:
    (path,) = live.options.folder.glob("*.seg")
    os.truncate(path, path.stat().st_size - 1)
    (bad,) = run_json("verify", disk.root, code=1)["bad_segments"]
    assert "truncated" in bad["reason"]


def test_a_segment_with_room_for_its_footer_and_no_more_is_not_cut_off(disk: Disk) -> None:
    disk.fill(10)
    (segment,) = disk.inventory.segments
    with segment.path.open("r+b") as file:
        file.seek(segment.records_end)
        file.write(bytes(segment.loaded.size - segment.records_end))
    result = run_json("verify", disk.root)
    assert (result["good"], result["pages"]) == (True, 10)


def test_pages_are_listed_in_the_order_in_which_they_were_written(
    disk: Disk, live: SegmentStore
) -> None:
    disk.put(live, 3, version=1)
    order = [page_key(name) for name in (*range(3), *range(4, 20), 3)]
    assert list(disk.inventory.pages) == live.keys() == order


def test_a_damaged_page_of_an_unsealed_segment_is_reported_alone(
    disk: Disk, live: SegmentStore
) -> None:
    disk.put(live, *range(20, 30))
    place = disk.inventory.pages[page_key(3)]
    flip(place.segment.path, place.entry.offset + 5000)
    result = run_json("verify", disk.root, code=1)
    (bad,) = result["bad_pages"]
    assert (bad["offset"], bad["key"]) == (place.entry.offset, page_key(3).hex())
    assert result["pages"] == 30


def test_a_segment_of_another_store_is_bad(disk: Disk) -> None:
    folder = disk.fill(10)
    (folder / "00000001.seg").rename(folder / "00000007.seg")
    (bad,) = run_json("verify", disk.root, code=1)["bad_segments"]
    assert bad["reason"] == "the segment belongs to another store"
    assert run_json("stat", disk.root)["unreadable_segments"] == 1


@pytest.mark.parametrize("lost", [1, 4096, 20000, 100_000, 300_000])
def test_a_segment_that_lost_its_end_is_found(disk: Disk, lost: int) -> None:
    disk.fill(40)
    (segment,) = disk.inventory.segments
    os.truncate(segment.path, segment.loaded.size - lost)
    result = run_json("verify", disk.root, code=1)
    (bad,) = result["bad_segments"]
    assert bad["reason"]


def test_a_segment_without_a_page_yet_is_not_bad(disk: Disk, live: SegmentStore) -> None:
    """A segment that is empty or contains only zeros is not reported, because its process may have
    died before it wrote the header, or may be about to write it."""
    for number, size in ((2, 0), (3, 1 << 20)):
        path = live.options.folder / f"{number:08}.seg"
        path.touch()
        os.truncate(path, size)
    assert run_json("verify", disk.root)["pages"] == 20
    assert run_json("stat", disk.root)["unreadable_segments"] == 0


def test_a_store_that_is_written_all_the_time_verifies(disk: Disk) -> None:
    """Segments are created, sealed and deleted while the command reads them. The command never
    reports damage."""
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


def test_reading_commands_change_nothing(disk: Disk, tmp_path: Path) -> None:
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
