"""A group of pages: KV of one type, whose blocks all have the same geometry.

An engine has one group for each type of attention or state that it keeps. All groups share the
block ids of VRAM and the slots of the CPU pool. A page takes a whole slot, even if it is smaller
than the slot.

The reach of an attention type comprises the earlier tokens whose KV the next token needs.

A hit of N tokens needs only the blocks that contain the next token's reach. vLLM calls the tokens
before the reach skipped, and has no blocks for them.

The layout of a page comprises the byte regions of a block, and their order in a slot.

A block of VRAM is scattered over the engine's allocation. A slot of the CPU pool is one run of
bytes. ``PageLayout`` maps one to the other. It is independent of the meaning of the bytes, so it
works for any dtype, head layout or attention type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tiered_kv.codecs.base import ElementType, PageFormat, Section


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of same-shaped layers in the engine's allocation (vLLM's KVCacheTensor).

    Layer ``l``'s bytes of block ``b`` start at ``offset + l*layer_stride + b*block_stride``.

    Attributes:
        used: bytes of a layer's page that have contents. None for all bytes up to the next page or,
            if a block's layers are contiguous, up to the next block.
    """

    layers: int
    layer_stride: int
    block_stride: int
    offset: int
    used: int | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """``count`` runs of ``nbytes`` bytes for each block, at intervals of ``run_stride`` bytes.

    Run ``r`` of block ``b`` starts at ``offset + r*run_stride + b*block_stride``.
    """

    offset: int
    count: int
    run_stride: int
    block_stride: int
    nbytes: int

    @property
    def bytes_per_block(self) -> int:
        return self.count * self.nbytes

    def end(self, num_blocks: int) -> int:
        """Return the position after this region's last byte in the allocation, bytes."""
        runs = (self.count - 1) * self.run_stride
        return self.offset + runs + (num_blocks - 1) * self.block_stride + self.nbytes


@dataclass(frozen=True, slots=True)
class PageLayout:
    """All regions of a block, in slot order."""

    regions: tuple[Region, ...]
    num_blocks: int

    @property
    def page_bytes(self) -> int:
        """Size of a page on one rank, bytes."""
        return sum(region.bytes_per_block for region in self.regions)

    @property
    def storage_bytes(self) -> int:
        """Size of the part of the engine's allocation that this layout covers, bytes."""
        return max(region.end(self.num_blocks) for region in self.regions)

    def describe(self) -> str:
        """Return a stable description of the bytes of a slot, for the fingerprint."""
        return ",".join(f"{region.count}x{region.nbytes}" for region in self.regions)


def page_layout(placements: Iterable[Placement], num_blocks: int) -> PageLayout:
    """Derive the byte regions of a block from vLLM's placements.

    Layer-outermost layouts give each layer one run per block (or one per head group, when a layer's
    stride spans several block-strided areas). Block-outermost layouts pack all layers of a block
    into one run. Several placements then describe the same packed block, which is included once.

    Raises:
        ValueError: there are no placements, or a layer stride is not a whole number of
            block-strided areas.
    """
    regions: dict[int, Region] = {}
    for place in placements:
        area = num_blocks * place.block_stride
        if place.layer_stride >= area:
            groups, rest = divmod(place.layer_stride, area)
            if rest:
                raise ValueError(
                    f"the layer stride of {place.layer_stride} bytes is not a multiple of the "
                    f"{area} bytes that {num_blocks} blocks take"
                )
            nbytes = place.block_stride if place.used is None else place.used // groups
            region = Region(place.offset, place.layers * groups, area, place.block_stride, nbytes)
        elif place.used is not None:
            region = Region(
                place.offset, place.layers, place.layer_stride, place.block_stride, place.used
            )
        else:
            region = Region(0, 1, place.block_stride, place.block_stride, place.block_stride)
        regions.setdefault(region.offset, region)
    if not regions:
        raise ValueError("the engine has no KV cache tensors")
    return PageLayout(tuple(regions.values()), num_blocks)


class KvKind(Enum):
    """Type of KV that a group of layers keeps."""

    FULL = "full"
    """All tokens: full attention, MLA and its indexers."""
    WINDOW = "window"
    """The last tokens: sliding-window attention."""
    CHUNK = "chunk"
    """The tokens of the current chunk: chunked local attention."""
    STATE = "state"
    """A state after the last token: Mamba, GDN, KDA, short convolutions."""


@dataclass(frozen=True, slots=True)
class KvReach:
    """The earlier tokens whose KV the layers of a group need.

    Attributes:
        kind: type of KV.
        span: length of the window or chunk, tokens; 0 for other types.
        extra: tokens kept before the window, which a drafter may recompute.

    Raises:
        ValueError: a window or chunk has no span, or another type has a span.
    """

    kind: KvKind = KvKind.FULL
    span: int = 0
    extra: int = 0

    def __post_init__(self) -> None:
        if (self.kind in (KvKind.WINDOW, KvKind.CHUNK)) != (self.span > 0):
            raise ValueError(f"{self.kind.value} KV cannot have a span of {self.span} tokens")

    def skipped(self, tokens: int) -> int:
        """Return the number of leading tokens whose KV is not needed once ``tokens`` tokens are
        computed."""
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
        """Return the blocks that a hit of ``tokens`` tokens needs. The last block may be
        partial."""
        skipped = self.skipped(tokens)
        if skipped >= tokens:
            return range(0)
        return range(skipped // block_size, -(-tokens // block_size))

    def describe(self) -> str:
        """Return a stable description of the reach, for a fingerprint."""
        return f"{self.kind.value}-{self.span}-{self.extra}"


WHOLE = KvReach()
"""Reach of full attention: all tokens."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Geometry of a group's pages on a rank.

    Attributes:
        index: the engine's number for the group.
        block_size: length of a page, tokens.
        layout: locations of a block's bytes.
        element: type of the page's elements, if all have the same type.
        reach: tokens that a hit needs.
        draft_tokens: number of following tokens that a token's KV in the drafter's layers depends
            on.
        arrangement: description of everything that determines the order of K, V, heads and tokens
            within a block. A backend may choose any order, and sizes do not reveal it.
        sections: sections of a page in order, if its elements have several types; ``element`` is
            then ignored.

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
            raise ValueError(
                f"the sections have {nbytes} bytes in total, but a page has {self.page_bytes} bytes"
            )

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
        """Return the blocks that a hit of ``tokens`` tokens needs. The last block may be
        partial."""
        return self.reach.blocks(tokens, self.block_size)

    def describe(self) -> str:
        """Return a stable description of a page's bytes, for a fingerprint."""
        told = f"{self.layout.describe()} {self.arrangement}"
        sections = self.page_format.sections
        if len(sections) == 1:  # the engine's dtype, which is described elsewhere
            return told
        return told + " " + ",".join(f"{one.element.value}:{one.nbytes}" for one in sections)


def slot_bytes(groups: Sequence[PageGroup]) -> int:
    """Return the size of a CPU slot, bytes, which is the largest page size of the groups; 0 without
    groups."""
    return max((group.page_bytes for group in groups), default=0)


CONTEXT = 0
"""Position of the group whose blocks contain the tokens of a context consecutively."""
