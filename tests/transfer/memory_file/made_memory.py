"""Memory files whose page bytes are derived from their keys."""

from __future__ import annotations

import mmap
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.transfer.memory_file.lasting_memory import LastingMemory
from tiered_kv.transfer.memory_file.memory_format import (
    ENTRY_BYTES,
    Geometry,
    SlotHeader,
    parse_file_header,
)
from tiered_kv.transfer.memory_file.opening import open_memory
from tiered_kv.transfer.memory_file.slot_table import SlotTable

PAGE = 8192
GEOMETRY = Geometry(bytes(range(16)), rank=0, ranks=1, replica=0, slots=24, slot_bytes=PAGE + 64)


def key_of(name: int) -> PageKey:
    return PageKey(b"fingerprint of 1" + name.to_bytes(32, "big"))


def page_of(key: PageKey) -> NDArray[np.uint8]:
    words = np.arange(PAGE // 8, dtype=np.uint64) + np.uint64(xxhash.xxh3_64_intdigest(key))
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def open_in(folder: Path, *, keep: bool = True, **changes: Any) -> LastingMemory:
    return open_memory(folder, replace(GEOMETRY, **changes), keep=keep)


def slot_of(memory: LastingMemory, slot: int) -> NDArray[np.uint8]:
    return memory.view.reshape(-1, GEOMETRY.slot_bytes)[slot, :PAGE]


def save(memory: LastingMemory, slot: int, name: int) -> PageKey:
    """Save a page as a worker does. Its save time is its name."""
    key = key_of(name)
    memory.invalidate([slot])
    slot_of(memory, slot)[:] = page_of(key)
    ticket = memory.ticket(slot)
    digest = memory.digest(slot, PAGE)
    assert memory.validate(slot, ticket, SlotHeader(key, PAGE, name, digest))
    return key


def on_hugetlbfs(folder: Path) -> bool:
    """Return whether the folder is on hugetlbfs, where files consist of whole huge pages."""
    return os.statvfs(folder).f_bsize > BLOCK


def write_file(path: Path, content: bytes | bytearray) -> None:
    """Write a file. hugetlbfs can be written only through mapped memory, so there the content is
    followed by zeros up to the end of its last page."""
    if not on_hugetlbfs(path.parent):
        path.write_bytes(content)
        return
    block, size = os.statvfs(path.parent).f_bsize, memoryview(content).nbytes
    with path.open("wb+") as file:
        file.truncate(-(-size // block) * block)
        if size:
            with mmap.mmap(file.fileno(), 0) as mapped:
                mapped[:size] = content


def as_killed(memory: LastingMemory, folder: Path) -> Path:
    """Return a folder with a copy of the file, as it would be left if its owner were killed now."""
    folder.mkdir()
    shutil.copy(memory.path, folder / memory.path.name)
    return folder


def keys_in(memory: LastingMemory) -> dict[int, PageKey]:
    return {slot: page.key for slot, page in memory.adopted.items()}


def read_file(path: Path) -> dict[int, PageKey]:
    """Return the keys of the valid slots of a file that no process uses. Asserts that each slot
    holds its page, and that no header is incomplete."""
    content = np.fromfile(path, np.uint8)
    header = parse_file_header(content[:BLOCK].tobytes())
    geometry = header.geometry
    table = content[BLOCK : BLOCK + geometry.slots * ENTRY_BYTES]
    slots = content[geometry.slots_at : geometry.nbytes].reshape(-1, geometry.slot_bytes)
    found, torn = SlotTable(table, header.nonce, geometry.slot_bytes).valid()
    assert not torn
    for slot, page in found.items():
        assert (slots[slot, : page.nbytes] == page_of(page.key)).all(), f"slot {slot} is wrong"
        assert xxhash.xxh3_128_digest(slots[slot, : page.nbytes].data) == page.digest
    return {slot: page.key for slot, page in found.items()}
