"""A modified snapshot is refused, or returns exactly the bytes that were written."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.snapshot.made_snapshots import FORMATS, ONE, check_whole, make, outline, with_pages
from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import PageFormat
from tiered_kv.json_fields import canonical
from tiered_kv.snapshot.manifest import Manifest, SnapshotError, dump, load
from tiered_kv.snapshot.pack import pack
from tiered_kv.snapshot.page_file import decode_page, encode_page
from tiered_kv.snapshot.reader import open_snapshot

MANIFESTS = 7000
SEALED = 4000
PAGES = 9000
FOLDERS, ZIPS = 400, 1200

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, "", "a", "\0",
    "\ud800", "../x", "/", "a" * 64, "A" * 64, [], {}, [[]], [None], {"": {}}, [[[[[1]]]]],
)  # fmt: skip
"""JSON values that replace valid ones in a manifest."""


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one to three changes."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, kind = rng.randrange(len(found) + 1), rng.randrange(7)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = rng.choice((0, 255, 0x30, 0x5B, 0x7B, rng.randrange(256)))
        elif kind == 2:
            del found[at : at + rng.randint(1, 40)]
        elif kind == 3:
            found[at:at] = rng.randbytes(rng.randint(1, 20))
        elif kind == 4:
            other = rng.randrange(len(found) + 1)
            found[at : at + 8] = found[other : other + 8]
        elif kind == 5:  # numbers in headers
            at = rng.randrange(48)
            found[at : at + 4] = rng.choice(
                (b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80", rng.randbytes(4))
            )
        else:
            del found[rng.randrange(len(found) + 1) :]
    return bytes(found)


def test_mutated_manifests_are_refused_or_equal_the_original() -> None:
    rng = random.Random(1)
    whole = with_pages(outline())
    data = dump(whole)
    refused = 0
    for _ in range(MANIFESTS):
        other = mutated(data, rng)
        try:
            found = load(other)
        except SnapshotError:
            refused += 1
        else:
            assert found == whole, other
    assert refused > 0.9 * MANIFESTS


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values in JSON data."""
    found = [path] if path else []
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, one in items:
        found += places(one, (*path, name))
    return found


def test_manifests_with_hostile_values_are_refused_or_consistent() -> None:
    """One or two values of a manifest are replaced, and its digest is correct, as in a deliberate
    attack. Each manifest is refused or consistent, and more than half are refused."""
    rng = random.Random(2)
    text = json.dumps(json.loads(dump(with_pages(outline()))))
    names = places(json.loads(text))
    refused = 0
    for _ in range(SEALED):
        found = json.loads(text)
        for _ in range(rng.choice((1, 1, 2))):
            *path, last = rng.choice(names)
            holder = found
            try:
                for name in path:
                    holder = holder[name]
                if rng.random() < 0.15:
                    del holder[last]
                else:
                    holder[last] = copy.deepcopy(rng.choice(HOSTILE))
            except (TypeError, LookupError):  # an earlier change replaced a parent of the value
                continue
        found.pop("sha256", None)
        digest = sha256(canonical(found)).hexdigest()
        try:
            read = load(json.dumps({**found, "sha256": digest}).encode())
        except SnapshotError:
            refused += 1
        else:
            check_agreement(read)
    assert refused > 0.5 * SEALED


def check_agreement(manifest: Manifest) -> None:
    """Check that the manifest is consistent, and that its values are in range."""
    assert load(dump(manifest)) == manifest
    assert 0 <= manifest.kv_tokens <= len(manifest.token_ids)
    assert all(0 <= token < 2**31 for token in manifest.token_ids)
    held = [
        {(p.group, p.block) for p in manifest.pages if p.rank == r} for r in range(manifest.ranks)
    ]
    assert all(one == held[0] for one in held)
    for page in manifest.pages:
        group = manifest.groups[page.group]
        assert 0 <= page.block * group.block_size < manifest.kv_tokens


@pytest.mark.parametrize("page_format", FORMATS, ids=lambda one: one.element.value)
def test_mutated_pages_are_refused_or_equal_the_original(page_format: PageFormat) -> None:
    rng = random.Random(3)
    guard, size = 64, page_format.page_bytes
    memory = np.full(size + 2 * guard, 0xA5, np.uint8)
    out = memory[guard : guard + size]
    pages = [synthetic_page(page_format, seed) for seed in range(3)]
    files = [b"".join(encode_page(page, page_format)) for page in pages]
    digests = [sha256(page.data).hexdigest() for page in pages]
    refused = 0
    for turn in range(PAGES // len(FORMATS)):
        which = turn % len(files)
        try:
            decode_page(mutated(files[which], rng), page_format, out)
        except SnapshotError:
            refused += 1
        else:
            same = sha256(out.data).hexdigest() == digests[which]
            assert same == np.array_equal(out, pages[which])
            refused += not same
    assert (memory[:guard] == 0xA5).all()
    assert (memory[guard + size :] == 0xA5).all()
    for page, file in zip(pages, files, strict=True):  # earlier errors must not affect this thread
        decode_page(file, page_format, out)
        assert np.array_equal(out, page)
    assert refused > 0


def is_whole(path: Path) -> bool:
    """Return False if the snapshot is refused. Asserts that an accepted snapshot equals what was
    written."""
    try:
        with open_snapshot(path) as snapshot:
            snapshot.verify()
            check_whole(snapshot)
            assert snapshot.manifest.token_ids == ONE.token_ids
    except SnapshotError:
        return False
    return True


def test_mutated_zip_files_are_refused_or_equal_the_original(tmp_path: Path) -> None:
    rng = random.Random(4)
    make(tmp_path, "one", ONE)
    pack(tmp_path / "one", tmp_path / "two.zip")
    data = (tmp_path / "two.zip").read_bytes()
    directory = data.index(b"PK\1\2")
    whole = 0
    for turn in range(ZIPS):
        if turn % 2:  # change only the directory, which has names and numbers
            other = data[:directory] + mutated(data[directory:], rng)
        else:
            other = mutated(data, rng)
        (tmp_path / "x.zip").write_bytes(other)
        whole += is_whole(tmp_path / "x.zip")
    assert whole < 0.5 * ZIPS  # changes of unread fields are accepted


def test_mutated_folders_are_refused_or_equal_the_original(tmp_path: Path) -> None:
    rng = random.Random(5)
    make(tmp_path, "one", ONE)
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    for _ in range(FOLDERS):
        path = rng.choice(files)
        data = path.read_bytes()
        path.write_bytes(mutated(data, rng))
        same = path.read_bytes() == data
        assert is_whole(tmp_path / "one") in ({True} if same else {False, True})
        path.write_bytes(data)
    assert is_whole(tmp_path / "one")
