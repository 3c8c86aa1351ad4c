from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_kv.bench.servers import load
from tiered_kv.bench.servers.load import CpuClock, cores_of_others, group_members, read_clock


def test_the_cores_of_others_exclude_those_of_this_process() -> None:
    begin = CpuClock(wall=10.0, machine=100.0, own=5.0)
    assert cores_of_others(begin, CpuClock(wall=20.0, machine=118.0, own=20.0)) == 0.3
    assert cores_of_others(begin, CpuClock(wall=20.0, machine=110.0, own=16.0)) == 0.0
    assert cores_of_others(begin, begin) is None
    assert cores_of_others(None, begin) is None


def test_a_group_s_time_counts_as_one_s_own() -> None:
    burn = "x = 0\nfor i in range(6_000_000): x += i\nprint(x, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", burn],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert list(group_members(process.pid)) == [process.pid]
        with_group, without = read_clock(process.pid), read_clock(os.getpid() + 10**7)
        process.communicate(b"\n")
    assert with_group is not None
    assert without is not None
    assert with_group.own > without.own + 0.05
    assert group_members(process.pid) == {}


def test_without_proc_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PROC", tmp_path)
    assert read_clock(1) is None
