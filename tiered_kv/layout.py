"""Layout of a page: the byte regions of a block, and their order in a slot.

A block of VRAM is scattered over the engine's allocation; a slot of the CPU pool is one run of
bytes. ``PageLayout`` maps one to the other. It is independent of what the bytes mean, so it serves
any dtype, head layout or attention kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of same-shaped layers in the engine's allocation (vLLM's KVCacheTensor).

    Layer ``l``'s bytes of block ``b`` start at ``offset + l*layer_stride + b*block_stride``.

    Attributes:
        used: bytes of a layer's page that hold something; None: all up to the next page, or, where
            a block's layers lie together, up to the next block.
    """

    layers: int
    layer_stride: int
    block_stride: int
    offset: int
    used: int | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """``count`` runs of ``nbytes`` for each block, ``run_stride`` bytes apart.

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
        """End of this region's last byte in the allocation."""
        runs = (self.count - 1) * self.run_stride
        return self.offset + runs + (num_blocks - 1) * self.block_stride + self.nbytes


@dataclass(frozen=True, slots=True)
class PageLayout:
    """All regions of a block, in the order in which a slot holds them."""

    regions: tuple[Region, ...]
    num_blocks: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one rank."""
        return sum(region.bytes_per_block for region in self.regions)

    @property
    def storage_bytes(self) -> int:
        """Size of the part of the engine's allocation that this layout covers, bytes."""
        return max(region.end(self.num_blocks) for region in self.regions)

    def describe(self) -> str:
        """Return a stable description of a slot's bytes for the fingerprint."""
        return ",".join(f"{region.count}x{region.nbytes}" for region in self.regions)


def page_layout(placements: Iterable[Placement], num_blocks: int) -> PageLayout:
    """Derive the byte regions of a block from vLLM's placements.

    Layer-outermost layouts give each layer one run per block (or one per head group,
    when a layer's stride spans several block-strided areas). Block-outermost layouts
    pack all layers of a block into one run; several placements then name the same
    packed block, which is taken once.

    Raises:
        ValueError: a layer stride that is no whole number of block-strided areas.
    """
    regions: dict[int, Region] = {}
    for place in placements:
        area = num_blocks * place.block_stride
        if place.layer_stride >= area:
            groups, rest = divmod(place.layer_stride, area)
            if rest:
                raise ValueError(
                    f"layer stride {place.layer_stride} is not a multiple of the "
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
