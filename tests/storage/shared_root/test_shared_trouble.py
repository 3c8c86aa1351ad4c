"""Shared folders that are full, old, or contain unexpected files."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.remote.conftest import keys
from tiered_kv.remote.base import Outcome, RemoteKey
from tiered_kv.remote.breaker import Breaker
from tiered_kv.storage.shared_root import own_folder, root_store
from tiered_kv.storage.shared_root.index_entries import Entry, Kind, Place, head_of, pack_entries
from tiered_kv.storage.shared_root.own_folder import FolderReader
from tiered_kv.storage.shared_root.root_store import SharedRoot
from tiered_kv.testing.conformance.remote import put_all, read_all, soon

MOST = 1 << 24
TWO_DAYS_S = 2 * 86400.0
BLOCK, ENTRY = 4096, 32
"""Bytes of a file system block, and of an index entry without its name."""


@pytest.fixture(autouse=True)
def _always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_store, "REFRESH_S", 0.0)


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "no locks"])
@pytest.mark.parametrize("looks", [True, False], ids=["looks", "reads alone"])
def test_the_folder_of_an_engine_that_only_reads_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool, looks: bool
) -> None:
    """An engine last wrote two days ago, but still looks up or reads pages, and another engine
    needs space. The folder stays: its lock shows on the same host, and its heartbeat on other
    hosts, that the engine is alive."""
    reader, (one, other) = SharedRoot(tmp_path, MOST), keys("one", "other")
    assert reader.put([(one, [b"x" * 1000])], soon()) == [Outcome.STORED]
    lock = next(tmp_path.glob("*/lock"))
    os.utime(lock, (time.time() - TWO_DAYS_S,) * 2)  # the last write was two days ago
    if not locked:
        monkeypatch.setattr(own_folder, "is_locked", lambda _: False)
        monkeypatch.setattr(own_folder, "SIGN_OF_LIFE_S", 0.0)
    if looks:
        assert reader.exists([one], soon()) == [Outcome.HIT]
    else:
        (got,) = reader.get([one], memoryview(bytearray(1000)), soon())
        assert got.outcome is Outcome.HIT
    writer = SharedRoot(tmp_path, MOST)
    monkeypatch.setattr(own_folder, "KEPT_FREE", 1.0)  # space is short
    writer.put([(other, [b"y" * 1000])], soon())
    assert lock.exists()
    writer.close()
    reader.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_an_engine_that_cannot_write_reads_what_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    others, (there, new) = SharedRoot(tmp_path, MOST), keys("there", "new")
    assert others.put([(there, [b"x" * 1000])], soon()) == [Outcome.STORED]

    def failing(fd: int, parts: Sequence[bytes], offset: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(own_folder, "_write", failing)
    mine = SharedRoot(tmp_path, MOST)
    assert mine.put([(new, [b"z" * 10])], soon()) == [Outcome.REFUSED]
    assert mine.exists([there], soon()) == [Outcome.HIT]
    mine.close()
    others.close()


def test_an_entry_with_an_impossible_place_is_ignored(tmp_path: Path) -> None:
    folder, number, (key,) = tmp_path / "other.0", bytes(16), keys("one")
    folder.mkdir()
    entry = Entry(Kind.VALUE, key.name, Place(1, 1 << 63, 10))
    (folder / "index").write_bytes(head_of(number) + pack_entries([entry], number))
    (folder / "00000001.pack").write_bytes(bytes(100))
    store = SharedRoot(tmp_path, MOST)
    (got,) = store.get([key], memoryview(bytearray(100)), soon())
    store.close()
    assert got.outcome is Outcome.MISS


# -- no space ---------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 8 MiB. Skips the test without root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("only root can mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill all remaining space of a disk, as another program could. Returns the filler file."""
    path = disk / "somebody else's"
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return path


def values(count: int, name: str = "value") -> list[tuple[RemoteKey, list[bytes]]]:
    """Return values of 100 kB, each of which starts with its key."""
    found = keys(*(f"{name} {at} {'x' * 600}" for at in range(count)))
    return [(key, [key.name, bytes(100_000)]) for key in found]


def check_values(store: SharedRoot, names: Sequence[RemoteKey]) -> int:
    """Return the number of values found. Asserts that each belongs to its key."""
    found = read_all(store, names)
    for at, value in found.items():
        assert value is Outcome.MISS or (
            isinstance(value, bytes) and value.startswith(names[at].name)
        )
    return len([one for one in found.values() if one is not Outcome.MISS])


