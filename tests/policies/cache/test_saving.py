"""A decoding request is examined when its next blocks may be full, and not earlier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.runtime.pages.saves import STRIDE_TOKENS, TOGETHER, SaveStride

sizes = st.integers(1, 1024)


@pytest.mark.parametrize(("block_size", "tokens"), [(16, 256), (48, 240), (512, 512)])
def test_as_many_blocks_are_saved_together_as_256_tokens_have_or_one(
    block_size: int, tokens: int
) -> None:
    assert SaveStride.of(block_size).tokens == tokens


@given(sizes)
def test_a_stride_is_of_whole_blocks(block_size: int) -> None:
    stride = SaveStride.of(block_size).tokens
    assert stride % block_size == 0
    assert stride == block_size or stride <= STRIDE_TOKENS < stride + block_size


@given(sizes, st.integers(0, 10_000), st.integers(0, 100), st.integers(0, 2_000))
def test_a_decoding_request_is_examined_in_time(
    block_size: int, step: int, saved: int, further: int
) -> None:
    """The request is examined after its next blocks are full, at most a few steps later, together
    with other requests."""
    stride = SaveStride.of(block_size)
    computed = saved * block_size + further % stride.tokens
    look = stride.next_look(step, saved=saved, computed=computed, known=computed)
    full = step + saved * block_size + stride.tokens - computed
    assert full <= look < full + TOGETHER
    assert look > step
    assert look % TOGETHER == 0


@given(sizes, st.integers(0, 10_000), st.integers(1, 10_000))
def test_a_prefill_is_examined_in_every_step(block_size: int, step: int, left: int) -> None:
    stride = SaveStride.of(block_size)
    assert stride.next_look(step, saved=0, computed=5, known=5 + left) == step + 1
