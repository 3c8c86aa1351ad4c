"""A group of pages: KV of one kind, whose blocks have one geometry.

An engine has one group for each kind of attention or state that it keeps. All groups share the
block ids of VRAM and the slots of the CPU pool; a page takes a whole slot and fills its own bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.codecs.base import ElementType, PageFormat, Section

from .kv_reach import WHOLE, KvKind, KvReach
from .layout import PageLayout


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Geometry of a group's pages on a rank.

    Attributes:
        index: the engine's number for the group.
        block_size: length of a page, tokens.
        layout: places of a block's bytes.
        element: type of the elements, if they are of one.
        reach: tokens that a hit needs.
        draft_tokens: tokens behind one on which its KV in layers of a drafter depends.
        arrangement: description of what decides how K, V, heads and tokens lie within a block; a
            backend may arrange them as it likes, and sizes do not tell.
        sections: sections of a page in its order, if its elements are of several types; ``element``
            does not count then.

    Raises:
        ValueError: the sections are not as long as a page.
    """

    index: int
    block_size: int
    layout: PageLayout
    element: ElementType = ElementType.OPAQUE
    reach: KvReach = WHOLE
    draft_tokens: int = 0
    arrangement: str = ""
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        nbytes = self.page_format.page_bytes
        if nbytes != self.page_bytes:
            raise ValueError(f"sections of {nbytes} bytes are no page of {self.page_bytes}")

    @property
    def page_bytes(self) -> int:
        """Size of a page, bytes."""
        return self.layout.page_bytes

    @property
    def page_format(self) -> PageFormat:
        """Format of a page in a store."""
        tokens = 0 if self.reach.kind is KvKind.STATE else self.block_size
        if self.sections:
            return PageFormat.of(self.sections, tokens)
        return PageFormat(self.element, self.page_bytes, tokens)

    def needs(self, tokens: int) -> range:
        """Blocks that a hit of ``tokens`` needs; the last may be filled in part."""
        return self.reach.blocks(tokens, self.block_size)

    def describe(self) -> str:
        """Stable text for a fingerprint: what the bytes of a page are."""
        told = f"{self.layout.describe()} {self.arrangement}"
        sections = self.page_format.sections
        if len(sections) == 1:  # the engine's dtype, which is told elsewhere
            return told
        return told + " " + ",".join(f"{one.element.value}:{one.nbytes}" for one in sections)


def slot_bytes(groups: Sequence[PageGroup]) -> int:
    """Size of a CPU slot, bytes: that of the largest group's pages; 0 without groups."""
    return max((group.page_bytes for group in groups), default=0)


CONTEXT = 0
"""Position of the group whose blocks hold the tokens of a context, one after the other."""