def test_on_a_full_disk_the_oldest_values_are_replaced_by_new_ones(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    store, reader, old = SharedRoot(small_disk, 6 << 20), SharedRoot(small_disk, MOST), values(45)
    assert set(store.put(old, soon())) == {Outcome.STORED}
    names = [key for key, _ in old]
    assert check_values(reader, names) == 45
    index = next(small_disk.glob("*/index")).stat().st_size
    # Makes the index end exactly at a block boundary.
    filler = b"f" * (BLOCK - (index + ENTRY) % BLOCK)
    put_all(store, [RemoteKey(filler, filler)], [b"value"])
    assert next(small_disk.glob("*/index")).stat().st_size % BLOCK == 0
    fill(small_disk)
    new = values(12, "new")
    assert Outcome.STORED in store.put(new[:6], soon()) + store.put(new[6:], soon())
    for each in (store, reader):
        assert 0 < check_values(each, names) < 45
        assert check_values(each, [key for key, _ in new])
    store.close()
    again = SharedRoot(small_disk, 6 << 20)
    assert check_values(again, names) == check_values(reader, names)
    again.close()
    reader.close()


def test_on_a_full_disk_a_process_opens_its_folder_and_continues(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk fills up while no process uses a folder. The next process opens the folder, stores new
    values, and keeps more than 20 of the 45 old values."""
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    store, old = SharedRoot(small_disk, 6 << 20), values(45)
    store.put(old, soon())
    store.close()
    fill(small_disk)
    again = SharedRoot(small_disk, 6 << 20)
    again.check(soon())
    assert Outcome.STORED in again.put(values(3, "new"), soon())
    assert check_values(again, [key for key, _ in old]) > 20
    again.close()


def test_on_a_full_disk_deleted_values_are_not_found(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    store, old = SharedRoot(small_disk, 6 << 20), values(45)
    store.put(old, soon())
    fill(small_disk)
    names = [key for key, _ in old[10:]]
    assert store.delete(names, soon())
    reader = SharedRoot(small_disk, MOST)
    assert check_values(store, names) == check_values(reader, names) == 0
    reader.close()
    store.close()


def test_an_unreported_quota_counts_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes fail beyond a quota of 3 MB that the disk does not report. New values are stored in
    place of the oldest, and values that did not fit leave no holes in the packs."""
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    real, old, new = os.pwrite, values(30), values(30, "new")

    def taken() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob("*/*"))

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        left = 3_000_000 - taken()
        if left <= 0:
            raise OSError(errno.EDQUOT, "quota")
        return real(fd, data[:left], offset)

    store = SharedRoot(tmp_path, 6 << 20)
    store.put(old[:28], soon())
    monkeypatch.setattr(os, "pwrite", pwrite)
    for at in range(10):
        assert store.put(new[3 * at : 3 * at + 3], soon()) == [Outcome.STORED] * 3
    assert check_values(store, [key for key, _ in new[-9:]]) == 9
    assert check_values(store, [key for key, _ in new]) > 20
    assert taken() <= 3_000_000
    reader = FolderReader(store_folder := next(tmp_path.glob("*/index")).parent)
    reader.refresh()
    noted = sum(place.nbytes for place in reader.contents.places.values())
    assert noted == sum(path.stat().st_size for path in store_folder.glob("*.pack"))
    store.close()


def test_a_disk_that_accepts_nothing_costs_at_most_one_pack_per_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs immediately use all space that this process frees. Each call refuses its
    values and deletes one pack."""
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    real, old, new = os.pwrite, values(30), values(12, "new")

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".pack":
            raise OSError(errno.EDQUOT, "quota")
        return real(fd, data, offset)

    store = SharedRoot(tmp_path, 6 << 20)
    store.put(old, soon())
    packs = len([*tmp_path.glob("*/*.pack")])
    monkeypatch.setattr(os, "pwrite", pwrite)
    for call in (1, 2):
        assert store.put(new, soon()) == [Outcome.REFUSED] * 12
        assert len([*tmp_path.glob("*/*.pack")]) == packs - call
    store.close()


@pytest.mark.parametrize(
    ("error", "outcomes"),
    [
        (errno.EDQUOT, [Outcome.STORED] * 2 + [Outcome.REFUSED] * 2),
        (errno.EIO, [Outcome.DOWN] * 4),
    ],
    ids=["full", "broken"],
)
def test_values_written_before_the_disk_was_full_count(
    error: int, outcomes: list[Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, new = os.pwrite, values(4)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".pack" and offset > 150_000:
            raise OSError(error, "injected")
        return real(fd, data, offset)

    store = SharedRoot(tmp_path, 6 << 20)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert store.put(new, soon()) == outcomes
    monkeypatch.undo()
    store.close()
    reader = SharedRoot(tmp_path, 6 << 20)
    assert check_values(reader, [key for key, _ in new]) == outcomes.count(Outcome.STORED)
    reader.close()


def test_a_disk_without_inodes_refuses_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has free bytes but no free inodes, so no pack can be created. Values are refused,
    and are stored once there are inodes again."""
    monkeypatch.setattr(Breaker, "lets_through", lambda *_: True)
    real, new = os.open, values(3)

    def no_more_files(path: Path, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).endswith(".pack"):
            raise OSError(errno.ENOSPC, "no inodes")
        return real(path, flags, *args, **options)

    store = SharedRoot(tmp_path, MOST)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_more_files)
        assert store.put(new, soon()) == [Outcome.REFUSED] * 3
    assert store.put(new, soon()) == [Outcome.STORED] * 3
    assert check_values(store, [key for key, _ in new]) == 3
    (pack,) = tmp_path.glob("*/*.pack")
    assert pack.stat().st_size == sum(len(part) for _, parts in new for part in parts)
    store.close()


