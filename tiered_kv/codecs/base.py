"""The contract of codecs, which convert pages to bytes for storage and back without loss.

A codec is a frozen value. Two codecs with the same ``codec_id`` and ``table`` can read each
other's pages, in any process and on any machine. The table is written into every segment
whose pages need it. All methods may run on several threads concurrently, and release the
interpreter lock during expensive work. Codecs are tested by subclassing
``tiered_kv.testing.conformance.codec.CodecConformance``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
"""A contiguous, one-dimensional array of bytes."""


class ElementType(Enum):
    """Type of a page's elements."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    OPAQUE = "opaque"
    """Bytes of unknown type."""


ELEMENTS = (
    ElementType.OPAQUE,
    ElementType.BF16,
    ElementType.FP16,
    ElementType.FP8_E4M3,
    ElementType.FP8_E5M2,
    ElementType.FP32,
)
"""Element types in the order of their numbers in files."""


@dataclass(frozen=True, slots=True)
class Section:
    """Contiguous bytes of a page that have one type.

    Attributes:
        element: type of the elements.
        nbytes: number of bytes.
    """

    element: ElementType
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The properties of a page that a codec may know.

    Attributes:
        element: type of the elements; opaque if they have several types.
        page_bytes: size of a page, bytes.
        tokens: tokens of a page; 0 for a state, in which no token has bytes of its own.
        sections: sections in page order, where adjacent sections have different types. If empty,
            there is one section of type ``element``.

    Raises:
        ValueError: the sections do not match the other fields.
    """

    element: ElementType
    page_bytes: int
    tokens: int
    sections: tuple[Section, ...] = ()

    @classmethod
    def of(cls, sections: Iterable[Section], tokens: int) -> PageFormat:
        """Create the format of pages that consist of these sections."""
        joined = _joined(sections)
        element = joined[0].element if len(joined) == 1 else ElementType.OPAQUE
        return cls(element, sum(section.nbytes for section in joined), tokens, joined)

    def __post_init__(self) -> None:
        sections = _joined(self.sections) or (Section(self.element, self.page_bytes),)
        found = sections[0].element if len(sections) == 1 else ElementType.OPAQUE
        nbytes = sum(section.nbytes for section in sections)
        if (found, nbytes) != (self.element, self.page_bytes):
            raise ValueError(
                f"the sections have {nbytes} bytes of type {found.value}, but the page has "
                f"{self.page_bytes} bytes of type {self.element.value}"
            )
        object.__setattr__(self, "sections", sections)

    @property
    def mixed(self) -> bool:
        """True if the elements have several types."""
        return len(self.sections) > 1

    @property
    def outline(self) -> PageFormat:
        """The format without the sections of a mixed page, as it is stored in a segment's
        header."""
        return PageFormat(self.element, self.page_bytes, self.tokens)


def check_size(page: Bytes, page_format: PageFormat) -> None:
    """Check that a page has the size of its format.

    Raises:
        ValueError: the size is not the page size of this format.
    """
    if page.nbytes != page_format.page_bytes:
        raise ValueError(f"the page has {page.nbytes} bytes instead of {page_format.page_bytes}")


def _joined(sections: Iterable[Section]) -> tuple[Section, ...]:
    """Return the sections without empty ones, with adjacent sections of the same type merged.
    Raises ValueError if a section has a negative size."""
    full = [section for section in sections if section.nbytes]
    if any(section.nbytes < 0 for section in full):
        raise ValueError("a section cannot have a negative size")
    return tuple(
        Section(element, sum(section.nbytes for section in run))
        for element, run in groupby(full, key=lambda section: section.element)
    )


@dataclass(frozen=True, slots=True)
class EncodedPage:
    """A page as stored, in two parts, either of which may be empty.

    Attributes:
        plane: bytes stored uncompressed.
        frame: compressed bytes.
    """

    plane: Bytes
    frame: Bytes

    @property
    def nbytes(self) -> int:
        """Size of both parts together, bytes."""
        return self.plane.nbytes + self.frame.nbytes


class CodecError(Exception):
    """Stored bytes that are not a page, or not a table, of the codec."""


class Codec(Protocol):
    """Encodes and decodes pages of one format.

    Attributes:
        codec_id: number in segments, 0 to 65535. Codecs from other packages share the number 65535,
            whatever their own number is: see ``out_of_tree``.
        name: name of the codec in ``TIERED_KV_CODEC``.
        page_format: format of every page encoded or decoded.
        table: data that decoding needs in addition to the page, at most 16 MiB; may be empty.
        wants_training: True if ``trained`` returns a better codec.
        stores_in_place: True if the plane is the page itself, and the frame is empty. A store may
            then write the page from the caller's memory and read it into the caller's memory,
            without calling ``encode`` or ``decode``.
    """

    @property
    def codec_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def page_format(self) -> PageFormat: ...
    @property
    def table(self) -> bytes: ...
    @property
    def wants_training(self) -> bool: ...
    @property
    def stores_in_place(self) -> bool: ...

    def encode(self, page: Bytes) -> EncodedPage:
        """Encode ``page_bytes`` bytes of any content.

        The result is larger than the page by at most 1/64 of the page size plus 4 KiB. The result
        does not alias the page, which may change after the call, unless the codec stores in place.
        """

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        """Decode the page into ``out`` (``page_bytes`` bytes).

        Raises:
            CodecError: the bytes are not a page of this codec; ``out`` has undefined contents.
        """

    def trained(self, pages: list[Bytes]) -> Codec:
        """Return a codec fitted to the given pages, or this codec if training does not help."""


@dataclass(frozen=True, slots=True)
class CodedPage:
    """A page together with the codec that encoded it.

    Attributes:
        codec: the codec; None if the page is not encoded and all bytes are in ``plane``.
    """

    codec: Codec | None
    page: EncodedPage

    def decode(self, out: Bytes) -> None:
        """Decode the page into ``out``.

        Raises:
            CodecError: the bytes are not a page of the codec; ``out`` has undefined contents.
        """
        if self.codec is None:
            out[:] = self.page.plane
        else:
            self.codec.decode(self.page, out)

    def decoded(self) -> Bytes | None:
        """Return the decoded page in new memory; None if it cannot be decoded."""
        codec = self.codec
        nbytes = self.page.nbytes if codec is None else codec.page_format.page_bytes
        out = np.empty(nbytes, np.uint8)
        try:
            self.decode(out)
        except Exception:  # codecs may raise anything; other pages must not be affected
            return None
        return out


class CodecClass(Protocol):
    """A codec's class, as used by the registry."""

    @property
    def codec_id(self) -> int: ...

    def __call__(self, page_format: PageFormat) -> Codec:
        """Create an untrained codec.

        Raises:
            ValueError: the codec does not support this format; the message names a codec that does.
        """

    def from_table(self, page_format: PageFormat, table: bytes) -> Codec:
        """Create the codec from its table, as stored in a segment.

        Raises:
            CodecError: the table does not belong to this codec and page format.
        """


def refuse_table(codec_id: int, table: bytes) -> None:
    """Check that no table is stored for a codec without a table.

    Raises:
        CodecError: the table is not empty.
    """
    if table:
        raise CodecError(
            f"codec {codec_id} has no table, but a table of {len(table)} bytes is stored for it"
        )
