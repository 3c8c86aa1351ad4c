"""An example of a third-party codec, which subtracts the most frequent byte from all bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiered_kv.codecs.base import Bytes, Codec, CodecError, EncodedPage, PageFormat
from tiered_kv.codecs.raw import NOTHING


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Stores even bytes before odd ones. Once trained, subtracts the most frequent byte from
    each."""

    page_format: PageFormat
    table: bytes = b""
    codec_id = 0
    name = "shuffled"
    stores_in_place = False

    @classmethod
    def from_table(cls, page_format: PageFormat, table: bytes) -> Codec:
        if len(table) > 1:
            raise CodecError("a table of one byte was expected")
        return cls(page_format, table)

    @property
    def wants_training(self) -> bool:
        return not self.table

    def encode(self, page: Bytes) -> EncodedPage:
        return EncodedPage(NOTHING, np.concatenate([page[::2], page[1::2]]) - self._commonest)

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        if encoded.plane.nbytes or encoded.frame.nbytes != out.nbytes:
            raise CodecError("no page of this codec")
        even = (out.nbytes + 1) // 2
        out[::2] = encoded.frame[:even] + self._commonest
        out[1::2] = encoded.frame[even:] + self._commonest

    def trained(self, pages: list[Bytes]) -> Codec:
        if not pages:
            return self
        counts = sum(np.bincount(page, minlength=256) for page in pages)
        return Shuffled(self.page_format, bytes([int(np.argmax(counts))]))

    @property
    def _commonest(self) -> np.uint8:
        return np.uint8(self.table[0] if self.table else 0)
