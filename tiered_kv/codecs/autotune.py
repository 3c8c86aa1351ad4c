"""Chooses the best codec for this machine by measurement.

Encoding a page costs CPU time and saves disk time. Which of the two limits throughput depends on
the machine, so ``choose`` measures both when a server starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.formatting import count

from .base import Bytes, Codec, CodecError, ElementType, PageFormat
from .registry import CODECS
from .symbols import ELEMENT_BYTES

TOLERANCE = 1.15
"""Maximum restore time of the chosen codec, as a multiple of the shortest restore time. A slightly
longer restore is acceptable for smaller pages, because the disk holds more of them and wears
less."""

MEASURE_S = 0.06
"""Approximate time to measure each codec, seconds."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """A codec's size and speed on one page and one core.

    Attributes:
        codec: the codec measured.
        stored_bytes: size of the encoded page, bytes.
        encode_s: time to encode the page, seconds.
        decode_s: time to decode it, seconds.
    """

    codec: Codec
    stored_bytes: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec, and a sentence for the log that gives the reason, with numbers."""

    codec: Codec
    reason: str


def choose(
    page_format: PageFormat,
    disk_read_mbs: float,
    disk_write_mbs: float,
    cores: int,
) -> Choice:
    """Measure every codec that supports these pages on a synthetic page, and ``pick`` one.

    Takes under 0.3 s for pages of a few MiB. In a process that has not encoded yet, loading the
    kernels takes another 0.3 s, and compiling them takes some seconds once per machine.

    Args:
        disk_read_mbs: read speed of the disk, MB/s.
        disk_write_mbs: write speed of the disk, MB/s.
        cores: number of threads that decode concurrently.
    """
    page = synthetic_page(page_format)
    measured = [measure_codec(codec, page) for codec in _candidates(page_format)]
    return pick(measured, disk_read_mbs, disk_write_mbs, cores)


def _candidates(page_format: PageFormat) -> Iterator[Codec]:
    """Yield the codecs that support pages of this format, at their default levels."""
    for kind in CODECS.values():
        with suppress(ValueError):
            yield kind.make(page_format)


def pick(
    measured: Sequence[Measured], disk_read_mbs: float, disk_write_mbs: float, cores: int
) -> Choice:
    """Pick the codec with the smallest pages among the codecs whose restore takes at most
    ``TOLERANCE`` times as long as the shortest restore.

    Pages are decoded while others are read, so restoring a page takes the longer of stored bytes /
    disk speed and decode time / cores. Saves run in the background, so their speed does not matter
    for the choice. The save speed is only mentioned in the reason.

    Raises:
        ValueError: ``measured`` is empty, or the disk's speed or the cores are not positive.
    """
    if not measured or cores < 1 or disk_read_mbs <= 0 or disk_write_mbs <= 0:
        raise ValueError(
            "choosing a codec needs at least one measured codec, disk speeds above 0 and at least "
            "one core"
        )

    def restore_s(candidate: Measured) -> float:
        return max(candidate.stored_bytes / (disk_read_mbs * 1e6), candidate.decode_s / cores)

    fastest = min(measured, key=restore_s)
    good = [one for one in measured if restore_s(one) <= TOLERANCE * restore_s(fastest)]
    best = min(good, key=lambda one: (one.stored_bytes, restore_s(one)))
    raw_bytes = best.codec.page_format.page_bytes
    save_s = max(best.stored_bytes / (disk_write_mbs * 1e6), best.encode_s / cores)
    restores = ", ".join(f"{restore_s(one) * 1e3:.3g} ms with {one.codec.name}" for one in measured)
    reason = (
        f"codec {best.codec.name}: restoring a page of {raw_bytes >> 10} KiB takes "
        f"{restores}, on {count(cores, 'core')} and a disk that reads {disk_read_mbs:.0f} MB/s; "
        f"pages shrink by a factor of {raw_bytes / best.stored_bytes:.2f} and are saved at "
        f"{raw_bytes / save_s / 1e6:.0f} MB/s"
    )
    return Choice(best.codec, reason)


def measure_codec(codec: Codec, page: Bytes, clock: Clock = time.thread_time) -> Measured:
    """Time a codec on one page and one core, for about ``MEASURE_S`` after a warm-up. Returns the
    shortest measured times.

    Args:
        clock: seconds; by default this thread's CPU time, so that other load on a busy machine is
            not counted.

    Raises:
        CodecError: the decoded page differs from the page.
    """
    out = np.empty_like(page)
    stored = codec.encode(page)  # compile, allocate, warm up
    codec.decode(stored, out)
    if not np.array_equal(out, page):
        raise CodecError(f"codec {codec.name} does not reproduce the page that it encoded")
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
    """Create a page of normally distributed random elements, as a stand-in for KV.

    Opaque bytes are random bf16 numbers, the most likely type.
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
    """Round each value to the nearest number of type ``element`` (bf16 for opaque), and return the
    numbers or their bit patterns. numpy itself supports only fp32 and fp16."""
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
