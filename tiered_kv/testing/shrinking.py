"""A codec that shrinks any page. Checkable KV is random, so other codecs cannot compress it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import xxhash

from tiered_kv.codecs.base import Bytes, Codec, CodecError, EncodedPage, PageFormat

NAME = f"{__name__}:Shrinking"
"""Name of the codec in settings."""
LEAST, MOST = 0.25, 0.75
"""Minimum and maximum compressed size, as fractions of a page. A page's content determines its
size."""
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Shrinking:
    """Codec that remembers pages, and stores only their digest, repeated to the compressed size.

    All codecs of a process share the remembered pages. ``decode`` accepts only the exact bytes that
    were stored.
    """

    page_format: PageFormat

    codec_id: ClassVar[int] = 0
    name: ClassVar[str] = NAME
    table: ClassVar[bytes] = b""
    wants_training: ClassVar[bool] = False
    stores_in_place: ClassVar[bool] = False

    @classmethod
    def from_table(cls, page_format: PageFormat, table: bytes) -> Codec:
        """Return a codec. This codec has no table."""
        return cls(page_format)

    def encode(self, page: Bytes) -> EncodedPage:
        whole = page.tobytes()
        digest = xxhash.xxh3_128_digest(whole)
        _PAGES[digest] = whole
        stored = np.frombuffer(_stored(digest, len(whole)), dtype=np.uint8).copy()
        plane = stored.nbytes // 3
        return EncodedPage(stored[:plane], stored[plane:])

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        stored = encoded.plane.tobytes() + encoded.frame.tobytes()
        whole = _PAGES.get(stored[:DIGEST_BYTES])
        if whole is None or stored != _stored(stored[:DIGEST_BYTES], len(whole)):
            raise CodecError("the page was not encoded by this codec")
        out[:] = np.frombuffer(whole, dtype=np.uint8)

    def trained(self, pages: list[Bytes]) -> Codec:
        return self


_PAGES: dict[bytes, bytes] = {}


def forget_pages() -> None:
    """Forget all pages of the process, which can then no longer be decoded."""
    _PAGES.clear()


def _stored(digest: bytes, page_bytes: int) -> bytes:
    """Return the stored form of a page."""
    share = LEAST + (MOST - LEAST) * digest[0] / 256
    size = max(DIGEST_BYTES, int(page_bytes * share))
    return (digest * (size // DIGEST_BYTES + 1))[:size]
