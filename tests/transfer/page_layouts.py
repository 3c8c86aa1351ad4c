"""Random page layouts and copy jobs on them, with the expected contents of the memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_kv.page_group import PageLayout, Region
from tiered_kv.testing.conformance.transfer import Bytes, addresses
from tiered_kv.transfer.base import CopyJob, Direction


@st.composite
def layouts(draw: st.DrawFn, longest: int = 300) -> PageLayout:
    """Draw a layout of consecutive regions, with or without gaps, at even and odd addresses.

    Runs are outside the blocks, as is usual for layers, or inside them.
    """
    num_blocks = draw(st.integers(1, 6))
    step = draw(st.sampled_from([1, 4, 8, 16]))
    gaps = st.sampled_from([0, 0, 16, 3])
    regions, offset = [], 0
    for _ in range(draw(st.integers(1, 3))):
        nbytes = draw(st.integers(1, max(1, longest // step))) * step
        count = draw(st.integers(1, 3))
        inner = nbytes + draw(gaps)
        if draw(st.booleans()):
            block_stride, run_stride = inner, num_blocks * inner + draw(gaps)
        else:
            block_stride, run_stride = count * inner + draw(gaps), inner
        region = Region(offset, count, run_stride, block_stride, nbytes)
        regions.append(region)
        offset = region.end(num_blocks) + draw(gaps)
    return PageLayout(tuple(regions), num_blocks)


@dataclass(frozen=True)
class Move:
    """A copy job of valid pages, and memory full of random bytes.

    Attributes:
        moved: expected contents of the storage and the slab after the job.
    """

    layout: PageLayout
    job: CopyJob
    storage: Bytes
    slab: Bytes
    moved: tuple[Bytes, Bytes]

    @property
    def num_slots(self) -> int:
        return len(self.slab)

    @property
    def nbytes(self) -> int:
        return len(self.job.blocks) * self.layout.page_bytes


@st.composite
def moves(draw: st.DrawFn, longest: int = 300) -> Move:
    """Draw a copy job with distinct blocks and slots. They are often in order, so that some pages
    are adjacent in both the storage and the slab."""
    layout = draw(layouts(longest))
    num_slots = draw(st.integers(1, 6))
    pages = draw(st.integers(0, min(layout.num_blocks, num_slots)))
    names = [
        draw(st.permutations(range(there))) if draw(st.booleans()) else range(there)
        for there in (layout.num_blocks, num_slots)
    ]
    direction = draw(st.sampled_from(Direction))
    blocks, slots = (tuple(those[:pages]) for those in names)
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    storage = rng.integers(0, 256, layout.storage_bytes + 8, dtype=np.uint8)
    slab = rng.integers(0, 256, (num_slots, layout.page_bytes), dtype=np.uint8)
    moved = storage.copy(), slab.copy()
    for block, slot in zip(blocks, slots, strict=True):
        where: NDArray[np.int64] = addresses(layout, block)
        if direction is Direction.SAVE:
            moved[1][slot] = storage[where]
        else:
            moved[0][where] = slab[slot]
    return Move(layout, CopyJob(1, direction, blocks, slots), storage, slab, moved)
