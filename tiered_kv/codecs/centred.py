"""The codec of KV pages: compresses the bits that vary little, and stores noise uncompressed.

An element's magnitude is similar in one channel (a layer's K or V, a head, a
dimension) for all tokens, and its mantissa is noise. So ``symbols`` splits each element into
a symbol and a rest. Symbols, minus the centre of their channel, are compressed with zstd's
Huffman stage, and the rest is stored uncompressed. The codec is lossless for any content: only the
size depends on how well the centres fit.

A page contains layers, heads, tokens and dimensions in an order that is not known here. It is
treated as a row of *stripes*, each an array [outer, tokens, inner] of elements, in which
``outer`` and ``inner`` identify the channel. One stripe with one ``inner`` describes every
layout that treats K and V alike; engines that transpose only K need more stripes. ``trained``
finds the stripes and fits the centres.

The table (little-endian):

    offset  bytes  field
    0       4      magic b"TKVC"
    4       1      version, 1
    5       1      element type, as in ``ELEMENTS``
    6       2      zero
    8       4      tokens of a page
    12      8      bytes of a page
    20      4      stripe: channels of a stripe, s
    24      4      channels of a page, c = elements / tokens
    28      4*c/s  inner of each stripe
    ...     c      centre of each channel, in the order (stripe, outer, inner)
    end-4   4      CRC-32 of everything before it
"""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .base import ELEMENTS as KNOWN_ELEMENTS
from .base import Bytes, CodecError, EncodedPage, PageFormat, check_size
from .symbols import ELEMENT_BYTES, REST_BYTES, decode, encode, kernels, symbols_of

ELEMENTS = KNOWN_ELEMENTS[1:]
"""Types of elements, in the order of their numbers in the table: all types except opaque."""

HEADER = struct.Struct("<4sBBHIQII")
MAGIC, VERSION = b"TKVC", 1

MAX_TRAINING_PAGES = 64
LAYOUT_PAGES = 8
"""Number of pages used to find the layout, which is the same in all pages."""
MIN_STRIPE = 32
"""Number of channels of the narrowest stripe. Layouts change only between heads, which are
wider."""
REFINEMENTS = 2


def symbol_count(page_format: PageFormat) -> int:
    """Return the number of elements of a page.

    Raises:
        ValueError: the element type is opaque, or a page is not a whole number of elements.
    """
    if page_format.element not in ELEMENTS:
        raise ValueError(
            "codec centred does not support opaque pages, whose element type is unknown: use codec "
            "zstd"
        )
    count, left = divmod(page_format.page_bytes, ELEMENT_BYTES[page_format.element])
    if left:
        raise ValueError(
            f"a page of {page_format.page_bytes} bytes is not a whole number of "
            f"{page_format.element.value} elements"
        )
    return count


def channel_count(page_format: PageFormat) -> int:
    """Return the number of channels of a page; 0 if the page has no tokens, or if its elements do
    not divide evenly among its tokens. Raises ValueError as ``symbol_count`` does."""
    if page_format.tokens < 1 or symbol_count(page_format) % page_format.tokens:
        return 0
    return symbol_count(page_format) // page_format.tokens


