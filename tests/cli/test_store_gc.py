"""``tiered-kv store gc`` deletes only the selected stores, and none that a process uses."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.cli.store_disk import OTHER, Disk, run, run_json
from tiered_kv.storage.store.store import SegmentStore


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
def test_a_store_used_while_the_clock_was_wrong_has_no_age(disk: Disk, last_use: float) -> None:
    """A store whose last use is dated 1969 or 1970 is not deleted by age, because it may have been
    used a minute ago. ``--all`` deletes it."""
    folder = disk.fill(10)
    os.utime(folder / "lock", (last_use, last_use))
    assert run_json("gc", disk.root, "--older-than", 1)["removed"] == []
    assert len(run_json("ls", disk.root)["stores"]) == 1
    assert run_json("gc", disk.root, "--all")["removed"] == [str(folder)]


def test_gc_keeps_a_folder_with_foreign_files(disk: Disk) -> None:
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
