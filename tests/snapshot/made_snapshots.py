"""Snapshots with small pages, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import Bytes, ElementType, PageFormat, Section
from tiered_kv.snapshot.draft import SnapshotDraft
from tiered_kv.snapshot.manifest import Manifest, SnapshotGroup, SnapshotPage
from tiered_kv.snapshot.rank_writer import PageWriter
from tiered_kv.snapshot.reader import Snapshot

BF16 = PageFormat(ElementType.BF16, 2048, 16)
OPAQUE = PageFormat(ElementType.OPAQUE, 1000, 16)
MIXED = PageFormat.of(
    [
        Section(ElementType.BF16, 640),
        Section(ElementType.FP32, 1600),
        Section(ElementType.OPAQUE, 17),
        Section(ElementType.FP32, 2400),
    ],
    0,
)
FORMATS = (
    BF16,
    OPAQUE,
    MIXED,
    PageFormat(ElementType.FP16, 2048, 16),
    PageFormat(ElementType.FP32, 2048, 16),
    PageFormat(ElementType.FP8_E4M3, 2048, 16),
)


def group(index: int, page_format: PageFormat, block_size: int = 16) -> SnapshotGroup:
    """Return the description of a KV group."""
    fingerprint = {
        "model": "a" * 32,
        "adapter": "",
        "dtype": "torch.bfloat16",
        "cache_dtype": "auto",
        "kv_scales": "checkpoint",
        "config": {"rope_theta": 10000.0, "rope_scaling": {"factor": 2.0}, "heads": [8, 2]},
        "group": index,
        "block_size": block_size,
        "layout": f"1x{page_format.page_bytes} NHD FLASH_ATTN",
        "ranks": 2,
    }
    return SnapshotGroup(index, block_size, page_format, fingerprint)


GROUPS = (group(0, BF16), group(1, MIXED, 32))
PLAIN = (group(0, OPAQUE),)
"""A group whose pages no codec compresses, which makes tests fast."""


def outline(groups: Sequence[SnapshotGroup] = GROUPS, ranks: int = 2, tokens: int = 40) -> Manifest:
    """Return a manifest without pages."""
    return Manifest(
        created=1.7e9,
        tiered_kv="0.1.0",
        vllm="0.33.0",
        model="org/model",
        ranks=ranks,
        hash_tokens=16,
        groups=tuple(groups),
        token_ids=tuple(range(100, 100 + tokens)),
        kv_tokens=tokens - 1,
        prompt_tokens=tokens // 2,
        job="job-1",
        turns=3,
        parents=("job-0",),
        cache_salt="sält",
        exact=True,
        sampling={"temperature": 0.5, "stop": ["\n"], "seed": None},
        pages=(),
        stored_bytes=0,
        shared_bytes=0,
    )


@cache
def _page(page_format: PageFormat, seed: int) -> Bytes:
    if page_format == OPAQUE:
        page = np.random.default_rng(seed).integers(0, 256, page_format.page_bytes, np.uint8)
    else:
        page = synthetic_page(page_format, seed)
    page.flags.writeable = False
    return page


def page_of(of: SnapshotGroup, block: int, rank: int, seed: int = 0) -> Bytes:
    """Return the bytes of a page, which depend on ``seed``."""
    return _page(of.page_format, 1000 * seed + 10 * block + rank)


def key_of(number: int, block: int) -> bytes:
    """Return the key of a page."""
    return sha256(b"%d %d" % (number, block)).digest()


def blocks_of(manifest: Manifest, number: int) -> range:
    """Return the blocks of a group."""
    return range(-(-manifest.kv_tokens // manifest.groups[number].block_size))


def add_pages(writer: PageWriter, manifest: Manifest, rank: int, seed: int = 0) -> None:
    """Write all pages of a rank."""
    for number, of in enumerate(manifest.groups):
        for block in blocks_of(manifest, number):
            page = page_of(of, block, rank, seed)
            writer.add(number, block, key_of(number, block), of.page_format, page)


def make(root: Path, name: str, manifest: Manifest | None = None, seed: int = 0) -> Manifest:
    """Create a snapshot, and return its manifest."""
    manifest = manifest or outline()
    with SnapshotDraft.begin(root, name) as draft:
        for rank in range(manifest.ranks):
            writer = PageWriter(draft.folder, rank)
            add_pages(writer, manifest, rank, seed)
            writer.finish()
        return draft.seal(manifest)


def with_pages(manifest: Manifest, seed: int = 0) -> Manifest:
    """Return the manifest with its pages listed, and arbitrary sizes."""
    pages = tuple(
        SnapshotPage(
            number,
            block,
            rank,
            sha256(page_of(of, block, rank, seed).data).hexdigest(),
            key_of(number, block).hex(),
        )
        for number, of in enumerate(manifest.groups)
        for block in blocks_of(manifest, number)
        for rank in range(manifest.ranks)
    )
    return replace(manifest, pages=pages, stored_bytes=1000, shared_bytes=10)


def check_whole(snapshot: Snapshot, seed: int = 0) -> None:
    """Assert that all pages exist and have the bytes that were written."""
    manifest = snapshot.manifest
    wanted = sum(len(blocks_of(manifest, n)) for n in range(len(manifest.groups)))
    assert len(manifest.pages) == wanted * manifest.ranks
    for page in manifest.pages:
        of = manifest.groups[page.group]
        out = np.empty(of.page_format.page_bytes, np.uint8)
        snapshot.read_page(page, out)
        assert np.array_equal(out, page_of(of, page.block, page.rank, seed)), "a wrong page"
    snapshot.verify()


ONE = outline(PLAIN, ranks=1)
"""Manifest of one rank and one group, whose snapshot has three pages."""


def written(folder: Path, manifest: Manifest = ONE, rank: int = 0, seed: int = 0) -> PageWriter:
    """Write the pages of a rank into a draft, without finishing. Returns the writer."""
    writer = PageWriter(folder, rank)
    add_pages(writer, manifest, rank, seed)
    return writer


def pool_files(root: Path) -> set[Path]:
    """Return the files of the page pool."""
    return {path for path in (root / ".pages").rglob("*") if path.is_file()}


def page_files(root: Path, name: str) -> set[Path]:
    """Return the files of a snapshot's pages."""
    return set((root / name / "pages").iterdir())


def open_files() -> int:
    """Return the number of files that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def drafts(root: Path) -> list[Path]:
    """Return the folders of drafts, including those that a killed maker left."""
    return list(root.glob(".making-*"))
