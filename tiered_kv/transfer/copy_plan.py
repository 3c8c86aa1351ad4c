"""Plan of a copy job: its valid pages, and the runs of bytes that the pages consist of.

The plan is pure arithmetic on arrays. All backends share this arithmetic, which is tested without a
backend. Addresses are byte offsets: into the engine's allocation ("storage") and into the CPU pool
("slab").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.page_group import PageLayout

from .base import CopyJob

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The valid pages of a copy job, and the indices of the other pages.

    Attributes:
        blocks: block numbers, int64 ``[pages]``.
        slots: slot numbers, int64 ``[pages]``.
        failed: indices in the job of pages whose block or slot does not exist.
    """

    blocks: Numbers
    slots: Numbers
    failed: frozenset[int]

    def __len__(self) -> int:
        return len(self.blocks)


def sort_out(job: CopyJob, num_blocks: int, num_slots: int) -> Pages:
    """Return the valid pages of a job. Pages whose block or slot does not exist count as failed,
    and are never copied."""
    blocks, slots = _numbers(job.blocks), _numbers(job.slots)
    good = (blocks >= 0) & (blocks < num_blocks) & (slots >= 0) & (slots < num_slots)
    if good.all():
        return Pages(blocks, slots, frozenset())
    failed = frozenset(int(i) for i in np.flatnonzero(~good))
    return Pages(blocks[good], slots[good], failed)


def _numbers(values: Sequence[int]) -> Numbers:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:  # no block or slot has such a number; -1 is invalid too
        return np.array([v if 0 <= v < 1 << 63 else -1 for v in values], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PageRuns:
    """The runs of a page, in slot order; each array is int64 ``[runs]``.

    Run ``r`` of block ``b`` starts at ``offset[r] + b*stride[r]`` of the storage, and at
    ``start[r]`` of the slot.

    Attributes:
        page_bytes: size of a page, bytes.
        slot_bytes: distance between consecutive slots, bytes.
    """

    offset: Numbers
    stride: Numbers
    start: Numbers
    nbytes: Numbers
    page_bytes: int
    slot_bytes: int

    def __len__(self) -> int:
        return len(self.nbytes)


def page_runs(layout: PageLayout, slot_bytes: int) -> PageRuns:
    """Return the runs that make up a page, as few as possible, for slots of ``slot_bytes``
    bytes."""
    runs: list[tuple[int, int, int, int]] = []
    start = 0
    for region in layout.regions:
        for run in range(region.count):
            offset = region.offset + run * region.run_stride
            if runs and runs[-1][1] == region.block_stride and runs[-1][0] + runs[-1][3] == offset:
                before = runs.pop()
                runs.append((*before[:3], before[3] + region.nbytes))
            else:
                runs.append((offset, region.block_stride, start, region.nbytes))
            start += region.nbytes
    return _page_runs(runs, layout.page_bytes, slot_bytes)


def check_layouts(layouts: Sequence[PageLayout], storage_bytes: int, slot_bytes: int) -> None:
    """Check that the pages of all groups lie within the storage, and fit into slots.

    Raises:
        ValueError: no groups, storage too small, or a slot size that differs from the size of the
            largest page.
    """
    if not layouts:
        raise ValueError("there is no page group to copy")
    spans = max(layout.storage_bytes for layout in layouts)
    if storage_bytes < spans:
        raise ValueError(f"the KV cache has {storage_bytes} bytes, but its layout spans {spans}")
    largest = max(layout.page_bytes for layout in layouts)
    if slot_bytes != largest:
        raise ValueError(f"slots have {slot_bytes} bytes, but the largest page has {largest}")


def _page_runs(runs: list[tuple[int, int, int, int]], page_bytes: int, slot_bytes: int) -> PageRuns:
    offset, stride, start, nbytes = np.array(runs, dtype=np.int64).reshape(-1, 4).T.copy()
    return PageRuns(offset, stride, start, nbytes, page_bytes, slot_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Runs of bytes to copy; each array is int64 ``[copies]``.

    Attributes:
        storage: offsets in the storage, bytes.
        slab: offsets in the slab, bytes.
        nbytes: lengths, bytes.
    """

    storage: Numbers
    slab: Numbers
    nbytes: Numbers

    def __len__(self) -> int:
        return len(self.nbytes)


def joints(runs: PageRuns, pages: Pages) -> NDArray[np.bool_]:
    """Return which pages directly follow the previous page, in both the storage and the slab; bool
    ``[pages - 1]``.

    Only consecutive pages of the job are compared, because pages are listed in block order and
    free slots are allocated in order.
    """
    end = runs.offset[-1] + pages.blocks[:-1] * runs.stride[-1] + runs.nbytes[-1]
    begin = runs.offset[0] + pages.blocks[1:] * runs.stride[0]
    if runs.page_bytes < runs.slot_bytes:  # there are unused bytes between the pages of two slots
        return np.zeros(len(end), dtype=np.bool_)
    joined: NDArray[np.bool_] = (end == begin) & (np.diff(pages.slots) == 1)
    return joined


def plan_copies(runs: PageRuns, pages: Pages) -> Copies:
    """Plan the copies of all bytes of the pages. Bytes that are contiguous in both the storage and
    the slab become one copy."""
    storage = (runs.offset + pages.blocks[:, None] * runs.stride).ravel()
    slab = (runs.start + pages.slots[:, None] * runs.slot_bytes).ravel()
    nbytes = np.broadcast_to(runs.nbytes, (len(pages), len(runs))).ravel()
    joined = joints(runs, pages)
    if not joined.any():
        return Copies(storage, slab, nbytes)
    begins = np.ones(len(nbytes), dtype=np.bool_)
    begins[len(runs) :: len(runs)] = ~joined
    first = np.flatnonzero(begins)
    return Copies(storage[first], slab[first], np.add.reduceat(nbytes, first))


def cut_copies(copies: Copies, every: int) -> Copies:
    """Split copies at each multiple of ``every`` bytes of the slab."""
    first = copies.slab // every
    parts = (copies.slab + copies.nbytes - 1) // every - first + 1
    if (parts == 1).all():
        return copies
    whole = np.repeat(np.arange(len(copies)), parts)
    piece = np.arange(len(whole)) - np.repeat(np.cumsum(parts) - parts, parts) + first[whole]
    start, end = copies.slab[whole], (copies.slab + copies.nbytes)[whole]
    slab = np.maximum(start, piece * every)
    nbytes = np.minimum(end, (piece + 1) * every) - slab
    return Copies(copies.storage[whole] + slab - start, slab, nbytes)
