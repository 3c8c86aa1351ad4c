"""The codec of pages whose elements have several types. Each type gets a suitable codec.

Sections of one type are encoded together, in *parts*, as if each part were a page. A part is
complete once it has half a MiB. Many short sections then need only one frame, and a part of one
long section is encoded without copying. The centred codec encodes parts with elements that it
supports, and zstd encodes the other parts.

A stored page consists of the concatenated planes of the parts, and a frame (little-endian):

    offset  bytes  field
    0       8*p    for each part: bytes of its plane u32, bytes of its frame u32
    8*p            frames of the parts, concatenated

The format of the table is described in ``section_table``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from .base import Bytes, Codec, CodecError, ElementType, EncodedPage, PageFormat, check_size
from .centred import CentredCodec
from .scratch import Scratch
from .section_table import SectionTable, StoredPart
from .zstd import ZstdCodec

PartCodec: TypeAlias = CentredCodec | ZstdCodec
"""Codec of a part. Its planes must not alias the page, so it must not be a codec that stores in
place."""

PART_BYTES = 512 << 10
"""Size at which a part is complete, bytes. An fp32 part of this size has one Huffman code."""

SIZES = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class SectionsCodec:
    """Stores the sections of each element type with a separate codec.

    Args:
        parts: indices of the sections of each part; if empty, parts of ``PART_BYTES``.
        codecs: codec of each part; if empty, untrained codecs.
    """

    page_format: PageFormat
    parts: tuple[tuple[int, ...], ...] = ()
    codecs: tuple[PartCodec, ...] = ()
    table: bytes = field(init=False, repr=False, compare=False)
    _spans: list[list[slice]] = field(init=False, repr=False, compare=False)
    codec_id = 3
    name = "centred"  # TIERED_KV_CODEC=centred selects this codec for pages of several types
    stores_in_place = False

    @classmethod
    def from_table(cls, page_format: PageFormat, table: bytes) -> Codec:
        """Create the codec from its table.

        Args:
            page_format: format of the pages, or its outline.

        Raises:
            CodecError: the table is damaged, or belongs to pages of another format.
        """
        told = SectionTable.read(table)
        if page_format not in (told.page_format, told.page_format.outline):
            raise CodecError(
                f"the table of sections does not belong to pages of format {page_format}"
            )
        codecs = tuple(
            _stored_codec(part_format(told.page_format, part.sections), part) for part in told.parts
        )
        return cls(told.page_format, tuple(part.sections for part in told.parts), codecs)

    def __post_init__(self) -> None:
        parts = self.parts or tuple(divide(self.page_format))
        codecs = self.codecs or tuple(
            _untrained(part_format(self.page_format, part)) for part in parts
        )
        stored = [
            StoredPart(part, codec.codec_id, codec.table)
            for part, codec in zip(parts, codecs, strict=True)
        ]
        places = _places(self.page_format)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "codecs", codecs)
        object.__setattr__(self, "table", SectionTable(self.page_format, stored).pack())
        object.__setattr__(self, "_spans", [[places[one] for one in part] for part in parts])

    @property
    def wants_training(self) -> bool:
        return any(codec.wants_training for codec in self.codecs)

    def encode(self, page: Bytes) -> EncodedPage:
        check_size(page, self.page_format)
        centred = [codec for codec in self.codecs if isinstance(codec, CentredCodec)]
        planes, at = _fresh(sum(codec.most_plane_bytes for codec in centred)), 0
        sizes, frames = bytearray(), []
        for codec, spans in zip(self.codecs, self._spans, strict=True):
            part = _gather(page, spans, _scratch.bytes)
            if isinstance(codec, CentredCodec):
                stored = codec.encode(part, planes[at:])
            else:
                stored = codec.encode(part)  # zstd stores no plane
            sizes += SIZES.pack(stored.plane.nbytes, stored.frame.nbytes)
            frames.append(stored.frame)
            at += stored.plane.nbytes
        return EncodedPage(
            planes[:at], np.concatenate([np.frombuffer(sizes, dtype=np.uint8), *frames])
        )

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        check_size(out, self.page_format)
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
            check_size(page, self.page_format)
        codecs = (
            codec.trained([_gather(page, spans, _fresh) for page in pages])
            if codec.wants_training
            else codec
            for codec, spans in zip(self.codecs, self._spans, strict=True)
        )
        return SectionsCodec(self.page_format, self.parts, tuple(codecs))

    def _split(self, encoded: EncodedPage) -> list[EncodedPage]:
        """Split a stored page into its parts.

        Raises:
            CodecError: the sizes do not match the plane and the frame.
        """
        plane, frame = 0, SIZES.size * len(self.parts)
        if encoded.frame.nbytes < frame:
            raise CodecError("the page is too short to contain the sizes of its parts")
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
            raise CodecError(
                f"the page has {encoded.plane.nbytes} plane bytes and {encoded.frame.nbytes} frame "
                f"bytes, but its sections need {plane} and {frame}"
            )
        return parts


def divide(page_format: PageFormat) -> Iterator[tuple[int, ...]]:
    """Divide the sections of a page into parts of one type each. Yields the indices of the sections
    of each part, which has at least ``PART_BYTES`` unless it is the last part of its type."""
    open_parts: dict[ElementType, list[int]] = {}
    sizes: dict[ElementType, int] = {}
    for number, section in enumerate(page_format.sections):
        element = section.element
        open_parts.setdefault(element, []).append(number)
        sizes[element] = sizes.get(element, 0) + section.nbytes
        if sizes[element] >= PART_BYTES:
            yield tuple(open_parts.pop(element))
            del sizes[element]
    yield from map(tuple, open_parts.values())


def part_format(page_format: PageFormat, part: Sequence[int]) -> PageFormat:
    """Return the format of a part, treated as a page."""
    sections = [page_format.sections[number] for number in part]
    return PageFormat.of(sections, page_format.tokens)


def _places(page_format: PageFormat) -> list[slice]:
    """Return the byte range of each section in a page."""
    places, begin = [], 0
    for section in page_format.sections:
        places.append(slice(begin, begin + section.nbytes))
        begin += section.nbytes
    return places


def _gather(page: Bytes, spans: Sequence[slice], memory: Callable[[int], Bytes]) -> Bytes:
    """Return the bytes of a part of a page: a view of the page if the part is contiguous, otherwise
    a copy in ``memory``."""
    if len(spans) == 1:
        return page[spans[0]]
    pieces = [page[span] for span in spans]
    return np.concatenate(pieces, out=memory(sum(piece.nbytes for piece in pieces)))


def _fresh(count: int) -> Bytes:
    return np.empty(count, dtype=np.uint8)


def _untrained(part: PageFormat) -> PartCodec:
    try:
        return CentredCodec(part)
    except ValueError:  # unsupported elements, or not a whole number of them
        return ZstdCodec(part)


def _stored_codec(part: PageFormat, stored: StoredPart) -> PartCodec:
    """Create the codec of a part.

    Raises:
        CodecError: the number or the table is invalid.
    """
    for cls in (CentredCodec, ZstdCodec):
        if cls.codec_id == stored.codec_id:
            return cls.from_table(part, stored.table)
    raise CodecError(f"codec {stored.codec_id} does not support parts of a page")


_scratch = Scratch()
