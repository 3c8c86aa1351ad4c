"""Number of cores that a process may use, with and without a container's limit."""

from pathlib import Path

import pytest

from tiered_kv import machine
from tiered_kv.machine import CORES, spare_cores, usable_cores


def limit(mounted: Path, group: str, said: str) -> None:
    """Write the CPU limit of a control group."""
    (mounted / group).mkdir(parents=True, exist_ok=True)
    (mounted / group / "cpu.max").write_text(said)


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with sixteen cores."""
    monkeypatch.setattr(machine, "CORES", frozenset(range(16)))


def test_without_a_limit_all_cores_are_usable(tmp_path: Path) -> None:
    assert usable_cores("/a/b", tmp_path) == 16
    limit(tmp_path, "a/b", "max 100000\n")
    assert usable_cores("/a/b", tmp_path) == 16


@pytest.mark.parametrize(
    ("said", "cores"), [("400000 100000\n", 4), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_container_may_use_less_than_its_machine_has(
    tmp_path: Path, said: str, cores: int
) -> None:
    limit(tmp_path, "", said)
    assert usable_cores("/", tmp_path) == cores


def test_the_strictest_control_group_counts(tmp_path: Path) -> None:
    limit(tmp_path, "pod", "300000 100000")
    limit(tmp_path, "pod/server", "800000 100000")
    assert usable_cores("/pod/server", tmp_path) == 3


@pytest.mark.parametrize("said", ["", "nonsense", "100000 0", "1 2 3"])
def test_an_unreadable_limit_is_ignored(tmp_path: Path, said: str) -> None:
    limit(tmp_path, "", said)
    assert usable_cores("/", tmp_path) == 16


def test_each_rank_needs_a_core_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    assert [spare_cores(ranks) for ranks in (1, 4, 8)] == [3, 0, 0]


def test_this_process_may_use_a_core() -> None:
    assert 1 <= usable_cores() <= max(16, len(CORES))
