"""After a kill at any moment, every valid slot holds the page of its key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.transfer.memory_file.killed_owners import write
from tests.transfer.memory_file.made_memory import (
    GEOMETRY,
    PAGE,
    key_of,
    open_in,
    read_file,
    save,
)
from tiered_kv.transfer.memory_file.lasting_memory import LastingMemory
from tiered_kv.transfer.memory_file.memory_format import SlotHeader

ROOT = Path(__file__).resolve().parents[3]


def kill_many(kills: int, seed: int) -> dict[str, int]:
    module = "tests.transfer.memory_file.killed_owners"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        done = subprocess.run(
            [sys.executable, "-m", module, folder, str(kills), str(seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def test_dozens_of_kills_at_random_moments_leave_no_wrong_page() -> None:
    told = kill_many(60, seed=1)
    assert told["adopted"] > 60, "nothing was there to be wrong"
    assert told["caught"] > 30, "nobody was killed in between"


@pytest.mark.slow
def test_a_thousand_kills_at_random_moments_leave_no_wrong_page() -> None:
    told = kill_many(1000, seed=2)
    assert told["adopted"] > 1000
    assert told["caught"] > 500


def _save(memory: LastingMemory) -> None:
    memory.invalidate([3, 4])
    write(memory, 3, 103)
    write(memory, 4, 104)
    for slot in (3, 4):
        ticket, digest = memory.ticket(slot), memory.digest(slot, PAGE)
        header = SlotHeader(key_of(100 + slot), PAGE, 1, digest)
        assert memory.validate(slot, ticket, header)


def _overwrite_twice(memory: LastingMemory) -> None:
    _save(memory)
    _save(memory)


def _discard(memory: LastingMemory) -> None:
    memory.invalidate([3])
    memory.clear()


@pytest.mark.parametrize("act", [_save, _overwrite_twice, _discard])
def test_the_file_is_valid_after_every_line(
    tmp_path: Path, act: Callable[[LastingMemory], None]
) -> None:
    """A process that stops between two lines of the memory file's code leaves a file that the next
    process can adopt."""
    memory = open_in(tmp_path)
    for slot in range(GEOMETRY.slots):
        save(memory, slot, slot)
    path, looks = tmp_path / "0-0.slots", 0

    def look(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal looks
        ours = "memory_file" in frame.f_code.co_filename
        if event == "line" and ours:
            sys.settrace(None)
            found = read_file(path)
            assert set(range(GEOMETRY.slots)) - {3, 4} <= found.keys() or act is _discard
            looks += 1
            sys.settrace(look)
            frame.f_trace = look
        return look if ours else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        act(memory)
    finally:
        sys.settrace(before)
    assert looks > 10
    memory.close()
