"""Blocks of the KV pool: which layers share one, its tokens, and its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.page_group import KvKind, KvReach

STATES = 2
"""States that are held of a context: the running one, and the one that the next turn finds."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers whose KV lies in the same blocks.

    Attributes:
        words: what they are. layers: number of layers.
        block: tokens of a block.
        page_bytes: bytes of a block that hold KV, on one rank.
    """

    words: str
    reach: KvReach
    layers: int
    block: int
    page_bytes: int

    def held(self, tokens: int) -> int:
        """Blocks that a context in the pool takes."""
        if self.reach.kind is KvKind.STATE:
            return STATES
        return self.needed(tokens)

    def needed(self, tokens: int) -> int:
        """Blocks that the next turn needs of a context."""
        return len(self.reach.blocks(tokens, self.block))


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
