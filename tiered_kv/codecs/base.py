"""The contract of codecs: pages to bytes for the SSD and back, bit for bit.

A codec is a frozen value. Two with the same ``codec_id`` and ``table`` understand each
other's pages, in any process and on any machine; the table is written into every segment
whose pages need it. All methods may run on several threads at once, and release the
interpreter lock where the work is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
"""A contiguous, one-dimensional array of bytes."""


class ElementType(Enum):
    """What the elements of a page are."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    OPAQUE = "opaque"
    """Bytes that no codec knows more about."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What a codec may know of a page.

    Attributes:
        element: type of the elements.
        page_bytes: bytes of a page.
        tokens: tokens of a page.
    """

    element: ElementType
    page_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class EncodedPage:
    """A page as stored: a plane kept as it is, and one standard zstd frame. Either may be empty."""

    plane: Bytes
    frame: Bytes

    @property
    def nbytes(self) -> int:
        return self.plane.nbytes + self.frame.nbytes


class CodecError(Exception):
    """Stored bytes that are no page of this codec."""


class Codec(Protocol):
    """How pages are encoded.

    Attributes:
        codec_id: what the format on disk calls this codec; 0 to 65535.
        name: as in ``TIERED_KV_CODEC``.
        page_format: of every page encoded or decoded.
        table: what decoding needs beside the page itself; empty if nothing.
        wants_training: True if ``trained`` gives a codec that does better.
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

    def encode(self, page: Bytes) -> EncodedPage:
        """Encode ``page_bytes`` bytes of any content. The result does not alias the page,
        which may change after the call, unless the codec is ``raw``."""

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        """Fill ``out`` (``page_bytes`` bytes) with the page.

        Raises:
            CodecError: the bytes are no page of this codec; ``out`` may hold anything.
        """

    def trained(self, pages: list[Bytes]) -> Codec:
        """A codec fitted to pages like these; itself if it learns nothing."""