CRASHES: dict[str, str] = {
    "the new index is written": "os.fdatasync",
    "the old one is replaced": "Path.replace",
    "a pack was deleted and it is not noted": "own_folder.pack_entries",
}


@pytest.mark.parametrize("where", CRASHES.values(), ids=CRASHES)
def test_a_process_killed_while_writing_the_index_leaves_a_usable_folder(
    tmp_path: Path, where: str
) -> None:
    script = f"""
import os, signal, sys
from pathlib import Path
from typing import Any
from tests.storage.shared_root.test_shared_trouble import values, soon
from tiered_kv.storage.shared_root import own_folder
from tiered_kv.storage.shared_root.root_store import SharedRoot

def die(*args): os.kill(os.getpid(), signal.SIGKILL)

store, found = SharedRoot(Path(sys.argv[1]), 3 << 20), values(40)
store.put(found[:25], soon())
own_folder.MOST_STALE = {0 if where != CRASHES["a pack was deleted and it is not noted"] else 999}
{where} = die
for number in range(25, 40):
    store.delete([found[number - 25][0]], soon())
    store.put(found[number:number + 1], soon())
"""
    reader = SharedRoot(tmp_path, MOST)
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert killed.returncode == -9
    names = [key for key, _ in values(40)]
    before = check_values(reader, names)
    assert before > 10
    store = SharedRoot(tmp_path, 3 << 20)
    store.check(soon())
    assert len([*tmp_path.glob("*/lock")]) == 1, "the same folder"
    put_all(store, keys("after"), [b"value"])
    for each in (store, reader):
        assert check_values(each, names) == before
        assert read_all(each, keys("after")) == {0: b"value"}
    assert not [*tmp_path.glob("*/index.new")]
    store.close()
    reader.close()


def test_a_folder_whose_index_could_not_be_replaced_is_opened(tmp_path: Path) -> None:
    """A process that was killed or ran out of space has left an incomplete new index. The folder is
    opened with the values of the old index, and accepts new values."""
    store = SharedRoot(tmp_path, MOST)
    put_all(store, keys("before"), [b"value"])
    store.close()
    (folder,) = tmp_path.iterdir()
    (folder / "index.new").write_bytes(b"half of an index")
    again = SharedRoot(tmp_path, MOST)
    assert again.exists(keys("before"), soon()) == [Outcome.HIT]
    put_all(again, keys("after"), [b"value"])
    assert [*tmp_path.iterdir()] == [folder]
    again.close()


def test_the_number_of_a_deleted_pack_is_not_reused(tmp_path: Path) -> None:
    """A pack is deleted before the index is updated. The next pack gets another number, so that a
    reader with the old index finds no wrong value."""
    store, reader = SharedRoot(tmp_path, MOST), SharedRoot(tmp_path, MOST)
    put_all(store, keys("old"), [b"old value"])
    assert reader.exists(keys("old"), soon()) == [Outcome.HIT]
    store.close()
    # Simulate a process that was killed before it updated the index.
    next(tmp_path.glob("*/*.pack")).unlink()
    again = SharedRoot(tmp_path, MOST)
    put_all(again, keys("new"), [b"new value"])
    assert [path.name for path in tmp_path.glob("*/*.pack")] == ["00000002.pack"]
    assert read_all(reader, keys("old")) == {0: Outcome.MISS}
    again.close()
    reader.close()


# -- read-only folders -------------------------------------------------------------------


@pytest.mark.parametrize("error", root_store.NOT_WRITABLE)
@pytest.mark.parametrize("call", ["put", "delete"])
def test_a_refused_write_does_not_affect_reads_and_is_logged_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
    call: str,
) -> None:
    caplog.set_level(logging.INFO, "tiered_kv")
    now, (there, new) = [time.monotonic()], keys("there", "new")
    mine, others = SharedRoot(tmp_path, MOST), SharedRoot(tmp_path, MOST)
    put_all(mine, [there], [b"x" * 1000])

    def failing(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    refused: Callable[[], object] = {
        "put": lambda: mine.put([(new, [b"z" * 10])], now[0] + 9),
        "delete": lambda: mine.delete([there], now[0] + 9),
    }[call]
    name = "put" if call == "put" else "delete"
    with monkeypatch.context() as patch:
        patch.setattr(own_folder.OwnFolder, name, failing)
        for _ in range(50):
            assert refused() in ([Outcome.REFUSED], False)
            assert mine.exists([there], now[0] + 9) == [Outcome.HIT]
            now[0] += 2.0
    assert len(caplog.records) == 1
    assert os.strerror(error) in caplog.text
    now[0] += 60.0
    assert mine.put([(new, [b"z" * 10])], now[0] + 9) == [Outcome.STORED]
    assert "accepts writes again" in caplog.messages[-1]
    mine.close()
    others.close()
