"""Blocks of the KV pool: which layers share a block, its tokens, and its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.page_group import KvKind, KvReach

STATES = 2
"""Number of states kept per context: the running one, and the one that the next turn restores."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers whose KV is in the same blocks.

    Attributes:
        words: description of the layers.
        layers: number of layers.
        block: tokens of a block.
        page_bytes: bytes of a block that contain KV, on one rank.
    """

    words: str
    reach: KvReach
    layers: int
    block: int
    page_bytes: int

    def held(self, tokens: int) -> int:
        """Number of blocks that a context takes in the pool."""
        if self.reach.kind is KvKind.STATE:
            return STATES
        return self.needed(tokens)

    def needed(self, tokens: int) -> int:
        """Number of blocks of a context that the next turn needs."""
        return len(self.reach.blocks(tokens, self.block))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Groups of a model, whose blocks come from one pool.

    Attributes:
        block_bytes: size of a block of the pool, on one rank, padding included, bytes.
    """

    groups: tuple[BlockGroup, ...]
    block_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Size of a slot of CPU memory on one rank, that of the largest page, bytes."""
        return max(group.page_bytes for group in self.groups)

    def held(self, tokens: int) -> int:
        """Number of blocks that a context takes in the pool, or of slots in CPU memory."""
        return sum(group.held(tokens) for group in self.groups)

    def held_bytes(self, tokens: int) -> int:
        """Size of the pages of a context, on one rank, without padding of slots, bytes."""
        return sum(group.held(tokens) * group.page_bytes for group in self.groups)

    def needed_bytes(self, tokens: int) -> int:
        """Bytes that a restore of a context moves, on one rank."""
        return sum(group.needed(tokens) * group.page_bytes for group in self.groups)
