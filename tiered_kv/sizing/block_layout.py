"""Blocks of the KV pool: layers that share a block, tokens and bytes per block, and advice on block
size.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.page_group import KvKind, KvReach

STATES = 2
"""Number of states kept per context: the running state, and the state that the next turn restores.
"""

SHORT_BLOCK = 32
"""Block size up to which longer blocks may be advised, tokens. vLLM's default is 16 on CUDA with
dense models."""
LONG_CONTEXT, VERY_LONG_CONTEXT = 1 << 17, 1 << 19
"""Context lengths from which blocks of 64 and of 128 tokens are advised, tokens."""


def advise_block_size(block: int, max_len: int) -> str | None:
    """Return advice on vLLM's ``--block-size``, in sentences; None if the blocks suit the contexts.

    Each page is a block, and the scheduler's thread handles each page of a context when its job
    returns and when its turn ends. During that time no request gets a token. Blocks that are four
    or eight times as long reduce the number of pages. Models with states need no advice: vLLM makes
    their blocks longer itself.

    Args:
        block: tokens per block of full attention.
        max_len: maximum context length of the server, tokens.
    """
    if block > SHORT_BLOCK or max_len < LONG_CONTEXT:
        return None
    better = 64 if max_len < VERY_LONG_CONTEXT else 128
    return (
        f"A context of {max_len:,} tokens has {max_len // block:,} blocks of {block}: --block-size "
        f"{better} shortens the pauses when its job returns. Hits in VRAM then end at multiples of "
        f"{better} tokens, and a context leaves {better // 2} tokens of its last block unused on "
        "average."
    )


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers whose KV is in the same blocks.

    Attributes:
        words: description of the layers.
        reach: tokens whose KV the layers need.
        layers: number of layers.
        block: tokens per block.
        page_bytes: bytes of a block that contain KV, on one rank.
    """

    words: str
    reach: KvReach
    layers: int
    block: int
    page_bytes: int

    def held(self, tokens: int) -> int:
        """Return the number of blocks that a context occupies in the pool."""
        if self.reach.kind is KvKind.STATE:
            return STATES
        return self.needed(tokens)

    def needed(self, tokens: int) -> int:
        """Return the number of blocks of a context that the next turn needs."""
        return len(self.reach.blocks(tokens, self.block))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Groups of a model, whose blocks come from one pool.

    Attributes:
        block_bytes: size of a block of the pool on one rank, including padding, bytes.
    """

    groups: tuple[BlockGroup, ...]
    block_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Size of a slot of CPU memory on one rank, bytes. It is the size of the largest page."""
        return max(group.page_bytes for group in self.groups)

    def held(self, tokens: int) -> int:
        """Return the number of blocks that a context occupies in the pool, or of slots in CPU
        memory.
        """
        return sum(group.held(tokens) for group in self.groups)

    def held_bytes(self, tokens: int) -> int:
        """Return the size of the pages of a context on one rank, without the padding of slots,
        bytes.
        """
        return sum(group.held(tokens) * group.page_bytes for group in self.groups)

    def needed_bytes(self, tokens: int) -> int:
        """Return the number of bytes that a restore of a context moves on one rank."""
        return sum(group.needed(tokens) * group.page_bytes for group in self.groups)
