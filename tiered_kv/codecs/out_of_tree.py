"""A codec from another package, as identified in segments.

Segments identify a codec by a number. All codecs from other packages share one number, and the
table of each starts with the codec's name:

    offset  bytes  field
    0       2      bytes of the name, n (little-endian)
    2       n      name, ``module:Class`` in UTF-8
    2 + n          the codec's own table
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Bytes, Codec, CodecError, EncodedPage, PageFormat

OUT_OF_TREE_ID = 0xFFFF


@dataclass(frozen=True, slots=True)
class OutOfTreeCodec:
    """A codec from another package, with the name of its class.

    Attributes:
        name: ``module:Class``.
        codec: the codec itself; its own name and number are ignored.
    """

    name: str
    codec: Codec
    codec_id = OUT_OF_TREE_ID

    @property
    def page_format(self) -> PageFormat:
        return self.codec.page_format

    @property
    def table(self) -> bytes:
        name = self.name.encode()
        return len(name).to_bytes(2, "little") + name + self.codec.table

    @property
    def wants_training(self) -> bool:
        return self.codec.wants_training

    @property
    def stores_in_place(self) -> bool:
        return self.codec.stores_in_place

    def encode(self, page: Bytes) -> EncodedPage:
        return self.codec.encode(page)

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        self.codec.decode(encoded, out)

    def trained(self, pages: list[Bytes]) -> Codec:
        return OutOfTreeCodec(self.name, self.codec.trained(pages))


def split_table(table: bytes) -> tuple[str, bytes]:
    """Split a table from a segment into the codec's name and its own table.

    Raises:
        CodecError: the table does not start with a name.
    """
    end = 2 + int.from_bytes(table[:2], "little")
    try:
        name = table[2:end].decode()
    except UnicodeDecodeError as error:
        raise CodecError("the codec's name in the table is damaged") from error
    if not name or len(table) < end:
        raise CodecError("the table does not start with the name of its codec")
    return name, table[end:]
