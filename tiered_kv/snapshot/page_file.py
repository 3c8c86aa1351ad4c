"""One page as a self-contained file, from which the page can be decoded.

    offset  bytes  field
    0       8      magic "TKVPAGE" and a zero
    8       2      version, 1
    10      2      codec
    12      4      type of the elements, as in ``codecs.base.ELEMENTS``; opaque if several
    16      4      tokens of the page
    20      4      bytes of the page
    24      4      bytes of the codec's table, at most 64 KiB
    28      4      bytes of the plane
    32      4      bytes of the frame
    36             table, plane and frame, and nothing after them

Integers are little-endian. A file is never larger than its header and the page. It is decoded with
its own format, so that pages with equal bytes share a file even if their groups have different
formats. There is no digest: the file's name is the digest of the page's bytes.

The pool of a root has the pages of the root's snapshots, by digest.

``ROOT/.pages/<first two hex>/<sha256>`` and the same page's file in a snapshot are hard links to
one file. A page without another link belongs to no snapshot. The pool only saves space: a page that
is missing in it, or cannot be linked, is written again, and snapshots are never read through it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import ELEMENTS, Bytes, Codec, EncodedPage, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import CODECS, from_table

from .manifest import SnapshotError, is_sha256
from .part_file import Origin
from .snapshot_files import POOL, make_folder

HEADER = struct.Struct("<8sHHIIIIII")
MAGIC, VERSION = b"TKVPAGE\0", 1
MOST_TABLE_BYTES = 64 << 10


def least_file_bytes() -> int:
    """Return the size of the smallest possible file of a page, bytes."""
    return HEADER.size


def most_file_bytes(page_format: PageFormat) -> int:
    """Return the size of the largest possible file of a page of this format, bytes."""
    return HEADER.size + page_format.page_bytes


def encode_page(page: Bytes, page_format: PageFormat) -> list[memoryview]:
    """Encode a page. Returns the parts of its file, which may alias the page.

    Args:
        page: the page, contiguous and of ``page_format.page_bytes`` bytes.
    """
    codec = _codec(page_format)
    encoded, table = codec.encode(page), codec.table
    if len(table) > MOST_TABLE_BYTES or len(table) + encoded.nbytes >= page.nbytes:
        codec, table = RawCodec(page_format), b""
        encoded = codec.encode(page)
    header = HEADER.pack(
        MAGIC,
        VERSION,
        codec.codec_id,
        ELEMENTS.index(page_format.element),
        page_format.tokens,
        page_format.page_bytes,
        len(table),
        encoded.plane.nbytes,
        encoded.frame.nbytes,
    )
    return [memoryview(header + table), encoded.plane.data, encoded.frame.data]


def decode_page(data: Bytes | bytes | memoryview, page_format: PageFormat, out: Bytes) -> None:
    """Decode the page of a file into ``out``. The caller must check the digest of the page.

    Args:
        page_format: format of the page; only its size must match the file.
        out: memory of exactly the page's size.

    Raises:
        SnapshotError: the bytes are not a page of that size; ``out`` has undefined contents.
        ValueError: ``out`` does not have the size of a page of this format.
    """
    stored = np.frombuffer(data, np.uint8)
    if out.nbytes != page_format.page_bytes:
        raise ValueError(
            f"the output buffer has {out.nbytes} bytes, but a page has {page_format.page_bytes}"
        )
    codec_id, stored_format, table, encoded = _parse(stored)
    if stored_format.page_bytes != out.nbytes:
        raise SnapshotError(f"a page has {stored_format.page_bytes} bytes instead of {out.nbytes}")
    try:
        _stored_codec(codec_id, table, stored_format).decode(encoded, out)
    except Exception as error:
        # CodecError by contract, but these bytes are untrusted.
        raise SnapshotError(f"a page is damaged: {error}") from error


def _parse(stored: Bytes) -> tuple[int, PageFormat, bytes, EncodedPage]:
    """Parse a file. Returns its codec id, page format, codec table and encoded page.

    Raises:
        SnapshotError: the header is missing or invalid, or the file's length does not match the
            header.
    """
    if stored.nbytes < HEADER.size:
        raise SnapshotError("a page file is truncated within its header")
    magic, version, codec, element, tokens, size, table, plane, frame = HEADER.unpack_from(
        stored.data
    )
    if magic != MAGIC:
        raise SnapshotError("a page file does not start with the magic number")
    if version != VERSION:
        raise SnapshotError(
            f"a page file has version {version}, but only version {VERSION} is supported"
        )
    if element >= len(ELEMENTS):
        raise SnapshotError(f"a page file has elements of the unknown type {element}")
    if table > MOST_TABLE_BYTES:
        raise SnapshotError(f"a page file has a codec table of {table} bytes, which is too large")
    if HEADER.size + table + plane + frame != stored.nbytes:
        raise SnapshotError(
            f"a page file has {stored.nbytes} bytes, but "
            f"{HEADER.size + table + plane + frame} according to its header"
        )
    table_bytes, plane_bytes, frame_bytes = np.split(stored[HEADER.size :], [table, table + plane])
    encoded = EncodedPage(plane_bytes, frame_bytes)
    return codec, PageFormat(ELEMENTS[element], size, tokens), table_bytes.tobytes(), encoded


@lru_cache(maxsize=8)
def _codec(page_format: PageFormat) -> Codec:
    """Return an untrained codec for pages of this format. It is always the same codec, and has a
    short table."""
    try:
        return CODECS["centred"].make(page_format)
    except ValueError:  # bytes of unknown type
        return RawCodec(page_format)


@lru_cache(maxsize=8)
def _stored_codec(codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
    return from_table(codec_id, table, page_format)


class PagePool:
    """The pool of the pages of a root.

    Args:
        root: folder of snapshots.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / POOL

    def link_to(self, digest: str, path: Path) -> Origin:
        """Link a page of the pool to a path, if possible. Does not check the page's bytes.

        Returns:
            ``SHARED`` if the page was linked, ``BESIDE`` if the path exists already, otherwise
            ``NEW`` or ``AGAIN``, with which the caller must write the file.
        """
        try:
            # A symbolic link in the pool is not followed: the link itself would be linked.
            os.link(self._place(digest), path, follow_symlinks=False)
        except FileExistsError:
            return Origin.BESIDE
        except OSError as error:  # usually because the pool does not have the page
            return Origin.AGAIN if error.errno == errno.EMLINK else Origin.NEW
        return Origin.SHARED

    def take(self, digest: str, path: Path, *, replace: bool) -> None:
        """Add a durable page of a snapshot to the pool, if possible. Never fails.

        Args:
            replace: True if an existing page in the pool is unusable.
        """
        place = self._place(digest)
        with contextlib.suppress(OSError):
            if replace:
                place.unlink(missing_ok=True)
            for folder in (self._folder, place.parent):
                with contextlib.suppress(FileExistsError):
                    make_folder(folder)
            os.link(path, place, follow_symlinks=False)

    def sweep(self) -> None:
        """Remove pages that belong to no snapshot. Never fails."""
        for shard in _entries(self._folder):
            if shard.is_dir(follow_symlinks=False):
                for entry in _entries(shard.path):
                    with contextlib.suppress(OSError):
                        if is_sha256(entry.name) and entry.stat(follow_symlinks=False).st_nlink < 2:
                            os.unlink(entry.path)  # noqa: PTH108

    def _place(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError):
        if not os.path.islink(folder):  # noqa: PTH114
            with os.scandir(folder) as entries:
                yield from list(entries)
