"""Views of pages in the engine's allocation as torch tensors, to gather and scatter whole pages.

A page whose layers are not contiguous consists of many short runs. torch's indexing reads or writes
all runs of many pages in one kernel, at VRAM speed. This module requires no GPU.
"""

from __future__ import annotations

import itertools
import math

import torch

from tiered_kv.page_group import PageLayout

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Element types for copying bytes, widest first."""


class PageViews:
    """The pages of one group.

    Args:
        layout: locations of a block's bytes.
        storage: the engine's allocation, uint8 ``[bytes]``.

    Attributes:
        page_bytes: size of a page, bytes.
        word: element type used to copy a page.
    """

    def __init__(self, layout: PageLayout, storage: torch.Tensor) -> None:
        self.page_bytes = layout.page_bytes
        self._regions = layout.regions
        self.word = _widest_word(layout, storage)
        self._in_storage = [
            _words(
                storage,
                self.word,
                region.offset,
                (layout.num_blocks, region.count, region.nbytes),
                (region.block_stride, region.run_stride),
            )
            for region in layout.regions
        ]
        sizes = (region.bytes_per_block for region in layout.regions)
        self._starts = list(itertools.accumulate(sizes, initial=0))[:-1]

    def gather(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy blocks into whole pages.

        Args:
            blocks: block numbers, int64 ``[pages]``, on the storage's device.
            pages: receives ``len(blocks)`` contiguous pages; uint8 ``[bytes]``.
        """
        for there, here in zip(self._in_storage, self._in_pages(pages, len(blocks)), strict=True):
            torch.index_select(there, 0, blocks, out=here)

    def scatter(self, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy whole pages into distinct blocks: the inverse of ``gather``."""
        for there, here in zip(self._in_storage, self._in_pages(pages, len(blocks)), strict=True):
            there.index_copy_(0, blocks, here)

    def _in_pages(self, pages: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the regions of whole pages, in the same shapes as in the storage."""
        return [
            _words(
                pages,
                self.word,
                start,
                (count, region.count, region.nbytes),
                (self.page_bytes, region.nbytes),
            )
            for region, start in zip(self._regions, self._starts, strict=True)
        ]


def _words(
    memory: torch.Tensor,
    word: torch.dtype,
    offset: int,
    shape: tuple[int, int, int],
    strides: tuple[int, int],
) -> torch.Tensor:
    """Return a view ``[pages, runs, words per run]`` of ``memory``. ``offset``, ``strides`` and the
    last dimension of ``shape`` are in bytes."""
    size = word.itemsize
    whole = memory[: memory.nbytes // size * size].view(word)
    return whole.as_strided(
        (*shape[:2], shape[2] // size), (strides[0] // size, strides[1] // size, 1), offset // size
    )


def _widest_word(layout: PageLayout, storage: torch.Tensor) -> torch.dtype:
    """Return the widest type to which the start and end of every run are aligned, in storage and
    pages."""
    numbers = [storage.data_ptr(), layout.page_bytes]
    for region in layout.regions:
        numbers += [region.offset, region.run_stride, region.block_stride, region.nbytes]
    aligned = math.gcd(*numbers)
    return next(word for word in WORDS if aligned % word.itemsize == 0)
