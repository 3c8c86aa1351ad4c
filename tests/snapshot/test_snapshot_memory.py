"""Reading a hostile snapshot needs only a bounded amount of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PEAK = """
def peak():  # unlike ru_maxrss, does not start at the parent's peak
    with open("/proc/self/status") as status:
        found = [line for line in status if line.startswith("VmHWM")]
    return int(found[0].split()[1]) << 10

def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()

"""

MANIFESTS = """
import sys
from tiered_kv.snapshot.manifest import SnapshotError, load

ROOM = 64 << 20
PIECES = {
    "lists": b"[],",
    "full lists": b"[[1]],",
    "deep lists": b"[",
    "deep objects": b'{"a":',
    "objects": b'{"a":1},',
    "tokens": b"257,",
    "texts": b'"ab",',
    "names": b'"%d":1,',
    "digits": b"9",
    "points": b".5",
    "escapes": rb"\\ud83d\\ude00",
    "zeros": b"\\0",
}

most = 0
for name, piece in PIECES.items():
    data = piece * (ROOM // len(piece) - 8)
    if name == "names":
        data = b"{" + b"".join(b'"%d":1,' % i for i in range(4_100_000)) + b'"a":1}'
    elif name in ("tokens", "texts", "lists", "full lists", "objects"):
        data = b"[" + data + b"1]"
    elif name == "escapes":
        data = b'{"a":"' + data + b'"}'
    elif name == "points":
        data = b"0." + b"5" * (ROOM - 8)
    if len(data) > ROOM:
        data = data[:ROOM]
    # Smaller parts are tested too, because larger ones may be refused before they are parsed.
    for part in (1, 4, 23, 260):
        some = data if part == 1 else data[: len(data) // part // len(piece) * len(piece)] + b"1]"
        before = forget_peak()
        try:
            load(some)
        except SnapshotError as error:
            most = max(most, grown := peak() - before)
            print(name, len(some), str(error)[:100], grown >> 20, file=sys.stderr)
        else:
            raise AssertionError(name)
print(most)
"""

FOLDERS = """
import os, sys
from pathlib import Path
from tests.snapshot.made_snapshots import ONE, make
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.pack import pack
from tiered_kv.snapshot.reader import open_snapshot

root = Path(sys.argv[1])
make(root, "one", ONE)
pack(root / "one", root / "two.zip")
with open_snapshot(root / "two.zip") as snapshot:
    snapshot.verify()
good = (root / "two.zip").read_bytes()
before = forget_peak()

def refused(path):
    try:
        with open_snapshot(path) as snapshot:
            snapshot.verify()
    except SnapshotError as error:
        print(str(error)[:100], (peak() - before) >> 20, file=sys.stderr)
        return
    raise AssertionError(path)

page = min((root / "one" / "pages").iterdir())
size = page.stat().st_size
os.truncate(page, 1 << 40)  # a sparse file occupies no disk space
refused(root / "one")
os.truncate(page, size)
os.truncate(root / "one" / "manifest.json", 1 << 40)
refused(root / "one")

path = root / "x.zip"
path.write_bytes(good)
os.truncate(path, 1 << 40)
refused(path)
with path.open("wb") as file:  # 8 GiB in front of the archive
    file.seek(8 << 30)
    file.write(good)
refused(path)
with path.open("wb") as file:  # a directory of 8 GiB
    file.write(good[:-22])
    file.seek(8 << 30)
    at = file.tell()
    offset = len(good)
    end = (1 << 20).to_bytes(8, "little")
    file.write(
        b"PK\\6\\6" + (44).to_bytes(8, "little") + bytes(12) + end + end
        + (at - offset).to_bytes(8, "little") + offset.to_bytes(8, "little")
        + b"PK\\6\\7" + bytes(4) + at.to_bytes(8, "little") + (1).to_bytes(4, "little")
        + b"PK\\5\\6" + bytes(4) + b"\\xff" * 12 + bytes(2)
    )
refused(path)
print(peak() - before)
"""

MEMBERS = """
import sys
from pathlib import Path
from tests.snapshot.test_hostile_zips import END, ENTRY
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.reader import open_snapshot

path = Path(sys.argv[1])
entry = ENTRY.pack(b"PK\\1\\2", 20, 20, *[0] * 14)
most = 0
for count in (1, 0xFFFF):  # zipfile reads every entry, however many the end counts
    directory = entry * 1_000_000
    path.write_bytes(directory + END.pack(b"PK\\5\\6", 0, 0, count, count, len(directory), 0, 0))
    del directory
    before = forget_peak()
    try:
        open_snapshot(path)
    except SnapshotError as error:
        print(str(error)[:100], (peak() - before) >> 20, file=sys.stderr)
        most = max(most, peak() - before)
    else:
        raise AssertionError(count)
print(most)
"""


def grown(script: str, *arguments: str) -> int:
    """Run a script that prints by how many bytes its memory grew, and return that number."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK + script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return int(done.stdout)


@pytest.mark.slow
def test_a_hostile_manifest_takes_a_few_times_its_size() -> None:
    assert grown(MANIFESTS) < 500 << 20


def test_files_that_claim_to_be_huge_take_no_memory(tmp_path: Path) -> None:
    assert grown(FOLDERS, str(tmp_path / "root")) < 64 << 20


def test_members_without_names_take_no_more_memory_than_their_directory(tmp_path: Path) -> None:
    assert grown(MEMBERS, str(tmp_path / "a.zip")) < 64 << 20
