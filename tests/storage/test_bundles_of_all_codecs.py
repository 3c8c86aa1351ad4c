"""Bundles of every codec and page format: no record may overlap the page from which it is
encoded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tiered_kv.codecs.base import PageFormat
from tiered_kv.codecs.registry import parse
from tiered_kv.keys import PageKey
from tiered_kv.storage.bundles import Bundles
from tiered_kv.testing.conformance.codec import CONTENTS, FORMATS

PAGES = 20
CONTENT = list(CONTENTS.values())


@pytest.mark.parametrize("name", ["centred", "zstd", "zstd:9", "raw"])
@pytest.mark.parametrize("page_format", FORMATS, ids=lambda one: f"{one.element.value}")
@pytest.mark.parametrize("mixed", [True, False])
def test_pages_are_restored_bit_for_bit(name: str, page_format: PageFormat, mixed: bool) -> None:
    """Pages are compressed three times into the same slots, with a codec that is trained on the
    first pages. Every page is read back exactly."""
    try:
        codec = parse(name)(page_format)
    except ValueError:
        pytest.skip("it does not know such pages")
    slots = np.zeros((PAGES, page_format.page_bytes + 32), np.uint8)
    bundles = Bundles(slots, codec)
    rng = np.random.default_rng(page_format.page_bytes)
    with ThreadPoolExecutor(3) as threads:
        for turn in range(3):
            order = [int(slot) for slot in rng.permutation(PAGES)]
            keys = [PageKey(b"%d of %d" % (i, turn)) for i in range(PAGES)]
            pages = [
                CONTENT[i % len(CONTENT) if mixed else 0](page_format, 100 * turn + i)
                for i in range(PAGES)
            ]
            for slot, page in zip(order, pages, strict=True):
                slots[slot, : page.nbytes] = page
            kept = bundles.pack(keys, order, threads.map)
            slots[order[kept:]] = 0xFF
            assert (kept == PAGES) if name == "raw" else (kept <= PAGES)
            for key, page in zip(keys, pages, strict=True):
                out = np.empty_like(page)
                assert bundles.read(order[0], key, out)
                assert np.array_equal(out, page)
                coded = bundles.copy(order[0], key)
                assert coded is not None
                coded.decode(out)
                assert np.array_equal(out, page)
