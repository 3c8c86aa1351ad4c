"""A snapshot written by commit 913b4b9, as a folder and as a zip file, with two ranks and two
groups of different page formats."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.golden.conftest import Copy
from tests.golden.written import FORMAT, changed, page
from tiered_kv.codecs.base import ElementType, PageFormat, Section
from tiered_kv.snapshot.manifest import (
    Manifest,
    SnapshotError,
    SnapshotGroup,
    SnapshotPage,
    dump,
    load,
)
from tiered_kv.snapshot.reader import open_snapshot

MIXED = PageFormat.of(
    [
        Section(ElementType.BF16, 640),
        Section(ElementType.FP32, 1600),
        Section(ElementType.OPAQUE, 17),
    ],
    0,
)


def group(index: int, page_format: PageFormat, block_size: int) -> SnapshotGroup:
    fingerprint: dict[str, object] = {
        "model": "a" * 32,
        "adapter": "",
        "config": {"rope_theta": 10000.0, "heads": [8, 2]},
        "group": index,
        "block_size": block_size,
        "ranks": 2,
    }
    return SnapshotGroup(index, block_size, page_format, fingerprint)


GROUPS = (group(0, FORMAT, 16), group(1, MIXED, 32))
BLOCKS = (3, 2)
"""Number of blocks of each group."""


def key_of(number: int, block: int) -> bytes:
    return sha256(b"%d %d" % (number, block)).digest()


def page_of(number: int, block: int, rank: int) -> bytes:
    return page(key_of(number, block) + bytes([rank]), GROUPS[number].page_format).tobytes()


def expected() -> Manifest:
    pages = tuple(
        SnapshotPage(
            number,
            block,
            rank,
            sha256(page_of(number, block, rank)).hexdigest(),
            key_of(number, block).hex(),
        )
        for number, blocks in enumerate(BLOCKS)
        for block in range(blocks)
        for rank in range(2)
    )
    return Manifest(
        created=1.7e9,
        tiered_kv="0.1.0",
        vllm="0.33.0",
        model="org/model",
        ranks=2,
        hash_tokens=16,
        groups=GROUPS,
        token_ids=tuple(range(100, 140)),
        kv_tokens=39,
        prompt_tokens=20,
        job="job-1",
        turns=3,
        parents=("job-0",),
        cache_salt="sält",
        exact=True,
        sampling={"temperature": 0.5, "stop": ["\n"], "seed": None},
        pages=pages,
        stored_bytes=16104,
        shared_bytes=0,
    )


def check_pages(path: Path) -> None:
    """Assert the bytes of every page of a snapshot."""
    with open_snapshot(path) as snapshot:
        for one in expected().pages:
            out = np.zeros(GROUPS[one.group].page_format.page_bytes, np.uint8)
            snapshot.read_page(one, out)
            assert out.tobytes() == page_of(one.group, one.block, one.rank)


@pytest.mark.parametrize("name", ["night", "packed.zip"])
def test_every_page_is_found(name: str, copy: Copy) -> None:
    path = copy("snapshots") / name
    with open_snapshot(path) as snapshot:
        assert snapshot.manifest == expected()
        snapshot.verify()
    check_pages(path)


def test_the_manifest_is_written_in_the_same_format(written: Path) -> None:
    assert dump(expected()) == (written / "snapshots" / "night" / "manifest.json").read_bytes()


def test_a_changed_byte_of_the_manifest_is_refused(written: Path) -> None:
    content = (written / "snapshots" / "night" / "manifest.json").read_bytes()
    for at in range(len(content)):
        with pytest.raises(SnapshotError):
            load(changed(content, at))


def refused(path: Path) -> bool:
    """Return True if the snapshot cannot be opened or verified. Otherwise asserts the bytes of its
    pages."""
    try:
        with open_snapshot(path) as snapshot:
            snapshot.verify()
    except SnapshotError:
        return True
    check_pages(path)
    return False


def most_are_refused(path: Path, offsets: Sequence[int], folder: Path) -> None:
    """Change bytes of encoded pages, and assert that at least 95% of the changes are refused. The
    other changes hit padding bits of zstd, which are never read."""
    content = path.read_bytes()
    path.unlink()  # a hard link: writing to it would change the file in the pool too
    unnoticed = 0
    for at in offsets:
        path.write_bytes(changed(content, at))
        unnoticed += not refused(folder)
    assert unnoticed <= len(offsets) / 20


@pytest.mark.parametrize("number", [0, 1])
def test_a_changed_byte_of_a_page_is_refused_or_changes_nothing(number: int, copy: Copy) -> None:
    folder = copy("snapshots") / "night"
    path = folder / "pages" / sha256(page_of(number, 0, 0)).hexdigest()
    content = path.read_bytes()
    path.unlink()  # a hard link: writing to it would change the file in the pool too
    # The bytes in between are a token count, which does not matter for decoding.
    for at in (*range(16), *range(20, 36)):
        path.write_bytes(changed(content, at))
        assert refused(folder), f"the change at {at} went unnoticed"
    path.write_bytes(content)
    most_are_refused(path, range(36, len(content), 7), folder)


def test_a_changed_byte_of_the_zip_file_is_refused_or_changes_nothing(copy: Copy) -> None:
    path = copy("snapshots") / "packed.zip"
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    assert {one.compress_type for one in members} == {zipfile.ZIP_STORED}
    begins = [one.header_offset + 30 + len(one.filename) for one in members]
    contents = zip(begins, members, strict=True)
    offsets = [at for begin, one in contents for at in range(begin, begin + one.file_size, 97)]
    most_are_refused(path, offsets, path)
