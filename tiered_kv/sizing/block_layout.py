"""Blocks of the KV pool: which layers share one, its tokens, and its bytes.

Where layers keep KV of several kinds, vLLM puts them into groups of equally many layers, whose
blocks are all of one size (``_get_kv_cache_groups_uniform_page_size``). A kind whose tokens take
less gets blocks of more tokens. Beside states, blocks are made so long that a page of attention
is no smaller than a state (``Platform.update_block_size_for_backend``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.kv_reach import KvKind

from .kv_layers import KvLayers

KERNEL_BLOCK = 16
"""Tokens of a block, and of what blocks are multiples, unless attention is MLA's: vLLM's default
(``CacheConfig.DEFAULT_BLOCK_SIZE``)."""
LATENT_BLOCK = 64
"""Tokens of a block of MLA, as FlashMLA wants it."""
ALIKE = 1.5
"""Kinds whose numbers of layers differ by less share one group size, the larger."""
STATES = 2
"""States that are held of a context: the running one, and the one that the next turn finds."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers whose KV lies in the same blocks.

    Attributes:
        words: what they are. layers: how many.
        block: tokens of a block.
        page_bytes: bytes of a block that hold KV, on one rank.
    """

    words: str
    kv: KvLayers
    layers: int
    block: int
    page_bytes: int

    def held(self, tokens: int) -> int:
        """Blocks that a context in the pool takes."""
        if self.kv.kind is KvKind.STATE:
            return STATES
        return self.needed(tokens)

    def needed(self, tokens: int) -> int:
        """Blocks that the next turn needs of a context."""
        return len(self.kv.reach.blocks(tokens, self.block))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Groups of a model, whose blocks come from one pool.

    Attributes:
        block_bytes: bytes of a block of the pool, on one rank, padding included.
    """

    groups: tuple[BlockGroup, ...]
    block_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of CPU memory on one rank: those of the largest page."""
        return max(group.page_bytes for group in self.groups)

    def held(self, tokens: int) -> int:
        """Blocks that a context takes in the pool, or slots in CPU memory."""
        return sum(group.held(tokens) for group in self.groups)

    def held_bytes(self, tokens: int) -> int:
        """Bytes of the pages of a context, on one rank, without what pads slots."""
        return sum(group.held(tokens) * group.page_bytes for group in self.groups)

    def needed_bytes(self, tokens: int) -> int:
        """Bytes that a restore of a context moves, on one rank."""
        return sum(group.needed(tokens) * group.page_bytes for group in self.groups)


def lay_out(kv: Sequence[KvLayers], base: int = 0) -> BlockLayout:
    """Lay a model's KV out as vLLM does.

    Args:
        base: tokens of a block before it is raised for states; 0 for vLLM's default.
    """
    block = base or (LATENT_BLOCK if kv[0].words == "MLA" else KERNEL_BLOCK)
    attention = [one for one in kv if one.kind is not KvKind.STATE]
    states = [one for one in kv if one.kind is KvKind.STATE]
    if attention and len({one.reach for one in kv}) == 1:  # one table of blocks does for all
        page = block * sum(one.layers * one.token_bytes for one in attention)
        words = " and ".join(one.words for one in attention)
        layers = sum(one.layers for one in attention)
        return BlockLayout((BlockGroup(words, attention[0], layers, block, page),), page)
    if attention and states:
        largest, token = max(one.state_bytes for one in states), attention[0].token_bytes
        block = max(block, block * -(-largest // (block * token)))
    pages = [one.state_bytes or block * one.token_bytes for one in kv]
    page = max(pages)
    size = group_layers([one.layers for one in kv])
    groups: list[BlockGroup] = []
    for one, own in zip(kv, pages, strict=True):
        tokens = block * (page // own) if one.token_bytes and page % own == 0 else block
        real = one.state_bytes or tokens * one.token_bytes
        parts = -(-one.layers // size)
        for at in range(parts):
            layers = len(range(at, one.layers, parts))
            groups.append(BlockGroup(one.words, one, layers, tokens, layers * real))
    return BlockLayout(tuple(groups), size * page)


def group_layers(counts: Sequence[int]) -> int:
    """Layers of a group, of kinds with so many layers."""
    fewest, most = min(counts), max(counts)
    return most if most < ALIKE * fewest else fewest
