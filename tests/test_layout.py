"""A page's regions, checked against arrays in which every byte of the allocation is numbered.

The model numbers bytes by their position in the engine's allocation, and views them as vLLM's
logical [layer, block, head group, byte] array. The bytes of block b are then ``array[:, b]``, and
the expected strides and offsets are the array's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_kv.page_group import PageLayout, Placement, page_layout
from tiered_kv.testing.conformance.transfer import addresses

ORDERS = ["LBH", "LHB", "BLH"]
"""Memory layouts, named by their axes from outermost to innermost. vLLM's names for them are LBHNC
or LBNHC, LHBNC, and BLHNC."""


@dataclass(frozen=True)
class Model:
    """Placements as vLLM computes them, and the byte numbers of each block."""

    placements: list[Placement]
    num_blocks: int
    size: int
    of_block: list[set[int]]

    @property
    def layout(self) -> PageLayout:
        return page_layout(self.placements, self.num_blocks)


def build(order: str, kinds: list[tuple[int, int]], num_blocks: int, heads: int) -> Model:
    """Build an allocation of several kinds of layers, each given as ``(layers, bytes per
    head)``."""
    page = {kind: kind[1] * heads for kind in kinds}
    packed = sum(layers * page[layers, per_head] for layers, per_head in kinds)
    numbers = np.arange(packed * num_blocks)
    placements, of_block, offset = [], [set[int]() for _ in range(num_blocks)], 0
    for layers, per_head in kinds:
        size = layers * page[layers, per_head]
        if order == "BLH":
            part = numbers.reshape(num_blocks, packed)[:, offset : offset + size]
            array = part.reshape(num_blocks, layers, heads, per_head).transpose(1, 0, 2, 3)
            strides = (page[layers, per_head], packed)
            step = size
        else:
            part = numbers[offset : offset + size * num_blocks]
            if order == "LBH":
                array = part.reshape(layers, num_blocks, heads, per_head)
                strides = (num_blocks * heads * per_head, heads * per_head)
            else:
                array = part.reshape(layers, heads, num_blocks, per_head).transpose(0, 2, 1, 3)
                strides = (num_blocks * heads * per_head, per_head)
            step = size * num_blocks
        _agree(array, strides, offset)
        placements.append(Placement(layers, strides[0], strides[1], offset))
        for block in range(num_blocks):
            of_block[block] |= {int(n) for n in array[:, block].flat}
        offset += step
    return Model(placements, num_blocks, packed * num_blocks, of_block)


def _agree(array: NDArray[np.int64], strides: tuple[int, int], offset: int) -> None:
    """Assert that strides and offset are those of the array, as vLLM would report them in
    KVCacheTensor."""
    assert array[0, 0, 0, 0] == offset
    for axis, stride in enumerate(strides):
        if array.shape[axis] > 1:
            assert np.diff(array, axis=axis).min() == np.diff(array, axis=axis).max() == stride


@st.composite
def models(draw: st.DrawFn) -> Model:
    kinds = draw(
        st.lists(
            st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3, unique=True
        )
    )
    return build(
        draw(st.sampled_from(ORDERS)), kinds, draw(st.integers(1, 6)), draw(st.integers(1, 3))
    )


@given(models())
def test_a_page_is_every_byte_of_its_block_once_and_no_other(model: Model) -> None:
    layout = model.layout
    for block in range(model.num_blocks):
        where = [int(n) for n in addresses(layout, block)]
        assert len(where) == layout.page_bytes
        assert set(where) == model.of_block[block]
        assert len(set(where)) == len(where)
    assert layout.storage_bytes == model.size


@given(models())
def test_blocks_of_one_kind_of_layout_share_no_byte(model: Model) -> None:
    layout = model.layout
    seen = np.concatenate([addresses(layout, block) for block in range(model.num_blocks)])
    assert len(np.unique(seen)) == len(seen) == model.size


def test_layers_outermost_give_one_run_for_each_layer() -> None:
    model = build("LBH", [(28, 64)], num_blocks=10, heads=2)
    (region,) = model.layout.regions
    assert (region.count, region.nbytes, region.run_stride) == (28, 128, 1280)


def test_head_groups_outside_blocks_give_one_run_for_each_group() -> None:
    model = build("LHB", [(28, 64)], num_blocks=10, heads=2)
    (region,) = model.layout.regions
    assert (region.count, region.nbytes, region.run_stride) == (56, 64, 640)


def test_blocks_outermost_are_a_single_run_however_many_kinds_of_layers() -> None:
    model = build("BLH", [(3, 64), (1, 32), (2, 16)], num_blocks=10, heads=1)
    (region,) = model.layout.regions
    assert (region.count, region.nbytes, region.block_stride) == (1, 256, 256)


@pytest.mark.parametrize("order", ORDERS)
def test_a_single_layer_is_a_page_by_itself(order: str) -> None:
    layout = build(order, [(1, 64)], num_blocks=10, heads=1).layout
    assert layout.page_bytes == 64
    assert layout.storage_bytes == 640


def test_padding_at_the_end_of_a_packed_block_travels_with_it() -> None:
    layout = page_layout([Placement(3, 40, 128, 0)], 4)
    assert [region.nbytes for region in layout.regions] == [128]


def test_padding_at_the_end_of_a_layers_page_travels_with_it() -> None:
    layout = page_layout([Placement(2, 4 * 64, 64, 0)], 4)
    assert layout.page_bytes == 128


def test_the_description_distinguishes_pages_of_different_composition() -> None:
    def describe(order: str) -> str:
        return build(order, [(4, 32)], num_blocks=5, heads=2).layout.describe()

    assert [describe(order) for order in ORDERS] == ["4x64", "8x32", "1x256"]


def test_the_description_does_not_depend_on_the_size_of_the_pool() -> None:
    """A page has the same description in an engine with more memory."""
    small, large = (build("LBH", [(4, 32)], blocks, 2).layout for blocks in (5, 500))
    assert small.describe() == large.describe()


def test_a_stride_that_fits_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="stride of 650 bytes is not a multiple of the 640 bytes"):
        page_layout([Placement(2, 650, 64, 0)], 10)


def test_an_engine_without_kv_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="no KV cache tensors"):
        page_layout([], 10)
