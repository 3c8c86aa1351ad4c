"""Kernels that split elements into byte planes and merge them, and fit the centres of channels.

An element is split into a *symbol*, the eight bits that contain its magnitude, and the *rest*,
which cannot be compressed. Centring subtracts from each symbol the centre of its channel,
modulo 256, in the same pass:

    bf16   symbol = the exponent, bits 14..7; rest = the sign, and bits 6..0
    fp16   symbol = the upper byte rotated; rest = the lower byte
    fp32   symbol = the exponent, bits 30..23; rest = three planes: the sign and bits 22..16,
           bits 15..8, bits 7..0
    fp8    symbol = the byte rotated; no rest

Bytes are rotated left by one, so that the sign, which says nothing about the magnitude, becomes the
lowest bit. The sign stays in the symbol where there is space for it, because the signs of a channel
are not evenly distributed. (For fp16 the choice was measured: with three mantissa bits in place of
two and the sign, pages are 0.3% larger.)

All kernels run at memory speed and without the interpreter lock. They check nothing: the caller is
responsible for sizes. Importing this module imports numba (a third of a second, plus some seconds
if the kernels have not been compiled and cached yet), so import it only when needed.
Elements are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
from numba import types
from numpy.typing import NDArray

from .base import Bytes

# Inputs have read-only types, for which numba accepts writable arrays as well.
_IN = types.Array(types.uint8, 1, "C", readonly=True)
_OUT = types.Array(types.uint8, 1, "C")
_PAGES = types.Array(types.uint8, 2, "C", readonly=True)
_SUMS = types.Array(types.int64, 1, "C")
_COSTS = types.Array(types.float32, 1, "C", readonly=True)
_WIDTHS = types.Array(types.int64, 1, "C", readonly=True)

REACH = 8
"""Maximum move of a centre by ``refine``, in symbols."""

Kernel = Callable[..., None]


def _kernel(*arguments: Any) -> Callable[[Kernel], Kernel]:
    def compiled(function: Kernel) -> Kernel:
        signature = types.void(*arguments)
        try:
            made: Kernel = numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # the cache is not writable: compile in each process
            made = numba.njit(signature, nogil=True)(function)
        return made

    return compiled


@_kernel(_IN, _IN, _OUT, _OUT)
def split_bf16(page: Bytes, centres: Bytes, symbols: Bytes, rest: Bytes) -> None:
    """Split each two-byte element of a page into a symbol and a byte of the rest. ``centres`` has
    one centre per element."""
    elements = page.view(np.uint16)
    for i in range(elements.size):
        element = elements[i]
        symbols[i] = np.uint8(element >> 7) - centres[i]
        rest[i] = np.uint8((element >> 8) & 0x80) | np.uint8(element & 0x7F)


@_kernel(_IN, _IN, _IN, _OUT)
def merge_bf16(symbols: Bytes, rest: Bytes, centres: Bytes, page: Bytes) -> None:
    """Merge symbols and the rest into elements. This is the inverse of ``split_bf16``."""
    elements = page.view(np.uint16)
    for i in range(elements.size):
        symbol = np.uint16(np.uint8(symbols[i] + centres[i]))
        low = np.uint16(rest[i])
        sign = (low & np.uint16(0x80)) << np.uint16(8)
        elements[i] = sign | (symbol << np.uint16(7)) | (low & np.uint16(0x7F))


@_kernel(_IN, _IN, _OUT, _OUT)
def split_fp16(page: Bytes, centres: Bytes, symbols: Bytes, rest: Bytes) -> None:
    """Split each fp16 element of a page, as ``split_bf16`` does for bf16."""
    elements = page.view(np.uint16)
    for i in range(elements.size):
        element = elements[i]
        symbols[i] = np.uint8(((element >> 7) & 0xFE) | (element >> 15)) - centres[i]
        rest[i] = np.uint8(element)


@_kernel(_IN, _IN, _IN, _OUT)
def merge_fp16(symbols: Bytes, rest: Bytes, centres: Bytes, page: Bytes) -> None:
    """Merge symbols and the rest into elements. This is the inverse of ``split_fp16``."""
    elements = page.view(np.uint16)
    for i in range(elements.size):
        symbol = np.uint16(np.uint8(symbols[i] + centres[i]))
        high = (symbol >> np.uint16(1)) | ((symbol & np.uint16(1)) << np.uint16(7))
        elements[i] = (high << np.uint16(8)) | np.uint16(rest[i])


@_kernel(_IN, _IN, _OUT)
def split_fp8(page: Bytes, centres: Bytes, symbols: Bytes) -> None:
    """Convert each byte of a page to a symbol."""
    for i in range(page.size):
        byte = page[i]
        symbols[i] = np.uint8((byte << 1) | (byte >> 7)) - centres[i]


@_kernel(_OUT, _IN)
def merge_fp8(page: Bytes, centres: Bytes) -> None:
    """Convert symbols to elements in place. This is the inverse of ``split_fp8``. ``page`` contains
    symbols before the call, and elements after it."""
    for i in range(page.size):
        byte = np.uint8(page[i] + centres[i])
        page[i] = np.uint8((byte >> 1) | (byte << 7))


@_kernel(_IN, _IN, _OUT, _OUT, _OUT, _OUT)
def split_fp32(
    page: Bytes, centres: Bytes, symbols: Bytes, high: Bytes, middle: Bytes, low: Bytes
) -> None:
    """Split each four-byte element of a page into a symbol and a byte of each plane of the rest."""
    elements = page.view(np.uint32)
    for i in range(elements.size):
        element = elements[i]
        symbols[i] = np.uint8(element >> 23) - centres[i]
        high[i] = np.uint8((element >> 24) & 0x80) | np.uint8((element >> 16) & 0x7F)
        middle[i] = np.uint8(element >> 8)
        low[i] = np.uint8(element)


@_kernel(_IN, _IN, _IN, _IN, _IN, _OUT)
def merge_fp32(
    symbols: Bytes, high: Bytes, middle: Bytes, low: Bytes, centres: Bytes, page: Bytes
) -> None:
    """Merge symbols and the planes of the rest into elements. This is the inverse of
    ``split_fp32``."""
    elements = page.view(np.uint32)
    for i in range(elements.size):
        symbol = np.uint32(np.uint8(symbols[i] + centres[i]))
        top = np.uint32(high[i])
        sign = (top & np.uint32(0x80)) << np.uint32(24)
        mantissa = (top & np.uint32(0x7F)) << np.uint32(16)
        mantissa |= (np.uint32(middle[i]) << np.uint32(8)) | np.uint32(low[i])
        elements[i] = sign | (symbol << np.uint32(23)) | mantissa


@_kernel(_IN, types.int64, _SUMS)
def count_fp32(page: Bytes, step: int, counts: NDArray[np.int64]) -> None:
    """Count each byte value in each of the three planes of the rest, in every ``step``-th element.

    Args:
        counts: receives the counts by plane and byte value, [3 * 256]; must be zero before.
    """
    elements = page.view(np.uint32)
    for i in range(0, elements.size, step):
        element = elements[i]
        counts[np.int64(((element >> 24) & 0x80) | ((element >> 16) & 0x7F))] += 1
        counts[256 + np.int64((element >> 8) & 0xFF)] += 1
        counts[512 + np.int64(element & 0xFF)] += 1


@_kernel(_PAGES, _PAGES, types.int64, types.int64, _OUT, _SUMS)
def medians(
    fitted: NDArray[np.uint8],
    scored: NDArray[np.uint8],
    tokens: int,
    inner: int,
    centres: Bytes,
    spread: NDArray[np.int64],
) -> None:
    """Compute each channel's median symbol.

    Args:
        fitted: symbols [pages, elements] from which the medians are computed.
        scored: symbols [pages, elements] on which ``spread`` is measured.
        tokens: tokens of a page; divides elements.
        inner: distance between the elements of a channel in two adjacent tokens, in elements;
            divides elements / tokens.
        centres: receives the medians, [elements / tokens].
        spread: receives, for each run of ``tokens * inner`` elements, the sum of absolute distances
            from the medians, [elements / tokens / inner].
    """
    counts = np.zeros(256, dtype=np.int64)
    half = (fitted.shape[0] * tokens + 1) // 2
    for tile in range(spread.size):
        spread[tile] = 0
        for i in range(inner):
            first = tile * tokens * inner + i
            counts[:] = 0
            for page in range(fitted.shape[0]):
                for token in range(tokens):
                    counts[fitted[page, first + token * inner]] += 1
            seen, median = counts[0], 0
            while seen < half:
                median += 1
                seen += counts[median]
            centres[tile * inner + i] = median
            for page in range(scored.shape[0]):
                for token in range(tokens):
                    spread[tile] += abs(np.int64(scored[page, first + token * inner]) - median)


@_kernel(_PAGES, types.int64, types.int64, _WIDTHS, _COSTS, _OUT)
def refine(
    symbols: NDArray[np.uint8],
    tokens: int,
    stripe: int,
    inners: NDArray[np.int64],
    costs: NDArray[np.float32],
    centres: Bytes,
) -> None:
    """Move each centre, by at most ``REACH``, to where its channel costs the fewest bits.

    Args:
        symbols: [pages, elements].
        tokens: tokens of a page.
        stripe: channels that share an ``inner``.
        inners: ``inner`` of each stripe.
        costs: bits of each centred symbol, [256].
        centres: [elements / tokens], changed in place.
    """
    counts = np.zeros(256, dtype=np.int64)
    for channel in range(centres.size):
        start = channel // stripe * stripe
        inner = inners[channel // stripe]
        tile = start + (channel - start) // inner * inner
        first = tile * tokens + (channel - tile)
        counts[:] = 0
        for page in range(symbols.shape[0]):
            for token in range(tokens):
                counts[symbols[page, first + token * inner]] += 1
        centre = np.int64(centres[channel])
        best, least = centre, np.inf
        for candidate in range(centre - REACH, centre + REACH + 1):
            bits = 0.0
            for symbol in range(256):
                if counts[symbol]:
                    bits += counts[symbol] * costs[(symbol - candidate) & 255]
            if bits < least:
                best, least = np.int64(candidate), bits
        centres[channel] = best & 255
