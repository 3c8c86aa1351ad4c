"""The doctor tests the page folder as a server would use it, and leaves it unchanged."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.store_disk import Disk
from tests.doctor.told import by_check, verdicts
from tiered_kv.config import TierConfig
from tiered_kv.doctor.__main__ import groups
from tiered_kv.doctor.ssd_folder import Mount, check_mount, check_ssd, judge_speed
from tiered_kv.storage.disk.probe import DiskSpeed


def test_without_a_folder_nothing_is_checked() -> None:
    assert verdicts(check_ssd(TierConfig())) == {"SSD": "ok"}


def test_a_refused_folder_is_not_reported_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_KV_SSD_PATH", "/there/is/no/folder")
    assert "SSD" not in dict(groups(beside=False))
    monkeypatch.delenv("TIERED_KV_SSD_PATH")
    assert "SSD" in dict(groups(beside=False))


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    found = by_check(check_ssd(TierConfig(ssd_path=tmp_path, ssd_gib=0.01)))
    assert set(found) == {"SSD mount", "SSD folder", "SSD space", "O_DIRECT", "SSD speed"}
    assert found["SSD folder"].verdict.value == found["SSD space"].verdict.value == "ok"
    assert "GB/s" in found["SSD speed"].seen
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_missing_disk_space_is_reported(tmp_path: Path) -> None:
    found = by_check(check_ssd(TierConfig(ssd_path=tmp_path, ssd_gib=1 << 20)))
    assert found["SSD space"].verdict.value == "warn"
    assert found["SSD space"].advice.startswith("Set TIERED_KV_SSD_GIB=")


def test_space_used_by_existing_stores_is_reported(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "root")
    disk.fill(40)
    before = sorted(disk.root.rglob("*"))
    found = by_check(check_ssd(TierConfig(ssd_path=disk.root, ssd_gib=0.01)))
    assert "GiB in stores" in found["SSD space"].seen
    assert sorted(disk.root.rglob("*")) == before


def test_a_folder_that_does_not_exist_yet_is_not_created(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    (found,) = check_ssd(TierConfig(ssd_path=path))
    assert found.verdict.value == "warn"
    assert "creates it at startup" in found.seen
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    found = by_check(check_ssd(TierConfig(ssd_path=tmp_path)))
    assert found["SSD folder"].verdict.value == "fail"
    (made,) = check_ssd(TierConfig(ssd_path=tmp_path / "kv"))
    assert made.verdict.value == "fail"


def test_a_file_system_without_file_creation_fails() -> None:
    """The check fails for a page folder in /proc, where not even root can create files. O_DIRECT is
    then not tested."""
    found = by_check(check_ssd(TierConfig(ssd_path=Path("/proc/self"))))
    assert found["SSD folder"].verdict.value == "fail"
    assert "O_DIRECT" not in found


DISK = Mount(Path("/nvme"), "xfs", "/dev/nvme0n1", ("rw", "noatime"))


@pytest.mark.parametrize(
    ("mount", "verdict", "said"),
    [
        (DISK, "ok", ""),
        (replace(DISK, options=("ro",)), "fail", "read-only"),
        (replace(DISK, options=("rw", "sync")), "warn", "without sync"),
        (replace(DISK, kind="tmpfs"), "warn", "TIERED_KV_CPU_GIB"),
        (replace(DISK, kind="nfs4"), "warn", "local disk"),
        (replace(DISK, kind="fuse.s3fs"), "warn", "local disk"),
        (replace(DISK, kind="overlay"), "warn", "volume"),
    ],
)
def test_a_mount_is_judged_by_its_kind_and_options(mount: Mount, verdict: str, said: str) -> None:
    found = check_mount(mount)
    assert found.verdict.value == verdict
    assert said in found.advice
    assert mount.kind in found.seen


def test_a_slow_disk_is_reported() -> None:
    assert judge_speed(DiskSpeed(read=6.9e9, write=3e9)).seen == "reads 6.90 GB/s, writes 3.00 GB/s"
    assert judge_speed(DiskSpeed(read=0.1e9, write=0.1e9)).verdict.value == "warn"
