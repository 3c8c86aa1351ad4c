"""A path belongs to the nearest mount above it, and to the latest one if several have that path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.doctor.ssd_folder import Mount, find_mount

LINES = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 0:50 / {top} rw,nosuid - tmpfs tmpfs rw,size=1024k
31 30 259:1 / {top}/nv\\040me ro,noatime master:1 - xfs /dev/nvme0n1 rw,attr2
32 30 0:60 / {top}/over rw - tmpfs first rw
33 30 0:61 / {top}/over rw - nfs4 host:/kv rw,vers=4.2
broken line
"""


@pytest.fixture
def mountinfo(tmp_path: Path) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text(LINES.format(top=tmp_path))
    return file


def test_a_path_is_on_the_nearest_mount(tmp_path: Path, mountinfo: Path) -> None:
    found = find_mount(tmp_path / "nv me" / "kv", mountinfo)
    options = ("ro", "noatime", "rw", "attr2")
    assert found == Mount(tmp_path / "nv me", "xfs", "/dev/nvme0n1", options)
    below = find_mount(tmp_path / "nv mean", mountinfo)
    assert below is not None
    assert below.kind == "tmpfs", "a name that begins alike is another folder"


def test_of_two_mounts_at_one_place_the_later_is_seen(tmp_path: Path, mountinfo: Path) -> None:
    found = find_mount(tmp_path / "over", mountinfo)
    assert found is not None
    assert found.source == "host:/kv"


def test_a_link_is_on_the_mount_of_its_target(tmp_path: Path, mountinfo: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "over")
    found = find_mount(tmp_path / "link", mountinfo)
    assert found is not None
    assert found.kind == "nfs4"


def test_without_a_list_nothing_is_known(tmp_path: Path) -> None:
    assert find_mount(tmp_path, tmp_path / "none") is None


def test_the_file_system_of_a_folder_is_found_on_this_machine(tmp_path: Path) -> None:
    found = find_mount(tmp_path)
    assert found is not None
    assert tmp_path.resolve().is_relative_to(found.point)
