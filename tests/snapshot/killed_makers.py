"""Snapshot makers that are killed with SIGKILL at their n-th step, for every n.

Run as ``python -m tests.snapshot.killed_makers FOLDER STORY``. The makers are forks of this
process, which has no other thread. It prints the number of moments at which a maker was killed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.snapshot.made_snapshots import (
    ONE,
    PLAIN,
    check_whole,
    drafts,
    make,
    outline,
    page_files,
)
from tiered_kv.snapshot.draft import SnapshotDraft
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.pack import pack, unpack
from tiered_kv.snapshot.reader import find_snapshot, open_snapshot

STEPS = ("open", "write", "fsync", "rename", "link", "unlink", "mkdir", "rmdir")
"""System calls that change files, or open them for a change."""

LONGER = outline(PLAIN, ranks=2, tokens=60)
"""Snapshot of two ranks with four pages each. Three pages of rank 0 are also in ``ONE``."""


def die_at(moment: int) -> None:
    """Make this process kill itself before its ``moment``-th step, or in the middle of that step if
    it is a write."""
    lock, steps = threading.Lock(), itertools.count(1)

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def step(*arguments: Any, **options: Any) -> Any:
            with lock:
                if next(steps) == moment:
                    if name == "write":
                        some = arguments[1]
                        original(arguments[0], some[: len(some) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, step)

    for name in STEPS:
        wrap(os, name)
    wrap(zipfile.ZipFile, "writestr")  # writestr writes without os.write


def killed_at(moment: int, act: Callable[[], object]) -> bool:
    """Call a function in a forked process. Returns True if the process was killed.

    Raises:
        AssertionError: the process failed by itself.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            die_at(moment)
            act()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0, f"a maker failed at moment {moment}"
    return False


def moments(act: Callable[[], object]) -> Iterator[int]:
    """Kill a maker at each moment, and yield the moment after the kill. The last moment is the
    first one that the maker survives."""
    for moment in itertools.count(1):
        alive = not killed_at(moment, act)
        yield moment
        if alive:
            break


def names(root: Path) -> set[str]:
    """Return all names that could be taken for snapshots."""
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}


def check_root(root: Path, *, new: str) -> bool:
    """Assert that every named snapshot is complete, and that ``first`` and ``second`` exist.
    Returns True if ``new`` exists."""
    for name in names(root):
        path = root / name
        with open_snapshot(path) as snapshot:
            check_whole(snapshot)
    for old in ("first", "second"):
        find_snapshot(root, old)
    try:
        find_snapshot(root, new)
    except SnapshotError:
        assert new not in names(root)
        return False
    return True


def begun(root: Path) -> None:
    """Create the snapshots ``first`` and ``second``."""
    make(root, "first", ONE)
    make(root, "second", outline(PLAIN, ranks=1, tokens=20))


def writing(root: Path) -> int:
    """Kill makers of a snapshot that shares pages with others."""
    begun(root)
    pool = sorted((root / ".pages").rglob("*/*"))
    count, there = 0, False
    for count in moments(lambda: make(root, "new", LONGER)):
        if check_root(root, new="new"):
            there = True
            shutil.rmtree(root / "new")
        if count % 3 == 0:  # another maker, at any moment, sweeps the killed maker's draft
            SnapshotDraft.begin(root, "next").abandon()
        else:  # the next maker of the same snapshot succeeds
            make(root, "new", LONGER)
            assert check_root(root, new="new")
            shutil.rmtree(root / "new")
        assert not drafts(root)
        SnapshotDraft.begin(root, "next").abandon()
        left = sorted((root / ".pages").rglob("*/*"))
        assert left == pool, "a page of no snapshot stays, or one of a snapshot does not"
    assert there
    return count


def renewing(root: Path) -> int:
    """Kill makers of a snapshot whose pages are all damaged in the pool."""
    begun(root)
    (root / ".kept").mkdir()
    count = 0

    def spoil() -> None:
        for path in page_files(root, "first"):  # the first snapshot keeps its own good pages
            place, kept = root / ".pages" / path.name[:2] / path.name, root / ".kept" / path.name
            place.parent.mkdir(exist_ok=True)
            for one in (place, kept):
                one.unlink(missing_ok=True)
            place.write_bytes(b"damaged")
            os.link(place, kept)  # as if another snapshot had the damaged page

    spoil()
    for moment in moments(lambda: make(root, "new", ONE)):
        count = moment
        if check_root(root, new="new"):
            shutil.rmtree(root / "new")
        spoil()
    make(root, "new", ONE)
    assert check_root(root, new="new")
    for path in page_files(root, "new"):
        assert path.samefile(root / ".pages" / path.name[:2] / path.name)
    assert not drafts(root)
    return count


def packing(root: Path) -> int:
    """Kill makers of a zip file."""
    begun(root)
    count, there = 0, False
    for moment in moments(lambda: pack(root / "first", root / "new.zip")):
        count = moment
        if check_root(root, new="new"):
            there = True
            (root / "new.zip").unlink()
        pack(root / "first", root / "new.zip")
        assert check_root(root, new="new")
        (root / "new.zip").unlink()
        assert not drafts(root)
    assert there
    return count


def unpacking(root: Path) -> int:
    """Kill makers that unpack a zip file to a folder."""
    begun(root)
    pack(root / "first", root / "zipped.zip")
    count, there = 0, False
    for moment in moments(lambda: unpack(root / "zipped.zip", root / "new")):
        count = moment
        if check_root(root, new="new"):
            there = True
            shutil.rmtree(root / "new")
        unpack(root / "zipped.zip", root / "new")
        assert check_root(root, new="new")
        shutil.rmtree(root / "new")
        assert not drafts(root)
    assert there
    return count


def crowding(root: Path) -> int:
    """Kill concurrent makers at various moments, while others remove and sweep snapshots."""
    begun(root)
    count = 0
    for turn in range(60):
        children = []
        for maker in range(3):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    if maker:  # the first maker survives
                        die_at(1 + (turn * 7 + maker * 13) % 90)
                    name = f"{turn}-{maker}"
                    make(root, name, LONGER)
                    if turn % 2:  # renamed first, because removing it takes many steps
                        (root / name).rename(root / f".gone-{name}")
                        shutil.rmtree(root / f".gone-{name}")
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        for maker, child in enumerate(children):
            status = os.waitpid(child, 0)[1]
            assert status == 0 or (maker and os.WIFSIGNALED(status)), f"maker {maker} failed"
            count += status != 0
        if turn % 2 == 0:
            with open_snapshot(root / f"{turn}-0") as snapshot:
                check_whole(snapshot)
            for name in names(root) - {"first", "second"}:
                with open_snapshot(root / name) as snapshot:
                    check_whole(snapshot)
                shutil.rmtree(root / name)
    SnapshotDraft.begin(root, "next").abandon()
    assert not drafts(root)
    check_root(root, new="new")
    return count


STORIES: dict[str, Callable[[Path], int]] = {
    story.__name__: story for story in (writing, renewing, packing, unpacking, crowding)
}

if __name__ == "__main__":
    os.fsync = lambda fd: None  # a killed process loses nothing that it has written
    print(STORIES[sys.argv[2]](Path(sys.argv[1])))
