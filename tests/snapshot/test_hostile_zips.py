"""Zip files that are not snapshots are refused with one sentence."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiered_kv.cli.app import app
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.stored_zip import members

LOCAL = struct.Struct("<4sHHHHHIIIHH")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
LOCATOR = struct.Struct("<4sIQI")
FULL = 0xFFFFFFFF


def beyond_any_file() -> bytes:
    """Return a zip file whose first member claims 2^63 bytes, with a second member after it."""
    names, huge = (b"manifest.json", b"pages/" + b"0" * 64), 1 << 63
    local = LOCAL.pack(b"PK\3\4", 45, 0, 0, 0, 0, 0, FULL, FULL, len(names[0]), 0) + names[0]
    sizes = struct.pack("<HHQQ", 1, 16, huge, huge)
    place = struct.pack("<HHQ", 1, 8, huge + len(local))
    heads = [
        (FULL, FULL, len(names[0]), len(sizes), 0, 0, 0, 0, 0),
        (0, 0, len(names[1]), len(place), 0, 0, 0, 0, FULL),
    ]
    directory = b"".join(
        ENTRY.pack(b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, *head) + name + extra
        for head, name, extra in zip(heads, names, (sizes, place), strict=True)
    )
    return local + directory + END.pack(b"PK\5\6", 0, 0, 2, 2, len(directory), len(local), 0)


FILES = {
    "a member beyond any file": beyond_any_file(),
    "a longer end that has no room": LOCATOR.pack(b"PK\6\7", 0, 0, 1)
    + END.pack(b"PK\5\6", 0, 0, 0, 0, 0, 0, 0),
    "a directory before the file": END.pack(b"PK\5\6", 0, 0, 0, 0, 1000, 0, 0),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_a_hostile_zip_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(SnapshotError):
            members(fd)
    finally:
        os.close(fd)
    assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code == 2
