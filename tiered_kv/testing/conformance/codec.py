"""The conformance suite of codecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import (
    Bytes,
    Codec,
    CodecClass,
    CodecError,
    ElementType,
    EncodedPage,
    PageFormat,
    Section,
)

FORMATS = (
    *(
        PageFormat(element, nbytes, tokens)
        for element in ElementType
        for nbytes, tokens in ((4096, 16), (6400, 16), (2 * 16 * 10 + 2, 16))
    ),
    PageFormat.of([Section(ElementType.BF16, 1280), Section(ElementType.FP32, 6912)] * 2, 0),
    PageFormat.of([Section(ElementType.OPAQUE, 77), Section(ElementType.FP8_E4M3, 4019)], 16),
)
"""Page formats to test: pages of each element type in three sizes, one of which does not divide
evenly among the tokens; and pages that contain several element types."""


def noise(page_format: PageFormat, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, page_format.page_bytes, dtype=np.uint8)


def constant(page_format: PageFormat, seed: int) -> Bytes:
    return np.full(page_format.page_bytes, seed & 0xFF, dtype=np.uint8)


CONTENTS: Mapping[str, Callable[[PageFormat, int], Bytes]] = {
    "numbers": synthetic_page,
    "noise": noise,
    "one byte": constant,
}


class CodecConformance:
    """Conformance suite of codecs. Create a subclass, name it ``Test…`` and set ``codec_class``.

    Attributes:
        codec_class: the class under test.
        formats: the page formats to test. The codec may refuse formats that it does not support.
    """

    codec_class: CodecClass
    formats: Sequence[PageFormat] = FORMATS

    def codecs(self, page_format: PageFormat) -> list[Codec]:
        """Return an untrained codec, trained codecs, and a reader's copy of each codec. Returns an
        empty list if the codec refuses the format.
        """
        try:
            codec = self.codec_class(page_format)
        except ValueError:
            return []
        made = [codec, codec.trained([])]
        made += [
            codec.trained([make(page_format, i) for i in range(3)]) for make in CONTENTS.values()
        ]
        return made + [self.reader(one) for one in made]

    def reader(self, codec: Codec) -> Codec:
        """Return the codec as another process recreates it, from its table alone."""
        return self.codec_class.from_table(codec.page_format, codec.table)

    @pytest.fixture
    def codec(self) -> Codec:
        """A trained codec."""
        for page_format in self.formats:
            if made := self.codecs(page_format):
                return made[2]
        raise AssertionError("the codec supports none of the page formats in this suite")

    @pytest.mark.parametrize("content", CONTENTS)
    def test_any_page_comes_back_from_any_reader(self, content: str) -> None:
        served = 0
        for page_format in self.formats:
            page = CONTENTS[content](page_format, 7)
            for codec in self.codecs(page_format):
                out = np.full_like(page, 0xA5)
                self.reader(codec).decode(codec.encode(page), out)
                assert np.array_equal(out, page), codec
                served += 1
        assert served

    def test_a_reader_is_the_same_codec(self, codec: Codec) -> None:
        read = self.reader(codec)
        assert (read.codec_id, read.table) == (codec.codec_id, codec.table)
        assert read.page_format == codec.page_format
        assert read.stores_in_place == codec.stores_in_place
        assert 0 <= codec.codec_id <= 0xFFFF
        assert len(codec.table) <= 1 << 24

    def test_training_is_a_function_of_the_pages(self, codec: Codec) -> None:
        pages = [synthetic_page(codec.page_format, i) for i in range(3)]
        untrained = self.codec_class(codec.page_format)
        assert untrained.trained(pages).table == untrained.trained(pages).table
        assert not untrained.trained(pages).wants_training

    def test_a_page_grows_by_little_at_most(self, codec: Codec) -> None:
        page = noise(codec.page_format, 1)
        assert codec.encode(page).nbytes <= page.nbytes + page.nbytes // 64 + 4096

    def test_a_page_may_change_once_it_is_encoded(self, codec: Codec) -> None:
        if codec.stores_in_place:
            pytest.skip("the page is its own encoding")
        page, out = synthetic_page(codec.page_format), np.empty(codec.page_format.page_bytes, "u1")
        kept = page.copy()
        first = codec.encode(page)
        page[:] = 0
        codec.encode(page)  # the second call reuses the thread's scratch memory
        codec.decode(first, out)
        assert np.array_equal(out, kept)

    def test_a_codec_in_place_stores_the_page_itself(self, codec: Codec) -> None:
        if not codec.stores_in_place:
            pytest.skip("the codec does not store pages in place")
        page = noise(codec.page_format, 1)
        encoded = codec.encode(page)
        assert np.array_equal(encoded.plane, page)
        assert encoded.frame.nbytes == 0

    def test_pages_may_be_read_only_and_lie_anywhere(self, codec: Codec) -> None:
        nbytes = codec.page_format.page_bytes
        memory, out = np.zeros(nbytes + 1, "u1"), np.full(nbytes + 2, 0xA5, "u1")
        memory[1:] = synthetic_page(codec.page_format)
        memory.flags.writeable = False
        codec.decode(_stored(codec.encode(memory[1:])), out[1:-1])
        assert np.array_equal(out[1:-1], memory[1:])
        assert out[0] == out[-1] == 0xA5

    def test_damaged_bytes_end_in_a_page_or_in_a_codec_error(self, codec: Codec) -> None:
        """The store detects most damage by its digest. Undetected damage must do no harm."""
        good, rng = codec.encode(synthetic_page(codec.page_format)), np.random.default_rng(0)
        for _ in range(300):
            damaged = EncodedPage(_damage(good.plane, rng), _damage(good.frame, rng))
            memory = np.full(codec.page_format.page_bytes + 128, 0xA5, np.uint8)
            with suppress(CodecError):
                codec.decode(damaged, memory[64:-64])
            assert (memory[:64] == 0xA5).all()
            assert (memory[-64:] == 0xA5).all()

    def test_nonsense_is_no_table(self, codec: Codec) -> None:
        with pytest.raises(CodecError):
            self.codec_class.from_table(codec.page_format, b"nonsense")

    def test_threads_share_a_codec(self, codec: Codec) -> None:
        def pages_of(thread: int) -> bool:
            pages = [synthetic_page(codec.page_format, 100 * thread + i) for i in range(8)]
            stored = [codec.encode(page) for page in pages]
            for page, encoded in zip(pages, stored, strict=True):
                out = np.empty_like(page)
                codec.decode(encoded, out)
                if not np.array_equal(out, page):
                    return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(pages_of, range(16)))


def _stored(encoded: EncodedPage) -> EncodedPage:
    """Return the stored parts as if read from a disk: read-only, and in separate memory."""
    parts = (np.frombuffer(part.tobytes(), np.uint8) for part in (encoded.plane, encoded.frame))
    return EncodedPage(*parts)


def _damage(part: Bytes, rng: np.random.Generator) -> Bytes:
    """Return the part changed, truncated, extended or unchanged, at random."""
    kind = rng.integers(4)
    if kind == 1 and part.nbytes:
        part = part.copy()
        # Headers are at the start, where damage has the most effects.
        part[rng.integers(min(part.nbytes, rng.choice([8, part.nbytes])))] ^= rng.integers(1, 256)
    elif kind == 2 and part.nbytes:
        part = part[: rng.integers(part.nbytes)]
    elif kind == 3:
        part = np.concatenate([part, rng.integers(0, 256, rng.integers(1, 9), dtype=np.uint8)])
    return part
