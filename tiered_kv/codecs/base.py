"""The contract of codecs: pages to bytes for the SSD and back, bit for bit.

A codec is a frozen value. Two with the same ``codec_id`` and ``table`` understand each
other's pages, in any process and on any machine; the table is written into every segment
whose pages need it. All methods may run on several threads at once, and release the
interpreter lock where the work is. Codecs are tested by subclassing
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
    """Bytes of which nothing more is known."""


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
    """Bytes of a page that lie one behind the other and are of one type.

    Attributes:
        element: type of the elements.
        nbytes: number of bytes.
    """

    element: ElementType
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The facts that a codec may know of a page.

    Attributes:
        element: type of the elements; opaque if they are of several types.
        page_bytes: bytes of a page.
        tokens: tokens of a page; 0 for a state, in which no token has bytes of its own.
        sections: sections in the order of the page, neighbours of unlike types; without any given,
            one of ``element``.

    Raises:
        ValueError: the sections are not those of such a page.
    """

    element: ElementType
    page_bytes: int
    tokens: int
    sections: tuple[Section, ...] = ()

    @classmethod
    def of(cls, sections: Iterable[Section], tokens: int) -> PageFormat:
        """Make the format of pages that consist of these sections."""
        joined = _joined(sections)
        element = joined[0].element if len(joined) == 1 else ElementType.OPAQUE
        return cls(element, sum(section.nbytes for section in joined), tokens, joined)

    def __post_init__(self) -> None:
        sections = _joined(self.sections) or (Section(self.element, self.page_bytes),)
        found = sections[0].element if len(sections) == 1 else ElementType.OPAQUE
        nbytes = sum(section.nbytes for section in sections)
        if (found, nbytes) != (self.element, self.page_bytes):
            raise ValueError(
                f"sections of {nbytes} bytes of {found.value} are no page of "
                f"{self.page_bytes} bytes of {self.element.value}"
            )
        object.__setattr__(self, "sections", sections)

    @property
    def mixed(self) -> bool:
        """True if the elements are of several types."""
        return len(self.sections) > 1

    @property
    def outline(self) -> PageFormat:
        """The format without the sections of a mixed page, as the header of a segment has it."""
        return PageFormat(self.element, self.page_bytes, self.tokens)


def check_size(page: Bytes, page_format: PageFormat) -> None:
    """Refuse a page of another size: what reads it after that may trust the size.

    Raises:
        ValueError: it is no page of this format.
    """
    if page.nbytes != page_format.page_bytes:
        raise ValueError(f"{page.nbytes} bytes where pages have {page_format.page_bytes}")


def _joined(sections: Iterable[Section]) -> tuple[Section, ...]:
    """Sections of which no two neighbours are alike and none is empty."""
    full = [section for section in sections if section.nbytes]
    if any(section.nbytes < 0 for section in full):
        raise ValueError("a section has no negative number of bytes")
    return tuple(
        Section(element, sum(section.nbytes for section in run))
        for element, run in groupby(full, key=lambda section: section.element)
    )


@dataclass(frozen=True, slots=True)
class EncodedPage:
    """A page as stored, in two parts of which either may be empty.

    Attributes:
        plane: bytes as they are in the page.
        frame: bytes that the codec coded.
    """

    plane: Bytes
    frame: Bytes

    @property
    def nbytes(self) -> int:
        """Size of both parts, bytes."""
        return self.plane.nbytes + self.frame.nbytes


class CodecError(Exception):
    """Stored bytes that are no page of this codec."""


class Codec(Protocol):
    """Encodes and decodes pages of one format.

    Attributes:
        codec_id: number in segments, 0 to 65535. Codecs out of tree share 65535, whatever they
            say: see ``out_of_tree``.
        name: name as in ``TIERED_KV_CODEC``.
        page_format: format of every page encoded or decoded.
        table: facts that decoding needs beside the page itself, at most 16 MiB; may be empty.
        wants_training: True if ``trained`` gives a codec that does better.
        stores_in_place: True if a page is its own plane, without a frame. A store may then write
            it from the caller's memory and read it there, by way of neither ``encode`` nor
            ``decode``.
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

        The result takes at most a sixty-fourth and 4 KiB more than the page. It does not alias
        the page, which may change after the call, unless the codec stores in place.
        """

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        """Fill ``out`` (``page_bytes`` bytes) with the page.

        Raises:
            CodecError: the bytes are no page of this codec; ``out`` may hold anything.
        """

    def trained(self, pages: list[Bytes]) -> Codec:
        """Fit a codec to pages like these; give this one if it learns nothing."""


@dataclass(frozen=True, slots=True)
class CodedPage:
    """A page together with the codec that encoded it.

    Attributes:
        codec: None if the page is not encoded, but all in ``plane``.
    """

    codec: Codec | None
    page: EncodedPage

    def decode(self, out: Bytes) -> None:
        """Fill ``out`` with the page.

        Raises:
            CodecError: the bytes are no page of the codec; ``out`` may hold anything.
        """
        if self.codec is None:
            out[:] = self.page.plane
        else:
            self.codec.decode(self.page, out)

    def decoded(self) -> Bytes | None:
        """The page, in memory of its own; None if it cannot be decoded."""
        codec = self.codec
        nbytes = self.page.nbytes if codec is None else codec.page_format.page_bytes
        out = np.empty(nbytes, np.uint8)
        try:
            self.decode(out)
        except Exception:  # whatever a codec thinks of a page, its neighbours must not suffer
            return None
        return out


class CodecClass(Protocol):
    """A codec's class, as the registry uses it."""

    @property
    def codec_id(self) -> int: ...

    def __call__(self, page_format: PageFormat) -> Codec:
        """Make an untrained codec.

        Raises:
            ValueError: it cannot serve such pages; the sentence says which codec can.
        """

    def from_table(self, page_format: PageFormat, table: bytes) -> Codec:
        """Make the codec that had this table.

        Raises:
            CodecError: it is no table of this codec and of such pages.
        """


def refuse_table(codec_id: int, table: bytes) -> None:
    """Refuse the table of a codec that has none.

    Raises:
        CodecError: there is one.
    """
    if table:
        raise CodecError(f"codec {codec_id} has no table, but {len(table)} bytes came as one")
