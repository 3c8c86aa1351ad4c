"""Pages are compressed in their own slots, and read back unchanged or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import Bytes, Codec, CodedPage, ElementType, EncodedPage, PageFormat
from tiered_kv.codecs.centred import CentredCodec
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import parse
from tiered_kv.codecs.training import MIN_SAMPLE
from tiered_kv.keys import PageKey
from tiered_kv.storage.bundles import Bundles

BF16 = PageFormat(ElementType.BF16, page_bytes=4096, tokens=16)
SMALL = PageFormat(ElementType.OPAQUE, page_bytes=256, tokens=16)

Make = Callable[[PageFormat, int], Bytes]


def key(name: int) -> PageKey:
    return PageKey(name.to_bytes(20, "big"))


def noise(page_format: PageFormat, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, page_format.page_bytes, dtype=np.uint8)


def repetitive(page_format: PageFormat, seed: int) -> Bytes:
    """Return a page that compresses to about a third."""
    page = np.full(page_format.page_bytes, seed & 0xFF, np.uint8)
    page[: page.nbytes // 4] = noise(page_format, seed)[: page.nbytes // 4]
    return page


class Pool:
    """Bundles in a pool of slots, and the pages that were compressed into them."""

    def __init__(
        self, codec: Codec, num_slots: int = 12, beyond: int = 0, fill: int = 0xA5
    ) -> None:
        self.format = codec.page_format
        self.slots: NDArray[np.uint8] = np.full(
            (num_slots, self.format.page_bytes + beyond), fill, np.uint8
        )
        self.bundles = Bundles(self.slots, codec)
        self.pages: dict[PageKey, Bytes] = {}

    def pack(self, pages: Sequence[Bytes], slots: Sequence[int], names: Iterable[int]) -> int:
        """Write pages to slots and compress them. Overwrites the freed slots, and returns how many
        slots the bundle fills."""
        keys = [key(name) for name in names]
        for slot, page in zip(slots, pages, strict=True):
            self.slots[slot, : page.nbytes] = page
        kept = self.bundles.pack(keys, slots, map)
        assert 1 <= kept <= len(slots)
        self.slots[list(slots[kept:])] = 0x5A
        self.pages.update(zip(keys, pages, strict=True))
        return kept

    def read(self, first: int, wanted: PageKey) -> Bytes | None:
        """Return a page, or None if it cannot be read. Asserts that ``read`` and ``copy`` of the
        bundle agree."""
        out = np.full(self.format.page_bytes, 0x77, np.uint8)
        found, coded = self.bundles.read(first, wanted, out), self.bundles.copy(first, wanted)
        assert found is (coded is not None)
        if coded is None:
            return None
        again = np.empty_like(out)
        coded.decode(again)
        assert np.array_equal(again, out)
        return out

    def whole(self, first: int, names: Iterable[int]) -> list[bool]:
        """Return whether each page can be read. Asserts that none has wrong bytes."""
        found = [(self.read(first, key(name)), self.pages[key(name)]) for name in names]
        assert all(page is None or np.array_equal(page, wanted) for page, wanted in found)
        return [page is not None for page, _ in found]


# -- pages are restored -----------------------------------------------------------------


@pytest.mark.parametrize("slots", [list(range(10)), list(range(9, -1, -1)), [5, 0, 9, 2, 7, 1]])
def test_compressible_pages_are_restored_from_fewer_slots(slots: list[int]) -> None:
    pool = Pool(CentredCodec(BF16))
    pages = [synthetic_page(BF16, seed) for seed in range(len(slots))]
    kept = pool.pack(pages, slots, range(len(slots)))
    assert kept < len(slots)
    assert all(pool.whole(slots[0], range(len(slots))))


def test_other_slots_are_not_changed() -> None:
    pool = Pool(CentredCodec(BF16), beyond=64)
    pool.pack([synthetic_page(BF16, seed) for seed in range(4)], [6, 2, 8, 3], range(4))
    assert (pool.slots[[0, 1, 4, 5, 7, 9, 10, 11]] == 0xA5).all()


def test_incompressible_pages_stay_in_their_slots() -> None:
    pool = Pool(CentredCodec(BF16), beyond=100)
    pages = [noise(BF16, seed) for seed in range(5)]
    assert pool.pack(pages, [4, 1, 7, 0, 2], range(5)) == 5
    for slot, page in zip([4, 1, 7, 0, 2], pages, strict=True):
        assert np.array_equal(pool.slots[slot, : BF16.page_bytes], page)
    assert all(pool.whole(4, range(5)))
    coded = pool.bundles.copy(4, key(3))
    assert coded is not None
    assert coded.codec is None


def test_a_single_page_is_a_bundle() -> None:
    pool = Pool(CentredCodec(BF16))
    assert pool.pack([synthetic_page(BF16, 1)], [3], [1]) == 1
    assert pool.whole(3, [1]) == [True]


def test_a_copy_does_not_change_when_the_slots_are_reused() -> None:
    pool = Pool(CentredCodec(BF16))
    pool.pack([synthetic_page(BF16, seed) for seed in range(6)], range(6), range(6))
    copies = [pool.bundles.copy(0, key(name)) for name in range(6)]
    pool.slots[:] = 0
    for name, coded in enumerate(copies):
        assert coded is not None
        out = np.empty(BF16.page_bytes, np.uint8)
        coded.decode(out)
        assert np.array_equal(out, pool.pages[key(name)])


def test_pages_encoded_and_read_on_many_threads_are_not_mixed_up() -> None:
    pool = Pool(CentredCodec(BF16), num_slots=32)
    keys = [key(name) for name in range(32)]
    for slot in range(32):
        pool.slots[slot] = synthetic_page(BF16, slot)
    before = pool.slots.copy()
    with ThreadPoolExecutor(4) as threads:
        kept = pool.bundles.pack(keys, list(range(32)), threads.map)
        assert kept < 32
        outs = np.empty_like(before)
        good = threads.map(lambda i: pool.bundles.read(0, keys[i], outs[i]), [*range(32)] * 4)
        assert all(good)
    assert np.array_equal(outs, before)


ZSTD = parse("zstd")(SMALL)
CONTENT = st.sampled_from([noise, repetitive])


@given(
    st.lists(CONTENT, min_size=1, max_size=8),
    st.permutations(range(8)),
    st.sampled_from([0, 1, 7, 300]),
    st.data(),
)
@settings(max_examples=150)
def test_any_page_in_any_slot_is_read_unchanged_or_not_at_all(
    contents: list[Make], order: list[int], beyond: int, data: st.DataObject
) -> None:
    """Any pages are compressed in any slots, and then some bytes of the bundle change. Each page is
    read unchanged or not at all."""
    pool, slots = Pool(ZSTD, 8, beyond), order[: len(contents)]
    pages = [make(SMALL, seed) for seed, make in enumerate(contents)]
    kept = pool.pack(pages, slots, range(len(pages)))
    names = range(len(pages))
    assert all(pool.whole(slots[0], names))
    for slot in set(range(8)) - set(slots):
        assert (pool.slots[slot] == 0xA5).all()

    used = slots[:kept]
    slot = data.draw(st.sampled_from(used))
    begin = data.draw(st.integers(0, pool.slots.shape[1] - 1))
    length = data.draw(st.integers(1, pool.slots.shape[1]))
    pool.slots[slot, begin : begin + length] ^= data.draw(st.integers(1, 255))
    pool.whole(slots[0], names)


@pytest.mark.parametrize("make", [noise, repetitive])
def test_a_changed_byte_damages_only_its_own_page(make: Make) -> None:
    pool, slots = Pool(ZSTD, 4), [2, 0, 3, 1]
    kept = pool.pack([make(SMALL, seed) for seed in range(4)], slots, range(4))
    spoilt = set[int]()
    unused = 0
    for slot in slots[:kept]:
        for at in range(SMALL.page_bytes):
            pool.slots[slot, at] ^= 1 << (at % 8)
            bad = [name for name, good in enumerate(pool.whole(2, range(4))) if not good]
            pool.slots[slot, at] ^= 1 << (at % 8)
            assert len(bad) <= 1
            assert bad or slot == slots[kept - 1], "only the last slot has room to spare"
            spoilt.update(bad)
            unused += not bad
    assert spoilt == set(range(4))
    assert unused < SMALL.page_bytes
    assert all(pool.whole(2, range(4)))


# -- bundles in sequence ------------------------------------------------------------------


def test_pages_that_were_never_packed_are_not_found() -> None:
    pool = Pool(CentredCodec(BF16))
    pool.pack([synthetic_page(BF16, seed) for seed in range(4)], range(4), range(4))
    out = np.empty(BF16.page_bytes, np.uint8)
    for first, name in ((0, 9), (1, 0), (11, 0)):
        assert not pool.bundles.read(first, key(name), out)
        assert pool.bundles.copy(first, key(name)) is None


def test_a_bundle_with_reused_slots_returns_no_foreign_page() -> None:
    pool = Pool(ZSTD, 8)
    kept = pool.pack([repetitive(SMALL, seed) for seed in range(8)], range(8), range(8))
    assert kept >= 3
    for slot in range(kept - 1, -1, -1):
        pool.slots[slot] = noise(SMALL, 100 + slot)
        gone = pool.whole(0, range(8)).count(False)
        assert gone >= kept - slot - 1
    assert not any(pool.whole(0, range(8)))


def test_a_bundle_replaces_every_bundle_it_overlaps() -> None:
    pool = Pool(ZSTD, 8)
    pool.pack([repetitive(SMALL, seed) for seed in range(4)], [0, 1, 2, 3], range(4))
    pool.pack([noise(SMALL, seed) for seed in range(10, 13)], [5, 1, 4], range(10, 13))
    assert pool.whole(0, range(4)) == [False] * 4
    assert pool.whole(5, range(10, 13)) == [True] * 3
    pool.pack([repetitive(SMALL, seed) for seed in range(20, 22)], [4, 7], range(20, 22))
    assert pool.whole(5, range(10, 13)) == [False] * 3
    assert pool.whole(4, range(20, 22)) == [True] * 2


def test_pages_that_cannot_be_encoded_stay_and_form_a_bundle() -> None:
    pool = Pool(ZSTD, 8)
    pool.pack([repetitive(SMALL, seed) for seed in range(4)], range(4), range(4))
    pool.slots[:4] = before = np.stack([noise(SMALL, seed) for seed in range(4)])

    def fails(encode: object, pages: Iterable[Bytes]) -> Iterable[EncodedPage]:
        raise MemoryError

    assert pool.bundles.pack([key(name) for name in range(4)], range(4), fails) == 4
    assert np.array_equal(pool.slots[:4], before)
    for name in range(4):
        found = pool.read(0, key(name))
        assert found is not None
        assert np.array_equal(found, before[name])


def test_a_page_saved_again_is_found_in_its_new_bundle() -> None:
    pool = Pool(ZSTD, 8)
    old, new = repetitive(SMALL, 1), repetitive(SMALL, 2)
    pool.pack([old, old], [0, 1], [1, 2])
    pool.pack([new, new], [4, 5], [1, 2])
    found = pool.read(4, key(1))
    assert found is not None
    assert np.array_equal(found, new)


@given(st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_bundles_follow_each_other_in_the_same_slots(seed: int) -> None:
    """Bundles are created in the same slots again and again, and are dropped without notice. All
    pages of the existing bundles can be read, and no page has wrong bytes."""
    rng, pool = np.random.default_rng(seed), Pool(ZSTD, 8, beyond=int(seed % 3))
    free, alive, name = list(range(8)), dict[int, tuple[list[int], list[int]]](), 0
    for _ in range(30):
        count = int(rng.integers(1, 6))
        if len(free) < count:
            first = int(rng.choice(list(alive)))
            slots, names = alive.pop(first)
            free += slots
            continue
        rng.shuffle(free)
        taken, free = free[:count], free[count:]
        names = list(range(name, name := name + count))
        make = noise if rng.random() < 0.3 else repetitive
        kept = pool.pack([make(SMALL, one) for one in names], taken, names)
        free += taken[kept:]
        alive[taken[0]] = taken[:kept], names
        for first, (_, expected) in alive.items():
            assert all(pool.whole(first, expected))
        for first in range(8):
            pool.whole(first, range(name))


# -- codecs ---------------------------------------------------------------------------------


class Counted:
    """A third-party codec that counts its calls."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self.encoded = codec, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._codec, name)

    def encode(self, page: Bytes) -> EncodedPage:
        self.encoded += 1
        return self._codec.encode(page)

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        self._codec.decode(encoded, out)


