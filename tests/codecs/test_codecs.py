"""Codecs restore any page bit-exactly, and compress the layouts of real models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import Bytes, Codec, CodecError, ElementType, EncodedPage, PageFormat
from tiered_kv.codecs.centred import ELEMENTS, CentredCodec, channel_count
from tiered_kv.codecs.raw import NOTHING
from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.codecs.symbols import ELEMENT_BYTES
from tiered_kv.codecs.zstd import LiteralEncoder, ZstdCodec, plain_encoder, symbol_encoder

WIDE = (ElementType.BF16, ElementType.FP16)
ONE = {ElementType.BF16: 0x3F80, ElementType.FP16: 0x3C00}
DOUBLED = {ElementType.BF16: 0x80, ElementType.FP16: 0x400}


def there_and_back(codec: Codec, page: Bytes) -> Bytes:
    out = np.full(page.nbytes, 0xA5, dtype=np.uint8)
    codec.decode(codec.encode(page), out)
    return out


def random_bits(page_format: PageFormat, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, page_format.page_bytes, dtype=np.uint8)


def not_numbers(page_format: PageFormat, seed: int) -> Bytes:
    """Return a page in which NaNs, infinities, zeros and subnormals are common."""
    page = synthetic_page(page_format, seed)
    odd = np.array([0xFF, 0x7F, 0x80, 0x00, 0x01, 0x7C, 0xFC], dtype=np.uint8)
    rng = np.random.default_rng(seed)
    return np.where(rng.random(page.size) < 0.3, rng.choice(odd, page.size), page)


def constant(page_format: PageFormat, seed: int) -> Bytes:
    return np.full(page_format.page_bytes, seed & 0xFF, dtype=np.uint8)


CONTENTS = (synthetic_page, random_bits, not_numbers, constant)


@st.composite
def page_formats(draw: st.DrawFn) -> PageFormat:
    element = draw(st.sampled_from(ELEMENTS))
    tokens = draw(st.integers(1, 40))
    ragged = draw(st.sampled_from([0, 0, 0, 1, 7]))  # elements left over after the tokens' elements
    count = tokens * draw(st.integers(1, 150)) + ragged
    return PageFormat(element, count * ELEMENT_BYTES[element], tokens)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    page_format=page_formats(),
    training=st.tuples(st.sampled_from(CONTENTS), st.integers(0, 3)),
    content=st.sampled_from(CONTENTS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_page_comes_back_from_any_codec(
    page_format: PageFormat,
    training: tuple[Callable[[PageFormat, int], Bytes], int],
    content: Callable[[PageFormat, int], Bytes],
    seed: int,
) -> None:
    """Any page is decoded exactly, by an untrained codec and by one that was trained on other
    pages. The decoder is recreated from the codec's table."""
    like, how_many = training
    page = content(page_format, seed)
    for name in ("raw", "zstd", "zstd:3", "centred"):
        codec = parse(name)(page_format)
        for one in (codec, codec.trained([like(page_format, i) for i in range(how_many)])):
            reader = from_table(one.codec_id, one.table, page_format)
            out = np.full(page.nbytes, 0xA5, dtype=np.uint8)
            reader.decode(one.encode(page), out)
            assert np.array_equal(out, page), one


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_bit_pattern_comes_back(element: ElementType) -> None:
    patterns: NDArray[np.uint16] | NDArray[np.uint8]
    if element in WIDE:
        patterns = np.arange(1 << 16, dtype=np.uint16)
    else:
        patterns = np.arange(1 << 8, dtype=np.uint8)
    page = patterns.view(np.uint8)
    untrained = CentredCodec(PageFormat(element, page.nbytes, 16))
    assert np.array_equal(there_and_back(untrained, page), page)
    assert np.array_equal(there_and_back(untrained.trained([page]), page), page)


def test_pages_may_be_read_only_and_lie_anywhere() -> None:
    page_format = PageFormat(ElementType.FP16, 2048, 16)
    memory = np.zeros(2048 + 1, dtype=np.uint8)
    memory[1:] = synthetic_page(page_format)
    page = memory[1:]  # at an odd address
    page.flags.writeable = False
    codec = CentredCodec(page_format).trained([page])
    encoded = codec.encode(page)
    stored = EncodedPage(
        *(np.frombuffer(part.tobytes(), np.uint8) for part in (encoded.plane, encoded.frame))
    )
    out = np.zeros(2048 + 1, dtype=np.uint8)
    codec.decode(stored, out[1:])
    assert np.array_equal(out[1:], page)


