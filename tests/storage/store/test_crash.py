"""After a crash of the process or the machine at any moment, the store opens and returns all
durable pages."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal
from tiered_kv.storage.disk.files import FileLayer
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import Crash, FaultyFiles, RecordedFiles, UnsafeFiles
from tiered_kv.testing.segment_store import ToyCodec, store_options

ROOT = Path(__file__).resolve().parents[3]


def open_store(
    options: StoreOptions, trained: bool, files: FileLayer | None = None
) -> SegmentStore:
    page_format = options.page_format
    codec = ToyCodec(page_format) if trained else RawCodec(page_format)
    return SegmentStore(
        options,
        codec,
        lambda id_, table, f: RawCodec(f) if id_ == 0 else ToyCodec(f, table),
        files,
    )


# -- every write boundary ---------------------------------------------------------------


@dataclass
class Moment:
    """Pages that were acknowledged after a number of file operations.

    Attributes:
        steps: number of recorded file operations.
        stored: version of each page that must exist.
        past: versions since the last reset that may exist instead of a missing page.
    """

    steps: int
    stored: dict[int, int]
    past: dict[int, set[int]]


@dataclass
class Story:
    """A sequence of calls on a store. After each call, the acknowledged pages are recorded."""

    store: SegmentStore
    files: RecordedFiles
    moments: list[Moment] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)
    past: dict[int, set[int]] = field(default_factory=dict)
    version: int = 0

    def note(self) -> None:
        past = {name: set(versions) for name, versions in self.past.items()}
        self.moments.append(Moment(len(self.files.steps), dict(self.stored), past))

    def put(self, names: Iterable[int]) -> None:
        self.version += 1
        names = list(names)
        pages = [(page_key(name), page_bytes(page_key(name), self.version)) for name in names]
        assert not self.store.put(pages)
        for name in names:
            self.stored[name] = self.version
            self.past.setdefault(name, set()).add(self.version)
        self.note()

    def drop(self, names: Iterable[int]) -> None:
        for name in names:
            self.store.drop([page_key(name)])
            self.stored.pop(name, None)
        self.note()

    def make_room(self) -> None:
        name = 200
        while (proposal := self.store.proposal()) is None:
            self.put(range(name, name + 10))
            name += 10
        for key in self.store.reclaim(proposal.segment, proposal.keys[::2]):
            del self.stored[name_of(key)]
        self.note()

    def reset(self) -> None:
        self.store.clear()
        self.stored.clear()
        self.past.clear()
        self.note()

    def live(self) -> None:
        self.note()
        self.put(range(3))
        self.put(range(3, 20))
        self.put([1, 4])
        self.drop([2, 5])
        self.put(range(30, 50))
        self.make_room()
        self.put(range(80, 85))
        self.drop(range(80, 85))
        self.put([81])
        self.reset()
        self.put(range(90, 95))
        self.put([3, 91])
        self.store.close()
        self.note()


def name_of(key: PageKey) -> int:
    return int.from_bytes(key[16:], "big")


def found_in(store: SegmentStore) -> dict[int, bytes]:
    keys = store.keys()
    wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in keys]
    failed = store.get(wanted)
    assert not failed, "a page is promised and not there"
    return {name_of(key): out.tobytes() for key, out in wanted}


def check(found: dict[int, bytes], before: Moment, after: Moment) -> None:
    """Assert that all acknowledged pages are found in a valid version, and that every other page
    that is found was put since the last reset."""
    for name in before.stored.keys() & after.stored.keys():
        assert name in found, f"page {name} was durable and is lost"
    for name, page in found.items():
        if name in before.stored:
            versions = {before.stored[name], after.stored.get(name, -1)}
            assert is_version(name, page, versions), f"page {name} is wrong, or of another time"
        else:
            check_was_stored(name, page, before, after)


def check_was_stored(name: int, page: bytes, before: Moment, after: Moment) -> None:
    """Assert that the page found is a version that was put since the last reset."""
    versions = before.past.get(name, set()) | after.past.get(name, set())
    assert is_version(name, page, versions), f"page {name} is wrong, or of before a reset"


def is_version(name: int, page: bytes, versions: set[int]) -> bool:
    return page in [page_bytes(page_key(name), v).tobytes() for v in versions if v >= 0]


@pytest.mark.parametrize("trained", [False, True], ids=["raw", "trained"])
@pytest.mark.parametrize("crash", list(Crash))
def test_a_crash_at_any_write_loses_nothing_durable(
    tmp_path: Path, crash: Crash, trained: bool
) -> None:
    files = RecordedFiles()
    segment = store_options(tmp_path, capacity_bytes=0).segment_bytes
    options = store_options(tmp_path / "root", io_threads=1, capacity_bytes=6 * segment)
    story = Story(open_store(options, trained, files), files)
    story.live()
    rng = random.Random(0)
    for count in range(len(files.steps)):
        before = next((m for m in reversed(story.moments) if m.steps <= count), Moment(0, {}, {}))
        after = next(m for m in story.moments if m.steps > count)
        copy = tmp_path / f"{count}"
        files.after_crash(count, crash, rng, options.root, copy)
        with closing(open_store(replace(options, root=copy), trained, UnsafeFiles())) as store:
            first = found_in(store)
            check(first, before, after)
            # The store remains usable, and the next restart finds its new page too.
            page = page_bytes(page_key(1000))
            while store.put([(page_key(1000), page)]):
                proposal = store.proposal()
                assert proposal is not None, "a store is full, and has nothing to give"
                store.reclaim(proposal.segment, ())
            kept = found_in(store)
        with closing(open_store(replace(options, root=copy), trained, UnsafeFiles())) as store:
            found = found_in(store)
        lost = [name for name, page in kept.items() if found.get(name) != page]
        assert not lost, "what was there when the store was closed"
        # An earlier record of a reclaimed page may be in a segment that still exists.
        for name in found.keys() - kept.keys():
            assert name in first, f"page {name} is back from before a reset"
            check_was_stored(name, found[name], before, after)


# -- kill -9 ------------------------------------------------------------------------------

PAGES = PageFormat(ElementType.BF16, 32 << 10, 16)


def kill_options(root: Path) -> StoreOptions:
    return store_options(root, page_format=PAGES, capacity_bytes=12 << 20, io_threads=3)


def write_until_killed(root: Path, first: int) -> None:
    """Put groups of pages forever, and print which are durable and which may be lost."""

    def say(what: str, keys: Iterable[PageKey]) -> None:
        os.write(1, f"{what} {' '.join(str(name_of(key)) for key in keys)}\n".encode())

    rng = random.Random(first)
    store = open_store(kill_options(root), trained=True)
    say("open", [])
    while True:
        keys = [page_key(first + i) for i in range(rng.randint(1, 40))]
        first += len(keys)
        failed = store.put([(key, page_bytes(key, 0, PAGES.page_bytes)) for key in keys])
        say("put", [key for i, key in enumerate(keys) if i not in failed])
        while (proposal := store.proposal()) is not None:
            survivors = proposal.keys[: len(proposal.keys) // 3]
            say("going", [key for key in proposal.keys if key not in survivors])
            store.reclaim(proposal.segment, survivors)


def kill_again_and_again(root: Path, times: int) -> None:
    rng = random.Random(times)
    durable = set[int]()
    for life in range(times):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.storage.store.test_crash", str(root), str(life << 20)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(rng.randint(1, 12))]
            time.sleep(rng.random() * 0.004)  # any moment of its next operations
            os.kill(writer.pid, signal.SIGKILL)
            lines += writer.stdout.read().splitlines(keepends=True)
        finally:
            writer.kill()
            writer.wait()
            if writer.stdout is not None:
                writer.stdout.close()
        for line in lines:
            what, *names = line.decode().split()
            if what == "put":
                durable.update(map(int, names))
            else:
                durable.difference_update(map(int, names))
        durable = check_after_kill(root, durable)


def check_after_kill(root: Path, durable: set[int]) -> set[int]:
    """Check that everything durable exists and is complete. Returns the names of all pages."""
    with closing(open_store(kill_options(root), trained=True)) as store:
        keys = store.keys()
        wanted = [(key, np.zeros(PAGES.page_bytes, np.uint8)) for key in keys]
        assert store.get(wanted) == frozenset()
    for key, out in wanted:
        assert np.array_equal(out, page_bytes(key, 0, PAGES.page_bytes)), "a wrong page"
    found = {name_of(key) for key, _ in wanted}
    assert durable <= found, f"lost {sorted(durable - found)}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("times", [12, 13])
def test_kill_minus_nine_at_any_moment_loses_nothing_durable(tmp_path: Path, times: int) -> None:
    kill_again_and_again(tmp_path, times)


@pytest.mark.nightly
def test_kill_minus_nine_at_three_hundred_moments_loses_nothing_durable(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 300)


def test_survivors_outlive_a_kill_during_a_reclaim_and_the_next_reclaim(
    tmp_path: Path,
) -> None:
    """A process is killed after it has written survivors, and before it deletes their old segment.
    The restarted store proposes the rest of that segment, and keeps the survivors of both
    reclaims."""
    segment = store_options(tmp_path, capacity_bytes=0).segment_bytes
    options = store_options(tmp_path / "root", capacity_bytes=8 * segment)
    files = FaultyFiles(UnsafeFiles())
    with closing(open_store(options, trained=False, files=files)) as store:
        for name in range(0, 1000, 8):
            if store.put([(page_key(i), page_bytes(page_key(i))) for i in range(name, name + 8)]):
                break
        first = store.proposal()
        assert first is not None
        # The process is killed before the last operation of the reclaim.
        files.fail("unlink", errno.EIO)
        store.reclaim(first.segment, first.keys[::2])
    assert files.struck == 1
    used = sum(path.stat().st_size for path in options.folder.glob("*.seg"))
    assert 6 * segment < used <= options.capacity_bytes

    with closing(open_store(options, trained=False)) as store:
        second = store.proposal()
        assert second is not None
        assert second == Proposal(first.segment, first.keys[1::2])
        kept = second.keys[::2]
        assert set(store.reclaim(second.segment, kept)) == set(second.keys) - set(kept)
        found = found_in(store)
        assert {name_of(key) for key in (*first.keys[::2], *kept)} <= found.keys()


# -- stale bytes ----------------------------------------------------------------------------


def unsealed_copy(store: SegmentStore, change: Callable[[bytes], bytes]) -> None:
    """Close the store, and write its newest segment as a killed process leaves it, after
    ``change``."""
    path = max(store.options.folder.glob("*.seg"))
    content = path.read_bytes()
    store.close()
    path.write_bytes(change(content))


def test_stale_records_in_a_reused_file_are_not_found(tmp_path: Path) -> None:
    """A file contains complete records of another segment after the records of its own segment. The
    store finds only the segment's own page."""
    options = store_options(tmp_path)
    store = open_store(options, trained=False)
    store.put([(page_key(i), page_bytes(page_key(i))) for i in range(10)])
    (path,) = options.folder.glob("*.seg")
    stale = path.read_bytes()
    store.clear()
    store.close()
    store = open_store(options, trained=False)  # numbers its segments from 1 again
    store.put([(page_key(100), page_bytes(page_key(100)))])

    assert path.exists(), "not the same name"

    def behind(content: bytes) -> bytes:
        end = 4096 + 8192
        return content[:end] + stale[end:]

    unsealed_copy(store, behind)
    store = open_store(options, trained=False)
    assert store.keys() == [page_key(100)]
    store.close()


def test_a_damaged_header_hides_no_later_record(tmp_path: Path) -> None:
    options = store_options(tmp_path)
    store = open_store(options, trained=False)
    for i in range(6):
        store.put([(page_key(i), page_bytes(page_key(i)))])
    damaged = 4096 + 2 * 8192 + 50
    unsealed_copy(store, lambda c: c[:damaged] + b"\xff" + c[damaged + 1 :])
    for _ in range(2):
        store = open_store(options, trained=False)
        assert store.keys() == [page_key(i) for i in (0, 1, 3, 4, 5)]
        found_in(store)
        store.close()


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
