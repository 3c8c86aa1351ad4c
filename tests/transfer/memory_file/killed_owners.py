"""Owners of a memory file that save random pages and are killed with SIGKILL at any moment.

Run as ``python -m tests.transfer.memory_file.killed_owners FOLDER KILLS SEED``. The owners are
forks of this process, which has no threads. After each kill, every valid slot must hold the page of
its key. The program prints a JSON object with the number of kills, of slots that were invalid after
a kill, and of pages that were adopted.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.transfer.memory_file.made_memory import (
    GEOMETRY,
    PAGE,
    key_of,
    open_in,
    page_of,
    read_file,
    slot_of,
)
from tiered_kv.transfer.memory_file.lasting_memory import LandedPage, LastingMemory
from tiered_kv.transfer.memory_file.memory_format import SlotHeader
from tiered_kv.transfer.memory_file.validation import Validation

PIECES = 4
"""Number of parts in which a page is written, so that it is incomplete for a while."""


def write(memory: LastingMemory, slot: int, name: int) -> None:
    """Overwrite a slot's bytes, first with garbage and then with the page."""
    there, page = slot_of(memory, slot), page_of(key_of(name))
    there[::2] = 0xEE
    step = PAGE // PIECES
    for at in range(0, PAGE, step):
        there[at : at + step] = page[at : at + step]


def own(folder: Path, seed: int, ready: int) -> None:
    """Save random pages until killed."""
    chance = random.Random(seed)
    memory = open_in(folder)
    found = len(memory.adopted)
    memory.check_adopted(1)
    assert len(memory.adopted) == found, "a page is wrong"
    validation = Validation(memory) if chance.random() < 0.5 else None
    os.write(ready, len(memory.adopted).to_bytes(1, "little"))
    for count in itertools.count():
        slots = chance.sample(range(GEOMETRY.slots), 3)
        memory.invalidate(slots)
        names = [seed << 20 | count << 2 | i for i in range(len(slots))]
        for slot, name in zip(slots, names, strict=True):
            write(memory, slot, name)
        if chance.random() < 0.1:  # the copy failed, so its slot must stay invalid
            continue
        pages = [
            LandedPage(slot, key_of(name), PAGE, count)
            for slot, name in zip(slots, names, strict=True)
        ]
        if validation is not None:
            validation.landed(pages)
            if chance.random() < 0.2:
                validation.wait_idle(1.0)
            continue
        for one in pages:
            ticket, digest = memory.ticket(one.slot), memory.digest(one.slot, PAGE)
            memory.validate(one.slot, ticket, SlotHeader(one.key, PAGE, count, digest))


def kill_many(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Start and kill owners one after the other.

    Raises:
        AssertionError: a valid slot held something other than its page, or an owner failed.
    """
    chance = random.Random(seed)
    told = {"kills": kills, "caught": 0, "adopted": 0}
    for kill in range(kills):
        reading, ready = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                own(folder, seed * 10_000 + kill, ready)
            finally:
                os._exit(1)
        os.close(ready)
        # Otherwise the owner is killed while it opens or creates the file.
        if chance.random() < 0.9:
            told["adopted"] += int.from_bytes(os.read(reading, 1), "little")
        time.sleep(chance.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "an owner failed by itself"
        os.close(reading)
        path = folder / "0-0.slots"
        if path.exists() and path.stat().st_size > GEOMETRY.nbytes:
            told["caught"] += GEOMETRY.slots - len(read_file(path))
    return told


if __name__ == "__main__":
    print(json.dumps(kill_many(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
