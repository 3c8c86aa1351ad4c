"""The codec of pages whose elements are of several types: each type by what suits it.

The sections of one type are taken together, in the order of the page, as if they were a page of
that type: a *part*. The centred codec serves the parts whose elements it knows, zstd the others.

A stored page is the planes of the parts, one behind the other, and a frame (little-endian):

    offset  bytes  field
    0       8*p    of each part: bytes of its plane u32, bytes of its frame u32
    8*p            frames of the parts, one behind the other

The table names the sections, so that pages can be read by who knows no more than their size:

    offset  bytes  field
    0       4      magic b"TKVS"
    4       1      version, 1
    5       1      parts, p: one for each type, in the order of their first sections
    6       2      zero
    8       4      tokens of a page
    12      8      bytes of a page
    20      4      sections, s: none empty, no neighbours of one type
    24      9*s    of each section: element type u8, as in ``ELEMENTS``; bytes u64
    ...     6*p    of each part: codec u16; bytes of its table u32
    ...            tables of the parts, one behind the other
    end-4   4      CRC-32 of all of the above
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .base import (
    Bytes,
    Codec,
    CodecClass,
    CodecError,
    ElementType,
    EncodedPage,
    PageFormat,
    Section,
)
from .centred import CentredCodec
from .scratch import Scratch
from .zstd import ZstdCodec

ELEMENTS = (
    ElementType.OPAQUE,
    ElementType.BF16,
    ElementType.FP16,
    ElementType.FP8_E4M3,
    ElementType.FP8_E5M2,
    ElementType.FP32,
)
"""Types of elements, in the order of their numbers in the table."""

PART_CODECS: Sequence[CodecClass] = (CentredCodec, ZstdCodec)
"""Codecs of parts. None gives its page itself as a plane: what is stored must not alias it."""

HEADER = struct.Struct("<4sBBHIQI")
MAGIC, VERSION = b"TKVS", 1
SECTION = struct.Struct("<BQ")
PART = struct.Struct("<HI")
SIZES = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class SectionsCodec:
    """Stores the sections of each element type by a codec of their own.

    Args:
        codecs: codecs of the parts; without any, untrained ones.
    """

    page_format: PageFormat
    codecs: tuple[Codec, ...] = ()
    table: bytes = field(init=False, repr=False, compare=False)
    _spans: list[list[slice]] = field(init=False, repr=False, compare=False)
    codec_id = 3
    name = "centred"  # as a user says it: of pages of several types, this is what it means
    stores_in_place = False

    @classmethod
    def from_table(cls, page_format: PageFormat, table: bytes) -> Codec:
        """Make the codec that had this table.

        Args:
            page_format: format of the pages, or its outline.
        """
        told, tables = read_table(table)
        if page_format not in (told, told.outline):
            raise CodecError(f"a table of sections for other pages than {page_format}")
        formats = part_formats(told)
        if len(tables) != len(formats):
            raise CodecError(f"a table of {len(tables)} parts for {len(formats)} types of elements")
        parts = zip(formats, tables, strict=True)
        return cls(told, tuple(_codec_of(part, *stored) for part, stored in parts))

    def __post_init__(self) -> None:
        codecs = self.codecs or tuple(map(_untrained, part_formats(self.page_format)))
        object.__setattr__(self, "codecs", codecs)
        object.__setattr__(self, "table", make_table(self.page_format, codecs))
        object.__setattr__(self, "_spans", list(_spans(self.page_format).values()))

    @property
    def wants_training(self) -> bool:
        return any(codec.wants_training for codec in self.codecs)

    def encode(self, page: Bytes) -> EncodedPage:
        self._check_page(page)
        stored = [
            codec.encode(_gather(page, spans, _scratch.bytes))
            for codec, spans in zip(self.codecs, self._spans, strict=True)
        ]
        sizes = b"".join(SIZES.pack(one.plane.nbytes, one.frame.nbytes) for one in stored)
        frames = [np.frombuffer(sizes, np.uint8), *(one.frame for one in stored)]
        return EncodedPage(_joined([one.plane for one in stored]), _joined(frames))

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        self._check_page(out)
        parts = zip(self.codecs, self._spans, self._split(encoded), strict=True)
        for codec, spans, stored in parts:
            if len(spans) == 1:
                codec.decode(stored, out[spans[0]])
                continue
            part = _scratch.bytes(codec.page_format.page_bytes)
            codec.decode(stored, part)
            begin = 0
            for span in spans:
                end = begin + span.stop - span.start
                out[span] = part[begin:end]
                begin = end

    def trained(self, pages: list[Bytes]) -> Codec:
        if not pages or not self.wants_training:
            return self
        for page in pages:
            self._check_page(page)
        codecs = (
            codec.trained([_gather(page, spans, _fresh) for page in pages])
            if codec.wants_training
            else codec
            for codec, spans in zip(self.codecs, self._spans, strict=True)
        )
        return SectionsCodec(self.page_format, tuple(codecs))

    def _split(self, encoded: EncodedPage) -> list[EncodedPage]:
        """The stored parts.

        Raises:
            CodecError: they are not as long as the plane and the frame.
        """
        plane, frame = 0, SIZES.size * len(self.codecs)
        if encoded.frame.nbytes < frame:
            raise CodecError("a page of sections without their sizes")
        parts = []
        for planes, frames in SIZES.iter_unpack(encoded.frame[:frame].data):
            parts.append(
                EncodedPage(
                    encoded.plane[plane : plane + planes], encoded.frame[frame : frame + frames]
                )
            )
            plane += planes
            frame += frames
        if (plane, frame) != (encoded.plane.nbytes, encoded.frame.nbytes):
            raise CodecError(f"{encoded.nbytes} bytes for sections of {plane} and {frame}")
        return parts

    def _check_page(self, page: Bytes) -> None:
        # A slice of a page that is too short would be, too.
        if page.nbytes != self.page_format.page_bytes:
            raise ValueError(f"{page.nbytes} bytes where pages have {self.page_format.page_bytes}")


# -- parts ------------------------------------------------------------------------


def part_formats(page_format: PageFormat) -> list[PageFormat]:
    """Format of each part, in the order of their first sections."""
    return [
        PageFormat(element, sum(span.stop - span.start for span in spans), page_format.tokens)
        for element, spans in _spans(page_format).items()
    ]


def _spans(page_format: PageFormat) -> dict[ElementType, list[slice]]:
    """Places of the sections of each type."""
    spans: dict[ElementType, list[slice]] = {}
    begin = 0
    for section in page_format.sections:
        span = slice(begin, begin + section.nbytes)
        spans.setdefault(section.element, []).append(span)
        begin = span.stop
    return spans


def _gather(page: Bytes, spans: Sequence[slice], memory: Callable[[int], Bytes]) -> Bytes:
    """A part of a page: bytes of the page itself if they lie together, else in ``memory``."""
    if len(spans) == 1:
        return page[spans[0]]
    pieces = [page[span] for span in spans]
    return np.concatenate(pieces, out=memory(sum(piece.nbytes for piece in pieces)))


def _fresh(count: int) -> Bytes:
    return np.empty(count, dtype=np.uint8)


def _joined(pieces: Sequence[Bytes]) -> Bytes:
    """One array of all; the only one that is not empty if there is no other."""
    full = [piece for piece in pieces if piece.nbytes]
    return full[0] if len(full) == 1 else np.concatenate(pieces)


def _untrained(part: PageFormat) -> Codec:
    try:
        return CentredCodec(part)
    except ValueError:  # no elements that it knows, or no whole number of them
        return ZstdCodec(part)


def _codec_of(part: PageFormat, codec_id: int, table: bytes) -> Codec:
    """Make the codec of a part.

    Raises:
        CodecError: there is none of that number, or with that table.
    """
    for cls in PART_CODECS:
        if cls.codec_id == codec_id:
            return cls.from_table(part, table)
    raise CodecError(f"codec {codec_id} is none of sections")


# -- tables -----------------------------------------------------------------------


def make_table(page_format: PageFormat, codecs: Sequence[Codec]) -> bytes:
    """Make the table of these codecs of parts."""
    sections = page_format.sections
    head = HEADER.pack(
        MAGIC,
        VERSION,
        len(codecs),
        0,
        page_format.tokens,
        page_format.page_bytes,
        len(sections),
    )
    body = b"".join(
        [
            head,
            *(SECTION.pack(ELEMENTS.index(one.element), one.nbytes) for one in sections),
            *(PART.pack(codec.codec_id, len(codec.table)) for codec in codecs),
            *(codec.table for codec in codecs),
        ]
    )
    return body + struct.pack("<I", zlib.crc32(body))


def read_table(table: bytes) -> tuple[PageFormat, list[tuple[int, bytes]]]:
    """Read the format of the pages, and the codec and table of each part.

    Raises:
        CodecError: damaged, or of another version.
    """
    if len(table) < HEADER.size + 4 or table[:4] != MAGIC:
        raise CodecError("this is no table of sections")
    body = table[:-4]
    if struct.unpack("<I", table[-4:])[0] != zlib.crc32(body):
        raise CodecError("a table of sections is damaged")
    _, version, parts, zero, tokens, page_bytes, count = HEADER.unpack_from(body)
    if version != VERSION or zero:
        raise CodecError(f"a table of sections of version {version} where {VERSION} is known")
    parts_from = HEADER.size + SECTION.size * count
    at = parts_from + PART.size * parts
    if at > len(body):
        raise CodecError("a table of sections is cut off")
    sections = _sections(SECTION.iter_unpack(body[HEADER.size : parts_from]))
    page_format = PageFormat.of(sections, tokens) if sections else None
    if page_format is None or page_format.sections != sections:
        raise CodecError("a table of sections that are not as they should be cut")
    if page_format.page_bytes != page_bytes:
        raise CodecError(f"sections of {page_format.page_bytes} bytes for pages of {page_bytes}")
    tables = []
    for codec_id, nbytes in PART.iter_unpack(body[parts_from:at]):
        tables.append((codec_id, body[at : at + nbytes]))
        at += nbytes
    if at != len(body):
        raise CodecError("a table of sections with tables of other lengths than it says")
    return page_format, tables


def _sections(rows: Iterable[tuple[int, int]]) -> tuple[Section, ...]:
    """Read sections.

    Raises:
        CodecError: one is of an unknown type.
    """
    found = []
    for element, nbytes in rows:
        if element >= len(ELEMENTS):
            raise CodecError(f"a section of elements of the unknown type {element}")
        found.append(Section(ELEMENTS[element], nbytes))
    return tuple(found)


_scratch = Scratch()
