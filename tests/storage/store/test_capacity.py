"""Several stores under one root stay within one capacity, and each within its share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.raw import RawCodec
from tiered_kv.messages import Proposal
from tiered_kv.storage.admin.inventory import Listing, list_stores
from tiered_kv.storage.segment.format import FormatError
from tiered_kv.storage.store.folders import StoreFolders, store_folders
from tiered_kv.storage.store.locks import LOCK_NAME, StoreBusyError, root_locked
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.segment_store import store_options
from tiered_kv.testing.segments import SegmentFile

ROOT = Path(__file__).resolve().parents[3]
Opener = Callable[..., SegmentStore]


def options_of(root: Path, number: int, segments: int = 16) -> StoreOptions:
    """Return the options of a store of one rank. All stores have the same capacity."""
    least = store_options(root, capacity_bytes=0).segment_bytes
    return store_options(root, rank=number, ranks=8, capacity_bytes=segments * least)


def open_at(options: StoreOptions) -> SegmentStore:
    return SegmentStore(options, RawCodec(options.page_format), lambda i, t, f: RawCodec(f))


@pytest.fixture
def open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    monkeypatch.setattr("tiered_kv.storage.store.capacity.FRESH_S", -1.0)  # never use a cached size
    opened: list[SegmentStore] = []

    def open_store(number: int, segments: int = 16) -> SegmentStore:
        opened.append(open_at(options_of(tmp_path, number, segments)))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def fill(store: SegmentStore, first: int, puts: int = 1, pages: int = 8) -> int:
    """Put pages, and return the number of refused pages."""
    refused = 0
    for put in range(puts):
        keys = [page_key(first + put * pages + i) for i in range(pages)]
        refused += len(store.put([(key, page_bytes(key)) for key in keys]))
    return refused


def fill_up(store: SegmentStore, first: int = 0) -> None:
    while not fill(store, first):
        first += 8


def used(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.seg"))


def segments_of(store: SegmentStore) -> int:
    return len(list(store.options.folder.glob("*.seg")))


def proposal_of(store: SegmentStore) -> Proposal:
    proposal = store.proposal()
    assert proposal is not None
    return proposal


def test_a_single_store_uses_the_whole_capacity_and_no_more(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store(0)
    fill_up(store)
    options = store.options
    share = options.capacity_bytes - 2 * options.segment_bytes  # the rest is reserved for survivors
    assert share - options.segment_bytes < used(tmp_path) <= share


def test_proposals_start_before_a_put_fails(open_store: Opener) -> None:
    store = open_store(0)
    first = 0
    while store.proposal() is None:
        assert fill(store, first) == 0
        first += 8
    assert fill(store, first, puts=1) == 0
    assert store.stats.no_room == 0


def test_unused_stores_are_deleted_first_the_longest_unused_of_them_before_others(
    open_store: Opener, tmp_path: Path
) -> None:
    for number, age in ((1, 1000), (2, 3000), (3, 2000)):
        store = open_store(number)
        fill(store, 0, puts=5)
        folder = store.options.folder
        store.close()
        os.utime(folder / LOCK_NAME, (time.time() - age, time.time() - age))
    mine = open_store(0)
    before = {info.rank: len(info.segments) for info in list_stores(tmp_path).stores}

    first = 0
    while used(tmp_path) + 2 * mine.options.segment_bytes <= mine.options.capacity_bytes:
        assert fill(mine, first) == 0
        first += 8
    assert fill(mine, first, puts=3) == 0
    left = {info.rank: len(info.segments) for info in list_stores(tmp_path).stores}
    assert left[2] < before[2]
    assert (left[1], left[3]) == (before[1], before[3])

    fill_up(mine, first + 24)
    left = {info.rank: len(info.segments) for info in list_stores(tmp_path).stores}
    assert (left[2], left[3]) == (0, 0)
    assert left[1] < before[1], "what is nobody's share may stay there"
    assert used(tmp_path) <= mine.options.capacity_bytes
    again = open_store(2)
    assert len(again) == 0


def test_a_newcomer_gets_one_segment_immediately_and_eventually_its_share(
    open_store: Opener, tmp_path: Path
) -> None:
    old = open_store(0)
    fill_up(old)
    new = open_store(1)
    capacity, segment = old.options.capacity_bytes, old.options.segment_bytes

    refused = fill(new, 0, puts=4)

    assert segments_of(new) == 1, "one segment, and only one"
    assert refused > 0
    assert used(tmp_path) <= capacity
    assert new.proposal() is not None, "it can write nothing, so it may give way to itself"

    # The old store exceeds its share now, and gets proposals until it no longer does.
    while (proposal := old.proposal()) is not None:
        old.reclaim(proposal.segment, ())
    assert used(old.options.folder) <= capacity // 2
    assert new.proposal() is None
    fill(new, 100, puts=60)
    assert used(new.options.folder) > capacity // 2 - 3 * segment
    assert used(new.options.folder) <= capacity // 2
    assert fill(old, 1000, puts=60) > 0, "at its share, with room to spare or not"
    assert used(tmp_path) <= capacity


def test_when_a_store_closes_the_others_get_its_share(open_store: Opener, tmp_path: Path) -> None:
    one, two = open_store(0), open_store(1)
    fill_up(one)
    fill_up(two)
    assert used(tmp_path) <= one.options.capacity_bytes
    two.close()
    fill_up(one, 5000)
    assert used(one.options.folder) > one.options.capacity_bytes - 4 * one.options.segment_bytes


def test_survivors_have_space_even_in_a_full_store(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(0)
    fill_up(store)
    proposal = proposal_of(store)
    assert store.reclaim(proposal.segment, proposal.keys) == []
    assert all(key in store for key in proposal.keys)
    assert used(tmp_path) <= store.options.capacity_bytes


def test_survivors_have_space_after_another_store_has_opened(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store(0)
    fill_up(store)
    newcomer = open_store(1)
    assert fill(newcomer, 1000) == 0
    assert used(tmp_path) > store.options.capacity_bytes - 2 * store.options.segment_bytes
    proposal = proposal_of(store)
    assert store.reclaim(proposal.segment, proposal.keys) == []
    assert used(tmp_path) <= store.options.capacity_bytes


def test_the_emptiest_segment_is_deleted_first_otherwise_the_oldest(open_store: Opener) -> None:
    store = open_store(0)
    fill_up(store)
    assert proposal_of(store).segment == 1
    third = SegmentFile(sorted(store.options.folder.glob("*.seg"))[2])
    keys = [entry.key for entry in third.entries]
    store.drop(keys[: len(keys) // 4])
    assert proposal_of(store).segment == 1
    store.drop(keys[:-1])
    assert proposal_of(store) == Proposal(3, (keys[-1],))
    store.drop(keys)
    assert proposal_of(store).segment == 1
    assert not third.path.exists()


def test_a_store_with_less_capacity_proposes_until_it_fits(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store(0, segments=16)
    fill_up(store)
    store.close()
    store = open_store(0, segments=8)
    while (proposal := store.proposal()) is not None:
        store.reclaim(proposal.segment, proposal.keys[:1])
    assert used(tmp_path) <= store.options.capacity_bytes
    assert fill(store, 9000) == 0


def test_a_store_in_use_names_its_holder(open_store: Opener) -> None:
    store = open_store(0)
    with pytest.raises(StoreBusyError) as caught:
        open_store(0)
    message = str(caught.value)
    assert f"process {os.getpid()} on {os.uname().nodename}" in message
    assert "another TIERED_KV_SSD_PATH" in message
    store.close()
    (store.options.folder / LOCK_NAME).write_text("no json")
    open_store(0)


def test_tools_see_a_store_in_use(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(3)
    began = int(time.time())
    fill(store, 0, puts=4)
    (info,) = list_stores(tmp_path).stores
    assert (info.fingerprint, info.replica, info.rank) == (store.options.fingerprint, 0, 3)
    assert info.locked
    assert info.holder["pid"] == os.getpid()
    assert info.nbytes == used(tmp_path)
    assert abs(info.last_use - time.time()) < 60
    segments = [SegmentFile(path) for path in info.segments]
    entries = [entry for segment in segments for entry in segment.entries]
    assert [entry.key for entry in entries] == store.keys()
    assert all(began <= entry.written <= time.time() for entry in entries)
    assert sum(entry.stored_bytes for entry in entries) == store.stored_bytes
    for segment in segments:
        for entry in segment.entries:
            page = segment.read(entry, RawCodec(PAGE_FORMAT))
            assert np.array_equal(page, page_bytes(entry.key))
    store.close()
    (info,) = list_stores(tmp_path).stores
    assert not info.locked


def test_tools_name_the_damaged_record(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(0)
    fill(store, 0)
    store.close()
    (path,) = store.options.folder.glob("*.seg")
    damaged, *whole = SegmentFile(path).entries
    content = bytearray(path.read_bytes())
    content[damaged.offset + 5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match="the page is damaged"):
        SegmentFile(path).read(damaged, RawCodec(PAGE_FORMAT))
    for entry in whole:
        SegmentFile(path).read(entry, RawCodec(PAGE_FORMAT))
    assert list_stores(tmp_path / "nothing") == Listing([], {})
    assert store_folders(tmp_path / "nothing") == StoreFolders()


def fill_in_turn(root: Path, number: int) -> None:
    """Fill a store and reclaim segments for a while, in a separate process."""
    store = open_at(options_of(root, number))
    for put in range(150):
        fill(store, put * 8)
        while (proposal := store.proposal()) is not None:
            store.reclaim(proposal.segment, proposal.keys[:2])
    print(json.dumps({"own": used(store.options.folder), "bad": store.stats.pages_bad}))
    store.close()


def size_of(segment: Path) -> int:
    """Return the bytes of a segment; 0 if it was deleted."""
    try:
        return segment.stat().st_size
    except FileNotFoundError:
        return 0


def test_processes_together_stay_within_the_capacity(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.storage.store.test_capacity", str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for number in range(3)
    ]
    options = options_of(tmp_path, 0)
    most = 0
    try:
        while any(writer.poll() is None for writer in writers):
            # Without the lock, a deleted and a new segment could both be counted.
            with root_locked(tmp_path):
                most = max(most, sum(map(size_of, tmp_path.rglob("*.seg"))))
            time.sleep(0.001)  # the writers need the lock too
        outputs = [writer.communicate()[0] for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert all(writer.returncode == 0 for writer in writers)
    assert all(json.loads(output)["bad"] == 0 for output in outputs)
    assert options.capacity_bytes // 2 < most
    assert most <= options.capacity_bytes
    assert used(tmp_path) <= options.capacity_bytes


if __name__ == "__main__":
    fill_in_turn(Path(sys.argv[1]), int(sys.argv[2]))
