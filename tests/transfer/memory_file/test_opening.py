"""A memory file is adopted if tiered-kv wrote it and it matches the engine. Otherwise it is refused
or recreated."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.transfer.memory_file.made_memory import (
    GEOMETRY,
    as_killed,
    key_of,
    keys_in,
    on_hugetlbfs,
    open_in,
    page_of,
    save,
    slot_of,
    write_file,
)
from tiered_kv.errors import ConfigError
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.transfer.host_memory import CpuPool
from tiered_kv.transfer.memory_file import opening
from tiered_kv.transfer.memory_file.lasting_memory import REST_S
from tiered_kv.transfer.memory_file.memory_format import MAGIC
from tiered_kv.transfer.memory_file.opening import open_memory

NAME = "0-0.slots"


def test_a_pool_over_the_file_finds_its_pages_again(folder: Path) -> None:
    memory = open_in(folder)
    pool = CpuPool(memory, GEOMETRY.slot_bytes)
    assert len(pool.slots) == GEOMETRY.slots
    assert not pool.slots.any()
    assert not memory.adopted
    for name in range(5):
        save(memory, 2 * name, name)
    memory.invalidate([4])
    pool.close()

    again = open_in(folder)
    assert keys_in(again) == {0: key_of(0), 2: key_of(1), 6: key_of(3), 8: key_of(4)}
    for slot, key in keys_in(again).items():
        assert (slot_of(again, slot) == page_of(key)).all()
    assert not again.resting, "after a clean stop nothing is under way"
    again.close()


def test_the_file_is_fully_allocated_and_private(folder: Path) -> None:
    memory = open_in(folder)
    there = (folder / NAME).stat()
    assert stat.S_IMODE(there.st_mode) == 0o600
    assert there.st_blocks * 512 >= there.st_size, "a hole would be a SIGBUS one day"
    assert there.st_size >= GEOMETRY.nbytes
    memory.close()


def test_a_clean_stop_removes_the_file_unless_configured_to_keep_it(folder: Path) -> None:
    memory = open_in(folder, keep=False)
    save(memory, 0, 0)
    memory.close()
    memory.close()
    assert not (folder / NAME).exists()
    memory = open_in(folder, keep=False)
    memory.keep = True
    memory.close()
    assert (folder / NAME).exists()
    assert memory.view.size == 0


def test_a_removed_file_is_recreated(folder: Path) -> None:
    memory = open_in(folder, keep=False)
    (folder / NAME).unlink()
    write_file(folder / NAME, b"another's")
    there = (folder / NAME).read_bytes()
    save(memory, 1, 1)
    memory.close()
    assert (folder / NAME).read_bytes() == there


# -- files that already exist --------------------------------------------------------


@pytest.mark.parametrize("content", [b"a diary", bytes(BLOCK) + b"a diary", b"TKVSEG\0\0" * 999])
def test_a_foreign_file_stays_and_the_start_is_refused(folder: Path, content: bytes) -> None:
    folder.mkdir()
    write_file(folder / NAME, content)
    there = (folder / NAME).read_bytes()
    with pytest.raises(ConfigError, match="not a memory file of tiered-kv: remove it") as said:
        open_in(folder)
    assert str(folder / NAME) in str(said.value)
    assert (folder / NAME).read_bytes() == there


def test_a_foreign_file_that_starts_with_zeros_stays_where_blocks_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "block_of", lambda fd: 2 << 20)  # as on hugetlbfs
    (tmp_path / NAME).write_bytes(bytes(BLOCK) + b"a diary")
    with pytest.raises(ConfigError, match="not a memory file of tiered-kv: remove it"):
        open_in(tmp_path)


def test_a_path_that_is_not_a_regular_file_stays(folder: Path) -> None:
    folder.mkdir()
    if not on_hugetlbfs(folder):  # hugetlbfs has no links
        (folder / "mine").write_bytes(MAGIC)
        (folder / NAME).symlink_to(folder / "mine")
        with pytest.raises(ConfigError, match="not a regular file"):
            open_in(folder)
        (folder / NAME).unlink()
    (folder / NAME).mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        open_in(folder)
    (folder / NAME).rmdir()
    os.mkfifo(folder / NAME)
    with pytest.raises(ConfigError, match="not a regular file"):
        open_in(folder)


def test_another_users_file_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_in(folder).close()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match="another user"):
        open_in(folder)
    assert (folder / NAME).exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"contents": bytes(16)}, "another model or other settings"),
        ({"slots": 25}, "24 slots of 8256 bytes, but this is rank 0 of 1 with 25 slots of 8256"),
        ({"slot_bytes": 16384}, "with 24 slots of 16384"),
        ({"ranks": 2}, "rank 0 of 1 .* rank 0 of 2"),
    ],
)
def test_an_engine_that_cannot_use_the_file_recreates_it(
    folder: Path, changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = open_in(folder)
    save(memory, 0, 0)
    memory.close()
    other = open_in(folder, **changes)
    assert not other.adopted
    assert not other.view.any()
    assert not other.resting
    pattern = rf"{folder / NAME} is recreated, because .*{why}"
    assert re.search(pattern, caplog.text)
    other.close()


def _version(content: bytearray) -> None:
    content[8] = 9


def _header(content: bytearray) -> None:
    content[100] ^= 1


def _digest(content: bytearray) -> None:
    content[40] ^= 1


def _short(content: bytearray) -> None:
    del content[-BLOCK:]


def _only_header(content: bytearray) -> None:
    del content[BLOCK:]


def _half_header(content: bytearray) -> None:
    del content[20:]


def _longer(content: bytearray) -> None:
    content += bytes(BLOCK)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_version, "format version 9, but only version 1"),
        (_header, "damaged"),
        (_digest, "damaged"),
        (_short, "instead of"),
        (_only_header, "instead of"),
        (_half_header, "truncated"),
        (_longer, "instead of"),
    ],
)
def test_a_damaged_file_is_recreated(
    folder: Path, spoil: object, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = open_in(folder)
    save(memory, 0, 0)
    memory.close()
    content = bytearray((folder / NAME).read_bytes())
    size = len(content)
    assert callable(spoil)
    spoil(content)
    if on_hugetlbfs(folder) and len(content) < size:
        pytest.skip("a file of one huge page cannot be shorter")
    write_file(folder / NAME, content)
    again = open_in(folder)
    assert not again.adopted
    assert why in caplog.text
    assert (folder / NAME).stat().st_size >= GEOMETRY.nbytes
    again.close()


@pytest.mark.parametrize("size", [0, 1, BLOCK])
def test_files_left_by_a_killed_creation_are_recreated(folder: Path, size: int) -> None:
    folder.mkdir()
    write_file(folder / NAME, bytes(size))
    memory = open_in(folder)
    save(memory, 0, 0)
    memory.close()


def test_an_incomplete_header_loses_only_its_page(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = open_in(folder)
    for slot in range(6):
        save(memory, slot, slot)
    memory.close()
    content = bytearray((folder / NAME).read_bytes())
    content[BLOCK + 1 * 128 + 50] ^= 1  # in the key
    content[BLOCK + 2 * 128 + 127] ^= 1  # in the header's own digest
    content[BLOCK + 3 * 128] = 77  # not a valid state
    # Slot 4 gets the header of slot 0.
    content[BLOCK + 4 * 128 : BLOCK + 5 * 128] = content[BLOCK : BLOCK + 128]
    write_file(folder / NAME, content)
    again = open_in(folder)
    assert keys_in(again) == {0: key_of(0), 5: key_of(5)}
    assert "emptied 4 slots with incomplete headers" in caplog.text
    assert again.resting == {1, 2, 3, 4}
    again.close()
    assert keys_in(open_in(folder)) == {0: key_of(0), 5: key_of(5)}


def test_a_file_with_holes_is_filled_before_it_is_used(folder: Path) -> None:
    memory = open_in(folder)
    save(memory, 0, 0)
    memory.close()
    content = (folder / NAME).read_bytes()
    write_file(folder / NAME, content[: 2 * BLOCK])
    os.truncate(folder / NAME, len(content))
    again = open_in(folder)
    there = (folder / NAME).stat()
    assert there.st_blocks * 512 >= there.st_size
    again.check_adopted(1)
    assert not again.adopted, "its page is zeros now"
    again.close()


def test_slots_rest_until_no_late_copy_can_land(folder: Path, tmp_path: Path) -> None:
    memory = open_in(folder)
    save(memory, 0, 0)
    memory.invalidate([5, 6])
    killed = as_killed(memory, tmp_path / "killed")
    # This engine stops before the slots have rested long enough.
    open_memory(killed, GEOMETRY, keep=True, clock=lambda: 90.0).close()
    now = 100.0
    again = open_memory(killed, GEOMETRY, keep=True, clock=lambda: now)
    assert again.resting == {5, 6}, "one that was never used need not rest"
    assert again.rest_s() == REST_S
    now = 99.0 + REST_S
    assert again.rest_s() == 1.0
    now = 101.0 + REST_S
    assert again.rest_s() == 0.0
    again.close()
    memory.close()
    assert open_in(folder).rest_s() == 0.0, "nothing rests"
