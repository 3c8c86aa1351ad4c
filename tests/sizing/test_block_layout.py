"""Block layouts of the KV pool, for models whose groups are known from vLLM's log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.sizing.published import DEEPSEEK_V32, GEMMA3_12B, LLAMA_8B, NEMOTRON_9B, write
from tests.sizing.recorded import answer_recorded
from tiered_kv.bench.sim.engine.models import MODELS
from tiered_kv.page_group import KvKind
from tiered_kv.sizing.block_layout import BlockLayout, advise_block_size
from tiered_kv.sizing.model_shape import read_shape


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.sizing.model_shape.ask_vllm", answer_recorded)


def layout(folder: Path, config: Mapping[str, Any], ranks: int = 1) -> BlockLayout:
    return read_shape(write(folder, config), gpu="h100-80", ranks=ranks).layout


def test_one_kind_of_kv_is_one_group(tmp_path: Path) -> None:
    made = layout(tmp_path, LLAMA_8B)
    (group,) = made.groups
    assert (group.layers, group.block, made.block_bytes) == (32, 16, 16 * 131_072)
    assert made.held(1600) == 100
    assert made.held_bytes(1600) == made.needed_bytes(1600) == 1600 * 131_072
    assert made.held(1601) == 101


def test_an_indexer_shares_the_blocks_of_its_attention(tmp_path: Path) -> None:
    made = layout(tmp_path, DEEPSEEK_V32)
    (group,) = made.groups
    assert (group.block, made.block_bytes) == (64, 64 * 61 * (1152 + 132))


def test_windows_take_no_more_than_their_span(tmp_path: Path) -> None:
    made = layout(tmp_path, GEMMA3_12B)
    windows = [group for group in made.groups if group.reach.kind is KvKind.WINDOW]
    assert [group.layers for group in made.groups] == [8] * 6
    assert len(windows) == 5
    assert [group.held(32_000) for group in windows] == [64] * 5
    assert made.held(32_000) == 2000 + 5 * 64
    assert made.held(160) == 6 * 10, "a short context lies in all of them"


def test_attention_blocks_are_as_long_as_states_require(tmp_path: Path) -> None:
    made = layout(tmp_path, NEMOTRON_9B)
    model = MODELS["nemotron-nano-9b-v2"]
    attention = [group for group in made.groups if group.reach.kind is KvKind.FULL]
    assert {group.block for group in made.groups} == {model.block} == {1312}
    assert [group.layers for group in attention] == [4]
    assert made.block_bytes == model.group_kv_bytes * model.block
    states = [group for group in made.groups if group.reach.kind is KvKind.STATE]
    assert len(states) == len(model.groups) - 1
    assert made.held(13_120) == 10 + 2 * len(states)
    moved = made.needed_bytes(13_120)
    assert moved == 10 * attention[0].page_bytes + 27 * 5_316_608


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_a_block(tmp_path: Path, ranks: int) -> None:
    whole = layout(tmp_path, LLAMA_8B)
    assert layout(tmp_path, LLAMA_8B, ranks).block_bytes * ranks == whole.block_bytes


@pytest.mark.parametrize(
    ("block", "max_len", "better"),
    [
        (16, 131_072, 64),
        (32, 131_072, 64),
        (16, 524_287, 64),
        (16, 524_288, 128),
        (16, 1_048_576, 128),
        (16, 131_071, None),
        (64, 1_048_576, None),
        (1312, 1_048_576, None),
    ],
)
def test_longer_blocks_are_advised_for_long_contexts_in_short_blocks(
    block: int, max_len: int, better: int | None
) -> None:
    advice = advise_block_size(block, max_len)
    if better is None:
        assert advice is None
        return
    assert advice is not None
    assert f"{max_len:,} tokens has {max_len // block:,} blocks of {block}: " in advice
    assert f"--block-size {better} shortens" in advice
    assert f"multiples of {better} tokens, and a context leaves {better // 2} tokens" in advice