@dataclass(frozen=True, slots=True)
class CentredCodec:
    """Stores centred symbols in one Huffman-only zstd frame, and the rest uncompressed.

    Args:
        table: table of a trained codec; without a table all centres are zero.

    Raises:
        ValueError: pages are opaque, or not a whole number of elements.
        CodecError: the table is damaged, or belongs to other pages.
    """

    page_format: PageFormat
    table: bytes = b""
    _centres: Bytes = field(init=False, repr=False, compare=False)
    codec_id = 2
    name = "centred"
    stores_in_place = False

    @classmethod
    def from_table(cls, page_format: PageFormat, table: bytes) -> CentredCodec:
        try:
            return cls(page_format, table)
        except ValueError as error:
            raise CodecError(str(error)) from error

    def __post_init__(self) -> None:
        count = symbol_count(self.page_format)
        if self.table:
            centres = Layout.from_table(self.table, self.page_format).per_element(self.page_format)
        else:
            centres = np.zeros(count, dtype=np.uint8)
        object.__setattr__(self, "_centres", centres)

    @property
    def wants_training(self) -> bool:
        return not self.table and channel_count(self.page_format) > 0

    @property
    def most_plane_bytes(self) -> int:
        """Maximum size of the plane of a page, bytes."""
        return REST_BYTES[self.page_format.element] * self._centres.size

    def encode(self, page: Bytes, plane: Bytes | None = None) -> EncodedPage:
        """Encode a page.

        Args:
            plane: memory of at least ``most_plane_bytes``, whose start is used for the plane; None
                allocates new memory.
        """
        check_size(page, self.page_format)
        if plane is None:
            plane = np.empty(self.most_plane_bytes, dtype=np.uint8)
        return encode(self.page_format.element, page, self._centres, plane)

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        check_size(out, self.page_format)
        decode(self.page_format.element, encoded, self._centres, out)

    def trained(self, pages: list[Bytes]) -> CentredCodec:
        """Create a codec with centres fitted to these pages, of which the first 64 are used.
        Returns this codec if there are no pages, or if the format has no channels.

        Takes between a tenth of a second and a few seconds, mostly without the interpreter lock.
        """
        if not pages or not channel_count(self.page_format):
            return self
        symbols = np.stack([self._symbols(page) for page in pages[:MAX_TRAINING_PAGES]])
        layout = find_layout(symbols, self.page_format.tokens)
        fit_centres(layout, symbols, self.page_format)
        return CentredCodec(self.page_format, layout.to_table(self.page_format))

    def _symbols(self, page: Bytes) -> Bytes:
        check_size(page, self.page_format)
        return symbols_of(self.page_format.element, page)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a page's channels, and their centres.

    Attributes:
        stripe: number of channels of a stripe.
        inners: ``inner`` of each stripe, int64; divides ``stripe``.
        centres: centre of each channel.
    """

    stripe: int
    inners: NDArray[np.int64]
    centres: Bytes

    def per_element(self, page_format: PageFormat) -> Bytes:
        """Return the centre of each element of a page, in page order."""
        tokens = page_format.tokens
        spread = np.empty(self.centres.size * tokens, dtype=np.uint8)
        first = 0
        for inner, run in itertools.groupby(self.inners.tolist()):
            last = first + len(list(run)) * self.stripe
            tiles = spread[first * tokens : last * tokens].reshape(-1, tokens, inner)
            tiles[:] = self.centres[first:last].reshape(-1, 1, inner)
            first = last
        return spread

    def to_table(self, page_format: PageFormat) -> bytes:
        element = ELEMENTS.index(page_format.element)
        channels, tokens, size = self.centres.size, page_format.tokens, page_format.page_bytes
        head = HEADER.pack(MAGIC, VERSION, element, 0, tokens, size, self.stripe, channels)
        body = head + self.inners.astype("<u4").tobytes() + self.centres.tobytes()
        return body + struct.pack("<I", zlib.crc32(body))

    @staticmethod
    def from_table(table: bytes, page_format: PageFormat) -> Layout:
        """Parse a table.

        Raises:
            CodecError: the table is damaged, has another version, or belongs to another page
                format.
        """
        if len(table) < HEADER.size + 4 or table[:4] != MAGIC:
            raise CodecError("the data is not a table of centres")
        if struct.unpack("<I", table[-4:])[0] != zlib.crc32(table[:-4]):
            raise CodecError("the table of centres is damaged")
        _, version, element, zero, tokens, size, stripe, channels = HEADER.unpack_from(table)
        if version != VERSION or zero:
            raise CodecError(
                f"the table of centres has version {version}, but only version {VERSION} is "
                "supported"
            )
        of = (ELEMENTS[element] if element < len(ELEMENTS) else None, size, tokens)
        if of != (page_format.element, page_format.page_bytes, page_format.tokens):
            raise CodecError(
                f"the table of centres does not belong to pages of format {page_format}"
            )
        if not channels or channels != channel_count(page_format) or not stripe:
            raise CodecError(
                f"the table has {channels} centres in stripes of {stripe}, which does not match "
                f"pages of format {page_format}"
            )
        stripes, left = divmod(channels, stripe)
        if left or len(table) != HEADER.size + 4 * stripes + channels + 4:
            raise CodecError(
                f"the table of centres has {len(table)} bytes, which does not match {channels} "
                f"centres in stripes of {stripe}"
            )
        inners = np.frombuffer(table, "<u4", stripes, HEADER.size).astype(np.int64)
        if not inners.all() or (stripe % inners).any():
            raise CodecError(
                f"an inner size in the table of centres does not divide a stripe of {stripe} "
                "channels"
            )
        centres = np.frombuffer(table, np.uint8, channels, HEADER.size + 4 * stripes)
        return Layout(stripe, inners, centres)


def find_layout(symbols: NDArray[np.uint8], tokens: int) -> Layout:
    """Find the stripes for which symbols of pages are closest to the medians of other pages.

    Medians are computed from every other page, and distances from the pages in between. More
    stripes always improve the fit to the pages from which they are chosen, but the fit to other
    pages only if the layout really has them. The centres of the returned layout are not fitted yet:
    see ``fit_centres``.

    Args:
        symbols: symbols [pages, elements].
        tokens: tokens of a page.
    """
    some = symbols[:LAYOUT_PAGES]
    fitted = np.ascontiguousarray(some[::2])
    scored = np.ascontiguousarray(some[1::2]) if len(some) > 1 else fitted
    channels = symbols.shape[1] // tokens
    centres = np.zeros(channels, dtype=np.uint8)
    spreads: dict[int, NDArray[np.int64]] = {}
    for inner in divisors(channels):
        spreads[inner] = np.empty(channels // inner, dtype=np.int64)
        kernels().medians(fitted, scored, tokens, inner, centres, spreads[inner])
    best, least = Layout(channels, np.ones(1, np.int64), centres), np.inf
    for stripe in reversed(divisors(channels)):
        if stripe < MIN_STRIPE and stripe < channels:
            break
        inners = divisors(stripe)
        options = np.stack(
            [spreads[inner].reshape(channels // stripe, -1).sum(axis=1) for inner in inners]
        )
        distance = float(options.min(axis=0).sum())
        if distance < least:
            chosen = np.array(inners, dtype=np.int64)[options.argmin(axis=0)]
            best, least = Layout(stripe, chosen, centres), distance
    return best


def fit_centres(layout: Layout, symbols: NDArray[np.uint8], page_format: PageFormat) -> None:
    """Set ``layout.centres``: first to the median symbol of each channel, and then to values for
    which the symbols take fewer bits.

    All channels share one code, so the best centre of a channel depends on the other centres. In a
    few iterations, the cost of each centred symbol is computed over all channels, and each centre
    is moved.

    Args:
        symbols: [pages, elements].
    """
    tokens, stripe = page_format.tokens, layout.stripe
    stripes = layout.centres.reshape(-1, stripe)
    for inner in np.unique(layout.inners).tolist():
        medians = np.empty_like(layout.centres)
        unread = np.empty(medians.size // inner, dtype=np.int64)
        kernels().medians(symbols, symbols[:0], tokens, inner, medians, unread)
        mine = layout.inners == inner
        stripes[mine] = medians.reshape(-1, stripe)[mine]
    for _ in range(REFINEMENTS):
        centred = symbols - layout.per_element(page_format)
        counts = np.bincount(centred.reshape(-1), minlength=256) + 0.5  # unseen symbols may occur
        costs = -np.log2(counts / counts.sum()).astype(np.float32)
        kernels().refine(symbols, tokens, stripe, layout.inners, costs, layout.centres)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]
