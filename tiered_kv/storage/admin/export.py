"""Export of pages from stores to plain files.

The export has the folder layout of a root: ``OUT/<fingerprint>/<replica>-<rank>/<key>.page``.
``OUT/manifest.json`` describes each exported page, and lists the pages that could not be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from tiered_kv.codecs.base import Bytes, CodecError, EncodedPage
from tiered_kv.keys import PageKey
from tiered_kv.plain_files import opened
from tiered_kv.storage.disk.files import RealFiles
from tiered_kv.storage.segment.format import FormatError
from tiered_kv.storage.segment.record import open_record, read_blocks
from tiered_kv.storage.store.locks import StoreError

from .inventory import Inventory, Place, codec_of

MANIFEST = "manifest.json"


@dataclass(slots=True)
class Exported:
    """Result of an export.

    Attributes:
        pages: manifest entry of each page.
        failed: reasons why pages could not be read, by location: segment file and offset.
    """

    pages: list[dict[str, object]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of the decoded pages, bytes."""
        return sum(int(str(page["raw_bytes"])) for page in self.pages)


def export(
    inventories: Sequence[Inventory],
    key: PageKey | None,
    out: Path,
    *,
    stored: bool,
    advance: Callable[[int], None],
) -> Exported:
    """Write pages of stores, and a manifest of these pages, into a folder. Pages that cannot be
    read are left out, and listed in the result.

    Args:
        key: key of the page to export, from every store that has it; None for all pages.
        out: folder that is empty or does not exist yet.
        stored: True to also write each page's encoded plane and zstd frame, and the codec table.
        advance: called with 1 after each page, whether the page was exported or could not be read.

    Raises:
        StoreError: no store has the page, or ``out`` is not empty.
        OSError: ``out`` cannot be written.
    """
    wanted = [
        (inventory, place)
        for inventory in inventories
        for found, place in inventory.pages.items()
        if key is None or found == key
    ]
    if key is not None and not wanted:
        raise StoreError(
            f"no store has page {key.hex()}: export all pages with --all to see their keys"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"{out} is not an empty folder: choose an empty or a new folder")
    out.mkdir(parents=True, exist_ok=True)
    exported = Exported()
    try:
        for inventory, place in wanted:
            try:
                encoded, page = _read(place)
            except (OSError, FormatError, CodecError) as error:
                where = f"{place.segment.path} at {place.entry.offset}"
                exported.failed[where] = f"page {place.entry.key.hex()}: {error}"
            else:
                exported.pages.append(_write(inventory, place, encoded, page, out, stored))
            advance(1)
    finally:  # also on a full disk: the exported pages are useless without the manifest
        manifest = {"pages": exported.pages, "failed": exported.failed}
        (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return exported


def _read(place: Place) -> tuple[EncodedPage, Bytes]:
    loaded, entry = place.segment.loaded, place.entry
    with opened(place.segment.path) as fd:
        stored = read_blocks(RealFiles(), fd, entry.offset, entry.nbytes)
        RealFiles().uncache(fd, entry.offset, entry.nbytes)
    _, encoded = open_record(loaded.header, entry.key, stored)
    page = np.empty(loaded.header.page_format.page_bytes, np.uint8)
    codec_of(loaded.header).decode(encoded, page)
    return encoded, page


def _write(
    inventory: Inventory,
    place: Place,
    encoded: EncodedPage,
    page: Bytes,
    out: Path,
    stored: bool,
) -> dict[str, object]:
    """Write a page's files. Returns the page's manifest entry."""
    header, entry = place.segment.loaded.header, place.entry
    folder = out / inventory.info.fingerprint.hex() / inventory.info.path.name
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"file": (f"{entry.key.hex()}.page", page.data)}
    if stored:
        if encoded.plane.nbytes:
            contents["plane_file"] = (f"{entry.key.hex()}.plane", encoded.plane.data)
        if encoded.frame.nbytes:
            contents["frame_file"] = (f"{entry.key.hex()}.zst", encoded.frame.data)
        if header.table:
            contents["table_file"] = (f"{header.table_id:016x}.table", memoryview(header.table))
    for name, content in contents.values():
        (folder / name).write_bytes(content)
    files = {what: str((folder / name).relative_to(out)) for what, (name, _) in contents.items()}
    return {
        "key": entry.key.hex(),
        **files,
        "fingerprint": header.fingerprint.hex(),
        "replica": header.replica,
        "rank": header.rank,
        "ranks": header.ranks,
        "written": entry.written,
        "element": header.page_format.element.value,
        "tokens": header.page_format.tokens,
        "codec": place.segment.codec_name,
        "codec_id": header.codec_id,
        "raw_bytes": page.nbytes,
        "plane_bytes": encoded.plane.nbytes,
        "frame_bytes": encoded.frame.nbytes,
        "xxh3_128": xxhash.xxh3_128_hexdigest(page.data),
    }
