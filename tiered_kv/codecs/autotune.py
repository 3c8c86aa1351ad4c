"""The codec that suits this machine, measured.

Encoding a page costs time on a core and saves time on the disk. Which of the two is the
scarcer is a property of the machine, so it is measured when a server starts: ``choose``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import Bytes, Codec, CodecError, ElementType, PageFormat
from .registry import CODECS
from .symbols import ELEMENT_BYTES

TOLERANCE = 1.15
"""Smaller pages are worth restores that take up to this much longer: the disk holds more
of them, and wears less."""

MEASURE_S = 0.06
"""Time that each codec is measured, about, seconds."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """A codec's size and speed on one page and one core.

    Attributes:
        codec: the codec measured.
        stored_bytes: size of the page, encoded.
        encode_s: time to encode the page, seconds.
        decode_s: time to decode it, seconds.
    """

    codec: Codec
    stored_bytes: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec, and one sentence for the log that says why it was chosen, with the numbers."""

    codec: Codec
    reason: str


def choose(
    page_format: PageFormat,
    disk_read_mbs: float,
    disk_write_mbs: float,
    cores: int,
) -> Choice:
    """Measure every codec that can serve these pages on a synthetic one, and ``pick``.

    Takes under 0.3 s for pages of a few MiB; in a process that has not encoded yet, as long
    again to load the kernels, and some seconds once on a machine to compile them.

    Args:
        disk_read_mbs: read speed of the disk, MB/s.
        disk_write_mbs: write speed, MB/s.
        cores: number of threads that decode at once.
    """
    page = synthetic_page(page_format)
    measured = [measure_codec(codec, page) for codec in _candidates(page_format)]
    return pick(measured, disk_read_mbs, disk_write_mbs, cores)


def _candidates(page_format: PageFormat) -> Iterator[Codec]:
    """The codecs that can serve such pages, at their default levels."""
    for kind in CODECS.values():
        with suppress(ValueError):
            yield kind.make(page_format)


def pick(
    measured: Sequence[Measured], disk_read_mbs: float, disk_write_mbs: float, cores: int
) -> Choice:
    """Pick the codec with the shortest restore, or one of smaller pages that is nearly as good.

    Pages are decoded while others are read, so restoring one takes the longer of
    stored bytes / disk and decoding / cores. Saves happen behind the requests and do not
    decide; how fast they are is part of the reason.

    Raises:
        ValueError: nothing was measured, or the disk or the cores are none.
    """
    if not measured or cores < 1 or disk_read_mbs <= 0 or disk_write_mbs <= 0:
        raise ValueError("a codec is chosen among some, for a disk of some speed and some cores")

    def restore_s(candidate: Measured) -> float:
        return max(candidate.stored_bytes / (disk_read_mbs * 1e6), candidate.decode_s / cores)

    fastest = min(measured, key=restore_s)
    good = [one for one in measured if restore_s(one) <= TOLERANCE * restore_s(fastest)]
    best = min(good, key=lambda one: (one.stored_bytes, restore_s(one)))
    raw_bytes = best.codec.page_format.page_bytes
    save_s = max(best.stored_bytes / (disk_write_mbs * 1e6), best.encode_s / cores)
    restores = ", ".join(f"{one.codec.name} {restore_s(one) * 1e3:.3g}" for one in measured)
    reason = (
        f"codec {best.codec.name}: restoring a page of {raw_bytes >> 10} KiB takes "
        f"({restores}) ms with {cores} cores and a disk that reads {disk_read_mbs:.0f} MB/s; "
        f"pages shrink {raw_bytes / best.stored_bytes:.2f} times and are saved at "
        f"{raw_bytes / save_s / 1e6:.0f} MB/s"
    )
    return Choice(best.codec, reason)


def measure_codec(codec: Codec, page: Bytes, clock: Clock = time.thread_time) -> Measured:
    """Time a codec on one page and one core, for about ``MEASURE_S`` after a warm-up.

    Args:
        clock: seconds; by default this thread's time on a core, so that others' work on a
            busy machine is not counted.

    Raises:
        CodecError: the codec does not give the page back.
    """
    out = np.empty_like(page)
    stored = codec.encode(page)  # compiles, reserves, warms up
    codec.decode(stored, out)
    if not np.array_equal(out, page):
        raise CodecError(f"codec {codec.name} does not give back what it was given")
    encode_s = decode_s = float("inf")
    began = clock()
    while True:
        start = clock()
        stored = codec.encode(page)
        between = clock()
        codec.decode(stored, out)
        end = clock()
        encode_s = min(encode_s, between - start)
        decode_s = min(decode_s, end - between)
        if end - began >= MEASURE_S:
            return Measured(codec, stored.nbytes, encode_s, decode_s)


def synthetic_page(page_format: PageFormat, seed: int = 0) -> Bytes:
    """Cast normal random numbers to the elements of a page: KV of which nothing is known.

    Opaque bytes are of random numbers as bf16, which most likely they are.
    """
    rng = np.random.default_rng(seed)
    sections = [
        _synthetic_bytes(section.element, section.nbytes, rng) for section in page_format.sections
    ]
    return np.concatenate(sections)


def _synthetic_bytes(element: ElementType, nbytes: int, rng: np.random.Generator) -> Bytes:
    count = -(-nbytes // ELEMENT_BYTES.get(element, 2))
    values = rng.standard_normal(count, dtype=np.float32)
    return _cast(values, element).view(np.uint8)[:nbytes]


def _cast(
    values: NDArray[np.float32], element: ElementType
) -> NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8]:
    """Round to the nearest number of that type; numpy knows only fp32 and fp16 itself."""
    if element is ElementType.FP32:
        return values
    if element is ElementType.FP16:
        return values.astype(np.float16).view(np.uint16)
    if element is ElementType.FP8_E5M2:  # the upper half of an fp16
        return ((values.astype(np.float16).view(np.uint16) + 0x80) >> 8).astype(np.uint8)
    if element is ElementType.FP8_E4M3:
        codes = np.arange(0x7F)  # 0x7f is NaN
        exponent, mantissa = codes >> 3, codes & 7
        normal = np.ldexp(1.0 + mantissa / 8, exponent - 7)
        numbers = np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -6))
        nearest = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, np.abs(values))
        return (nearest | (values < 0) << 7).astype(np.uint8)
    bits = values.view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16)
