"""fp32 pages: exponents are compressed, and so are mantissa planes that compress well."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_kv.codecs.base import CodecError, ElementType, EncodedPage, PageFormat
from tiered_kv.codecs.centred import CentredCodec
from tiered_kv.testing.conformance.codec import CodecConformance

FP32 = ElementType.FP32

COUNT = 1 << 16


def normal(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(COUNT, dtype=np.float32)


def shortened(numbers: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    """Round a fraction of the numbers to bf16."""
    bits = numbers.view(np.uint32).copy()
    bits[np.random.default_rng(1).random(COUNT) < share] &= 0xFFFF0000
    return bits.view(np.float32)


STATES: dict[str, tuple[NDArray[np.float32], int, float]] = {
    "noise below the exponent": (normal(), 0b000, 1.19),
    "all of them bf16 before": (shortened(normal(), 1), 0b110, 2.9),
    "six in ten bf16 before": (shortened(normal(), 0.6), 0b110, 1.6),
    "fp16 before": (normal().astype(np.float16).astype(np.float32), 0b110, 2.2),
    "zeros": (np.zeros(COUNT, np.float32), 0b111, 200),
    "ones": (np.ones(COUNT, np.float32), 0b111, 200),
    "not numbers": (np.full(COUNT, np.nan, np.float32), 0b111, 200),
}


class TestFp32(CodecConformance):
    codec_class = CentredCodec
    formats = (PageFormat(FP32, 6400, 16), PageFormat(FP32, 6404, 16), PageFormat(FP32, 4, 0))


@pytest.mark.parametrize("what", STATES)
def test_planes_of_fp32_are_coded_where_that_is_worth_it(what: str) -> None:
    numbers, coded, ratio = STATES[what]
    page = numbers.view(np.uint8)
    codec = CentredCodec(PageFormat(FP32, page.nbytes, 0))
    stored = codec.encode(page)
    assert stored.frame[0] == coded
    assert stored.plane.nbytes == (3 - coded.bit_count()) * COUNT
    assert page.nbytes / stored.nbytes > ratio
    out = np.empty_like(page)
    codec.decode(stored, out)
    assert np.array_equal(out, page)


HEADS = {
    "nothing": b"",
    "half a size": b"\0\0",
    "planes that there are not": b"\x08" + bytes(16),
    "a plane that is not there": b"\x01" + bytes(8),
    "no frame": b"\0" + bytes(4),
    "a frame beyond the end": b"\0\xff\xff\xff\xff",
}


@pytest.mark.parametrize("what", HEADS)
def test_a_frame_of_fp32_with_another_head_is_refused(what: str) -> None:
    codec = CentredCodec(PageFormat(FP32, 4 * COUNT, 0))
    stored = codec.encode(normal().view(np.uint8))
    assert stored.frame[0] == 0
    out = np.empty(4 * COUNT, np.uint8)
    head = np.frombuffer(HEADS[what], np.uint8)
    for frame in (head, np.concatenate([head, stored.frame[5:]])):
        with pytest.raises(CodecError):
            codec.decode(EncodedPage(stored.plane, frame), out)


def test_planes_of_fp32_are_not_taken_for_one_another() -> None:
    codec = CentredCodec(PageFormat(FP32, 4 * COUNT, 0))
    stored = codec.encode(shortened(normal(), 0.6).view(np.uint8))
    out = np.empty(4 * COUNT, np.uint8)
    for chosen in set(range(8)) - {0b110, 0b101, 0b011}:
        frame = stored.frame.copy()
        frame[0] = chosen
        with pytest.raises(CodecError):
            codec.decode(EncodedPage(stored.plane, frame), out)


def test_kv_in_fp32_is_centred() -> None:
    """In the pages, each channel of 16 tokens has one exponent. Training reduces the encoded
    exponents to less than 0.02 bytes per number, and pages are decoded exactly."""
    scales = np.exp2(np.random.default_rng(0).integers(-8, 8, (COUNT // 16 // 64, 1, 64)))
    pages = [
        (1 + np.random.default_rng(i).random((COUNT // 16 // 64, 16, 64)))
        * scales
        * np.random.default_rng(i).choice([-1, 1], (COUNT // 16 // 64, 16, 64))
        for i in range(9)
    ]
    page, *others = [one.astype(np.float32).reshape(-1).view(np.uint8) for one in pages]
    untrained = CentredCodec(PageFormat(FP32, page.nbytes, 16))
    trained = untrained.trained(others)
    assert untrained.encode(page).frame.nbytes > 0.45 * COUNT
    assert trained.encode(page).frame.nbytes < 0.02 * COUNT
    reader = CentredCodec.from_table(untrained.page_format, trained.table)
    out = np.empty_like(page)
    reader.decode(trained.encode(page), out)
    assert np.array_equal(out, page)
