"""The reach of each KV type matches the blocks that vLLM itself keeps and allocates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.page_group import KvKind, KvReach
from tiered_kv.testing.checked_kv import CELL
from tiered_kv.testing.vllm.engine import EngineSize, engine_config
from tiered_kv.testing.vllm.groups import GroupSpec, group_pages

LONGEST = 1024
SPANS = (KvKind.WINDOW, KvKind.CHUNK)


@pytest.fixture(scope="module", autouse=True)
def _managers_are_known(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Configure an engine, because only then does vLLM register the managers of its KV cache
    specs."""
    size = EngineSize(64, 16, CELL, LONGEST, 64, 256, "fcfs")
    engine_config(tmp_path_factory.mktemp("model"), size, None)


@dataclass(frozen=True)
class Group:
    """A KV cache group as both vLLM and this package describe it."""

    spec: GroupSpec
    extra: int = 0

    @property
    def reach(self) -> KvReach:
        return KvReach(self.spec.kind, self.spec.span, self.extra)


@st.composite
def any_group(draw: st.DrawFn) -> Group:
    kind = draw(st.sampled_from(KvKind))
    spec = GroupSpec(
        kind,
        block_size=4 if kind is KvKind.STATE else draw(st.sampled_from([4, 8, 12, 16, 32])),
        span=draw(st.integers(1, 100)) if kind in SPANS else 0,
    )
    return Group(spec, draw(st.integers(0, 20)) if kind is KvKind.WINDOW else 0)


def coordinator(groups: Sequence[Group]) -> tuple[Any, int]:
    """Return vLLM's managers of the groups, and the number of tokens in a scheduler block."""
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    specs = []
    for group, pages in zip(groups, group_pages([g.spec for g in groups], CELL), strict=True):
        spec = pages.vllm_spec()
        specs.append(replace(spec, extra_retained_tokens=group.extra) if group.extra else spec)
    sizes = [group.spec.block_size for group in groups]
    config = KVCacheConfig(
        num_blocks=2000,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"{i}"], spec) for i, spec in enumerate(specs)],
    )
    made = get_kv_cache_coordinator(
        config,
        max_model_len=LONGEST,
        max_in_flight_tokens=LONGEST,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=math.gcd(*sizes),
    )
    return made, math.lcm(*sizes)


@given(any_group(), st.integers(0, LONGEST))
def test_vllm_skips_the_same_tokens(group: Group, tokens: int) -> None:
    found, _ = coordinator([group])
    skipped = found.single_type_managers[0].get_num_skipped_tokens(tokens)
    assert group.reach.skipped(tokens) == max(0, skipped)


@given(st.lists(any_group(), min_size=1, max_size=3), st.integers(1, LONGEST))
def test_a_hit_has_the_blocks_that_it_needs(groups: list[Group], tokens: int) -> None:
    """For a hit outside VRAM of any length, aligned to blocks or not, vLLM allocates exactly the
    blocks that ``KvReach.blocks`` returns."""
    found, _ = coordinator(groups)
    empty: tuple[list[Any], ...] = tuple([] for _ in groups)
    found.allocate_new_computed_blocks("one", empty, 0, tokens)
    check(groups, found, tokens)


@given(
    st.lists(any_group(), min_size=1, max_size=3),
    st.integers(1, 10),
    st.integers(1, LONGEST // 2),
)
def test_a_hit_that_continues_from_vram_has_the_blocks_that_it_needs(
    groups: list[Group], whole_blocks: int, more: int
) -> None:
    found, aligned = coordinator(groups)
    local = whole_blocks * aligned
    pool = found.block_pool
    hit = tuple(
        [
            pool.get_new_blocks(1)[0] if i in group.reach.blocks(local, size) else pool.null_block
            for i in range(local // size)
        ]
        for group in groups
        for size in [group.spec.block_size]
    )
    found.allocate_new_computed_blocks("one", hit, local, more)
    check(groups, found, local + more)
    for group, old, blocks in zip(groups, hit, found.get_blocks("one"), strict=True):
        for i in group.reach.blocks(local + more, group.spec.block_size):
            assert i >= len(old) or blocks[i] is old[i], "a block of the hit was given up"


def check(groups: Sequence[Group], found: Any, tokens: int) -> None:
    for group, blocks in zip(groups, found.get_blocks("one"), strict=True):
        given_out = [i for i, block in enumerate(blocks) if not block.is_null]
        assert given_out == list(group.reach.blocks(tokens, group.spec.block_size))


@given(any_group(), st.integers(1, LONGEST), st.integers(0, 8))
def test_vllm_keeps_what_the_next_token_needs(group: Group, tokens: int, unheard: int) -> None:
    """A running request frees blocks as it continues, but no block that is still needed. While
    steps are in flight, the blocks that the first of them needs are kept."""
    found, _ = coordinator([group])
    size = group.spec.block_size
    done = 0
    while done < tokens:
        step = min(size, tokens - done)
        found.remove_skipped_blocks("one", max(0, done - unheard))
        found.allocate_new_blocks("one", done + step, done + step)
        kept = [i for i, block in enumerate(found.get_blocks("one")[0]) if not block.is_null]
        for heard in {done, max(0, done - unheard)} - {0}:
            assert set(group.reach.blocks(heard, size)) <= set(kept)
        done += step
