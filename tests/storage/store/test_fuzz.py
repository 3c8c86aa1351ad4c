"""Segments with arbitrary bytes: the store opens, and returns correct pages or none."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import Codec, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.storage.admin.inventory import list_stores
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.storage.segment.format import FormatError
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import UnsafeFiles
from tiered_kv.testing.segment_store import ToyCodec, store_options
from tiered_kv.testing.segments import SegmentFile

MUTATIONS, NIGHTLY_MUTATIONS = 500, 10_000
PAGES = {page_key(i): page_bytes(page_key(i)) for i in range(23)}
Contents = dict[str, bytearray]


def codec_from(codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
    if codec_id not in (RawCodec.codec_id, ToyCodec.codec_id):
        raise ValueError("no such codec")
    return ToyCodec(page_format, table) if codec_id else RawCodec(page_format)


def open_store(options: StoreOptions) -> SegmentStore:
    return SegmentStore(options, ToyCodec(PAGE_FORMAT), codec_from, UnsafeFiles())


def flip_bit(rng: random.Random, content: bytearray, other: bytearray) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def flip_bit_of_a_header(rng: random.Random, content: bytearray, other: bytearray) -> None:
    block = rng.randrange(len(content) // BLOCK) * BLOCK
    content[block + rng.randrange(160)] ^= 1 << rng.randrange(8)


def zero_blocks(rng: random.Random, content: bytearray, other: bytearray) -> None:
    start = rng.randrange(len(content) // BLOCK) * BLOCK
    end = min(len(content), start + BLOCK * rng.randint(1, 4))
    content[start:end] = bytes(end - start)


def scribble(rng: random.Random, content: bytearray, other: bytearray) -> None:
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.randint(1, 300))
    content[start:end] = rng.randbytes(end - start)


def cut(rng: random.Random, content: bytearray, other: bytearray) -> None:
    del content[rng.randrange(len(content)) :]


def cut_at_a_block(rng: random.Random, content: bytearray, other: bytearray) -> None:
    del content[rng.randrange(len(content) // BLOCK) * BLOCK :]


def extend(rng: random.Random, content: bytearray, other: bytearray) -> None:
    content.extend(rng.choice([bytes(BLOCK), rng.randbytes(77), content[-BLOCK:], other[:BLOCK]]))


def move_blocks(rng: random.Random, content: bytearray, other: bytearray) -> None:
    """Overwrite blocks with blocks of this or another segment."""
    source = rng.choice([content, other])
    start = rng.randrange(len(source) // BLOCK) * BLOCK
    blocks = bytes(source[start : start + BLOCK * rng.randint(1, 6)])
    at = rng.randrange(len(content) // BLOCK) * BLOCK
    content[at : at + len(blocks)] = blocks


def become_another(rng: random.Random, content: bytearray, other: bytearray) -> None:
    content[:] = other


def become_noise(rng: random.Random, content: bytearray, other: bytearray) -> None:
    content[:] = rng.randbytes(rng.randrange(3 * BLOCK))


MUTATORS: list[Callable[[random.Random, bytearray, bytearray], None]] = [
    flip_bit,
    flip_bit_of_a_header,
    flip_bit_of_a_header,
    zero_blocks,
    scribble,
    cut,
    cut_at_a_block,
    extend,
    move_blocks,
    move_blocks,
    become_another,
    become_noise,
]


@pytest.fixture
def segments(tmp_path: Path) -> tuple[StoreOptions, Contents]:
    """Create three segments: untrained and sealed, trained and sealed, trained and never sealed.
    Returns the store's options and the contents."""
    options = store_options(tmp_path / "root", io_threads=1)
    store = open_store(options)
    store.put(list(PAGES.items())[0:7])
    store.put(list(PAGES.items())[7:17])
    store.close()
    store = open_store(options)
    store.put(list(PAGES.items())[17:20])
    store.put(list(PAGES.items())[20:23])
    paths = sorted(options.folder.glob("*.seg"))
    contents = {path.name: bytearray(path.read_bytes()) for path in paths}
    store.close()
    assert len(contents) == 3
    return options, contents


def check(options: StoreOptions) -> int:
    """Return the number of pages that a store serves. Asserts that every page is correct."""
    (info,) = list_stores(options.root).stores
    for path in info.segments:
        with contextlib.suppress(FormatError):
            segment = SegmentFile(path)
            header = segment.header
            codec = codec_from(header.codec_id, header.table, header.page_format)
            for entry in segment.entries:
                with contextlib.suppress(FormatError, OSError):
                    assert np.array_equal(segment.read(entry, codec), PAGES[entry.key])
    store = open_store(options)
    keys = store.keys()
    wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in keys]
    failed = store.get(wanted)
    for i, (key, out) in enumerate(wanted):
        assert i in failed or np.array_equal(out, PAGES[key]), "a wrong page"
    assert set(store.keys()) == {key for i, key in enumerate(keys) if i not in failed}
    assert store.stats.pages_bad == len(failed)
    store.close()
    return len(keys) - len(failed)


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_segment_never_serves_a_wrong_page(
    segments: tuple[StoreOptions, Contents], seed: int
) -> None:
    mutate(segments, seed, MUTATIONS // 4)


@pytest.mark.nightly
def test_none_of_many_more_mutated_segments_serves_a_wrong_page(
    segments: tuple[StoreOptions, Contents],
) -> None:
    mutate(segments, 4, NIGHTLY_MUTATIONS)


def mutate(segments: tuple[StoreOptions, Contents], seed: int, times: int) -> None:
    options, contents = segments
    rng = random.Random(seed)
    served = 0
    for _ in range(times):
        changed = {name: bytearray(content) for name, content in contents.items()}
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            name, other = rng.choices(list(changed), k=2)
            if len(changed[name]) >= BLOCK <= len(changed[other]):
                rng.choice(MUTATORS)(rng, changed[name], changed[other])
        for path in options.folder.glob("*.seg"):
            path.unlink()
        for name, content in changed.items():
            (options.folder / name).write_bytes(content)
        served += check(options)
    assert served > times * 23 // 3, "hardly anything survived: the test proves little"


def test_every_page_of_unchanged_segments_is_served(
    segments: tuple[StoreOptions, Contents],
) -> None:
    assert check(segments[0]) == 23


@pytest.mark.parametrize("name", ["00000001.seg", "00000003.seg"])
def test_one_bit_costs_at_most_one_page_or_a_segment_header(
    segments: tuple[StoreOptions, Contents], name: str
) -> None:
    options, contents = segments
    rng = random.Random(1)
    path = options.folder / name
    for _ in range(60):
        content = bytearray(contents[name])
        # After the segment's header, without which nothing can be read.
        first = BLOCK if name == "00000001.seg" else 2 * BLOCK
        bit = rng.randrange(8 * first, 8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        for other, whole in contents.items():
            (options.folder / other).write_bytes(whole)
        path.write_bytes(content)
        assert check(options) >= 22


def test_files_that_are_not_segments_are_ignored(
    segments: tuple[StoreOptions, Contents],
) -> None:
    options, _ = segments
    strangers = [options.folder / name for name in ("notes.txt", "1.seg", "abcdefgh.seg")]
    for stranger in strangers:
        stranger.write_text("not ours")
    assert check(options) == 23
    assert all(stranger.exists() for stranger in strangers)
