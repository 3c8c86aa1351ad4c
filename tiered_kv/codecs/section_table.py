"""The table of the sections codec. It lists a page's sections, which a segment's header does not.

With the table, a reader that knows only the page size can decode pages. Layout of the table
(little-endian):

    offset  bytes  field
    0       4      magic b"TKVS"
    4       1      version, 1
    5       1      zero
    6       2      parts, p
    8       4      tokens of a page
    12      8      bytes of a page
    20      4      sections, s: none is empty, adjacent ones have different types
    24      11*s   for each section: element type u8, as in ``base.ELEMENTS``; part u16; bytes u64
    ...     6*p    for each part: codec u16; bytes of its table u32
    ...            tables of the parts, concatenated
    end-4   4      CRC-32 of everything before it

Parsing is total: any bytes either give a table or raise ``CodecError``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from .base import ELEMENTS, CodecError, PageFormat, Section

MAGIC, VERSION = b"TKVS", 1
HEADER = struct.Struct("<4sBBHIQI")
SECTION = struct.Struct("<BHQ")
PART = struct.Struct("<HI")


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a page, as described by the table.

    Attributes:
        sections: indices of its sections, ascending.
        codec_id: number of its codec.
        table: table of that codec.
    """

    sections: tuple[int, ...]
    codec_id: int
    table: bytes


@dataclass(frozen=True, slots=True)
class SectionTable:
    """Contents of a table.

    Attributes:
        page_format: format of the pages.
        parts: parts of a page; each section belongs to one part.
    """

    page_format: PageFormat
    parts: Sequence[StoredPart]

    def pack(self) -> bytes:
        """Return the table as bytes, in the format of the module docstring."""
        of, parts = self.page_format, self.parts
        part_of = {number: i for i, part in enumerate(parts) for number in part.sections}
        head = (MAGIC, VERSION, 0, len(parts), of.tokens, of.page_bytes, len(of.sections))
        pieces = [HEADER.pack(*head)]
        for i, section in enumerate(of.sections):
            pieces.append(SECTION.pack(ELEMENTS.index(section.element), part_of[i], section.nbytes))
        pieces += [PART.pack(part.codec_id, len(part.table)) for part in parts]
        body = b"".join([*pieces, *(part.table for part in parts)])
        return body + struct.pack("<I", zlib.crc32(body))

    @staticmethod
    def read(table: bytes) -> SectionTable:
        """Parse a table.

        Raises:
            CodecError: the table is damaged, has another version, or describes an impossible page.
        """
        if len(table) < HEADER.size + 4 or table[:4] != MAGIC:
            raise CodecError("the data is not a table of sections")
        body = table[:-4]
        if struct.unpack("<I", table[-4:])[0] != zlib.crc32(body):
            raise CodecError("the table of sections is damaged")
        _, version, zero, part_count, tokens, page_bytes, count = HEADER.unpack_from(body)
        if version != VERSION or zero:
            raise CodecError(
                f"the table of sections has version {version}, but only version {VERSION} is "
                "supported"
            )
        parts_at = HEADER.size + SECTION.size * count
        tables_at = parts_at + PART.size * part_count
        if tables_at > len(body):
            raise CodecError("the table of sections is truncated")
        members = [list[int]() for _ in range(part_count)]
        sections: list[Section] = []
        for element, part, nbytes in SECTION.iter_unpack(body[HEADER.size : parts_at]):
            if element >= len(ELEMENTS) or part >= part_count:
                raise CodecError(
                    f"a section in the table has an unknown type ({element}) or part ({part})"
                )
            members[part].append(len(sections))
            sections.append(Section(ELEMENTS[element], nbytes))
        page_format = _format(sections, tokens, page_bytes)
        for numbers in members:
            if len({sections[number].element for number in numbers}) != 1:
                raise CodecError("a part has no sections, or sections of different types")
        stored = PART.iter_unpack(body[parts_at:tables_at])
        parts, end = [], tables_at
        for numbers, (codec_id, nbytes) in zip(members, stored, strict=True):
            parts.append(StoredPart(tuple(numbers), codec_id, body[end : end + nbytes]))
            end += nbytes
        if end != len(body):
            raise CodecError(
                f"the tables of the parts end at byte {end} instead of byte {len(body)}"
            )
        return SectionTable(page_format, parts)


def _format(sections: Sequence[Section], tokens: int, page_bytes: int) -> PageFormat:
    """Return the format of pages with these sections.

    Raises:
        CodecError: the sections are invalid.
    """
    found = PageFormat.of(sections, tokens) if sections else None
    if found is None or found.sections != tuple(sections):
        raise CodecError(
            "the table has no sections, an empty section, or adjacent sections of the same type"
        )
    if found.page_bytes != page_bytes:
        raise CodecError(
            f"the sections have {found.page_bytes} bytes in total, but a page has {page_bytes}"
        )
    return found
