"""The codec that stores pages uncompressed, for disks that are faster than decoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Bytes, Codec, CodecError, EncodedPage, PageFormat, refuse_table

NOTHING: Bytes = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class RawCodec:
    """Stores pages uncompressed."""

    page_format: PageFormat
    codec_id = 0
    name = "raw"
    table = b""
    wants_training = False
    stores_in_place = True

    @classmethod
    def from_table(cls, page_format: PageFormat, table: bytes) -> Codec:
        refuse_table(cls.codec_id, table)
        return cls(page_format)

    def encode(self, page: Bytes) -> EncodedPage:
        return EncodedPage(page, NOTHING)

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        if encoded.plane.nbytes != out.nbytes or encoded.frame.nbytes:
            raise CodecError(
                f"the raw page has {encoded.plane.nbytes} raw and {encoded.frame.nbytes} "
                f"compressed bytes instead of {out.nbytes} and 0"
            )
        out[:] = encoded.plane

    def trained(self, pages: list[Bytes]) -> Codec:
        return self
