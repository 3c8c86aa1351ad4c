"""Gathering and scattering with torch on a CPU, by the same calls as on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.transfer.page_layouts import Move, moves
from tiered_kv.page_group import PageLayout, Placement, Region, page_layout
from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.cuda.page_views import PageViews


@given(moves())
def test_pages_of_every_layout_are_gathered_and_scattered(move: Move) -> None:
    storage, slab = (torch.from_numpy(before.copy()) for before in (move.storage, move.slab))
    views = PageViews(move.layout, storage)
    blocks, slots = (
        torch.tensor(those, dtype=torch.int64) for those in (move.job.blocks, move.job.slots)
    )
    whole = torch.empty(move.nbytes, dtype=torch.uint8)
    pages = whole.view(len(blocks), move.layout.page_bytes)

    if move.job.direction is Direction.SAVE:
        views.gather(blocks, whole)
        slab[slots] = pages
    else:
        pages[:] = slab[slots]
        views.scatter(whole, blocks)

    for found, right in zip((storage, slab), move.moved, strict=True):
        assert np.array_equal(found.numpy(), right)


@pytest.mark.parametrize(
    ("layout", "nbytes"),
    [
        (page_layout([Placement(3, 7 * 64, 64, 0)], 7), 8),
        (PageLayout((Region(4, 3, 700, 100, 100),), 7), 4),
        (PageLayout((Region(0, 3, 700, 100, 98),), 7), 2),
        (PageLayout((Region(5, 3, 900, 101, 99),), 7), 1),
    ],
)
def test_bytes_move_in_the_widest_words_that_the_layout_allows(
    layout: PageLayout, nbytes: int
) -> None:
    storage = torch.zeros(layout.storage_bytes + 8, dtype=torch.uint8)
    assert storage.data_ptr() % 8 == 0
    assert PageViews(layout, storage).word.itemsize == nbytes
    assert PageViews(layout, storage[1:]).word.itemsize == 1