def test_a_page_can_be_taken_apart_with_plain_zstd() -> None:
    """A page is decoded by hand with plain zstd. The frame holds the exponents, and the plane holds
    the signs and mantissas."""
    page_format = PageFormat(ElementType.BF16, 64 * 1024, 16)
    page = synthetic_page(page_format)
    encoded = CentredCodec(page_format).encode(page)

    exponents = zstandard.ZstdDecompressor().decompress(encoded.frame.tobytes())

    rest = encoded.plane.astype(np.uint16)
    by_hand = (rest & 0x80) << 8 | np.frombuffer(exponents, np.uint8).astype(np.uint16) << 7
    assert np.array_equal((by_hand | rest & 0x7F).view(np.uint8), page)


# -- training -------------------------------------------------------------------

TOKENS, HEADS, DIM, LAYERS = 16, 2, 32, 3
SHAPES = {
    "tokens, heads, dims": (LAYERS * 2, TOKENS, HEADS * DIM),
    "heads, tokens, dims": (LAYERS * 2 * HEADS, TOKENS, DIM),
    "tokens, heads, K beside V": (LAYERS, TOKENS, HEADS * DIM * 2),
    "dims, tokens": (LAYERS * 2 * HEADS * DIM, TOKENS, 1),
    "parts of 8 dims": (LAYERS * 2 * HEADS * DIM // 8, TOKENS, 8),
}


def loud_and_quiet(
    shape: tuple[int, int, int], seed: int, element: ElementType = ElementType.BF16
) -> Bytes:
    """Return a page in which each channel has one exponent, with random mantissas and signs."""
    outer, tokens, inner = shape
    exponents = np.random.default_rng(0).integers(-8, 8, (outer, 1, inner))
    rng = np.random.default_rng(seed)
    mantissas = rng.integers(0, DOUBLED[element], (outer, tokens, inner))
    signs = rng.integers(0, 2, (outer, tokens, inner)) << 15
    bits = ONE[element] + exponents * DOUBLED[element] + mantissas + signs
    return np.ascontiguousarray(bits.astype(np.uint16).reshape(-1)).view(np.uint8)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_channels_are_found_in_any_layout(shape: tuple[int, int, int]) -> None:
    pages = [loud_and_quiet(shape, seed) for seed in range(9)]
    page, pages = pages[0], pages[1:]
    untrained = CentredCodec(PageFormat(ElementType.BF16, page.nbytes, TOKENS))
    assert untrained.wants_training
    trained = untrained.trained(pages)
    assert not trained.wants_training

    symbols = page.nbytes // 2
    assert untrained.encode(page).frame.nbytes > 0.45 * symbols  # 16 exponents take 4 of 8 bits
    assert trained.encode(page).frame.nbytes < 0.02 * symbols  # centred exponents are all equal
    assert np.array_equal(there_and_back(trained, page), page)


def test_k_may_be_transposed_and_v_not() -> None:
    halves = SHAPES["dims, tokens"], SHAPES["heads, tokens, dims"]
    pages = [np.concatenate([loud_and_quiet(shape, seed) for shape in halves]) for seed in range(9)]
    codec = CentredCodec(PageFormat(ElementType.BF16, pages[0].nbytes, TOKENS))
    trained = codec.trained(pages[1:])
    assert trained.encode(pages[0]).frame.nbytes < 0.02 * pages[0].nbytes / 2


def test_fp16_is_centred_too() -> None:
    shape = SHAPES["heads, tokens, dims"]
    pages = [loud_and_quiet(shape, seed, ElementType.FP16) for seed in range(9)]
    untrained = CentredCodec(PageFormat(ElementType.FP16, pages[0].nbytes, TOKENS))
    trained = untrained.trained(pages[1:])
    # A sign and two mantissa bits are random and remain: 3 of 8 bits.
    assert trained.encode(pages[0]).frame.nbytes < 0.39 * pages[0].nbytes / 2
    assert untrained.encode(pages[0]).frame.nbytes > 0.8 * pages[0].nbytes / 2


def test_training_is_a_function_of_the_pages() -> None:
    pages = [loud_and_quiet(SHAPES["dims, tokens"], seed) for seed in range(4)]
    codec = CentredCodec(PageFormat(ElementType.BF16, pages[0].nbytes, TOKENS))
    once, again = codec.trained(pages), codec.trained(pages)
    assert once == again
    assert once.table == again.table != b""
    assert once != codec.trained([page ^ np.uint8(0x80) for page in pages])


def test_training_without_pages_or_without_channels_learns_nothing() -> None:
    even = CentredCodec(PageFormat(ElementType.BF16, 2 * 16 * 10, 16))
    assert even.trained([]) is even
    ragged_format = PageFormat(ElementType.BF16, 2 * 16 * 10 + 2, 16)
    assert channel_count(ragged_format) == 0
    ragged = CentredCodec(ragged_format)
    assert not ragged.wants_training
    assert ragged.trained([synthetic_page(ragged_format)]) is ragged


def test_a_page_of_another_size_is_refused_by_every_method() -> None:
    """Encoding, decoding and training raise ValueError for a page of the wrong size, because the
    kernels do not check sizes."""
    page_format = PageFormat(ElementType.BF16, 1024, 16)
    codec, short = CentredCodec(page_format), np.zeros(1022, dtype=np.uint8)
    encoded = codec.encode(np.zeros(1024, dtype=np.uint8))
    for call in (
        lambda: codec.encode(short),
        lambda: codec.decode(encoded, short),
        lambda: codec.trained([short]),
    ):
        with pytest.raises(ValueError, match="1022 bytes instead of 1024"):
            call()


def test_pages_with_a_partial_element_are_refused() -> None:
    with pytest.raises(ValueError, match="use codec zstd"):
        CentredCodec(PageFormat(ElementType.OPAQUE, 1024, 16))
    with pytest.raises(ValueError, match="1023 bytes is not a whole number of bf16 elements"):
        CentredCodec(PageFormat(ElementType.BF16, 1023, 16))
    with pytest.raises(ValueError, match="zstd level 23 is not between 1 and 22"):
        ZstdCodec(PageFormat(ElementType.BF16, 1024, 16), 23)


# -- dependencies --------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, 131_072, 131_073, 500_000])
def test_frames_without_matches_are_ordinary_frames(size: int) -> None:
    symbols = np.random.default_rng(size).normal(128, 3, size).astype(np.uint8)
    for encode in (LiteralEncoder(), plain_encoder()):
        frame = encode(symbols)
        assert zstandard.get_frame_parameters(frame.tobytes()).content_size == size
        assert zstandard.ZstdDecompressor().decompress(frame.tobytes()) == symbols.tobytes()
        if size > 100_000:
            assert frame.nbytes < 0.46 * size  # log2(3 * sqrt(2 pi e)) = 3.6 of 8 bits


def test_without_cffi_another_encoder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard.backend_cffi", None)
    monkeypatch.delattr(zstandard, "backend_cffi", raising=False)
    encode = symbol_encoder()
    assert not isinstance(encode, LiteralEncoder)
    frame = encode(np.zeros(1000, dtype=np.uint8))
    assert zstandard.ZstdDecompressor().decompress(frame.tobytes()) == bytes(1000)


def test_numba_is_imported_only_to_encode() -> None:
    """Importing ``tiered_kv.codecs.autotune`` does not import numba, which takes longer to import
    than the rest of the core."""
    script = "import sys, tiered_kv.codecs.autotune; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_planes_of_a_codec_without_planes_are_refused() -> None:
    page_format = PageFormat(ElementType.FP8_E4M3, 1024, 16)
    page, stray = synthetic_page(page_format), np.zeros(3, dtype=np.uint8)
    for codec in (ZstdCodec(page_format), CentredCodec(page_format)):
        encoded = codec.encode(page)
        assert encoded.plane.nbytes == 0
        with pytest.raises(CodecError, match="3 raw bytes"):
            codec.decode(EncodedPage(stray, encoded.frame), np.empty_like(page))
    with pytest.raises(CodecError, match="bytes instead of 1024"):
        parse("raw")(page_format).decode(EncodedPage(stray, NOTHING), np.empty_like(page))