def copied(pool: Pool, first: int, name: int) -> CodedPage:
    found = pool.bundles.copy(first, key(name))
    assert found is not None
    return found


def test_the_codec_is_trained_once_on_the_first_pages() -> None:
    pool = Pool(CentredCodec(BF16), 40)
    assert MIN_SAMPLE == 16
    seen = list[bytes]()
    for bundle in range(4):
        slots, names = range(8 * bundle, 8 * bundle + 8), range(8 * bundle, 8 * bundle + 8)
        pool.pack([synthetic_page(BF16, name) for name in names], slots, names)
        codec = copied(pool, slots[0], names[0]).codec
        assert codec is not None
        seen.append(codec.table)
    assert seen[0] == b"" != seen[1] == seen[2] == seen[3]
    for bundle in range(4):
        assert all(pool.whole(8 * bundle, range(8 * bundle, 8 * bundle + 8)))


def test_pages_are_encoded_like_the_peer_once_its_codec_is_known() -> None:
    pool = Pool(CentredCodec(BF16), 40)
    other: Any = Counted(CentredCodec(BF16).trained([]))
    known: list[Any] = [None]
    pool.bundles.encode_like(lambda: known[0])
    pages = [synthetic_page(BF16, seed) for seed in range(8)]
    pool.pack(pages, range(8), range(8))
    assert other.encoded == 0
    known[0] = other
    pool.pack(pages, range(8, 16), range(8, 16))
    assert other.encoded == 8
    assert id(copied(pool, 8, 9).codec) == id(other)
    known[0] = None
    pool.pack(pages, range(16, 24), range(16, 24))
    assert other.encoded == 8
    for first in (0, 8, 16):
        assert all(pool.whole(first, range(first, first + 8)))


def test_pages_are_compressed_even_if_a_lower_tier_stores_them_raw() -> None:
    pool = Pool(CentredCodec(BF16))
    pool.bundles.encode_like(lambda: RawCodec(BF16))
    kept = pool.pack([synthetic_page(BF16, seed) for seed in range(8)], range(8), range(8))
    assert kept < 8
    assert all(pool.whole(0, range(8)))


def test_a_codec_that_fails_on_a_page_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Choosy(Counted):
        def decode(self, encoded: EncodedPage, out: Bytes) -> None:
            super().decode(encoded, out)
            if np.array_equal(out, bad):
                raise RuntimeError("not this one")

    pool, bad = Pool(CentredCodec(BF16)), synthetic_page(BF16, 2)
    choosy: Any = Choosy(CentredCodec(BF16))
    pool.bundles.encode_like(lambda: choosy)
    pool.pack([synthetic_page(BF16, seed) for seed in range(4)], range(4), range(4))
    out = np.empty(BF16.page_bytes, np.uint8)
    assert [pool.bundles.read(0, key(name), out) for name in range(4)] == [True, True, False, True]
    assert "not this one" in caplog.text
