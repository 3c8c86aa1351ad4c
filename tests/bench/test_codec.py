"""Figures of the codec benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from tiered_kv.bench.codec import cast, entropy_bits, entropy_bound, race
from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import Bytes, Codec, ElementType, EncodedPage, PageFormat
from tiered_kv.codecs.centred import CentredCodec
from tiered_kv.codecs.raw import NOTHING, RawCodec
from tiered_kv.codecs.zstd import ZstdCodec

PAGE = PageFormat(ElementType.BF16, 64 * 1024, 32)
PAGES = [synthetic_page(PAGE, seed) for seed in range(3)]


def test_entropy_of_known_distributions() -> None:
    assert entropy_bits(np.zeros(1000, dtype=np.uint8)) == 0
    assert entropy_bits(np.arange(256, dtype=np.uint8)) == pytest.approx(8)
    assert entropy_bits(np.array([1, 1, 2, 3], dtype=np.uint8)) == pytest.approx(1.5)


def test_the_bound_is_slightly_above_the_codec() -> None:
    codec = CentredCodec(PAGE).trained(PAGES)
    ratio = race({"centred": codec}, PAGES, rounds=1)["centred"]["ratio"]
    bound = entropy_bound(PAGES, PAGE)
    assert ratio < bound < 1.03 * ratio


def test_a_race_gives_ratio_and_speeds_of_each() -> None:
    found = race({"raw": RawCodec(PAGE), "zstd1": ZstdCodec(PAGE)}, PAGES, rounds=2)
    assert found["raw"]["ratio"] == 1
    assert found["zstd1"]["ratio"] == pytest.approx(
        sum(page.nbytes for page in PAGES)
        / sum(ZstdCodec(PAGE).encode(page).nbytes for page in PAGES)
    )
    for figures in found.values():
        assert all(figures[key] for key in ("ratio", "encode_mbs", "decode_mbs"))


class Idle:
    """A codec that decodes nothing: ``out`` keeps the previous codec's result."""

    codec_id, name, table = 9, "idle", b""
    wants_training = stores_in_place = False
    page_format = PAGE

    def encode(self, page: Bytes) -> EncodedPage:
        return EncodedPage(NOTHING, np.zeros(1, dtype=np.uint8))

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        pass

    def trained(self, pages: list[Bytes]) -> Codec:
        return self


def test_a_codec_that_returns_another_codecs_result_is_detected() -> None:
    with pytest.raises(RuntimeError, match="idle decoded a page that differs"):
        race({"raw": RawCodec(PAGE), "idle": Idle()}, PAGES, rounds=1)


def test_casting_keeps_the_numbers() -> None:
    pytest.importorskip("torch")
    e5m2 = cast(PAGES, "float8_e5m2")
    assert [page.nbytes for page in e5m2] == [page.nbytes // 2 for page in PAGES]
    values = (PAGES[0].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    back = (e5m2[0].astype(np.uint16) << 8).view(np.float16)
    assert np.allclose(back, values, rtol=2**-3, atol=2**-16)
