"""The doctor compares a machine's resources with a server's needs."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tiered_kv.config import GIB, TierConfig
from tiered_kv.doctor.cold_memory import (
    check_cores,
    check_cpu_memory,
    check_huge_pages,
    check_locked_memory,
    count_gpus,
)

EIGHT = TierConfig(cpu_gib=8)


@pytest.mark.parametrize(
    ("gpus", "usable", "verdict"), [(0, 1, "warn"), (0, 2, "ok"), (8, 8, "warn"), (8, 4, "fail")]
)
def test_each_rank_needs_a_core_and_some_are_left_for_pages(
    gpus: int, usable: int, verdict: str
) -> None:
    found = check_cores(gpus, usable)
    assert found.verdict.value == verdict
    assert bool(found.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("total", "left", "verdict"),
    [(64, 32, "ok"), (64, 9, "warn"), (64, 7, "fail"), (7, 7, "fail"), (64, 64, "ok")],
)
def test_the_cpu_tier_must_fit_into_memory(total: int, left: int, verdict: str) -> None:
    found = check_cpu_memory(EIGHT, 0, total * GIB, left * GIB)
    assert found.verdict.value == verdict
    assert f"TIERED_KV_CPU_GIB=8, {left}.0 " in found.seen


def test_ranks_share_the_memory() -> None:
    assert check_cpu_memory(EIGHT, 2, 64 * GIB, 7 * GIB).verdict.value == "fail"
    assert "set at most" in check_cpu_memory(EIGHT, 0, 64 * GIB, 7 * GIB).advice.lower()


def test_a_tier_that_is_off_needs_no_memory() -> None:
    assert check_cpu_memory(TierConfig(cpu_gib=0), 1, GIB, 1).verdict.value == "ok"


@pytest.mark.parametrize(
    ("gpus", "limit", "verdict"),
    [
        (0, 1 << 16, "ok"),
        (1, 1 << 16, "warn"),
        (1, 8 * GIB, "ok"),
        (2, 4 * GIB, "ok"),
        (1, resource.RLIM_INFINITY, "ok"),
    ],
)
def test_a_gpu_needs_its_part_of_cpu_memory_locked(gpus: int, limit: int, verdict: str) -> None:
    assert check_locked_memory(EIGHT, gpus, limit).verdict.value == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("always [madvise] never\n", "ok"),
        ("[always] madvise never\n", "ok"),
        ("always madvise [never]\n", "warn"),
    ],
)
def test_huge_pages_may_be_turned_off(tmp_path: Path, text: str, verdict: str) -> None:
    file = tmp_path / "enabled"
    file.write_text(text)
    assert check_huge_pages(file).verdict.value == verdict


def test_a_kernel_may_have_no_huge_pages(tmp_path: Path) -> None:
    assert check_huge_pages(tmp_path / "none").seen == "not in this kernel"


def test_gpus_are_those_that_a_server_would_see(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"}, tmp_path) == 3
