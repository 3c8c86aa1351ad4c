"""Reach of an attention kind: the earlier tokens whose KV the next token needs.

A hit of N tokens needs the blocks that hold those, and no others. vLLM calls the tokens before
them skipped, and has no blocks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class KvKind(Enum):
    """Kind of KV that a group of layers keeps."""

    FULL = "full"
    """All tokens: full attention, MLA and its indexers."""
    WINDOW = "window"
    """The last tokens: sliding-window attention."""
    CHUNK = "chunk"
    """The tokens of the present chunk: chunked local attention."""
    STATE = "state"
    """A state after the last token: Mamba, GDN, KDA, short convolutions."""


@dataclass(frozen=True, slots=True)
class KvReach:
    """Reach of a group's layers.

    Attributes:
        kind: kind of KV.
        span: length of the window or chunk, tokens; 0 for other kinds.
        extra: tokens kept before the window, which a drafter may compute again.
    """

    kind: KvKind = KvKind.FULL
    span: int = 0
    extra: int = 0

    def __post_init__(self) -> None:
        if (self.kind in (KvKind.WINDOW, KvKind.CHUNK)) != (self.span > 0):
            raise ValueError(f"{self.kind.value} KV has no span of {self.span} tokens")

    def skipped(self, tokens: int) -> int:
        """Number of the first tokens that are not needed once ``tokens`` are computed."""
        match self.kind:
            case KvKind.FULL:
                return 0
            case KvKind.WINDOW:  # the next token attends to itself and span - 1 before it
                return max(0, tokens - self.span + 1 - self.extra)
            case KvKind.CHUNK:
                return tokens // self.span * self.span
            case KvKind.STATE:
                return max(0, tokens - 1)

    def blocks(self, tokens: int, block_size: int) -> range:
        """Blocks that a hit of ``tokens`` needs; the last may be filled in part."""
        skipped = self.skipped(tokens)
        if skipped >= tokens:
            return range(0)
        return range(skipped // block_size, -(-tokens // block_size))

    def describe(self) -> str:
        """Stable text for a fingerprint."""
        return f"{self.kind.value}-{self.span}-{self.extra}"


WHOLE = KvReach()
"""Reach of full attention."""
