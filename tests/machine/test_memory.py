"""Memory that a process may use, with and without a container's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.machine import system_memory

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    """Write the meminfo file of a machine with 64 GiB, of which 48 are available."""
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {48 * GIB >> 10} kB\n")
    return file


def limit(folder: Path, most: str, used: int, cached: int = 0) -> None:
    """Write a control group's memory limit, its usage, and how much of the usage is inactive
    files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 2\n")


def test_available_memory_is_part_of_the_machines() -> None:
    total, available = system_memory()
    assert 0 < available <= total < 1 << 50


def test_without_a_limit_all_of_the_machine_counts(tmp_path: Path, meminfo: Path) -> None:
    limit(tmp_path / "a", "max", 5 * GIB)
    assert system_memory("/a", tmp_path, meminfo) == (64 * GIB, 48 * GIB)


def test_a_container_may_have_less_than_its_machine(tmp_path: Path, meminfo: Path) -> None:
    limit(tmp_path, str(16 * GIB), 4 * GIB)
    assert system_memory("/", tmp_path, meminfo) == (16 * GIB, 12 * GIB)


def test_the_strictest_control_group_counts(tmp_path: Path, meminfo: Path) -> None:
    limit(tmp_path / "pod", str(16 * GIB), 6 * GIB)
    limit(tmp_path / "pod" / "server", str(32 * GIB), 5 * GIB)
    assert system_memory("/pod/server", tmp_path, meminfo) == (16 * GIB, 10 * GIB)


def test_inactive_file_pages_count_as_available(tmp_path: Path, meminfo: Path) -> None:
    limit(tmp_path / "pod", str(16 * GIB), 15 * GIB, cached=9 * GIB)
    assert system_memory("/pod", tmp_path, meminfo) == (16 * GIB, 10 * GIB)
