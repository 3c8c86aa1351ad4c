"""Stored form of pages with one element type: symbols in a zstd frame, and the rest.

``planes`` defines symbol and rest for each type. The rest is noise and stored uncompressed, except
for fp32: numbers converted from a shorter type end in zeros, and some states contain many such
numbers. So each of the three planes of an fp32 rest is compressed too, if a sample shows that this
is worthwhile. Each plane has its own frame, since the planes have little in common. The frame of an
fp32 page (little-endian):

    offset  bytes  field
    0       1      compressed planes: bit 0 the highest, bit 2 the lowest
    1       4*n    bytes of each frame: of the symbols, and of the n - 1 compressed planes
    1+4*n          zstd frames, concatenated

The functions do not check the sizes of pages, which must be whole numbers of elements, or of
centres, of which each element needs one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType, ModuleType

import numpy as np
from numpy.typing import NDArray

from .base import Bytes, CodecError, ElementType, EncodedPage
from .scratch import Scratch
from .zstd import compress_symbols, decompress

ELEMENT_BYTES: Mapping[ElementType, int] = MappingProxyType(
    {
        ElementType.BF16: 2,
        ElementType.FP16: 2,
        ElementType.FP8_E4M3: 1,
        ElementType.FP8_E5M2: 1,
        ElementType.FP32: 4,
    }
)
"""Size of an element of each type that has symbols, bytes."""

PLANES = 3
"""Number of planes of the rest of fp32."""

REST_BYTES: Mapping[ElementType, int] = MappingProxyType(
    {
        ElementType.BF16: 1,
        ElementType.FP16: 1,
        ElementType.FP8_E4M3: 0,
        ElementType.FP8_E5M2: 0,
        ElementType.FP32: PLANES,
    }
)
"""Maximum bytes per element of each type in the plane of a stored page."""

SAMPLE = 2048
"""Number of elements sampled to decide which planes are compressed."""

CODED_BITS = 7.0
"""Entropy of a plane's sample, bits per byte, below which the plane is compressed. Compressing the
planes adds a third to the time to decode a page, so it must save many bytes."""


def encode(element: ElementType, page: Bytes, centres: Bytes, plane: Bytes) -> EncodedPage:
    """Encode a page: split it into symbols and the rest, and compress the symbols minus their
    centres.

    Args:
        plane: memory whose start is used for the plane; at least ``REST_BYTES`` for each element.
    """
    if element is ElementType.FP32:
        return _encode_fp32(page, centres, plane)
    symbols = _scratch.bytes(centres.size)
    rest = plane[: REST_BYTES[element] * centres.size]
    _split(element, page, centres, symbols, rest)
    return EncodedPage(rest, compress_symbols(symbols))


def decode(element: ElementType, encoded: EncodedPage, centres: Bytes, out: Bytes) -> None:
    """Decode the page into ``out``.

    Raises:
        CodecError: the bytes are not a page of type ``element`` with one element per centre.
    """
    if element is ElementType.FP32:
        _decode_fp32(encoded, centres, out)
        return
    count = centres.size
    if encoded.plane.nbytes != REST_BYTES[element] * count:
        raise CodecError(
            f"the page has {encoded.plane.nbytes} raw bytes, but its {count} elements need "
            f"{REST_BYTES[element] * count}"
        )
    if not REST_BYTES[element]:
        decompress(encoded.frame, out)
        kernels().merge_fp8(out, centres)
        return
    symbols = _scratch.bytes(count)
    decompress(encoded.frame, symbols)
    bf16 = element is ElementType.BF16
    merge = kernels().merge_bf16 if bf16 else kernels().merge_fp16
    merge(symbols, encoded.plane, centres, out)


def symbols_of(element: ElementType, page: Bytes) -> Bytes:
    """Return the symbols of a page without centring, in new memory."""
    symbols = np.empty(page.nbytes // ELEMENT_BYTES[element], dtype=np.uint8)
    rest = _scratch.bytes(REST_BYTES[element] * symbols.size)
    _split(element, page, np.zeros_like(symbols), symbols, rest)
    return symbols


def _split(element: ElementType, page: Bytes, centres: Bytes, symbols: Bytes, rest: Bytes) -> None:
    """Write the symbols of a page minus their centres to ``symbols``, and the rest to ``rest``."""
    match element:
        case ElementType.BF16:
            kernels().split_bf16(page, centres, symbols, rest)
        case ElementType.FP16:
            kernels().split_fp16(page, centres, symbols, rest)
        case ElementType.FP32:
            kernels().split_fp32(page, centres, symbols, *_cut(rest, symbols.size))
        case _:
            kernels().split_fp8(page, centres, symbols)


# -- fp32 -------------------------------------------------------------------------


def _encode_fp32(page: Bytes, centres: Bytes, plane: Bytes) -> EncodedPage:
    count, chosen = centres.size, _worth_coding(page)
    coded = _cut(_scratch.bytes((1 + chosen.bit_count()) * count), count)
    plane = plane[: (PLANES - chosen.bit_count()) * count]
    kernels().split_fp32(page, centres, *_in_order(chosen, coded, _cut(plane, count)))
    frames = [compress_symbols(piece) for piece in coded]
    head = struct.pack(f"<B{len(frames)}I", chosen, *(frame.nbytes for frame in frames))
    return EncodedPage(plane, np.concatenate([np.frombuffer(head, np.uint8), *frames]))


def _decode_fp32(encoded: EncodedPage, centres: Bytes, out: Bytes) -> None:
    count = centres.size
    chosen, frames = _frames(encoded.frame)
    stored = PLANES - chosen.bit_count()
    if encoded.plane.nbytes != stored * count:
        raise CodecError(
            f"the page has {encoded.plane.nbytes} raw bytes, but {stored} planes of {count} "
            f"elements need {stored * count}"
        )
    coded = _cut(_scratch.bytes(len(frames) * count), count)
    for frame, piece in zip(frames, coded, strict=True):
        decompress(frame, piece)
    planes = _in_order(chosen, coded, _cut(encoded.plane, count))
    kernels().merge_fp32(*planes, centres, out)


def _frames(frame: Bytes) -> tuple[int, list[Bytes]]:
    """Parse the frame of an fp32 page. Returns a bit mask of the compressed planes, and the zstd
    frames of the symbols and of these planes.

    Raises:
        CodecError: the sizes do not match the frame.
    """
    chosen = int(frame[0]) if frame.nbytes else 1 << PLANES
    if chosen >> PLANES:
        raise CodecError("the list of planes of an fp32 frame is missing or invalid")
    sizes = struct.Struct(f"<{1 + chosen.bit_count()}I")
    at, frames = 1 + sizes.size, list[Bytes]()
    if frame.nbytes < at:
        raise CodecError("an fp32 frame ends before its planes")
    for nbytes in sizes.unpack_from(frame.data, 1):
        frames.append(frame[at : at + nbytes])
        at += nbytes
    if at != frame.nbytes:
        raise CodecError(
            f"the planes of an fp32 frame end at byte {at}, but the frame has {frame.nbytes} bytes"
        )
    return chosen, frames


def _in_order(chosen: int, coded: list[Bytes], stored: list[Bytes]) -> list[Bytes]:
    """Return the symbols and the planes of the rest in order. The planes whose bits in ``chosen``
    are set were compressed."""
    symbols, *first = coded
    other = list(stored)
    return [symbols, *((first if chosen >> i & 1 else other).pop(0) for i in range(PLANES))]


def _cut(memory: Bytes, count: int) -> list[Bytes]:
    """Split memory into consecutive pieces of ``count`` bytes."""
    return [memory[at : at + count] for at in range(0, memory.nbytes, count)]


def _worth_coding(page: Bytes) -> int:
    """Return the planes of the rest that are worth compressing, as a bit mask."""
    counts: NDArray[np.int64] = np.zeros((PLANES, 256), dtype=np.int64)
    step = page.nbytes // 4 // SAMPLE | 1  # odd, since rows of states have even numbers of elements
    kernels().count_fp32(page, step, counts.reshape(-1))
    seen = counts[0].sum()
    bits = np.log2(seen) - (counts * np.log2(np.maximum(counts, 1))).sum(axis=1) / seen
    return sum(1 << i for i in range(PLANES) if bits[i] < CODED_BITS)


_scratch = Scratch()


@cache
def kernels() -> ModuleType:
    """Return the module ``planes``. It is imported on first use, because importing it takes
    time."""
    from . import planes

    return planes
