"""The speed of a disk is measured with a file that is deleted afterwards."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path

import pytest

from tiered_kv.storage.disk.probe import CHUNK, measure_disk


@pytest.mark.parametrize("threads", [1, 3])
def test_speeds_are_bytes_over_the_seconds_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    ticks = itertools.accumulate([100.0, 2.0, 100.0, 0.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    speed = measure_disk(tmp_path, threads, 8 * CHUNK)
    assert (speed.write, speed.read) == (8 * CHUNK / 2.0, 8 * CHUNK / 0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_detected_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        measure_disk(tmp_path, 2, 4 * CHUNK)
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before
