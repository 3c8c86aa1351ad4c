"""A group of pages: KV of one kind, whose blocks have one geometry.

An engine has one group for each kind of attention or state that it keeps. All groups share the
block ids of VRAM and the slots of the CPU pool; a page takes a whole slot and fills its own bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.codecs.base import ElementType, PageFormat

from .kv_reach import WHOLE, KvReach
from .layout import PageLayout


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Geometry of a group's pages on a rank.

    Attributes:
        index: the engine's number for the group.
        block_size: length of a page, tokens.
        layout: places of a block's bytes.
        element: type of the elements.
        reach: tokens that a hit needs.
        arrangement: description of what decides how K, V, heads and tokens lie within a block; a
            backend may arrange them as it likes, and sizes do not tell.
    """

    index: int
    block_size: int
    layout: PageLayout
    element: ElementType = ElementType.OPAQUE
    reach: KvReach = WHOLE
    arrangement: str = ""

    @property
    def page_bytes(self) -> int:
        """Size of a page, bytes."""
        return self.layout.page_bytes

    @property
    def page_format(self) -> PageFormat:
        """Format of a page in a store."""
        return PageFormat(self.element, self.page_bytes, self.block_size)

    def needs(self, tokens: int) -> range:
        """Blocks that a hit of ``tokens`` needs; the last may be filled in part."""
        return self.reach.blocks(tokens, self.block_size)

    def describe(self) -> str:
        """Stable text for a fingerprint: what the bytes of a page are."""
        return f"{self.layout.describe()} {self.arrangement}"


def slot_bytes(groups: Sequence[PageGroup]) -> int:
    """Size of a CPU slot, bytes: that of the largest group's pages; 0 without groups."""
    return max((group.page_bytes for group in groups), default=0)


CONTEXT = 0
"""Position of the group whose blocks hold the tokens of a context, one after the other."""
